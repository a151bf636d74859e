# Finds what the folders need. Each dependency is attached to the folder that uses it, so that a header that leaks into
# another folder does not compile.

find_package(PkgConfig REQUIRED)
find_package(Threads REQUIRED)
pkg_check_modules(YAML REQUIRED IMPORTED_TARGET yaml-0.1)
pkg_check_modules(JANSSON REQUIRED IMPORTED_TARGET jansson)
pkg_check_modules(XXHASH REQUIRED IMPORTED_TARGET libxxhash)
pkg_check_modules(PCRE2 REQUIRED IMPORTED_TARGET libpcre2-8)
set(QD_BASE_LIBRARIES PkgConfig::YAML PkgConfig::JANSSON PkgConfig::XXHASH Threads::Threads m)

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
