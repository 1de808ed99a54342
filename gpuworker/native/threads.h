// A team of threads that runs one function together, on the OpenMP pool that torch has started anyway.
//
// Kernels are written for a team: every member calls them, takes its share, and waits at barriers. A whole step is one
// parallel region. The library links no OpenMP: it finds the one that torch brought, so that there is a single pool.
#pragma once

#include <omp.h>

#include <atomic>
#include <cstdint>

namespace quire {

struct Range {
  int64_t begin, end;
};

class Team {
 public:
  Team(int rank, int size) : rank_(rank), size_(size) {}
  int rank() const { return rank_; }
  int size() const { return size_; }

  // Waits for all members; what they wrote before it is seen after it.
  void barrier() const {
    if (size_ > 1) {
#pragma omp barrier
    }
  }

  // The contiguous part of [0, count) that is this member's, in units of `grain`.
  Range share(int64_t count, int64_t grain = 1) const {
    const int64_t units = (count + grain - 1) / grain;
    const int64_t begin = units * rank_ / size_ * grain, end = units * (rank_ + 1) / size_ * grain;
    return {begin < count ? begin : count, end < count ? end : count};
  }

 private:
  int rank_, size_;
};

// Hands out [0, count) piece by piece to whoever comes: a member that is slow, because its core has other work, takes
// less. Reset it by one member, with a barrier before the next use.
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
    body(Team(0, 1));
    return;
  }
#pragma omp parallel num_threads(threads)
  body(Team(omp_get_thread_num(), omp_get_num_threads()));
}

}  // namespace quire
