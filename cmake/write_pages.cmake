# Writes manual pages and completion scripts with the program: cmake -DPROGRAM=… -DTO=FOLDER
# [-DEMULATOR=…] -P write_pages.cmake
function(write path)
  execute_process(COMMAND ${EMULATOR} ${PROGRAM} ${ARGN} OUTPUT_FILE ${TO}/${path} RESULT_VARIABLE result)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "${PROGRAM} ${ARGN}: ${result}")
  endif()
endfunction()

file(REMOVE_RECURSE ${TO})
file(MAKE_DIRECTORY ${TO}/man1 ${TO}/man5)
write(man1/quadrille.1 help --man)
write(man5/quadrille-config.5 help --man config)
write(quadrille completion bash)
write(_quadrille completion zsh)
# The commands are those that `quadrille help` lists.
execute_process(COMMAND ${EMULATOR} ${PROGRAM} help OUTPUT_VARIABLE list)
string(REGEX MATCHALL "\n  quadrille [a-z]+" commands "${list}")
foreach(command ${commands})
  string(REGEX REPLACE ".* " "" command "${command}")
  write(man1/quadrille-${command}.1 help --man ${command})
endforeach()
file(TOUCH ${TO}/written)
