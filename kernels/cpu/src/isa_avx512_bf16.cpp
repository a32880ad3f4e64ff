// The ops for avx512_bf16.
#define PAGEWIRE_KERNELS kernels_avx512_bf16
#include "isa.inc"
