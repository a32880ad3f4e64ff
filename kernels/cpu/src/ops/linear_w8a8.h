// The integer kind of linear_int8.h: x int8 [m, whole blocks], its scales [m], sums in 32 bits.
//
// On AMX tiles it is the plain product of linear.h over int8. With VNNI (w + 128) q for unsigned w + 128, less 128 times the
// sum of q, which begins the sum; what overflows 32 bits on the way comes back. Else |w| * (q with w's sign), a pair of which
// stays below 2^15 for both in -127 ... 127, in 256 bits. The sums are exact, so every set gives the same bits.
#pragma once

#if defined(PAGEWIRE_AMX)
template <typename T>
void linear_w8a8(const LinearArgs& a, const Region& region) {
  const LinearPlan<int8_t> plan(a, region.num_threads);
  TileScope scope;
  const auto finish = [&a](int64_t row, int64_t rows, int64_t panel, float* c) { finish_int8<T>(a, row, rows, panel, c); };
  each_task(region, plan.num_tasks, [&](int64_t task) { multiply_task(a, plan, task, (float*)region.scratch, scope, finish); });
}

template <typename T>
int64_t linear_w8a8_scratch(const LinearArgs& a) { return linear_scratch<int8_t>(a); }

#else

#if defined(__AVX512VNNI__)
constexpr int64_t W8A8_ROWS = 12;  // 24 of 32 registers accumulate

template <int ROWS, bool FROM_MEMORY>
void multiply_w8a8(const char* a, int64_t stride, const int32_t* x_sums, const char* b, int64_t num_blocks, int32_t* c) {
  const __m512i flip = _mm512_set1_epi8(-128);
  __m512i acc[2][ROWS];
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i) acc[0][i] = acc[1][i] = _mm512_set1_epi32(-128 * x_sums[i]);
  for (int64_t block = 0; block < num_blocks; ++block, b += BLOCK_BYTES, a += DEPTH_INT8)
#pragma GCC unroll 2
    for (int strip = 0; strip < 2; ++strip)
#pragma GCC unroll 4
      for (int word = 0; word < 16; ++word) {
        if (ROWS >= LEAST_READ_AHEAD) _mm_prefetch(b + strip * TILE_BYTES + word * 64 + READ_AHEAD, _MM_HINT_T1);
        const __m512i w = _mm512_xor_si512(_mm512_loadu_si512(b + strip * TILE_BYTES + word * 64), flip);
#pragma GCC unroll 16
        for (int i = 0; i < ROWS; ++i) {
          int32_t four;
          __builtin_memcpy(&four, a + i * stride + word * 4, 4);
          acc[strip][i] = _mm512_dpbusd_epi32(acc[strip][i], w, _mm512_set1_epi32(four));
        }
      }
#pragma GCC unroll 2
  for (int strip = 0; strip < 2; ++strip)
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i) _mm512_storeu_si512(c + i * PANEL + strip * 16, acc[strip][i]);
}
#else
constexpr int64_t W8A8_ROWS = 3;  // 12 of 16 registers accumulate

template <int ROWS, bool FROM_MEMORY>
void multiply_w8a8(const char* a, int64_t stride, const int32_t*, const char* b, int64_t num_blocks, int32_t* c) {
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i acc[2][ROWS][2];
#pragma GCC unroll 2
  for (int strip = 0; strip < 2; ++strip)
#pragma GCC unroll 4
    for (int i = 0; i < ROWS; ++i) acc[strip][i][0] = acc[strip][i][1] = _mm256_setzero_si256();
  for (int64_t block = 0; block < num_blocks; ++block, b += BLOCK_BYTES, a += DEPTH_INT8)
#pragma GCC unroll 2
    for (int strip = 0; strip < 2; ++strip)
#pragma GCC unroll 4
      for (int word = 0; word < 16; ++word) {
        if (FROM_MEMORY) prefetch_ahead(b + strip * TILE_BYTES + word * 64);
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) {
          const __m256i w = _mm256_loadu_si256((const __m256i*)(b + strip * TILE_BYTES + word * 64 + v * 32));
          const __m256i magnitude = _mm256_abs_epi8(w);
#pragma GCC unroll 4
          for (int i = 0; i < ROWS; ++i) {
            int32_t four;
            __builtin_memcpy(&four, a + i * stride + word * 4, 4);
            const __m256i x = _mm256_sign_epi8(_mm256_set1_epi32(four), w);
            const __m256i pairs = _mm256_maddubs_epi16(magnitude, x);
            acc[strip][i][v] = _mm256_add_epi32(acc[strip][i][v], _mm256_madd_epi16(pairs, ones));
          }
        }
      }
#pragma GCC unroll 2
  for (int strip = 0; strip < 2; ++strip)
#pragma GCC unroll 4
    for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v)
        _mm256_storeu_si256((__m256i*)(c + i * PANEL + strip * 16 + v * 8), acc[strip][i][v]);
}
#endif

template <bool FROM_MEMORY, int MOST = W8A8_ROWS>
INLINE void multiply_rows_w8a8(int64_t rows, const char* a, int64_t stride, const int32_t* x_sums, const char* b,
                               int64_t num_blocks, int32_t* c) {
  if constexpr (MOST > 0) {
    if (rows == MOST) return multiply_w8a8<MOST, FROM_MEMORY>(a, stride, x_sums, b, num_blocks, c);
    multiply_rows_w8a8<FROM_MEMORY, MOST - 1>(rows, a, stride, x_sums, b, num_blocks, c);
  }
}

template <typename T>
void linear_w8a8(const LinearArgs& a, const Region& region) {
  const Int8Plan<T> plan(a, region.num_threads, a.m <= W8A8_ROWS);
  float* sums = (float*)region.scratch;
  each_task(region, plan.num_tasks, [&](int64_t task) {
    const Int8Part part(a, plan, task);
    for (int64_t row = part.first_row; row < part.last_row; row += W8A8_ROWS) {
      const int64_t rows = smaller(W8A8_ROWS, part.last_row - row);
      for (int64_t panel = part.first_panel; panel < part.last_panel; ++panel) {
        const char* x = (const char*)a.x + row * a.x_stride;
        const char* weight = a.weight + panel * plan.num_blocks * BLOCK_BYTES;
        if (PREFETCHES && row == part.first_row) {
          multiply_rows_w8a8<true>(rows, x, a.x_stride, a.x_sums + row, weight, plan.num_blocks, (int32_t*)sums);
        } else {
          multiply_rows_w8a8<false>(rows, x, a.x_stride, a.x_sums + row, weight, plan.num_blocks, (int32_t*)sums);
        }
        finish_int8<T>(a, row, rows, panel, sums);
      }
    }
  });
}

template <typename T>
int64_t linear_w8a8_scratch(const LinearArgs&) { return W8A8_ROWS * PANEL * (int64_t)sizeof(float); }
#endif
