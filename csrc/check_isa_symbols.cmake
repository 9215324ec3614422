# Fails when an object compiled for one instruction set has a symbol that the linker may merge with another's.
#
# The linker keeps one copy of an inline or template function that several objects define, perhaps the one with
# instructions that the machine lacks. So such functions may exist only in the namespace of the instruction set.
# Usage: cmake -DNM=nm -DISA=avx2 -DOBJECTS="a.o,b.o" -P check_isa_symbols.cmake
string(REPLACE "," ";" objects "${OBJECTS}")
foreach(object IN LISTS objects)
    execute_process(COMMAND ${NM} -C ${object} OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
    string(REGEX MATCHALL "[^\n]* [WVu] [^\n]*" shared "${symbols}")
    list(FILTER shared EXCLUDE REGEX "tlt::${ISA}::")
    if(shared)
        list(JOIN shared "\n  " text)
        message(FATAL_ERROR "${object}: shared symbols outside tlt::${ISA} (see csrc/cpu/kernels.h):\n  ${text}")
    endif()
endforeach()
