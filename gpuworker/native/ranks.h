// Meetings of ranks (quire_ranks.h). One thread of a rank calls these functions at a time.
#pragma once

#include <algorithm>
#include <atomic>
#include <ctime>

#include "quire_ranks.h"
#include "threads.h"

namespace quire {

constexpr int kRankSpins = 2000;  // some 40 microseconds

inline std::atomic<uint32_t>& shared_word(uint32_t& word) { return reinterpret_cast<std::atomic<uint32_t>&>(word); }
static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t) && std::atomic<uint32_t>::is_always_lock_free);

// Sleeps while a word that processes share is `seen`, a tenth of a second at most.
inline void sleep_on_shared(std::atomic<uint32_t>& word, uint32_t seen) {
#if defined(__linux__)
  const timespec limit{0, 100000000};
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &limit, nullptr, 0);
#else
  (void)word, (void)seen;
  std::this_thread::yield();
#endif
}

inline void wake_shared(std::atomic<uint32_t>& word) {
#if defined(__linux__)
  syscall(SYS_futex, &word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
#else
  (void)word;
#endif
}

// Waits until a counter of another rank has reached `wanted`; counters wrap around. Gives up where that is asked for,
// after a tenth of a second, and returns false then.
inline bool wait_for_rank(quire_rank_counters& of, uint32_t& counter, uint32_t wanted, bool gives_up = false) {
  std::atomic<uint32_t>& word = shared_word(counter);
  const auto is_there = [&] { return static_cast<int32_t>(word.load(std::memory_order_acquire) - wanted) >= 0; };
  for (int spin = 0; spin < kRankSpins; ++spin) {
    if (is_there()) return true;
    relax();
  }
  std::atomic<uint32_t>& sleepers = shared_word(of.sleepers);
  sleepers.fetch_add(1, std::memory_order_seq_cst);
  for (uint32_t seen; static_cast<int32_t>((seen = word.load(std::memory_order_seq_cst)) - wanted) < 0;) {
    sleep_on_shared(word, seen);
    if (gives_up) break;
  }
  sleepers.fetch_sub(1, std::memory_order_relaxed);
  return is_there();
}

// Moves a counter of this rank on, after what it wrote before.
inline uint32_t advance_rank(quire_rank_counters& own, uint32_t& counter) {
  std::atomic<uint32_t>& word = shared_word(counter);
  const uint32_t now = word.fetch_add(1, std::memory_order_seq_cst) + 1;
  if (shared_word(own.sleepers).load(std::memory_order_seq_cst)) wake_shared(word);
  return now;
}

// Waits until all ranks have come here; what each wrote before is visible to all then. That is so many floats of its
// part, or its columns of so many rows of logits, which rank 0 alone reads.
inline void meet_ranks(const quire_ranks& ranks, int64_t floats, int64_t rows = 0) {
  quire_rank_counters* all = ranks.board->ranks;
  all[ranks.rank].floats = static_cast<uint32_t>(floats);
  all[ranks.rank].rows = static_cast<uint32_t>(rows);
  const uint32_t meeting = advance_rank(all[ranks.rank], all[ranks.rank].met);
  for (int32_t r = 0; r < ranks.size; ++r) {
    if (r != ranks.rank) wait_for_rank(all[r], all[r].met, meeting);
  }
}

// Which of the two sets of parts the next meeting is for.
inline uint32_t next_parts(const quire_ranks& ranks) {
  return shared_word(ranks.board->ranks[ranks.rank].met).load(std::memory_order_relaxed);
}

inline float* part_of_rank(const quire_ranks& ranks, uint32_t turn, int32_t rank) {
  return ranks.parts + ((turn & 1) * ranks.size + rank) * ranks.part_floats;
}

// Gives the tokens of a step from rank 0 to the others, one way. Each counts the steps of its own in `begun`.
inline void share_tokens(const quire_ranks& ranks, int64_t* token_ids, int64_t count) {
  quire_rank_counters& own = ranks.board->ranks[ranks.rank];
  if (ranks.rank == 0) {
    std::copy(token_ids, token_ids + count, ranks.token_ids);
    own.given = static_cast<uint32_t>(count);
    advance_rank(own, own.begun);
    return;
  }
  quire_rank_counters& first = ranks.board->ranks[0];
  wait_for_rank(first, first.begun, own.begun + 1);
  shared_word(own.begun).fetch_add(1, std::memory_order_relaxed);
  std::copy(ranks.token_ids, ranks.token_ids + count, token_ids);
}

}  // namespace quire
