# How PolyCCL's own targets are compiled: one place for language, warnings, optimisation and sanitizers.

option(POLYCCL_WERROR "Treat warnings in PolyCCL's own code as errors" OFF)
set(POLYCCL_SANITIZE "" CACHE STRING "Instrument PolyCCL's own code: thread, address or empty")
set_property(CACHE POLYCCL_SANITIZE PROPERTY STRINGS "" thread address)
if(NOT POLYCCL_SANITIZE MATCHES "^(thread|address|)$")
  message(FATAL_ERROR "POLYCCL_SANITIZE is '${POLYCCL_SANITIZE}'. It must be thread, address or empty.")
endif()

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
# A library that was found outside the system's folders is found there at run time too.
set(CMAKE_INSTALL_RPATH_USE_LINK_PATH ON)

# Whole-program flags of a sanitizer: they must reach whatever is linked together.
set(POLYCCL_SANITIZE_FLAGS "")
if(POLYCCL_SANITIZE)
  set(POLYCCL_SANITIZE_FLAGS -fsanitize=${POLYCCL_SANITIZE} -fno-omit-frame-pointer)
endif()

# Compile a target of our own: C++20, hidden symbols, position independent, all warnings.
function(polyccl_compile_options target)
  set_target_properties(
    ${target}
    PROPERTIES CXX_STANDARD 20
               CXX_STANDARD_REQUIRED ON
               CXX_EXTENSIONS OFF
               C_STANDARD 11
               C_STANDARD_REQUIRED ON
               C_EXTENSIONS OFF
               C_VISIBILITY_PRESET hidden
               CXX_VISIBILITY_PRESET hidden
               VISIBILITY_INLINES_HIDDEN ON
               POSITION_INDEPENDENT_CODE ON)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wpedantic $<$<BOOL:${POLYCCL_WERROR}>:-Werror>
                                           $<$<NOT:$<CONFIG:Debug>>:-O3> ${POLYCCL_SANITIZE_FLAGS})
  target_link_options(${target} PRIVATE ${POLYCCL_SANITIZE_FLAGS})
  target_compile_definitions(${target} PRIVATE POLYCCL_VERSION="${POLYCCL_VERSION}")
endfunction()
