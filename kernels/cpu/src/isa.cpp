// Detection of instruction sets: cpuid for the processor, xgetbv for the kernel, arch_prctl for AMX's tile state.
#include "isa.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

constexpr int ARCH_REQ_XCOMP_PERM = 0x1023;
constexpr int XFEATURE_XTILEDATA = 18;

struct Processor {
  bool avx2 = false, avx512 = false, avx512_vnni = false, avx512_bf16 = false, amx = false;

  Processor() {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return;
    const bool osxsave = c >> 27 & 1, fma = c >> 12 & 1, f16c = c >> 29 & 1, avx = c >> 28 & 1;
    if (!osxsave || !avx || !fma || !f16c) return;
    unsigned low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low & 0x6) != 0x6 || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
    const unsigned num_leaves = a;
    avx2 = b >> 5 & 1;
    avx512 = avx2 && (low & 0xe6) == 0xe6 && (b >> 16 & 1) && (b >> 17 & 1) && (b >> 30 & 1) && (b >> 31 & 1);
    avx512_vnni = avx512 && (c >> 11 & 1);
    const bool tiles = (d >> 22 & 1) && (d >> 24 & 1) && (d >> 25 & 1) && (low & 0x60000) == 0x60000;
    if (num_leaves < 1 || !__get_cpuid_count(7, 1, &a, &b, &c, &d)) return;
    avx512_bf16 = avx512_vnni && (a >> 5 & 1);
    amx = avx512_bf16 && tiles;
  }
};

const Processor& processor() {
  static const Processor p;
  return p;
}

void replace(OpsOfType& ops, const IntegerOps& by) {
  ops.linear_w8a8 = by.linear_w8a8;
  ops.linear_fixed = by.linear_fixed;
}

// avx512's, but for the integer ops.
const Kernels* kernels_avx512_vnni() {
  static const Kernels all = [] {
    Kernels made = kernels_avx512;
    replace(made.float32, integer_ops_vnni[FLOAT32]);
    replace(made.bfloat16, integer_ops_vnni[BFLOAT16]);
    return made;
  }();
  return &all;
}

}  // namespace

const std::vector<Isa>& built_isas() {
  static const std::vector<Isa> all = {
      {"amx", &kernels_amx, false},
      {"avx512_bf16", &kernels_avx512_bf16, false},
      {"avx512_vnni", kernels_avx512_vnni(), false},
      {"avx512", &kernels_avx512, false},
      {"avx2", &kernels_avx2, false},
#ifdef PAGEWIRE_EMULATED_AMX
      {"amx_emulated", &kernels_amx_emulated, true},
#endif
  };
  return all;
}

std::string why_not(const Isa& isa) {
  const Processor& p = processor();
  const std::string name = isa.name;
  if (name == "avx2" && !p.avx2) return "the processor or kernel lacks AVX2 with FMA and F16C";
  if (name == "avx512" && !p.avx512) return "the processor or kernel lacks AVX-512 F, BW, DQ and VL";
  if (name == "avx512_vnni" && !p.avx512_vnni) return "the processor lacks AVX512_VNNI";
  if ((name == "avx512_bf16" || name == "amx_emulated") && !p.avx512_bf16) return "the processor lacks AVX512_BF16 or AVX512_VNNI";
  if (name == "amx") {
    if (!p.amx) return "the processor or kernel lacks AMX tiles with BF16 and INT8";
    if (syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) != 0)
      return "the kernel refuses AMX's tile state to this process";
  }
  return "";
}
