// Vectors of float32 on AVX-512 and AVX2, under one set of names. W lanes each.
// Included once per instruction set, inside an unnamed namespace: nothing here may be shared between translation units.
#pragma once

typedef uint16_t bf16;

// What was measured on Zen 4, for the set that it uses: instructions for bfloat16 and no tiles. Others with that set (Zen 5, Cooper
// Lake) get the same: nothing of it changes a bit.
#if defined(__AVX512BF16__) && !defined(PAGEWIRE_AMX)
#define ON_ZEN_4 1
#else
#define ON_ZEN_4 0
#endif

#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)

typedef __m512 vec;
constexpr int W = 16;

INLINE vec vset(float x) { return _mm512_set1_ps(x); }
INLINE vec vzero() { return _mm512_setzero_ps(); }
INLINE vec vload(const float* p) { return _mm512_loadu_ps(p); }
INLINE void vstore(float* p, vec v) { _mm512_storeu_ps(p, v); }
INLINE __mmask16 first_lanes(int n) { return n >= 16 ? 0xffff : (1u << n) - 1; }
INLINE vec vload(const float* p, int n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
INLINE void vstore(float* p, vec v, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), v); }
INLINE vec vadd(vec a, vec b) { return _mm512_add_ps(a, b); }
INLINE vec vsub(vec a, vec b) { return _mm512_sub_ps(a, b); }
INLINE vec vmul(vec a, vec b) { return _mm512_mul_ps(a, b); }
INLINE vec vdiv(vec a, vec b) { return _mm512_div_ps(a, b); }
INLINE vec vfma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vec vfnma(vec a, vec b, vec c) { return _mm512_fnmadd_ps(a, b, c); }
INLINE vec vmax(vec a, vec b) { return _mm512_max_ps(a, b); }  // b if either is NaN
INLINE vec vmin(vec a, vec b) { return _mm512_min_ps(a, b); }
INLINE vec vround(vec x) { return _mm512_roundscale_ps(x, 0); }
// 1 / x of a finite x >= 1. With AMX to a unit in the last place: one step of Newton's from 14 bits, a third of a division's
// time. Those bits are one maker's: other sets run on processors of several, whose KV must be the same.
#if defined(PAGEWIRE_AMX)
INLINE vec vreciprocal(vec x) {
  const vec r = _mm512_rcp14_ps(x);
  return vfma(r, vfnma(x, r, vset(1.0f)), r);
}
#else
INLINE vec vreciprocal(vec x) { return vdiv(vset(1.0f), x); }
#endif
INLINE vec vscale2(vec x, vec e) { return _mm512_scalef_ps(x, e); }  // x * 2^e
INLINE float vsum(vec v) { return _mm512_reduce_add_ps(v); }
INLINE float vmaximum(vec v) { return _mm512_reduce_max_ps(v); }

// Lanes i with low <= i < high keep x, the others get `other`.
INLINE vec vkeep(vec x, int64_t low, int64_t high, vec other) {
  const int a = low < 0 ? 0 : low > 16 ? 16 : low, b = high < 0 ? 0 : high > 16 ? 16 : high;
  const __mmask16 mask = first_lanes(b) & ~first_lanes(a);
  return _mm512_mask_mov_ps(other, mask, x);
}

INLINE vec widen(__m256i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16)); }
INLINE __m256i narrow(vec v) {
#if defined(__AVX512BF16__)
  return (__m256i)_mm512_cvtneps_pbh(v);
#else  // to nearest even; a NaN stays one
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  rounded = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc00000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
#endif
}
INLINE vec rounded(vec v) { return widen(narrow(v)); }  // to bfloat16's numbers
INLINE vec vload(const bf16* p) { return widen(_mm256_loadu_si256((const __m256i*)p)); }
INLINE vec vload(const bf16* p, int n) { return widen(_mm256_maskz_loadu_epi16(first_lanes(n), p)); }
INLINE void vstore(bf16* p, vec v) { _mm256_storeu_si256((__m256i*)p, narrow(v)); }
INLINE void vstore(bf16* p, vec v, int n) { _mm256_mask_storeu_epi16(p, first_lanes(n), narrow(v)); }

INLINE vec load_halves(const char* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }  // float16

// Words of two bfloat16: the first ones, the second ones, as float32.
INLINE vec load_even(const void* p) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16)); }
INLINE vec load_odd(const void* p) {
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(0xffff0000)));
}

#else

typedef __m256 vec;
constexpr int W = 8;

