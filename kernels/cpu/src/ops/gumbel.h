// Which of a row's tokens can win argmax(logit / T + gumbel): those whose score, computed quickly, is within a margin of the
// best. Noise is Philox4x32-10 as in engine/philox.py; its integers are exact, its logarithms are float32's, good to 1e-5,
// so that whoever computes the scores of what is left in float64 gets the token that all scores in float64 would give.
//
// Noise reaches a gap g only where 1 - u <= e^-g. So of most blocks of tokens only Philox's integers are computed, and of those
// more than GUMBEL_LARGEST below the best nothing.
#pragma once

constexpr int GUMBEL_LANES = 64;          // candidates at a time; as dense ids they take 16 Philox counters
constexpr double GUMBEL_LARGEST = 22.88;  // no noise is larger
constexpr double LOG2_E_DOUBLE = 1.4426950408889634;

// The compiler's own vectors of the instruction set's width. Words lie in the low halves of 64-bit lanes, where the
// multiplication looks for them; the high halves are never looked at.
constexpr int HALF_W = W / 2;
typedef uint64_t words_v __attribute__((vector_size(W * 4)));
typedef uint32_t uint_v __attribute__((vector_size(W * 4)));
typedef int32_t int_v __attribute__((vector_size(W * 4)));
typedef float float_v __attribute__((vector_size(W * 4)));

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

INLINE void start_counters(const GumbelKey& key, words_v (&c)[4]) {
  const words_v zero{};
  c[1] = zero + key.position, c[2] = zero + key.choice, c[3] = zero + key.domain;
}

// The words of half a vector's counters, from that of id `first` on.
INLINE void dense_words(const GumbelKey& key, int64_t first, words_v (&c)[4]) {
  start_counters(key, c);
  for (int i = 0; i < HALF_W; ++i) c[0][i] = first / 4 + i;
  philox(c, (uint32_t)key.seed, (uint32_t)(key.seed >> 32));
}

INLINE bool any_lane(words_v mask) {
#ifdef __AVX512F__
  return _mm512_test_epi64_mask((__m512i)mask, (__m512i)mask) != 0;
#else
  return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#endif
}

// Whether one of the 64 words of the ids from `first` on is at least `least`.
INLINE bool any_word_reaches(const GumbelKey& key, int64_t first, uint64_t least) {
  const words_v low = words_v{} + 0xFFFF'FFFFu, bound = words_v{} + least;
  words_v reached{};
  for (int start = 0; start < GUMBEL_LANES / 4; start += HALF_W) {
    words_v c[4];
    dense_words(key, first + 4 * start, c);
    for (int word = 0; word < 4; ++word) reached |= (words_v)((c[word] & low) >= bound);
  }
  return any_lane(reached);
}

// Smaller words have less noise than `gap`.
INLINE uint64_t least_word(double gap) {
  if (!(gap > 1.0)) return 0;
  const int64_t halvings = (int64_t)((gap - 1e-3) * LOG2_E_DOUBLE);
  return (1ull << 32) - (1ull << (32 - smaller(halvings, 32)));
}

// Noise of the ids first ... first + 63; `first` is a multiple of 4.
INLINE void dense_noise(const GumbelKey& key, int64_t first, float* noise) {
  constexpr int N = GUMBEL_LANES / 4;
  uint32_t words[4][N];
  for (int start = 0; start < N; start += HALF_W) {
    words_v c[4];
    dense_words(key, first + 4 * start, c);
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
INLINE void sparse_noise(const GumbelKey& key, const int64_t* ids, float* noise) {
  for (int start = 0; start < GUMBEL_LANES; start += W) {
    uint_v some;
    for (int part = 0; part < W; part += HALF_W) {
      words_v id, c[4];
      __builtin_memcpy(&id, ids + start + part, sizeof(id));
      start_counters(key, c);
      c[0] = id >> 2;
      philox(c, (uint32_t)key.seed, (uint32_t)(key.seed >> 32));
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
INLINE float largest(const float* values) {
  vec most = vload(values);
  for (int i = W; i < GUMBEL_LANES; i += W) most = vmax(most, vload(values + i));
  return vmaximum(most);
}

INLINE void start(GumbelPart& part) { part.best = -__builtin_inf(), part.count = 0; }

// 64 candidates from `first` on join the part; `logits` are theirs, -inf where there is none. ids null: `first` is the first's.
inline void gumbel_block(const GumbelKey& key, double temperature, const float* logits, int64_t first, const int64_t* ids,
                         GumbelPart& part) {
  const float likeliest = largest(logits);
  const double gap = gumbel_floor(part.best) - (double)likeliest / temperature;
  if (part.count < 0 || likeliest == -__builtin_inff() || !(gap <= GUMBEL_LARGEST)) return;
  float noise[GUMBEL_LANES];
  if (ids) {
    sparse_noise(key, ids, noise);
  } else if (any_word_reaches(key, first, least_word(gap))) {
    dense_noise(key, first, noise);
  } else {
    return;
  }
  double scores[GUMBEL_LANES], top = -__builtin_inf();
  for (int i = 0; i < GUMBEL_LANES; ++i) scores[i] = (double)logits[i] / temperature + (double)noise[i];
  for (int i = 0; i < GUMBEL_LANES; ++i) top = scores[i] > top ? scores[i] : top;
  part.best = top > part.best ? top : part.best;
  const double floor = gumbel_floor(part.best);
  for (int i = 0; i < GUMBEL_LANES; ++i) {
    if (!(scores[i] >= floor) || scores[i] == -__builtin_inf()) continue;
    if (part.count == GUMBEL_ROOM) keep_above(part, floor);
    if (part.count == GUMBEL_ROOM) {
      part.count = -1;  // more are near the best than there is room for
      return;
    }
    part.index[part.count] = first + i, part.score[part.count++] = scores[i];
  }
}
