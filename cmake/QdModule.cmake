# qd_module(NAME [PLAN] [RECURSE] [SOURCES …] [LIBRARIES …] [DEFINITIONS …] [OPTIONS …])
#
# One object library per folder. Without SOURCES: all *.c files of the folder, with RECURSE also of
# its sub-folders. PLAN: the folder is part of libquadrille-plan too. LIBRARIES adds their include
# paths to this folder only, and links them into the libraries. A folder without sources creates no
# target.
define_property(GLOBAL PROPERTY QD_OBJECTS BRIEF_DOCS "objects of libquadrille" FULL_DOCS "generator expressions")
define_property(GLOBAL PROPERTY QD_PLAN_OBJECTS BRIEF_DOCS "objects of libquadrille-plan" FULL_DOCS "as QD_OBJECTS")
define_property(GLOBAL PROPERTY QD_LIBRARIES BRIEF_DOCS "libraries that libquadrille links" FULL_DOCS "targets")

function(qd_module name)
  cmake_parse_arguments(ARG "PLAN;RECURSE" "" "SOURCES;LIBRARIES;DEFINITIONS;OPTIONS" ${ARGN})
  if(NOT "SOURCES" IN_LIST ARGN)
    set(glob GLOB)
    if(ARG_RECURSE)
      set(glob GLOB_RECURSE)
    endif()
    file(${glob} ARG_SOURCES CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/*.c)
  endif()
  if(NOT ARG_SOURCES)
    return()
  endif()
  set(target qd-${name})
  add_library(${target} OBJECT ${ARG_SOURCES})
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
  target_link_libraries(${target} PRIVATE Threads::Threads ${ARG_LIBRARIES})
  target_compile_definitions(${target} PRIVATE ${ARG_DEFINITIONS})
  target_compile_options(${target} PRIVATE ${ARG_OPTIONS})
  set_property(GLOBAL APPEND PROPERTY QD_OBJECTS $<TARGET_OBJECTS:${target}>)
  set_property(GLOBAL APPEND PROPERTY QD_LIBRARIES ${ARG_LIBRARIES})
  if(ARG_PLAN)
    set_property(GLOBAL APPEND PROPERTY QD_PLAN_OBJECTS $<TARGET_OBJECTS:${target}>)
  endif()
endfunction()

# Instruction sets that *_isa.c files are compiled for; one of the QD_ISA variants is chosen at run
# time.
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64|amd64")
  set(QD_ISA_LIST avx512 avx2 generic)
  set(QD_ISA_FLAGS_avx512 -march=skylake-avx512 -mprefer-vector-width=512)
  set(QD_ISA_FLAGS_avx2 -march=haswell)
  # AVX-512's vectors in pairs of registers, for tests; of some files only (src/device/cpu).
  set(QD_ISA_EMULATIONS emulated)
  set(QD_ISA_FLAGS_emulated -march=haswell -Wno-psabi -O1) # -O3 takes half a minute a file
  if(CMAKE_C_COMPILER_ID STREQUAL "GNU") # gcc contracts multiply-adds among these
    list(APPEND QD_ISA_FLAGS_emulated -fexpensive-optimizations)
  endif()
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64")
  set(QD_ISA_LIST neon) # present on every arm64 machine
  if(CMAKE_C_COMPILER_ID STREQUAL "GNU") # otherwise gcc hoists loads and spills accumulators of a tile
    set(QD_ISA_FLAGS_neon -fno-schedule-insns)
  endif()
else()
  set(QD_ISA_LIST generic)
endif()

# qd_isa_module(NAME [SOURCES …] [ISAS …] …): like qd_module, for *_isa.c files, once per instruction
# set: QD_ISA_LIST or those named.
function(qd_isa_module name)
  cmake_parse_arguments(ARG "" "" "SOURCES;LIBRARIES;DEFINITIONS;ISAS" ${ARGN})
  if(NOT DEFINED ARG_ISAS)
    set(ARG_ISAS ${QD_ISA_LIST})
  endif()
  if(NOT ARG_SOURCES)
    return()
  endif()
  foreach(isa ${ARG_ISAS})
    qd_module(${name}-${isa} SOURCES ${ARG_SOURCES} LIBRARIES ${ARG_LIBRARIES}
              DEFINITIONS QD_ISA=${isa} QD_ISA_${isa}=1 ${ARG_DEFINITIONS}
              OPTIONS -O3 -ffp-contract=fast -fno-math-errno -fno-trapping-math ${QD_ISA_FLAGS_${isa}})
  endforeach()
endfunction()

# qd_libraries(): builds the static and shared libraries from the objects of all modules.
function(qd_libraries)
  get_property(objects GLOBAL PROPERTY QD_OBJECTS)
  get_property(plan_objects GLOBAL PROPERTY QD_PLAN_OBJECTS)
  get_property(libraries GLOBAL PROPERTY QD_LIBRARIES)
  list(REMOVE_DUPLICATES libraries)
  set(kinds STATIC)
  if(NOT QD_STATIC_DEPS) # some .a files cannot be linked into a shared library
    list(APPEND kinds SHARED)
  endif()
  foreach(kind ${kinds})
    string(TOLOWER ${kind} suffix)
    add_library(quadrille-plan-${suffix} ${kind} ${plan_objects})
    add_library(quadrille-${suffix} ${kind} ${objects})
    target_link_libraries(quadrille-plan-${suffix} PRIVATE ${QD_BASE_LIBRARIES})
    target_link_libraries(quadrille-${suffix} PRIVATE ${QD_BASE_LIBRARIES} ${libraries})
    foreach(library quadrille-plan quadrille)
      set_target_properties(${library}-${suffix} PROPERTIES OUTPUT_NAME ${library} LINKER_LANGUAGE C
        VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR}
        ARCHIVE_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/lib LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/lib)
      target_include_directories(${library}-${suffix} INTERFACE ${PROJECT_SOURCE_DIR}/include)
      if(kind STREQUAL "SHARED") # hides symbols of linked archives and C++ templates too
        target_link_options(${library}-${suffix} PRIVATE -Wl,--version-script=${PROJECT_SOURCE_DIR}/cmake/exports.map)
        set_property(TARGET ${library}-${suffix} PROPERTY LINK_DEPENDS ${PROJECT_SOURCE_DIR}/cmake/exports.map)
      endif()
    endforeach()
  endforeach()
endfunction()
