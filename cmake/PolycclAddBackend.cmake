# polyccl_add_backend(<target> <source>...): a backend plugin, lib<target>.so, that exports polyccl_backend_query() and nothing else.
#
# Used by PolyCCL's own backends and, through find_package(polyccl), by those that live outside its tree. Link the vendor's library, where
# there is one to link, with target_link_libraries(<target> PRIVATE ...) afterwards.

set(_POLYCCL_VERSION_SCRIPT "${CMAKE_CURRENT_LIST_DIR}/backend.map")

function(polyccl_add_backend target)
  add_library(${target} MODULE ${ARGN})
  target_link_libraries(${target} PRIVATE polyccl::abi)
  set_target_properties(
    ${target}
    PROPERTIES PREFIX lib
               SUFFIX .so
               C_VISIBILITY_PRESET hidden
               CXX_VISIBILITY_PRESET hidden
               VISIBILITY_INLINES_HIDDEN ON
               POSITION_INDEPENDENT_CODE ON
               LINK_DEPENDS "${_POLYCCL_VERSION_SCRIPT}")
  # Visibility hides what is compiled here; the version script also hides what static libraries bring along.
  target_link_options(${target} PRIVATE "LINKER:--version-script=${_POLYCCL_VERSION_SCRIPT}")
  # A symbol that nothing defines is an error of this build, not of a user's load.
  target_link_options(${target} PRIVATE "LINKER:--no-undefined")
endfunction()
