// The ops for avx512.
#define PAGEWIRE_KERNELS kernels_avx512
#include "isa.inc"
