// The integer ops for avx512 with VNNI (Ice Lake); the rest is avx512's.
#define PAGEWIRE_INTEGER_OPS integer_ops_vnni
#include "isa.inc"
