// A thread that makes native calls one after the other, so that a step begins the moment the one before it ends: no
// Python stands between two steps, and no other thread's hold of the GIL delays them.
#pragma once

#include "quire_cpu.h"

#ifdef __cplusplus
extern "C" {
#endif

// Returns 0 for done, else a code of its own.
typedef int32_t (*quire_call)(void *argument);

typedef struct quire_queue quire_queue;

// Starts the thread; null when there can be none.
QUIRE_API quire_queue *quire_queue_start(void);

// Queues a call and returns its number: 1, 2, 3 ... What `argument` points to must stay until the call is over.
QUIRE_API int64_t quire_queue_put(quire_queue *, quire_call call, void *argument);

// How long a call took, and how long the thread had nothing to do between the call before it and this one; seconds.
typedef struct {
  double took, idle_before;
} quire_queue_times;

// Waits until call `number` is over; returns what it returned. Calls are asked for in order, each once, by one thread.
// The number of one that was never put is waited for until it is.
QUIRE_API int32_t quire_queue_wait(quire_queue *, int64_t number, quire_queue_times *times);

// Makes what was put, then ends the thread and frees the queue.
QUIRE_API void quire_queue_stop(quire_queue *);

#ifdef __cplusplus
}
#endif
