# Gloo as the system has it (Debian's libgloo-dev, or a prefix in CMAKE_PREFIX_PATH).
#
# Sets SystemGloo_FOUND, SystemGloo_VERSION, SystemGloo_LIBRARY, SystemGloo_INCLUDE_DIR and the imported target SystemGloo::gloo.
# Gloo's own CMake package is not used: some distributions' packages leave out files that it refers to.

find_path(SystemGloo_INCLUDE_DIR gloo/config.h)
find_library(SystemGloo_LIBRARY gloo)
mark_as_advanced(SystemGloo_INCLUDE_DIR SystemGloo_LIBRARY)

if(SystemGloo_INCLUDE_DIR)
  file(STRINGS "${SystemGloo_INCLUDE_DIR}/gloo/config.h" lines REGEX "^#define GLOO_VERSION_(MAJOR|MINOR|PATCH) [0-9]+")
  string(REGEX MATCHALL "[0-9]+" numbers "${lines}")
  list(JOIN numbers "." SystemGloo_VERSION)
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  SystemGloo
  REQUIRED_VARS SystemGloo_LIBRARY SystemGloo_INCLUDE_DIR
  VERSION_VAR SystemGloo_VERSION)

if(SystemGloo_FOUND AND NOT TARGET SystemGloo::gloo)
  add_library(SystemGloo::gloo UNKNOWN IMPORTED)
  set_target_properties(SystemGloo::gloo PROPERTIES IMPORTED_LOCATION "${SystemGloo_LIBRARY}"
                                                    INTERFACE_INCLUDE_DIRECTORIES "${SystemGloo_INCLUDE_DIR}")
endif()
