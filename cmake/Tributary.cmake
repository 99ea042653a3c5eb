# Functions shared by every floor's CMakeLists.txt.

# Warnings as data: one list for all of our own code.
set(TRIBUTARY_WARNINGS -Wall -Wextra -Wpedantic -Wshadow -Wnon-virtual-dtor -Wno-sign-compare
                       -Wno-missing-field-initializers -Wno-unused-parameter)

function(tributary_floors_up_to top out)
  set(all kernels collective base worker proto service)
  list(FIND all ${top} index)
  if(index EQUAL -1)
    message(FATAL_ERROR "TRIBUTARY_TOP_FLOOR must be kernels, collective, base, worker or service, not '${top}'")
  endif()
  math(EXPR count "${index} + 1")
  list(SUBLIST all 0 ${count} floors)
  set(${out} ${floors} PARENT_SCOPE)
endfunction()

# With TRIBUTARY_UNITY the sources of one library or program are compiled several at a time, so that the
# headers they share are read, and the templates they share instantiated, once for all of them. For builds
# that are made whole every time: in the others every source is compiled by itself, which shows that it
# includes what it uses. Sources that include themselves (Highway's) stay alone, and so do those of tests but
# of the ones that say UNITY. Two names that clash are found by `make lint`, or in CI's sanitizer runs.
function(_tributary_unity target)
  if(TRIBUTARY_UNITY)
    set_target_properties(${target} PROPERTIES
      UNITY_BUILD ON
      UNITY_BUILD_CODE_BEFORE_INCLUDE "// NOLINTNEXTLINE(bugprone-suspicious-include)")
  endif()
endfunction()

# For folders that move data and do no arithmetic: instrumented code without optimization compiles in
# about half the time, and hides less from the sanitizers.
macro(tributary_folder_without_arithmetic)
  if(TRIBUTARY_SANITIZE)
    add_compile_options(-O0)
  endif()
endmacro()

# For folders of tests over gRPC, which do no arithmetic either. With TRIBUTARY_QUICK_TESTS their sources are
# compiled without optimization, and the headers that most of them read are read once for all of them: together
# that halves the time that the compiler takes. It is for builds that are made whole every time. Only tests are
# compiled so; what they test is compiled as it is shipped, each source with its own includes.
macro(tributary_folder_of_rpc_tests)
  tributary_folder_without_arithmetic()
  set(TRIBUTARY_RPC_TESTS ${TRIBUTARY_QUICK_TESTS})
endmacro()

# What every target with precompiled headers must be compiled with, for the compiler to take them. Sources of
# programs are compiled as those of libraries are, so that one file of headers serves both.
function(_tributary_rpc_test_options target)
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-O0> -fPIC -pthread)
  target_compile_definitions(${target} PRIVATE
    $<TARGET_PROPERTY:tributary_kernels,INTERFACE_COMPILE_DEFINITIONS>)
endfunction()

function(_tributary_rpc_test target)
  if(NOT TRIBUTARY_RPC_TESTS)
    return()
  endif()
  if(NOT TARGET tributary_rpc_test_headers)
    add_library(tributary_rpc_test_headers OBJECT ${PROJECT_SOURCE_DIR}/tests/support/precompiled.cc)
    target_link_libraries(tributary_rpc_test_headers PRIVATE tributary_service GTest::gmock GTest::gtest)
    _tributary_settings(tributary_rpc_test_headers)
    _tributary_rpc_test_options(tributary_rpc_test_headers)
    target_precompile_headers(tributary_rpc_test_headers PRIVATE
      <algorithm> <atomic> <chrono> <functional> <map> <memory> <mutex> <optional> <random> <span> <sstream> <string>
      <string_view> <thread> <variant> <vector>
      <absl/container/flat_hash_map.h> <absl/status/statusor.h> <absl/strings/str_cat.h>
      <gmock/gmock.h> <grpcpp/grpcpp.h> <gtest/gtest.h> <tributary/v1/attention.grpc.pb.h>)
  endif()
  _tributary_rpc_test_options(${target})
  target_precompile_headers(${target} REUSE_FROM tributary_rpc_test_headers)
endfunction()

