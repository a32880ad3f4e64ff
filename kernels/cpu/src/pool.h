// The process's own threads: they run one function together, wait a moment for the next, then sleep in the kernel.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "args.h"

// Thread 0 is the caller. Regions of different callers run one after another. A pool is made on first use, again after a
// fork (a child has none of its parent's threads) and after `configure`.
class Pool {
 public:
  static Pool& instance();

  // `cpus`: thread i is bound to cpus[i]; empty: none is bound. The caller (thread 0) is never bound by the pool.
  void configure(int num_threads, std::vector<int> cpus, int64_t spin_ns);
  int num_threads() const { return num_threads_; }

  // Calls fn(context, region) on every thread; `wide` false: on the caller alone, for work too small to share.
  void run(void (*fn)(const void*, const Region&), const void* context, int64_t scratch_bytes, bool wide);

  // Memory shared by the regions of one op; the caller holds the pool meanwhile.
  char* shared(int64_t bytes);
  std::recursive_mutex& mutex() { return mutex_; }

 private:
  struct Scratch {
    char* data = nullptr;
    int64_t size = 0;
    char* get(int64_t bytes);
  };
  struct alignas(64) Word {
    std::atomic<uint32_t> value{0};
  };

  Pool();
  void start();
  void stop();
  void work(int thread);
  void wait_while(std::atomic<uint32_t>& word, uint32_t value, std::atomic<uint32_t>& sleepers) const;
  void call(int thread);
  static void after_fork();

  std::recursive_mutex mutex_;
  int num_threads_ = 1;
  std::vector<int> cpus_;
  int64_t spin_ns_ = 100'000;
  bool started_ = false;
  uint32_t first_generation_ = 0;

  Word generation_, workers_asleep_, num_running_, caller_asleep_, num_alive_;
  std::atomic<bool> stopping_{false};
  alignas(64) int64_t counter_ = 0;
  alignas(64) void (*fn_)(const void*, const Region&) = nullptr;
  const void* context_ = nullptr;
  int64_t scratch_bytes_ = 0;
  std::vector<Scratch> scratch_;
  Scratch shared_;
};
