# What is installed beside the module and the plugins: the ABI header, the CMake package for backends outside the tree, and the record of
# the build that `polyccl info` shows. All paths are below the root of the wheel.

include(CMakePackageConfigHelpers)

set(header "${PROJECT_SOURCE_DIR}/core/abi/polyccl/backend.h")
install(FILES "${header}" DESTINATION polyccl/include/polyccl)

file(STRINGS "${header}" abi_lines REGEX "^#define POLYCCL_ABI_(MAJOR|MINOR) [0-9]+")
string(REGEX MATCHALL "[0-9]+" abi_numbers "${abi_lines}")
list(JOIN abi_numbers "." POLYCCL_ABI_VERSION)
configure_package_config_file("${PROJECT_SOURCE_DIR}/cmake/polycclConfig.cmake.in" "${PROJECT_BINARY_DIR}/cmake/polycclConfig.cmake"
                              INSTALL_DESTINATION polyccl/cmake)
# A plugin of one ABI major works with every version of PolyCCL that has it, so the package promises compatibility by that alone.
write_basic_package_version_file("${PROJECT_BINARY_DIR}/cmake/polycclConfigVersion.cmake" COMPATIBILITY AnyNewerVersion
                                 ARCH_INDEPENDENT)
install(
  FILES "${PROJECT_BINARY_DIR}/cmake/polycclConfig.cmake" "${PROJECT_BINARY_DIR}/cmake/polycclConfigVersion.cmake"
        "${PROJECT_SOURCE_DIR}/cmake/PolycclAddBackend.cmake" "${PROJECT_SOURCE_DIR}/cmake/backend.map"
  DESTINATION polyccl/cmake)

# The record. Values are ours or CMake's: names, numbers and flags, with quotes and backslashes escaped.
function(_polyccl_write_record)
  get_property(built GLOBAL PROPERTY POLYCCL_BUILT)
  set(names "")
  set(libraries "")
  set(RECORD_PORTABLE true)
  foreach(name IN LISTS built)
    get_property(version GLOBAL PROPERTY POLYCCL_BUILT_VERSION_${name})
    get_property(kind GLOBAL PROPERTY POLYCCL_BUILT_KIND_${name})
    get_property(portable GLOBAL PROPERTY POLYCCL_BUILT_PORTABLE_${name})
    if(NOT portable)
      set(RECORD_PORTABLE false)
    endif()
    list(APPEND names "\"${name}\"")
    list(APPEND libraries "\"${name}\": {\"version\": \"${version}\", \"kind\": \"${kind}\"}")
  endforeach()
  set(options "")
  foreach(name IN LISTS POLYCCL_BACKENDS)
    string(TOUPPER "${name}" upper)
    list(APPEND options "\"POLYCCL_BACKEND_${upper}\": \"${POLYCCL_BACKEND_${upper}}\"")
  endforeach()
  list(APPEND options "\"POLYCCL_SANITIZE\": \"${POLYCCL_SANITIZE}\"")
  list(JOIN names ", " RECORD_NAMES)
  list(JOIN libraries ", " RECORD_LIBRARIES)
  list(JOIN options ", " RECORD_OPTIONS)
  string(TOUPPER "${CMAKE_BUILD_TYPE}" type)
  set(flags "${CMAKE_CXX_FLAGS} ${CMAKE_CXX_FLAGS_${type}}")
  string(REPLACE "\\" "\\\\" flags "${flags}")
  string(REPLACE "\"" "\\\"" flags "${flags}")
  string(STRIP "${flags}" RECORD_FLAGS)
  configure_file("${PROJECT_SOURCE_DIR}/cmake/_build.json.in" "${PROJECT_BINARY_DIR}/_build.json" @ONLY)
endfunction()
_polyccl_write_record()
install(FILES "${PROJECT_BINARY_DIR}/_build.json" DESTINATION polyccl)

# scikit-build-core puts the Python files into the wheel; without it, `cmake --install build --prefix P` makes a whole package in P.
if(NOT SKBUILD)
  install(
    DIRECTORY "${PROJECT_SOURCE_DIR}/core/python/polyccl"
    DESTINATION .
    FILES_MATCHING
    PATTERN "*.py"
    PATTERN "*.pyi"
    PATTERN "py.typed"
    PATTERN "__pycache__" EXCLUDE)
endif()
