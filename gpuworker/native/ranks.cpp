#include "quire_ranks.h"

#include <condition_variable>
#include <chrono>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

#include "ranks.h"

struct quire_beat {
  std::mutex mutex;
  std::condition_variable ended;
  bool is_ended = false;
  std::thread thread;
};

namespace {

uint32_t& counter_of(quire_rank_counters& rank, int32_t counter) { return counter == QUIRE_MET ? rank.met : rank.begun; }

}  // namespace

extern "C" {

int64_t quire_ranks_bytes(void) { return sizeof(quire_ranks); }
int64_t quire_rank_board_bytes(void) { return sizeof(quire_rank_board); }

quire_beat* quire_beat_start(quire_rank_board* board, int32_t rank, double seconds) {
  quire_beat* beat = new (std::nothrow) quire_beat;
  if (!beat) return nullptr;
  try {
    beat->thread = std::thread([=] {
      const std::chrono::duration<double> pause(seconds);
      std::unique_lock<std::mutex> lock(beat->mutex);
      do {
        quire::shared_word(board->ranks[rank].beats).fetch_add(1, std::memory_order_relaxed);
      } while (!beat->ended.wait_for(lock, pause, [&] { return beat->is_ended; }));
    });
  } catch (const std::system_error&) {
    delete beat;
    return nullptr;
  }
  return beat;
}

void quire_beat_stop(quire_beat* beat) {
  {
    std::lock_guard<std::mutex> lock(beat->mutex);
    beat->is_ended = true;
    beat->ended.notify_one();
  }
  beat->thread.join();
  delete beat;
}

int32_t quire_ranks_await(quire_rank_board* board, int32_t first, int32_t count, int32_t counter, uint32_t wanted) {
  for (int32_t r = first; r < first + count; ++r) {
    quire_rank_counters& rank = board->ranks[r];
    if (!quire::wait_for_rank(rank, counter_of(rank, counter), wanted, true)) return 0;
  }
  return 1;
}

void quire_ranks_advance(quire_rank_board* board, int32_t first, int32_t count, int32_t counter) {
  for (int32_t r = first; r < first + count; ++r) {
    quire_rank_counters& rank = board->ranks[r];
    quire::advance_rank(rank, counter_of(rank, counter));
  }
}

}  // extern "C"
