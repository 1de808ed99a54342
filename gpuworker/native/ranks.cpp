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

}  // extern "C"
