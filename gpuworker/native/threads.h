// A team of threads that runs one function together, on the OpenMP pool that torch has started anyway.
//
// Kernels are written for a team: every member calls them. The work is a sequence of phases, each cut into pieces that
// members take on demand. A phase is over when its pieces are done. No phase waits for a member: one that has lost its
// core to other work finds the pieces of phases gone, and goes on to the phase that the others are in.
// A whole step is one parallel region. The library links no OpenMP: it finds the one that torch brought, so that there is
// a single pool.
#pragma once

#include <omp.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <vector>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <thread>
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
#elif defined(__aarch64__)
  __asm__ volatile("isb");  // `yield` takes no time on most of these processors
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

// Pieces of work, each taken by one member. A phase is used once: a member may come to it long after it is over.
class alignas(64) Phase {
 public:
  int64_t take() { return next_.fetch_add(1, std::memory_order_relaxed); }

  // Reports pieces as done, and waits until all are: first spinning, then asleep.
  void finish(uint32_t pieces, uint32_t all) {
    if (pieces && done_.fetch_add(pieces, std::memory_order_seq_cst) + pieces == all) {
      if (sleepers_.load(std::memory_order_seq_cst)) wake_all(done_);
      return;
    }
    for (int spin = 0; spin < kSpins; ++spin) {
      if (done_.load(std::memory_order_acquire) == all) return;
      relax();
    }
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    for (uint32_t seen; (seen = done_.load(std::memory_order_seq_cst)) != all;) sleep_while(done_, seen);
  }

 private:
  std::atomic<int64_t> next_{0};
  std::atomic<uint32_t> done_{0};
  std::atomic<int> sleepers_{0};
};

// What the members of a team share.
struct Shared {
  explicit Shared(int64_t count) : phases(count) {}

  Barrier barrier;
  std::vector<Phase> phases;
};

class Team {
 public:
  Team(int rank, int size, Shared* shared) : rank_(rank), size_(size), shared_(shared) {}
  int rank() const { return rank_; }
  int size() const { return size_; }

  // Waits for all members; their earlier writes are visible afterwards.
  void barrier() const {
    if (size_ > 1) shared_->barrier.wait(size_);
  }

  // The next phase: calls body(piece) for those of [0, count) that this member takes, and returns when all are done;
  // their writes are visible then. All members go through the same phases. Between phases they write nothing shared.
  template <typename Body>
  void phase(int64_t count, Body&& body) {
    if (count < 1) return;
    if (size_ == 1) {
      for (int64_t piece = 0; piece < count; ++piece) body(piece);
      return;
    }
    if (phase_ == shared_->phases.size()) std::abort();  // run_team was called for fewer
    Phase& phase = shared_->phases[phase_++];
    uint32_t mine = 0;
    for (int64_t piece; (piece = phase.take()) < count; ++mine) body(piece);
    phase.finish(mine, static_cast<uint32_t>(count));
  }

  // A phase that calls body(i) for each i of [0, count), so many at a time.
  template <typename Body>
  void phase(int64_t count, int64_t at_once, Body&& body) {
    phase((count + at_once - 1) / at_once, [&](int64_t piece) {
      const int64_t end = (piece + 1) * at_once < count ? (piece + 1) * at_once : count;
      for (int64_t i = piece * at_once; i < end; ++i) body(i);
    });
  }

  // The contiguous part of [0, count) that is this member's, in units of `grain`.
  Range share(int64_t count, int64_t grain = 1) const {
    const int64_t units = (count + grain - 1) / grain;
    const int64_t begin = units * rank_ / size_ * grain, end = units * (rank_ + 1) / size_ * grain;
    return {begin < count ? begin : count, end < count ? end : count};
  }

 private:
  int rank_, size_;
  Shared* shared_;
  size_t phase_ = 0;  // the number of phases so far
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

// Runs body(team) on `threads` threads, the caller among them. The body has at most so many phases.
template <typename Body>
void run_team(int threads, int64_t phases, Body&& body) {
  if (threads <= 1) {
    Team alone(0, 1, nullptr);
    body(alone);
    return;
  }
  Shared shared(phases);
#pragma omp parallel num_threads(threads)
  {
    Team team(omp_get_thread_num(), omp_get_num_threads(), &shared);
    body(team);
  }
}

}  // namespace quire
