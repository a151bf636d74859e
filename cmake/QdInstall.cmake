# Installation: programs, libraries, headers, data, documentation, manual pages, completion scripts
# and pkg-config files.
foreach(target quadrille-static quadrille-shared quadrille-plan-static quadrille-plan-shared quadrille-program)
  if(TARGET ${target})
    list(APPEND QD_INSTALLED ${target})
  endif()
endforeach()
install(TARGETS ${QD_INSTALLED}
        RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR}
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY include/quadrille DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")
install(DIRECTORY data/ DESTINATION ${CMAKE_INSTALL_DATADIR}/quadrille PATTERN ".gitkeep" EXCLUDE)
install(FILES LICENSE README.md CHANGELOG.md SECURITY.md DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(DIRECTORY docs/ DESTINATION ${CMAKE_INSTALL_DOCDIR}/docs)
install(DIRECTORY examples/ DESTINATION ${CMAKE_INSTALL_DOCDIR}/examples)

# Manual pages and completion scripts, which the program writes itself, so not without an emulator in a cross build.
if(NOT CMAKE_CROSSCOMPILING OR CMAKE_CROSSCOMPILING_EMULATOR)
  set(QD_PAGES ${PROJECT_BINARY_DIR}/pages)
  add_custom_command(
    OUTPUT ${QD_PAGES}/written
    COMMAND ${CMAKE_COMMAND} -DPROGRAM=$<TARGET_FILE:quadrille-program> "-DEMULATOR=${CMAKE_CROSSCOMPILING_EMULATOR}" -DTO=${QD_PAGES}
            -P ${PROJECT_SOURCE_DIR}/cmake/write_pages.cmake
    DEPENDS quadrille-program ${PROJECT_SOURCE_DIR}/cmake/write_pages.cmake
    COMMENT "Writing manual pages and completion scripts" VERBATIM)
  add_custom_target(quadrille-pages ALL DEPENDS ${QD_PAGES}/written)
  install(DIRECTORY ${QD_PAGES}/man1 ${QD_PAGES}/man5 DESTINATION ${CMAKE_INSTALL_MANDIR})
  install(FILES ${QD_PAGES}/quadrille DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions)
  install(FILES ${QD_PAGES}/_quadrille DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/site-functions)
endif()

# Paths are relative to the .pc file, so that an installation can be moved, or made with another
# prefix than it was configured for.
file(RELATIVE_PATH QD_PC_PREFIX ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
string(REGEX REPLACE "/$" "" QD_PC_PREFIX "${QD_PC_PREFIX}")
set(QD_PC_PRIVATE "")
if(QD_MPI_FOUND)
  foreach(library ${MPI_C_LIBRARIES})
    string(APPEND QD_PC_PRIVATE " ${library}")
  endforeach()
endif()
if(QD_UCX_FOUND)
  string(APPEND QD_PC_PRIVATE " -lsodium -ldl")
endif()
# Not as a required package: its own private libraries (TLS) are only for its archive.
if(QD_SERVE_FOUND)
  string(APPEND QD_PC_PRIVATE " -lmicrohttpd")
endif()
# The CUDA runtime is linked, and kernels are C++; cuBLASLt, cuDNN and NCCL are loaded on demand
# (src/device/cuda/libraries.c).
if(QD_CUDA_FOUND)
  get_target_property(cudart CUDA::cudart_static IMPORTED_LOCATION)
  string(APPEND QD_PC_PRIVATE " ${cudart} -lrt -ldl -lstdc++")
endif()
foreach(library quadrille quadrille-plan)
  configure_file(cmake/${library}.pc.in ${PROJECT_BINARY_DIR}/${library}.pc @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/${library}.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
endforeach()

# The same for CMake's find_package(Quadrille).
include(CMakePackageConfigHelpers)
set(QD_CONFIG_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/Quadrille)
file(RELATIVE_PATH QD_CONFIG_PREFIX ${CMAKE_INSTALL_FULL_LIBDIR}/cmake/Quadrille ${CMAKE_INSTALL_PREFIX})
string(REGEX REPLACE "/$" "" QD_CONFIG_PREFIX "${QD_CONFIG_PREFIX}")
string(STRIP "${QD_PC_PRIVATE}" QD_CONFIG_PRIVATE)
string(REPLACE " " ";" QD_CONFIG_PRIVATE "${QD_CONFIG_PRIVATE}")
configure_file(cmake/QuadrilleConfig.cmake.in ${PROJECT_BINARY_DIR}/QuadrilleConfig.cmake @ONLY)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/QuadrilleConfigVersion.cmake VERSION ${PROJECT_VERSION}
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/QuadrilleConfig.cmake ${PROJECT_BINARY_DIR}/QuadrilleConfigVersion.cmake
        DESTINATION ${QD_CONFIG_DIR})
