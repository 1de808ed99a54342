// The ranks of one host that run each step together, tensor parallel: every rank is a process with its heads, its columns
// and rows of weights, and its part of the vocabulary. What all of them need passes through memory that they share:
//
//     quire_rank_board | token ids [max_tokens] | parts [2, size, max_rows, hidden] | logits [max_kept, vocab]
//
// max_rows is the greater of max_tokens and max_kept.
//
// Where a product adds up over ranks, each writes its part, meets the others, and adds up all parts in the order of ranks.
// So every rank has the same numbers to the bit, whoever came first. Two sets of parts take turns: who meets for one set
// has read the other.
//
// Ranks of other hosts have slots here, too. A process of this host fills them and moves the counters of those ranks on
// (gpuworker/plane/rank_bridge.py), so a step does not know where a rank runs.
#pragma once

#include "quire_cpu.h"

#ifdef __cplusplus
extern "C" {
#endif

#define QUIRE_MAX_RANKS 16

// Counters of one rank, in a cache line of its own. Only this rank writes them, except `sleepers`.
typedef struct {
  uint32_t met;       // how often this rank has come to a meeting
  uint32_t sleepers;  // ranks that sleep until it comes
  uint32_t begun;     // of rank 0: the steps whose tokens it has given
  uint32_t beats;     // goes up while the process runs (gpuworker/plane/rank_watch.py)
  uint32_t serving;   // of rank 0: whether a rank that stands still ends the worker
  uint32_t floats;    // of its part, that it has written for the meeting
  uint32_t rows;      // of logits, whose columns it has written for the meeting
  uint32_t given;     // of rank 0: the tokens of the step that it has begun
  uint32_t reserved[8];
} quire_rank_counters;

typedef struct {
  quire_rank_counters ranks[QUIRE_MAX_RANKS];
  uint32_t tokens, kept, hidden, vocab;  // what the sizes behind it follow from; each rank writes the same
  uint32_t reserved[12];
} quire_rank_board;

// What one process knows of the ranks. The vocabulary is cut for the embedding and the last linear: this rank has rows
// first_token .. first_token + tokens - 1 of both.
typedef struct {
  int32_t rank, size;
  quire_rank_board *board;
  int64_t *token_ids;   // [max_tokens]
  float *parts;         // [2, size, part_floats]
  int64_t part_floats;  // max_rows · hidden
  int64_t first_token, tokens;
} quire_ranks;

// Bytes of a quire_ranks and of a board, for callers that describe them in another language.
QUIRE_API int64_t quire_ranks_bytes(void);
QUIRE_API int64_t quire_rank_board_bytes(void);

// A thread that moves the `beats` of a rank on, which no Python code can delay.
typedef struct quire_beat quire_beat;

// Starts it, with so many seconds between two beats; null when it cannot be started.
QUIRE_API quire_beat *quire_beat_start(quire_rank_board *board, int32_t rank, double seconds);

// Ends the thread.
QUIRE_API void quire_beat_stop(quire_beat *);

enum quire_rank_counter { QUIRE_MET = 0, QUIRE_BEGUN = 1 };

// Waits until a counter of `count` ranks from `first` on has reached `wanted`, some tenths of a second at most. Returns
// whether it has.
QUIRE_API int32_t quire_ranks_await(quire_rank_board *, int32_t first, int32_t count, int32_t counter, uint32_t wanted);

// Moves a counter of ranks that run elsewhere on by one, after what was written for them.
QUIRE_API void quire_ranks_advance(quire_rank_board *, int32_t first, int32_t count, int32_t counter);

#ifdef __cplusplus
}
#endif