INLINE vec vset(float x) { return _mm256_set1_ps(x); }
INLINE vec vzero() { return _mm256_setzero_ps(); }
INLINE vec vload(const float* p) { return _mm256_loadu_ps(p); }
INLINE void vstore(float* p, vec v) { _mm256_storeu_ps(p, v); }
INLINE __m256i lanes() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
INLINE __m256i first_lanes(int n) { return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lanes()); }
INLINE vec vload(const float* p, int n) { return _mm256_maskload_ps(p, first_lanes(n)); }
INLINE void vstore(float* p, vec v, int n) { _mm256_maskstore_ps(p, first_lanes(n), v); }
INLINE vec vadd(vec a, vec b) { return _mm256_add_ps(a, b); }
INLINE vec vsub(vec a, vec b) { return _mm256_sub_ps(a, b); }
INLINE vec vmul(vec a, vec b) { return _mm256_mul_ps(a, b); }
INLINE vec vdiv(vec a, vec b) { return _mm256_div_ps(a, b); }
INLINE vec vfma(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vec vfnma(vec a, vec b, vec c) { return _mm256_fnmadd_ps(a, b, c); }
INLINE vec vmax(vec a, vec b) { return _mm256_max_ps(a, b); }
INLINE vec vmin(vec a, vec b) { return _mm256_min_ps(a, b); }
INLINE vec vreciprocal(vec x) { return vdiv(vset(1.0f), x); }
INLINE vec vround(vec x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// x * 2^e for whole e: 0 below -126, infinite above 127. A NaN in x stays one.
INLINE vec vscale2(vec x, vec e) {
  const vec bounded = _mm256_min_ps(_mm256_max_ps(e, _mm256_set1_ps(-127.0f)), _mm256_set1_ps(128.0f));
  const __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(bounded), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(x, _mm256_castsi256_ps(bits));
}
INLINE float vsum(vec v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}
INLINE float vmaximum(vec v) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_shuffle_ps(s, s, 1)));
}
INLINE vec vkeep(vec x, int64_t low, int64_t high, vec other) {
  const int a = low < 0 ? 0 : low > 8 ? 8 : low, b = high < 0 ? 0 : high > 8 ? 8 : high;
  const __m256i mask = _mm256_andnot_si256(first_lanes(a), first_lanes(b));
  return _mm256_blendv_ps(other, x, _mm256_castsi256_ps(mask));
}

INLINE vec widen(__m128i v) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16)); }
// With a bfloat16 in the upper half of each lane, to nearest even; a NaN stays one.
INLINE __m256i round_upper(vec v) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i sum = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  return _mm256_blendv_epi8(sum, _mm256_set1_epi32(0x7fc00000), _mm256_castps_si256(_mm256_cmp_ps(v, v, 3)));
}
INLINE __m128i narrow(vec v) {
  const __m256i words = _mm256_srli_epi32(round_upper(v), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}
INLINE vec rounded(vec v) {  // to bfloat16's numbers
  return _mm256_castsi256_ps(_mm256_and_si256(round_upper(v), _mm256_set1_epi32(0xffff0000)));
}
INLINE vec vload(const bf16* p) { return widen(_mm_loadu_si128((const __m128i*)p)); }
INLINE vec vload(const bf16* p, int n) {
  bf16 some[8] = {};
  __builtin_memcpy(some, p, 2 * (n < 8 ? n : 8));
  return vload(some);
}
INLINE void vstore(bf16* p, vec v) { _mm_storeu_si128((__m128i*)p, narrow(v)); }
INLINE void vstore(bf16* p, vec v, int n) {
  bf16 some[8];
  vstore(some, v);
  __builtin_memcpy(p, some, 2 * (n < 8 ? n : 8));
}
INLINE vec load_halves(const char* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
INLINE vec load_even(const void* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256((const __m256i*)p), 16));
}
INLINE vec load_odd(const void* p) {
  return _mm256_castsi256_ps(
      _mm256_and_si256(_mm256_loadu_si256((const __m256i*)p), _mm256_set1_epi32(0xffff0000)));
}

#endif

INLINE float to_float(float x) { return x; }
INLINE float to_float(bf16 x) {
  const uint32_t bits = (uint32_t)x << 16;
  float f;
  __builtin_memcpy(&f, &bits, 4);
  return f;
}

INLINE int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t next_task(const Region& region) { return __atomic_fetch_add(region.counter, 1, __ATOMIC_RELAXED); }

// This thread's part of the tasks of an op that reads a weight, dealt in runs, long ones first: neighbours go to one thread, which so
// reads front to back for long, and nobody is left with much when the others are done. On Zen 4 products of few rows are 3 to 5 %
// faster than with one task, 128 KB, at a time.
template <typename Task>
INLINE void each_task(const Region& region, int64_t num_tasks, Task task) {
  int64_t first = __atomic_load_n(region.counter, __ATOMIC_RELAXED);
  while (first < num_tasks) {
    const int64_t end = first + larger(1, (num_tasks - first) / (2 * region.num_threads));
    if (!__atomic_compare_exchange_n(region.counter, &first, end, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) continue;
    while (first < end) task(first++);
    first = __atomic_load_n(region.counter, __ATOMIC_RELAXED);
  }
}

template <typename Args>
int64_t no_scratch(const Args&) { return 0; }
