# Finds what the folders need. Each dependency is attached to the folder that uses it, so that a header that leaks into
# another folder does not compile.

find_package(PkgConfig REQUIRED)
find_package(Threads REQUIRED)
pkg_check_modules(YAML REQUIRED IMPORTED_TARGET yaml-0.1)
pkg_check_modules(JANSSON REQUIRED IMPORTED_TARGET jansson)
pkg_check_modules(XXHASH REQUIRED IMPORTED_TARGET libxxhash)
set(QD_BASE_LIBRARIES PkgConfig::YAML PkgConfig::JANSSON PkgConfig::XXHASH Threads::Threads m)

# At most one product library per build.
set(QD_BLAS_FOUND none)
if(QD_BLAS MATCHES "auto|onednn")
  # Not by its CMake package: Debian's asks for OpenCL, which the CPU library does not need.
  find_library(QD_DNNL_LIBRARY dnnl)
  find_path(QD_DNNL_INCLUDE dnnl.h)
  if(QD_DNNL_LIBRARY AND QD_DNNL_INCLUDE)
    add_library(QD::dnnl UNKNOWN IMPORTED)
    set_target_properties(QD::dnnl PROPERTIES IMPORTED_LOCATION ${QD_DNNL_LIBRARY}
      INTERFACE_INCLUDE_DIRECTORIES ${QD_DNNL_INCLUDE})
    set(QD_BLAS_FOUND onednn)
  elseif(QD_BLAS STREQUAL "onednn")
    message(FATAL_ERROR "QD_BLAS=onednn, but oneDNN was not found (Debian: libdnnl-dev)")
  endif()
endif()
if(QD_BLAS_FOUND STREQUAL "none" AND QD_BLAS MATCHES "auto|openblas")
  pkg_check_modules(OPENBLAS QUIET IMPORTED_TARGET openblas)
  if(OPENBLAS_FOUND)
    set(QD_BLAS_FOUND openblas)
  elseif(QD_BLAS STREQUAL "openblas")
    message(FATAL_ERROR "QD_BLAS=openblas, but OpenBLAS was not found (Debian: libopenblas-dev)")
  else()
    message(WARNING "neither oneDNN (Debian: libdnnl-dev) nor OpenBLAS was found: products use our own kernel")
  endif()
endif()

set(QD_MPI_FOUND OFF)
if(NOT QD_MPI STREQUAL "off")
  find_package(MPI QUIET COMPONENTS C)
  if(MPI_C_FOUND)
    set(QD_MPI_FOUND ON)
  elseif(QD_MPI STREQUAL "on")
    message(FATAL_ERROR "QD_MPI=on, but no MPI library was found (Debian: libopenmpi-dev)")
  endif()
endif()

if(QD_TESTS)
  pkg_check_modules(CMOCKA REQUIRED IMPORTED_TARGET cmocka)
endif()
