# Run operations.py (PYTHON, SCRIPT) and write what it prints to OUTPUT, whole or not at all.
execute_process(COMMAND "${PYTHON}" -I -B "${SCRIPT}" OUTPUT_VARIABLE text RESULT_VARIABLE result)
if(NOT result EQUAL 0)
  message(FATAL_ERROR "${SCRIPT} failed (${result}): the table of operations could not be generated.")
endif()
file(WRITE "${OUTPUT}" "${text}")
