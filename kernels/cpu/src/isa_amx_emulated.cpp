// The AMX ops on emulated tiles, for the tests.
#define PAGEWIRE_KERNELS kernels_amx_emulated
#define PAGEWIRE_AMX
#define PAGEWIRE_AMX_EMULATED
#include "isa.inc"
