// Drawing the next token of each row from its logits, and the tokens that a step starts from.
//
// The same rules in the same order as gpuworker/sampling/sampler.py. A row's token depends on that row alone, to the last bit:
// rows are drawn one by one, each by one thread, in an order that the size of the vocabulary alone decides.
#pragma once

#include "quire_cpu.h"

#ifdef __cplusplus
extern "C" {
#endif

// How a row draws. Ids in the lists are within the vocabulary.
typedef struct {
  uint64_t seed;
  float temperature;  // 0: greedy
  float top_p, min_p;
  float repetition, frequency, presence;
  int32_t top_k;                 // 0: no such bound
  int32_t logprobs;              // how many of the best it wants besides its own; -1: none, nor its own
  int32_t prompt_tokens;
  int32_t bias_begin, bias_end;  // its part of bias_ids and bias_values
  int32_t ends_begin, ends_end;  // its part of end_ids
  int32_t ends_from;             // the position from which its end tokens may be drawn
} quire_draw_row;

// Which tokens the rows with a constraint may draw; filled on another thread, perhaps still while the draw is called.
typedef struct {
  const uint32_t *bits;  // [masks, words]: bit i of word w allows token 32 w + i
  const int32_t *of;     // [count], which of them is a row's; -1: it has none
  uint32_t *ready;       // 0 until quire_masks_open; the draw waits for that before it reads `bits`
  double *waited;        // out: for so many seconds
  int64_t words;
} quire_masks;

// Lets the draw that waits for `ready` go on, or the one that will ask.
QUIRE_API void quire_masks_open(uint32_t *ready);

// One draw of all rows of a step.
typedef struct {
  const quire_draw_row *rows;  // [count]
  const int32_t *bias_ids;
  const float *bias_values;
  const int32_t *end_ids;
  float *logits;               // [count, vocab], overwritten
  int64_t logits_stride;       // elements
  int32_t *table;              // the token table; what is drawn is written into it
  const int64_t *first;        // [count], where in the table the row's first token is
  const int64_t *positions;    // [count], of the token to draw: so many are known
  int64_t *tokens;             // [count], out
  float *logprobs;             // [count], out: of the drawn token, where asked for
  int32_t *top_ids;            // [count, top_count], out: the best, of equal ones the lowest ids first
  float *top;                  // [count, top_count], out
  const quire_masks *masks;    // null where no row has a constraint
  int32_t count, vocab, top_count, threads;
} quire_draw;

// Draws; `draw` is a quire_draw. Returns 0.
QUIRE_API int32_t quire_draw_tokens(void *draw);

// Reads the tokens that a step computes: token_ids[i] = table[places[i]].
typedef struct {
  const int32_t *table;
  const int64_t *places;  // [count]
  int64_t *token_ids;     // [count], out
  int64_t count;
} quire_take;

QUIRE_API int32_t quire_take_tokens(void *take);

#ifdef __cplusplus
}
#endif
