// Which of a row's tokens can win argmax(logit / T + gumbel): those whose score, computed quickly, is within a margin of the
// best. Noise is Philox4x32-10 as in engine/philox.py; its integers are exact, its logarithms are float32's, good to 1e-5,
// so that whoever computes the scores of what is left in float64 gets the token that all scores in float64 would give.
#pragma once

constexpr int GUMBEL_LANES = 64;          // candidates at a time; as dense ids they take 16 Philox counters
constexpr double GUMBEL_LARGEST = 22.88;  // no noise is larger

// The compiler's own vectors of the instruction set's width. Words lie in the low halves of 64-bit lanes, where the
// multiplication looks for them; the high halves are never looked at.
constexpr int HALF_W = W / 2;
typedef uint64_t words_v __attribute__((vector_size(W * 4)));
typedef uint32_t uint_v __attribute__((vector_size(W * 4)));
typedef int32_t int_v __attribute__((vector_size(W * 4)));
typedef float float_v __attribute__((vector_size(W * 4)));
typedef double double_v __attribute__((vector_size(W * 4)));

INLINE words_v low_product(words_v a, words_v b) {
#ifdef __AVX512F__
  return (words_v)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#else
  return (words_v)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#endif
}

// Ten rounds on half a vector's counters side by side, in place.
INLINE void philox(words_v (&c)[4], uint32_t k0, uint32_t k1) {
  const words_v zero{}, m0 = zero + 0xD2511F53u, m1 = zero + 0xCD9E8D57u;
  for (int round = 0; round < 10; ++round) {
    const words_v a = low_product(c[0], m0), b = low_product(c[2], m1);
    c[0] = (b >> 32) ^ c[1] ^ (zero + k0);
    c[2] = (a >> 32) ^ c[3] ^ (zero + k1);
    c[1] = b, c[3] = a;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
}

// ln x of positive normal numbers: 2 atanh((m - 1) / (m + 1)) for m in [0.707, 1.414), plus e ln 2.
INLINE float_v ln(float_v x) {
  const uint_v moved = (uint_v)x - 0x3F3504F3u;  // moves the exponent's border from 1 to 0.707
  const float_v e = __builtin_convertvector((int_v)moved >> 23, float_v);
  const float_v m = (float_v)((moved & 0x007FFFFFu) + 0x3F3504F3u);
  const float_v s = (m - 1.0f) / (m + 1.0f), z = s * s;
  const float_v p = 1.0f + z * (1.0f / 3 + z * (1.0f / 5 + z * (1.0f / 7 + z * (1.0f / 9))));
  return e * 0.693147181f + 2.0f * s * p;
}

// -ln(-ln u), u = (word + 1/2) / 2^32. Near 1 the inner logarithm is of 1 - u, which the word has exactly.
INLINE float_v gumbel_of(uint_v word) {
  const float_v u = (__builtin_convertvector(word, float_v) + 0.5f) * 0x1p-32f;
  const float_v v = (__builtin_convertvector(~word, float_v) + 0.5f) * 0x1p-32f;
  const float_v s = v / (2.0f - v), z = s * s;
  const float_v series = 1.0f / 5 + z * (1.0f / 7 + z * (1.0f / 9 + z * (1.0f / 11 + z * (1.0f / 13))));
  const float_v high = 2.0f * s * (1.0f + z * (1.0f / 3 + z * series));
  return -ln((int_v)word < 0 ? high : -ln(u));
}

INLINE void start_counters(const GumbelArgs& a, words_v (&c)[4]) {
  const words_v zero{};
  c[1] = zero + a.position, c[2] = zero + a.choice, c[3] = zero + a.domain;
}

// Noise of the ids first … first + 63; `first` is a multiple of 4.
INLINE void dense_noise(const GumbelArgs& a, int64_t first, float* noise) {
  constexpr int N = GUMBEL_LANES / 4;
  uint32_t words[4][N];
  for (int start = 0; start < N; start += HALF_W) {
    words_v c[4];
    start_counters(a, c);
    for (int i = 0; i < HALF_W; ++i) c[0][i] = first / 4 + start + i;
    philox(c, a.key[0], a.key[1]);
    for (int word = 0; word < 4; ++word)
      for (int i = 0; i < HALF_W; ++i) words[word][start + i] = (uint32_t)c[word][i];
  }
  for (int word = 0; word < 4; ++word)
    for (int start = 0; start < N; start += W) {
      uint_v some;
      __builtin_memcpy(&some, &words[word][start], sizeof(some));
      const float_v g = gumbel_of(some);
      for (int i = 0; i < W; ++i) noise[4 * (start + i) + word] = g[i];
    }
}

// Noise of 64 ids.
INLINE void sparse_noise(const GumbelArgs& a, const int64_t* ids, float* noise) {
  for (int start = 0; start < GUMBEL_LANES; start += W) {
    uint_v some;
    for (int part = 0; part < W; part += HALF_W) {
      words_v id, c[4];
      __builtin_memcpy(&id, ids + start + part, sizeof(id));
      start_counters(a, c);
      c[0] = id >> 2;
      philox(c, a.key[0], a.key[1]);
      const words_v even = (id & 2) != 0 ? c[2] : c[0], odd = (id & 2) != 0 ? c[3] : c[1];
      const words_v mine = (id & 1) != 0 ? odd : even;
      for (int i = 0; i < HALF_W; ++i) some[part + i] = (uint32_t)mine[i];
    }
    const float_v g = gumbel_of(some);
    __builtin_memcpy(noise + start, &g, sizeof(g));
  }
}

INLINE double gumbel_floor(double best) { return best - GUMBEL_MARGIN - GUMBEL_ROUNDING * (best < 0 ? -best : best); }

inline void keep_above(GumbelPart& part, double floor) {
  int64_t kept = 0;
  for (int64_t i = 0; i < part.count; ++i)
    if (part.score[i] >= floor) part.index[kept] = part.index[i], part.score[kept] = part.score[i], ++kept;
  part.count = kept;
}

// The largest of 64.
INLINE double largest(const double* values) {
  double_v most;
  __builtin_memcpy(&most, values, sizeof(most));
  for (int i = HALF_W; i < GUMBEL_LANES; i += HALF_W) {
    double_v some;
    __builtin_memcpy(&some, values + i, sizeof(some));
    most = some > most ? some : most;
  }
  double top = most[0];
  for (int i = 1; i < HALF_W; ++i) top = most[i] > top ? most[i] : top;
  return top;
}

// logit / T of 64 candidates from `first` on, -inf past `end`.
INLINE void scaled_logits(const GumbelArgs& a, int64_t first, int64_t end, double* scores) {
  float logits[GUMBEL_LANES];
  const int64_t count = smaller(end - first, GUMBEL_LANES);
  __builtin_memcpy(logits, a.logits + first, count * sizeof(float));
  for (int64_t i = count; i < GUMBEL_LANES; ++i) logits[i] = -__builtin_inff();
  for (int i = 0; i < GUMBEL_LANES; ++i) scores[i] = (double)logits[i] / a.temperature;
}

// 64 candidates from `first` on join the part. False: more are near the best than there is room for.
inline bool gumbel_block(const GumbelArgs& a, int64_t first, int64_t end, GumbelPart& part) {
  double scores[GUMBEL_LANES];
  scaled_logits(a, first, end, scores);
  if (!(largest(scores) + GUMBEL_LARGEST >= gumbel_floor(part.best))) return true;
  float noise[GUMBEL_LANES];
  if (a.ids) {
    int64_t ids[GUMBEL_LANES] = {};
    __builtin_memcpy(ids, a.ids + first, smaller(end - first, GUMBEL_LANES) * sizeof(int64_t));
    sparse_noise(a, ids, noise);
  } else {
    dense_noise(a, first, noise);
  }
  for (int i = 0; i < GUMBEL_LANES; ++i) scores[i] += (double)noise[i];
  const double top = largest(scores);
  part.best = top > part.best ? top : part.best;
  const double floor = gumbel_floor(part.best);
  if (!(top >= floor) || top == -__builtin_inf()) return true;
  for (int i = 0; i < GUMBEL_LANES; ++i) {
    if (!(scores[i] >= floor) || scores[i] == -__builtin_inf()) continue;
    if (part.count == GUMBEL_ROOM) keep_above(part, floor);
    if (part.count == GUMBEL_ROOM) return false;
    part.index[part.count] = first + i, part.score[part.count++] = scores[i];
  }
  return true;
}

inline void gumbel(const GumbelArgs& a, const Region& region) {
  const int64_t blocks = (a.count + GUMBEL_LANES - 1) / GUMBEL_LANES;
  const int64_t each = (blocks + region.num_threads - 1) / region.num_threads * GUMBEL_LANES;
  const int64_t begin = smaller(a.count, each * region.thread), end = smaller(a.count, begin + each);
  GumbelPart& part = a.parts[region.thread];
  part.best = -__builtin_inf(), part.count = 0;
  if (begin == end) return;
  // Where the likeliest is, first: its score rules many others out.
  int64_t start = begin;
  float likeliest = -__builtin_inff();
  for (int64_t first = begin; first + GUMBEL_LANES <= end; first += GUMBEL_LANES) {
    float_v most;
    __builtin_memcpy(&most, a.logits + first, sizeof(most));
    for (int i = W; i < GUMBEL_LANES; i += W) {
      float_v some;
      __builtin_memcpy(&some, a.logits + first + i, sizeof(some));
      most = some > most ? some : most;
    }
    for (int i = 0; i < W; ++i)
      if (most[i] > likeliest) likeliest = most[i], start = first;
  }
  bool fits = gumbel_block(a, start, end, part);
  for (int64_t first = begin; first < end && fits; first += GUMBEL_LANES)
    if (first != start) fits = gumbel_block(a, first, end, part);
  if (fits) return;
  float most = -__builtin_inff();
  for (int64_t i = begin; i < end; ++i) most = a.logits[i] > most ? a.logits[i] : most;
  part.count = -1, part.score[0] = (double)most / a.temperature + GUMBEL_LARGEST;
}
