#include "step_queue.h"

#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

struct quire_queue {
  struct Call {
    quire_call run;
    void* argument;
  };
  struct Outcome {
    int32_t status;
    quire_queue_times times;
  };

  std::mutex mutex;
  std::condition_variable came, over;
  std::deque<Call> calls;
  std::deque<Outcome> outcomes;  // of the calls from `first_outcome` on
  int64_t put = 0, first_outcome = 1;
  bool stopping = false;
  std::thread thread;

  void work() {
    using Clock = std::chrono::steady_clock;
    const auto seconds = [](Clock::duration time) { return std::chrono::duration<double>(time).count(); };
    auto ended = Clock::now();
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
      came.wait(lock, [&] { return stopping || !calls.empty(); });
      if (calls.empty()) return;
      const Call call = calls.front();
      calls.pop_front();
      lock.unlock();
      const auto began = Clock::now();
      const int32_t status = call.run(call.argument);
      const double idle = seconds(began - ended);
      ended = Clock::now();
      lock.lock();
      outcomes.push_back({status, {seconds(ended - began), idle}});
      over.notify_all();
    }
  }
};

extern "C" {

quire_queue* quire_queue_start(void) {
  quire_queue* queue = new (std::nothrow) quire_queue;
  if (!queue) return nullptr;
  try {
    queue->thread = std::thread([queue] { queue->work(); });
  } catch (const std::system_error&) {
    delete queue;
    return nullptr;
  }
  return queue;
}

int64_t quire_queue_put(quire_queue* queue, quire_call call, void* argument) {
  std::lock_guard<std::mutex> lock(queue->mutex);
  queue->calls.push_back({call, argument});
  queue->came.notify_one();
  return ++queue->put;
}

int32_t quire_queue_wait(quire_queue* queue, int64_t number, quire_queue_times* times) {
  std::unique_lock<std::mutex> lock(queue->mutex);
  const auto is_over = [&] { return number < queue->first_outcome + static_cast<int64_t>(queue->outcomes.size()); };
  queue->over.wait(lock, is_over);
  while (queue->first_outcome < number) {
    queue->outcomes.pop_front();
    ++queue->first_outcome;
  }
  const quire_queue::Outcome outcome = queue->outcomes.front();
  queue->outcomes.pop_front();
  ++queue->first_outcome;
  *times = outcome.times;
  return outcome.status;
}

void quire_queue_stop(quire_queue* queue) {
  {
    std::lock_guard<std::mutex> lock(queue->mutex);
    queue->stopping = true;
    queue->came.notify_one();
  }
  queue->thread.join();
  delete queue;
}

}  // extern "C"
