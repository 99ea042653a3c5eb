# Finds CUDA when it is wanted and there. Sets TRIBUTARY_WITH_CUDA.
set(TRIBUTARY_WITH_CUDA OFF)
if(NOT TRIBUTARY_CUDA STREQUAL "OFF")
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    # Ampere, consumer Ampere, Ada, Hopper with its own instructions.
    if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
      set(CMAKE_CUDA_ARCHITECTURES 80 86 89 90a)
    endif()
    enable_language(CUDA)
    find_package(CUDAToolkit REQUIRED)
    # CMake 3.25 does not know that nvcc 12 and later speak C++20.
    if(NOT DEFINED CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
      set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
    endif()
    set(CMAKE_CUDA_STANDARD 20)
    # The algebra (kernels/lse.h, kernels/key_range.h) is constexpr host code used on the device.
    string(APPEND CMAKE_CUDA_FLAGS " --expt-relaxed-constexpr")
    # A quarter of the time, and kernels that nobody should run for their speed.
    if(TRIBUTARY_QUICK_CUDA AND CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.9)
      string(APPEND CMAKE_CUDA_FLAGS " -Ofc=max")
      install(CODE "message(WARNING \"the kernels of this build run slowly: configure it with -DTRIBUTARY_QUICK_CUDA=OFF\")"
              ALL_COMPONENTS)
    endif()
    set(TRIBUTARY_WITH_CUDA ON)
  elseif(TRIBUTARY_CUDA STREQUAL "ON")
    message(FATAL_ERROR "TRIBUTARY_CUDA=ON, but no CUDA compiler was found; set CUDACXX or put nvcc on the PATH")
  endif()
endif()
message(STATUS "CUDA: ${TRIBUTARY_WITH_CUDA}")

# What a library's kernels are compiled for, from CMAKE_CUDA_ARCHITECTURES. Machine code for sm_80 also
# runs on sm_86 and sm_89, and nothing here is faster when compiled for them but what CONVERTS_FP8:
# sm_89 has instructions for that. Kernels of ONLY one architecture are compiled for no other that is
# named beside it. What is compiled for sm_89, or else for sm_80, leaves PTX behind, for architectures
# that nobody has named. With TRIBUTARY_QUICK_CUDA sm_89 is left out: its code is in part that of sm_80, in part
# that of sm_90.
function(tributary_fat_binary target)
  cmake_parse_arguments(PARSE_ARGV 1 arg "CONVERTS_FP8" "ONLY" "")
  set(architectures ${CMAKE_CUDA_ARCHITECTURES})
  if("80" IN_LIST architectures)
    list(REMOVE_ITEM architectures 86)
    if(NOT arg_CONVERTS_FP8 OR (TRIBUTARY_QUICK_CUDA AND "90a" IN_LIST architectures))
      list(REMOVE_ITEM architectures 89)
    endif()
  endif()
  if(arg_ONLY AND arg_ONLY IN_LIST architectures)
    set(architectures ${arg_ONLY})
  endif()
  list(TRANSFORM architectures REPLACE "^([0-9]+a?)$" "\\1-real")
  if("89-real" IN_LIST architectures)
    list(TRANSFORM architectures REPLACE "^89-real$" "89")
  else()
    list(TRANSFORM architectures REPLACE "^80-real$" "80")
  endif()
  set_target_properties(${target} PROPERTIES CUDA_ARCHITECTURES "${architectures}")
endfunction()