# ThreadSanitizer does not see the locks of the system's Abseil, which gRPC's headers use: a file that tells it
# is linked into every program of such a build.
function(_tributary_program_settings target)
  if(NOT TRIBUTARY_SANITIZE MATCHES "thread")
    return()
  endif()
  if(NOT TARGET tributary_tsan_mutex)
    find_package(absl REQUIRED)
    add_library(tributary_tsan_mutex OBJECT ${PROJECT_SOURCE_DIR}/tests/support/tsan_mutex.cc)
    target_link_libraries(tributary_tsan_mutex PUBLIC absl::synchronization ${CMAKE_DL_LIBS})
    _tributary_settings(tributary_tsan_mutex)
  endif()
  find_package(absl REQUIRED)
  target_link_libraries(${target} PRIVATE tributary_tsan_mutex)
endfunction()

# With TRIBUTARY_WERROR warnings are errors, but for one that g++ 12 gives about correct uses of std::string.
function(_tributary_settings target)
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:${TRIBUTARY_WARNINGS}>)
  # Everything is position-independent, for libtributary.so's sake. g++ then inlines no function that another
  # library could put its own in place of, unless it is told that none does; clang never thinks so.
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-fno-semantic-interposition>)
  if(TRIBUTARY_WERROR)
    target_compile_options(${target} PRIVATE
      $<$<COMPILE_LANGUAGE:CXX>:-Werror> $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-error=restrict>)
    if(TRIBUTARY_UNITY)  # g++ takes a source that another one includes for a header, and 12 warns falsely of lists
      target_compile_options(${target} PRIVATE
        $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-error=subobject-linkage -Wno-error=array-bounds>)
    endif()
  endif()
  target_include_directories(${target} PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}>)
  if(TRIBUTARY_SANITIZE)
    target_compile_options(${target} PUBLIC -fsanitize=${TRIBUTARY_SANITIZE} -fno-omit-frame-pointer)
    target_link_options(${target} PUBLIC -fsanitize=${TRIBUTARY_SANITIZE})
  endif()
endfunction()

# tributary_library(name SOURCES ... DEPENDS ...)
function(tributary_library name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPENDS" ${ARGN})
  add_library(${name} STATIC ${ARG_SOURCES})
  target_link_libraries(${name} PUBLIC ${ARG_DEPENDS})
  _tributary_settings(${name})
  _tributary_unity(${name})
  _tributary_rpc_test(${name})
endfunction()

# tributary_executable(name [OUTPUT file] SOURCES ... DEPENDS ...)
function(tributary_executable name)
  cmake_parse_arguments(ARG "" "OUTPUT" "SOURCES;DEPENDS" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE ${ARG_DEPENDS})
  _tributary_settings(${name})
  _tributary_program_settings(${name})
  _tributary_unity(${name})
  if(ARG_OUTPUT)
    set_target_properties(${name} PROPERTIES OUTPUT_NAME ${ARG_OUTPUT})
  endif()
endfunction()

# tributary_test(name SOURCES ... DEPENDS ... [TIMEOUT seconds] [UNITY])
# One binary, one CTest entry. A binary in which every case was skipped (no GPU, say) is reported as
# skipped, not as passed; the case says why. Where a case failed the list of skipped cases is not the
# end of the output.
function(tributary_test name)
  cmake_parse_arguments(ARG "UNITY" "TIMEOUT" "SOURCES;DEPENDS" ${ARGN})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 300)
  endif()
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE ${ARG_DEPENDS} GTest::gmock GTest::gtest GTest::gtest_main)
  _tributary_settings(${name})
  _tributary_program_settings(${name})
  _tributary_rpc_test(${name})
  if(ARG_UNITY)
    _tributary_unity(${name})
  endif()
  if(TRIBUTARY_SHORT_GRID)
    target_compile_definitions(${name} PRIVATE TRIBUTARY_SHORT_GRID=1)
  endif()
  add_test(NAME ${name} COMMAND ${name})
  set(all_skipped "\\[  PASSED  \\] 0 tests\\.\n(\\[  SKIPPED \\][^\n]*\n?)+$")
  set_tests_properties(${name} PROPERTIES TIMEOUT ${ARG_TIMEOUT}
                       SKIP_REGULAR_EXPRESSION "${all_skipped}")
endfunction()
