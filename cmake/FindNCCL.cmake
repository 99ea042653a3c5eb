# Finds nccl.h, all that a build needs: the library is loaded when it is used. Looks where CUDA is, in the
# system, and where NVIDIA's Python wheel puts it; set NCCL_ROOT for another place. Defines NCCL::headers.
find_path(NCCL_INCLUDE_DIR nccl.h
  HINTS ${NCCL_ROOT} ENV NCCL_ROOT ${CUDAToolkit_INCLUDE_DIRS} ${CUDAToolkit_TARGET_DIR}
  PATH_SUFFIXES include)
if(NOT NCCL_INCLUDE_DIR)
  find_package(Python3 QUIET COMPONENTS Interpreter)
  if(Python3_EXECUTABLE)
    execute_process(
      COMMAND ${Python3_EXECUTABLE} -c "import nvidia.nccl as n; print(list(n.__path__)[0])"
      OUTPUT_VARIABLE wheel OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    find_path(NCCL_INCLUDE_DIR nccl.h HINTS ${wheel}/include)
  endif()
endif()
mark_as_advanced(NCCL_INCLUDE_DIR)

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(NCCL REQUIRED_VARS NCCL_INCLUDE_DIR)
if(NCCL_FOUND AND NOT TARGET NCCL::headers)
  add_library(NCCL::headers INTERFACE IMPORTED)
  target_include_directories(NCCL::headers INTERFACE ${NCCL_INCLUDE_DIR})
endif()
