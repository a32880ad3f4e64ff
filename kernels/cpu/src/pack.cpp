// Weights in tile order: a copy, done once per weight, shared out by strips.
#include "pack.h"

#include <cstring>

#include "pool.h"

namespace {

constexpr int64_t WORD = 4, TILE = 16, MOST_WORDS = 24;

struct Job {
  const char* rows;
  int64_t row_stride_bytes, row_bytes, num_rows;
  char* packed;
  int64_t depth_blocks, first_strip, strip_step, block_words;
};

void pack_strip(const Job& job, int64_t group) {
  const int64_t strip = job.first_strip + group * job.strip_step;
  const int64_t tile_bytes = job.block_words * TILE * WORD, block_bytes = job.block_words * WORD;
  char* panel = job.packed + strip / 2 * job.depth_blocks * 2 * tile_bytes + strip % 2 * tile_bytes;
  const int64_t width = job.num_rows - group * TILE < TILE ? job.num_rows - group * TILE : TILE;
  for (int64_t block = 0; block < job.depth_blocks; ++block) {
    uint32_t* tile = reinterpret_cast<uint32_t*>(panel + block * 2 * tile_bytes);
    const int64_t begin = block * block_bytes, left = job.row_bytes - begin;
    for (int64_t n = 0; n < width; ++n) {
      uint32_t words[MOST_WORDS] = {};
      std::memcpy(words, job.rows + (group * TILE + n) * job.row_stride_bytes + begin, left < block_bytes ? left : block_bytes);
      for (int64_t r = 0; r < job.block_words; ++r) tile[r * TILE + n] = words[r];
    }
  }
}

void pack_all(const void* context, const Region& region) {
  const Job& job = *static_cast<const Job*>(context);
  const int64_t num_groups = (job.num_rows + TILE - 1) / TILE;
  for (int64_t g; (g = __atomic_fetch_add(region.counter, 1, __ATOMIC_RELAXED)) < num_groups;) pack_strip(job, g);
}

}  // namespace

void pack_rows(const char* rows, int64_t row_stride_bytes, int64_t row_bytes, int64_t num_rows, char* packed,
               int64_t depth_blocks, int64_t first_strip, int64_t strip_step, int64_t block_words) {
  const Job job{rows,         row_stride_bytes, row_bytes,  num_rows,   packed,
                depth_blocks, first_strip,      strip_step, block_words};
  Pool::instance().run(pack_all, &job, 0, num_rows * row_bytes > 64 * 1024);
}
