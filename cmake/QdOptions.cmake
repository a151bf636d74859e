# Build options, and the flags of every target.

set(QD_MPI auto CACHE STRING "MPI backend: auto (if found), on or off")
set_property(CACHE QD_MPI PROPERTY STRINGS auto on off)
set(QD_UCX auto CACHE STRING "UCX backend, for worlds without MPI: auto (if UCX and libsodium are found), on or off")
set_property(CACHE QD_UCX PROPERTY STRINGS auto on off)
set(QD_CUDA auto CACHE STRING "CUDA device: auto (if nvcc, cuBLAS and cuDNN are found), on or off")
set_property(CACHE QD_CUDA PROPERTY STRINGS auto on off)
set(QD_SERVE auto CACHE STRING "quadrille serve: auto (if libmicrohttpd is found), on or off")
set_property(CACHE QD_SERVE PROPERTY STRINGS auto on off)
set(QD_SANITIZE none CACHE STRING "none, address (with undefined), thread, or fuzz (address and coverage, clang only)")
set_property(CACHE QD_SANITIZE PROPERTY STRINGS none address thread fuzz)
option(QD_TESTS "build the tests" ON)
option(QD_STATIC_DEPS "link libraries from their .a files, so that the programs run on machines without them" OFF)
option(QD_WERROR "treat warnings as errors" OFF)
option(QD_DEMO "only what make demo runs: no tests and no CUDA" OFF)

foreach(pair "QD_MPI;auto|on|off" "QD_UCX;auto|on|off" "QD_CUDA;auto|on|off" "QD_SERVE;auto|on|off" "QD_SANITIZE;none|address|thread|fuzz")
  list(GET pair 0 name)
  list(GET pair 1 choices)
  string(TOLOWER "${${name}}" ${name})
  if(NOT ${name} MATCHES "^(${choices})$")
    message(FATAL_ERROR "${name} is '${${name}}'; it must be one of ${choices}")
  endif()
endforeach()

if(QD_DEMO) # without changing the cache: the next configuration without it has them again
  set(QD_TESTS OFF)
  set(QD_CUDA off)
endif()

if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Release or Debug" FORCE)
endif()

set(CMAKE_C_STANDARD 17)
set(CMAKE_C_STANDARD_REQUIRED ON)
set(CMAKE_C_EXTENSIONS ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

# Shared libraries export what the public headers declare with QD_API (include/quadrille/export.h).
# Programs and tests that link the static libraries can still use every symbol.
foreach(language C CXX CUDA)
  set(CMAKE_${language}_VISIBILITY_PRESET hidden)
endforeach()
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)

# Assertions stay enabled in release builds: they state invariants, and none is in an inner loop.
set(CMAKE_C_FLAGS_RELEASE "-O2 -g")
set(CMAKE_C_FLAGS_DEBUG "-O0 -g3")

set(QD_WARNINGS -Wall -Wextra -Wshadow)
if(QD_WERROR)
  list(APPEND QD_WARNINGS -Werror)
endif()
add_compile_options("$<$<COMPILE_LANGUAGE:C>:${QD_WARNINGS}>")
# Outside the kernels no multiply-add is contracted, so that results are bit-identical across
# compilers and machines. -gz: each test is a static executable; debug information compresses
# threefold.
add_compile_options("$<$<COMPILE_LANGUAGE:C>:-ffp-contract=off;-gz>")
# Error traces and assertions name files relative to the root of the repository.
add_compile_options("$<$<COMPILE_LANGUAGE:C>:-fmacro-prefix-map=${PROJECT_SOURCE_DIR}/=>")

if(QD_SANITIZE STREQUAL "address")
  add_compile_options(-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -O1)
  add_link_options(-fsanitize=address,undefined)
elseif(QD_SANITIZE STREQUAL "fuzz")
  add_compile_options(-fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -O1)
  add_link_options(-fsanitize=address,undefined)
elseif(QD_SANITIZE STREQUAL "thread")
  add_compile_options(-fsanitize=thread -fno-omit-frame-pointer -O1)
  add_link_options(-fsanitize=thread)
endif()
