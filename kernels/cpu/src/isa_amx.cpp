// The ops for AMX tiles (bfloat16) and AVX-512 with BF16 (the rest).
#define PAGEWIRE_KERNELS kernels_amx
#define PAGEWIRE_AMX
#include "isa.inc"
