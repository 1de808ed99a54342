// A thread that makes native calls one after the other, so that a step begins as soon as the previous one ends. No
// Python code runs between two steps, and no other thread delays them by holding the GIL.
#pragma once

#include "quire_cpu.h"

#ifdef __cplusplus
extern "C" {
#endif

// Returns 0 for success, else a code that the call defines.
typedef int32_t (*quire_call)(void *argument);

typedef struct quire_queue quire_queue;

// Starts the thread; null when it cannot be started.
QUIRE_API quire_queue *quire_queue_start(void);

// Queues a call and returns its number: 1, 2, 3 ... What `argument` points to must stay until the call is over.
QUIRE_API int64_t quire_queue_put(quire_queue *, quire_call call, void *argument);

// The seconds that a call took, and the seconds for which the thread was idle before the call.
typedef struct {
  double took, idle_before;
} quire_queue_times;

// Waits until call `number` is over, and returns its result. One thread waits for calls in order, once for each.
// A wait for a number that is not queued yet lasts until that call is queued and over.
QUIRE_API int32_t quire_queue_wait(quire_queue *, int64_t number, quire_queue_times *times);

// Makes the queued calls, then ends the thread and frees the queue.
QUIRE_API void quire_queue_stop(quire_queue *);

#ifdef __cplusplus
}
#endif
