// A team of threads that runs one function together, on the OpenMP pool that torch has started anyway.
//
// Kernels are written for a team: every member calls them, takes its share, and waits at barriers. A whole step is one
// parallel region. The library links no OpenMP: it finds the one that torch brought, so that there is a single pool.
#pragma once

#include <omp.h>

#include <atomic>
#include <cstdint>
#include <thread>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace quire {

struct Range {
  int64_t begin, end;
};

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// Sleeps while `word` is `seen`, and returns no later than after wake_all on it; may return early.
#if defined(__linux__)
inline void sleep_while(std::atomic<uint32_t>& word, uint32_t seen) {
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}
inline void wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
}
#else
inline void sleep_while(std::atomic<uint32_t>&, uint32_t) { std::this_thread::yield(); }
inline void wake_all(std::atomic<uint32_t>&) {}
#endif

constexpr int kSpins = 500;  // some 10 microseconds

// A barrier of a team. Members first spin, for the time by which members on separate cores are apart. Then they sleep:
// a missing member has lost its core to other work, and may need the core on which a waiting member spins.
class Barrier {
 public:
  void wait(int size) {
    const uint32_t round = round_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_seq_cst);
      if (sleepers_.load(std::memory_order_seq_cst)) wake_all(round_);
      return;
    }
    for (int spin = 0; spin < kSpins; ++spin) {
      if (round_.load(std::memory_order_acquire) != round) return;
      relax();
    }
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (round_.load(std::memory_order_seq_cst) == round) sleep_while(round_, round);
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
  }

 private:
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> round_{0};
  std::atomic<int> sleepers_{0};
};

class Team {
 public:
  Team(int rank, int size, Barrier* barrier) : rank_(rank), size_(size), barrier_(barrier) {}
  int rank() const { return rank_; }
  int size() const { return size_; }

  // Waits for all members; their earlier writes are visible afterwards.
  void barrier() const {
    if (size_ > 1) barrier_->wait(size_);
  }

  // The contiguous part of [0, count) that is this member's, in units of `grain`.
  Range share(int64_t count, int64_t grain = 1) const {
    const int64_t units = (count + grain - 1) / grain;
    const int64_t begin = units * rank_ / size_ * grain, end = units * (rank_ + 1) / size_ * grain;
    return {begin < count ? begin : count, end < count ? end : count};
  }

 private:
  int rank_, size_;
  Barrier* barrier_;
};

// Hands out [0, count) piece by piece on demand: a member that is slow, because its core has other work, takes less.
// One member resets the queue, with a barrier before the next use.
class Queue {
 public:
  void reset() { next_.store(0, std::memory_order_relaxed); }
  int64_t take() { return next_.fetch_add(1, std::memory_order_relaxed); }

 private:
  alignas(64) std::atomic<int64_t> next_{0};
};

// Runs body(team) on `threads` threads, the caller among them.
template <typename Body>
void run_team(int threads, Body&& body) {
  if (threads <= 1) {
    body(Team(0, 1, nullptr));
    return;
  }
  Barrier barrier;
#pragma omp parallel num_threads(threads)
  body(Team(omp_get_thread_num(), omp_get_num_threads(), &barrier));
}

}  // namespace quire
