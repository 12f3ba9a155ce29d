# Fails where an object compiled for one instruction set defines a symbol that other objects may define too:
# the linker keeps one of them, so that a processor without these instructions would come to run them.
execute_process(COMMAND "${NM}" -C --defined-only "${OBJECT}" OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCHALL "[^\n]* [WVu] [^\n]*" shared "${symbols}")
list(FILTER shared EXCLUDE REGEX "${SET}::")
if(shared)
  list(JOIN shared "\n" shared)
  message(FATAL_ERROR "Compiled for ${SET}, but shared with other sources; put it into the namespace ${SET}:\n${shared}")
endif()
