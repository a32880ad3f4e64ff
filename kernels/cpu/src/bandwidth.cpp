// Reads a buffer front to back on all threads.
#include "bandwidth.h"

#include <emmintrin.h>

#include "pool.h"

namespace {

struct Job {
  const char* buffer;
  int64_t num_bytes;
  uint64_t checksum;
};

constexpr int64_t LINE = 64, PART = 1 << 20;

void read_parts(const void* context, const Region& region) {
  Job& job = *const_cast<Job*>(static_cast<const Job*>(context));
  __m128i sums[4] = {};
  for (int64_t part; (part = __atomic_fetch_add(region.counter, 1, __ATOMIC_RELAXED)) * PART < job.num_bytes;) {
    const int64_t end = (part + 1) * PART < job.num_bytes ? (part + 1) * PART : job.num_bytes;
    for (int64_t i = part * PART; i + LINE <= end; i += LINE) {
      for (int j = 0; j < 4; ++j)
        sums[j] = _mm_xor_si128(sums[j], _mm_loadu_si128(reinterpret_cast<const __m128i*>(job.buffer + i + j * 16)));
    }
  }
  const __m128i all = _mm_xor_si128(_mm_xor_si128(sums[0], sums[1]), _mm_xor_si128(sums[2], sums[3]));
  __atomic_fetch_xor(&job.checksum, static_cast<uint64_t>(_mm_cvtsi128_si64(_mm_xor_si128(all, _mm_srli_si128(all, 8)))),
                     __ATOMIC_RELAXED);
}

}  // namespace

uint64_t read_all(const char* buffer, int64_t num_bytes) {
  Job job{buffer, num_bytes, 0};
  Pool::instance().run(read_parts, &job, 0, true);
  return job.checksum;
}
