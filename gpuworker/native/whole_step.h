// A whole step as one call: moves of states, block copies, the tokens to start from, the model's forward, and sampling. The
// call can be queued (step_queue.h) behind the step that samples those tokens.
#pragma once

#include "sample.h"
#include "quire_attention.h"
#include "quire_llama.h"

#ifdef __cplusplus
extern "C" {
#endif

// Bytes to copy between the place of a sequence's states and pages of the cache; from null: zeros are written.
typedef struct {
  void *to;
  const void *from;
  int64_t bytes;
} quire_move;

typedef struct {
  const int32_t *copies;  // [num_copies, 2]: blocks to copy from and to, in this order
  const quire_cache *pools;  // [num_pools]: the memory of all layers, of equally many blocks each
  quire_parts parts;
  const quire_llama *model;
  quire_take take;          // its token_ids are those of `run`
  const quire_step *steps;  // [parts.num_plans]: they differ in tables and slots alone
  quire_llama_run run;    // its logits are those of `sample`
  quire_sample sample;        // without rows when no row samples
  quire_score score;          // without rows when no prompt is scored; its logits come behind those of `sample`
  int32_t num_copies, num_pools, num_rows, threads, deterministic, reserved;
  const quire_move *before, *behind;  // done before all else, and when the forward is done; each in any order
  int64_t num_before, num_behind;
} quire_whole_step;

// A block or a slot that the cache does not have; beside the refusals of quire_llama.h.
enum quire_step_refusal { QUIRE_STEP_BAD_BLOCK = 3 };

// Runs the step; `step` is a quire_whole_step. Returns what quire_llama_forward does, or QUIRE_STEP_BAD_BLOCK before any
// block is read or written; what is to be done before is done. A step without rows only moves and copies.
QUIRE_API int32_t quire_run_step(void *step);

// Bytes of a quire_whole_step and of a quire_sample_row, for callers that describe them in another language.
QUIRE_API int64_t quire_whole_step_bytes(void);
QUIRE_API int64_t quire_sample_row_bytes(void);

// Copies whole blocks of all layers, in order: a source may be the destination of an earlier copy.
QUIRE_API void quire_copy_blocks(const quire_cache *cache, const int32_t *copies, int32_t count);

#ifdef __cplusplus
}
#endif
