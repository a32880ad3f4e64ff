// Spin, then sleep on a futex: between two ops of a step the threads stay awake, idle they use no CPU.
#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include <xmmintrin.h>

#include <cstdlib>
#include <new>
#include <thread>

namespace {

constexpr int64_t HUGE_PAGE = 2 << 20;
constexpr unsigned FLUSH_DENORMALS = 0x8040;  // FTZ and DAZ, as AMX and AVX512_BF16 always do

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000 + t.tv_nsec;
}

void sleep_on(std::atomic<uint32_t>& word, uint32_t value) {
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void wake(std::atomic<uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0); }

}  // namespace

Pool& Pool::instance() {
  static Pool* pool = new Pool;  // never destroyed: its threads may outlive the interpreter
  return *pool;
}

Pool::Pool() { pthread_atfork(nullptr, nullptr, &Pool::after_fork); }

void Pool::after_fork() {
  Pool& pool = instance();
  new (&pool.mutex_) std::recursive_mutex;  // the parent's threads may have held it
  pool.started_ = false;
  pool.num_alive_.value = 0;
}

char* Pool::Scratch::get(int64_t bytes) {
  if (bytes > size) {
    std::free(data);
    size = (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    data = static_cast<char*>(std::aligned_alloc(HUGE_PAGE, size));
    if (!data) {
      size = 0;
      throw std::bad_alloc();
    }
    madvise(data, size, MADV_HUGEPAGE);
  }
  return data;
}

char* Pool::shared(int64_t bytes) { return shared_.get(bytes); }

void Pool::configure(int num_threads, std::vector<int> cpus, int64_t spin_ns) {
  std::lock_guard<std::recursive_mutex> hold(mutex_);
  stop();
  num_threads_ = num_threads;
  cpus_ = std::move(cpus);
  spin_ns_ = spin_ns;
}

void Pool::start() {
  if (static_cast<int>(scratch_.size()) < num_threads_) scratch_.resize(num_threads_);
  started_ = true;
  first_generation_ = generation_.value.load();
  stopping_ = false;
  workers_asleep_.value = 0;
  caller_asleep_.value = 0;
  num_running_.value = 0;
  for (int i = 1; i < num_threads_; ++i) {
    num_alive_.value.fetch_add(1);
    std::thread([this, i] { work(i); }).detach();
  }
}

void Pool::stop() {
  if (!started_) return;
  stopping_ = true;
  generation_.value.fetch_add(1);
  wake(generation_.value);
  while (num_alive_.value.load() != 0) sched_yield();
  started_ = false;
}

void Pool::wait_while(std::atomic<uint32_t>& word, uint32_t value, std::atomic<uint32_t>& sleepers) const {
  int64_t deadline = 0;
  for (unsigned i = 1;; ++i) {
    if (word.load(std::memory_order_acquire) != value) return;
    _mm_pause();
    if (i % 32 != 0) continue;
    const int64_t now = now_ns();
    if (deadline == 0) deadline = now + spin_ns_;
    if (now < deadline) continue;
    sleepers.fetch_add(1);
    while (word.load() == value) sleep_on(word, value);
    sleepers.fetch_sub(1);
    return;
  }
}

void Pool::call(int thread) {
  const unsigned mode = _mm_getcsr();
  _mm_setcsr(mode | FLUSH_DENORMALS);
  fn_(context_, Region{thread, num_threads_, &counter_, scratch_[thread].data});
  _mm_setcsr(mode);
}

void Pool::work(int thread) {
  if (thread < static_cast<int>(cpus_.size())) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpus_[thread], &set);
    sched_setaffinity(0, sizeof set, &set);
  }
  // `run` can't have begun before all workers are counted in, and none finishes a region before it has begun: a worker
  // that starts late still finds the generation of its first region ahead of `seen`.
  uint32_t seen = first_generation_;
  for (;;) {
    wait_while(generation_.value, seen, workers_asleep_.value);
    seen += 1;
    if (stopping_) break;
    call(thread);
    if (num_running_.value.fetch_sub(1) == 1 && caller_asleep_.value.load() != 0) wake(num_running_.value);
  }
  num_alive_.value.fetch_sub(1);
}

void Pool::run(void (*fn)(const void*, const Region&), const void* context, int64_t scratch_bytes, bool wide) {
  std::lock_guard<std::recursive_mutex> hold(mutex_);
  if (!started_) start();
  counter_ = 0;
  fn_ = fn;
  context_ = context;
  if (!wide || num_threads_ == 1) {
    scratch_[0].get(scratch_bytes);
    const unsigned mode = _mm_getcsr();
    _mm_setcsr(mode | FLUSH_DENORMALS);
    fn(context, Region{0, 1, &counter_, scratch_[0].data});
    _mm_setcsr(mode);
    return;
  }
  for (int i = 0; i < num_threads_; ++i) scratch_[i].get(scratch_bytes);
  num_running_.value.store(num_threads_ - 1);
  generation_.value.fetch_add(1);
  if (workers_asleep_.value.load() != 0) wake(generation_.value);
  call(0);
  for (uint32_t left; (left = num_running_.value.load(std::memory_order_acquire)) != 0;)
    wait_while(num_running_.value, left, caller_asleep_.value);
}
