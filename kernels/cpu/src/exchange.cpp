#include "exchange.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <stdexcept>
#include <string>

namespace {

constexpr int64_t NAP_NS = 100'000'000;  // a sleeper looks up so often: `give_up` may wake it just before it sleeps

int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

// Not FUTEX_PRIVATE: the other side is another process.
void sleep_while(uint32_t* word, uint32_t value) {
  const timespec nap{0, NAP_NS};
  syscall(SYS_futex, word, FUTEX_WAIT, value, &nap, nullptr, 0);
}

void wake_all(uint32_t* word) { syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

bool has_reached(uint32_t written, uint32_t piece) { return static_cast<int32_t>(written - piece) >= 0; }

}  // namespace

Exchange::Exchange(void* memory, int64_t capacity, int rank, int size, int64_t spin_ns, int64_t timeout_ms)
    : lines_(static_cast<Line*>(memory)),
      data_(static_cast<char*>(memory) + size * sizeof(Line)),
      capacity_(capacity),
      spin_ns_(spin_ns),
      timeout_ms_(timeout_ms),
      rank_(rank),
      size_(size) {
  if (capacity < 64 || capacity % 64 || rank < 0 || rank >= size) {
    throw std::invalid_argument("an exchange needs a capacity of whole 64 bytes and a rank below its size");
  }
}

int64_t Exchange::bytes(int size, int64_t capacity) { return size * (static_cast<int64_t>(sizeof(Line)) + 2 * capacity); }

void Exchange::sum(const float* own, float* total, int64_t count) {
  const int64_t most = capacity_ / sizeof(float);
  for (int64_t done = 0; done < count; done += most) {
    const int64_t n = std::min(most, count - done);
    write(reinterpret_cast<const char*>(own + done), n * sizeof(float));
    await_all();
    float* to = total + done;
    std::memcpy(to, part(0), n * sizeof(float));
    for (int rank = 1; rank < size_; ++rank) {
      const float* from = reinterpret_cast<const float*>(part(rank));
      for (int64_t i = 0; i < n; ++i) to[i] += from[i];
    }
  }
}

void Exchange::gather(const char* own, char* all, int64_t num_bytes) {
  for (int64_t done = 0; done < num_bytes; done += capacity_) {
    const int64_t n = std::min(capacity_, num_bytes - done);
    write(own + done, n);
    await_all();
    for (int rank = 0; all && rank < size_; ++rank) std::memcpy(all + rank * num_bytes + done, part(rank), n);
  }
}

void Exchange::give_up() {
  given_up_.store(true);
  for (int rank = 0; rank < size_; ++rank) wake_all(&lines_[rank].written);
}

void Exchange::write(const char* own, int64_t num_bytes) {
  ++piece_;
  std::memcpy(const_cast<char*>(part(rank_)), own, num_bytes);
  Line& line = lines_[rank_];
  // Either this sees who is about to sleep, or that one sees the new number.
  __atomic_store_n(&line.written, piece_, __ATOMIC_SEQ_CST);
  if (__atomic_load_n(&line.sleepers, __ATOMIC_SEQ_CST)) wake_all(&line.written);
}

void Exchange::await_all() {
  for (int rank = 0; rank < size_; ++rank) {
    if (rank != rank_) await(rank);
  }
}

void Exchange::await(int rank) {
  Line& line = lines_[rank];
  if (has_reached(__atomic_load_n(&line.written, __ATOMIC_ACQUIRE), piece_)) return;
  const int64_t started = now_ns();
  for (int turn = 1; spin_ns_ > 0; ++turn) {
    _mm_pause();
    if (has_reached(__atomic_load_n(&line.written, __ATOMIC_ACQUIRE), piece_)) return;
    if (turn % 16 == 0 && now_ns() - started >= spin_ns_) break;
  }
  for (;;) {
    if (given_up_.load()) throw std::runtime_error("the exchange was given up");
    __atomic_fetch_add(&line.sleepers, 1, __ATOMIC_SEQ_CST);
    const uint32_t written = __atomic_load_n(&line.written, __ATOMIC_SEQ_CST);
    const bool is_there = has_reached(written, piece_);
    if (!is_there) sleep_while(&line.written, written);
    __atomic_fetch_sub(&line.sleepers, 1, __ATOMIC_SEQ_CST);
    if (is_there) return;
    if ((now_ns() - started) / 1'000'000 >= timeout_ms_) {
      throw std::runtime_error("rank " + std::to_string(rank) + " has been silent for " + std::to_string(timeout_ms_) + " ms");
    }
  }
}
