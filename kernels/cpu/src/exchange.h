// What processes of one machine tell each other in memory that all of them map: each its part, added up or side by side.
//
//   words    per rank a line of 64 bytes: how many pieces it has written, how many others sleep until it writes the next
//   data     [2][rank][capacity] bytes: pieces by turns in the first and in the second half
//
// A rank that has written piece s has read piece s - 1. So when all have written s, the half of s - 1 is free again, and one
// wait a piece is enough. Waiting is awake for a moment, then asleep in the kernel (a futex): no core is kept from others.
#pragma once
#include <atomic>
#include <cstdint>

class Exchange {
 public:
  // `memory`: `bytes(size, capacity)` of them, zero when the first rank comes, shared by all.
  Exchange(void* memory, int64_t capacity, int rank, int size, int64_t spin_ns, int64_t timeout_ms);
  static int64_t bytes(int size, int64_t capacity);

  // total[i] = the ranks' own[i], added in the order of the ranks. Throws std::runtime_error, as `gather`, when it is given
  // up or a rank is silent for the timeout.
  void sum(const float* own, float* total, int64_t count);

  // all[r] = rank r's own; on a rank with no `all` nothing is read.
  void gather(const char* own, char* all, int64_t num_bytes);

  // Ends a `sum` or `gather` of this process that waits, and every later one. From any thread.
  void give_up();

 private:
  struct Line {
    uint32_t written, sleepers;
    char rest[56];
  };
  const char* part(int rank) const { return data_ + ((piece_ & 1) * size_ + rank) * capacity_; }
  void write(const char* own, int64_t num_bytes);
  void await_all();
  void await(int rank);

  Line* lines_;
  char* data_;
  int64_t capacity_, spin_ns_, timeout_ms_;
  int rank_, size_;
  uint32_t piece_ = 0;
  std::atomic<bool> given_up_{false};
};
