// The ops for avx2.
#define PAGEWIRE_KERNELS kernels_avx2
#include "isa.inc"
