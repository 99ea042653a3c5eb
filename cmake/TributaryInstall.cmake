# The component `development`: what a model host outside of this tree builds with. docs/hosts.md says how.
#
#   cmake --install build/cpu --component development --prefix PREFIX
#
# Headers lie under include/tributary, so that a host's #include lines are those of this tree and nothing of ours
# stands in the system's own include folder.
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

set(TRIBUTARY_HEADERS ${CMAKE_INSTALL_INCLUDEDIR}/tributary)
set(TRIBUTARY_PACKAGE ${CMAKE_INSTALL_LIBDIR}/cmake/Tributary)

# Installs files under DESTINATION, in the folders that they have below BASE.
function(_tributary_install_tree base destination)
  foreach(file IN LISTS ARGN)
    cmake_path(GET file PARENT_PATH folder)
    install(FILES ${base}/${file} DESTINATION ${destination}/${folder} COMPONENT development)
  endforeach()
endfunction()

# tributary_install_client(): the C++ client, as find_package(Tributary) and as pkg-config's tributary-client.
function(tributary_install_client)
  set(headers service/client/client.h service/client/describe_options.h service/client/host_session.h service/client/session.h
      base/rpc/security_options.h base/status/errors.h base/status/rpc_errors.h)
  set(targets client base proto errors)
  if(TARGET tributary_client_cuda)
    list(APPEND headers service/client/cuda_memory.h service/client/cuda/device_session.h
         service/client/layer_times.h)
    list(APPEND targets client_cuda device_memory)
  endif()
  _tributary_install_tree(${PROJECT_SOURCE_DIR} ${TRIBUTARY_HEADERS} ${headers})

  set(messages google/rpc/status google/rpc/error_details tributary/v1/types tributary/v1/session
               tributary/v1/attention)
  list(TRANSFORM messages APPEND .proto OUTPUT_VARIABLE protos)
  list(TRANSFORM messages APPEND .pb.h OUTPUT_VARIABLE generated)
  _tributary_install_tree(${PROJECT_SOURCE_DIR}/proto ${CMAKE_INSTALL_DATADIR}/tributary/proto ${protos})
  _tributary_install_tree(${PROJECT_BINARY_DIR}/proto/generated ${TRIBUTARY_HEADERS}
                          ${generated} tributary/v1/attention.grpc.pb.h)

  foreach(name IN LISTS targets)
    set_target_properties(tributary_${name} PROPERTIES EXPORT_NAME ${name})
    target_include_directories(tributary_${name} INTERFACE $<INSTALL_INTERFACE:${TRIBUTARY_HEADERS}>)
    install(TARGETS tributary_${name} EXPORT TributaryTargets
            ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT development)
  endforeach()
  install(EXPORT TributaryTargets NAMESPACE Tributary:: DESTINATION ${TRIBUTARY_PACKAGE} COMPONENT development)

  configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/TributaryConfig.cmake.in TributaryConfig.cmake
                                INSTALL_DESTINATION ${TRIBUTARY_PACKAGE})
  # Before 1.0 a minor version may break a host.
  write_basic_package_version_file(TributaryConfigVersion.cmake COMPATIBILITY SameMinorVersion)
  install(FILES ${CMAKE_CURRENT_BINARY_DIR}/TributaryConfig.cmake
                ${CMAKE_CURRENT_BINARY_DIR}/TributaryConfigVersion.cmake
          DESTINATION ${TRIBUTARY_PACKAGE} COMPONENT development)
  _tributary_install_pkgconfig(tributary-client)
endfunction()

# tributary_install_c(): libtributary.so.1 and its header, as Tributary::c and as pkg-config's tributary, and the same with
# the service in it, as Tributary::c_embedded and tributary-embedded. Before
# tributary_install_client, whose package names it.
function(tributary_install_c)
  foreach(name IN ITEMS c c_embedded)
    set_target_properties(tributary_${name} PROPERTIES EXPORT_NAME ${name})
    target_include_directories(tributary_${name} INTERFACE $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
    install(TARGETS tributary_${name} EXPORT TributaryTargets
            LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT development)
  endforeach()
  install(FILES ${PROJECT_SOURCE_DIR}/service/client/c/tributary.h
                ${PROJECT_SOURCE_DIR}/service/embedded/c/tributary_embedded.h
          DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT development)
  _tributary_install_pkgconfig(tributary)
  _tributary_install_pkgconfig(tributary-embedded)
endfunction()

# NAME.pc, which finds its prefix from where it lies: an installed tree may be moved.
function(_tributary_install_pkgconfig name)
  file(RELATIVE_PATH TRIBUTARY_PREFIX_FROM_PC /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
  configure_file(${PROJECT_SOURCE_DIR}/cmake/${name}.pc.in ${name}.pc @ONLY)
  install(FILES ${CMAKE_CURRENT_BINARY_DIR}/${name}.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig
          COMPONENT development)
endfunction()
