# Cross-compiles for arm64 on a Debian machine and runs the tests under qemu:
#   cmake --preset arm64 -DQD_ARM64_ROOT=FOLDER
# FOLDER is a Debian arm64 system with the libraries (docs/arm64.md says how to create one). Tests
# run if the kernel passes arm64 programs to qemu (binfmt_misc) and QEMU_LD_PREFIX is the folder, or
# inside the folder (chroot).
set(QD_ARM64_ROOT "$ENV{QD_ARM64_ROOT}" CACHE PATH "a Debian arm64 system with the libraries")
if(NOT EXISTS "${QD_ARM64_ROOT}/usr/lib/aarch64-linux-gnu")
  message(FATAL_ERROR "QD_ARM64_ROOT is '${QD_ARM64_ROOT}', which is not an arm64 system; docs/arm64.md says how to create one")
endif()
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES QD_ARM64_ROOT)

set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_LIBRARY_ARCHITECTURE aarch64-linux-gnu)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc CACHE STRING "")
set(CMAKE_C_COMPILER_TARGET aarch64-linux-gnu) # for clang
set(CMAKE_SYSROOT ${QD_ARM64_ROOT})
set(CMAKE_FIND_ROOT_PATH ${QD_ARM64_ROOT})
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
set(ENV{PKG_CONFIG_SYSROOT_DIR} ${QD_ARM64_ROOT})
set(ENV{PKG_CONFIG_LIBDIR} ${QD_ARM64_ROOT}/usr/lib/aarch64-linux-gnu/pkgconfig:${QD_ARM64_ROOT}/usr/share/pkgconfig)

# MPI's compiler wrappers are arm64 programs that cannot run here: sets what FindMPI would query.
set(mpi ${QD_ARM64_ROOT}/usr/lib/aarch64-linux-gnu/openmpi)
if(EXISTS ${mpi}/include/mpi.h)
  set(MPI_SKIP_COMPILER_WRAPPER ON)
  set(MPI_C_LIB_NAMES mpi CACHE STRING "")
  set(MPI_mpi_LIBRARY ${mpi}/lib/libmpi.so CACHE STRING "")
  set(MPI_C_HEADER_DIR ${mpi}/include CACHE STRING "")
  set(MPIEXEC_EXECUTABLE /usr/bin/mpiexec CACHE STRING "") # inside the folder
endif()
