// Samples the next token of each row from its logits, and reads the tokens that a step starts from.
//
// The rules and their order are those of gpuworker/sampling/sampler.py. A row's token depends on that row alone, to the
// last bit: one thread samples a whole row, in an order that the size of the vocabulary alone decides.
#pragma once

#include "follow.h"

#ifdef __cplusplus
extern "C" {
#endif

// The sampling parameters of a row. Ids in the lists are within the vocabulary.
typedef struct {
  uint64_t seed;
  float temperature;  // 0: greedy
  float top_p, min_p;
  float repetition, frequency, presence;
  int32_t top_k;                 // 0: no such bound
  int32_t logprobs;              // how many of the best besides the sampled token; -1: no log-probabilities
  int32_t prompt_tokens;
  int32_t bias_begin, bias_end;  // its part of bias_ids and bias_values
  int32_t ends_begin, ends_end;  // its part of end_ids
  int32_t ends_from;             // the position from which its end tokens may be sampled
  int32_t words_begin, words_end;  // its part of word_begins: runs of tokens that its output may not have
  int32_t closing;               // the token that stands for its end tokens where its mask forbids those; -1: none
  int32_t listed;                // not 0: its part of `top_ids` names the tokens, `logprobs` of them
} quire_sample_row;

// The tokens that rows with a constraint may sample; another thread may still fill the masks while sampling begins.
typedef struct {
  const uint32_t *bits;  // [masks, words]: bit i of word w allows token 32 w + i
  const int32_t *of;     // [count], the index of each row's mask; -1: none
  uint32_t *ready;       // 0 until quire_masks_open; sampling waits for that before it reads `bits`
  double *waited;        // out: the seconds of that wait
  int64_t words;
} quire_masks;

// Sets `ready`, and wakes the sampling call that waits for it.
QUIRE_API void quire_masks_open(uint32_t *ready);

// The sampling of all rows of a step.
typedef struct {
  const quire_sample_row *rows;  // [count]
  const int32_t *bias_ids;
  const float *bias_values;
  const int32_t *end_ids;
  const int32_t *word_ids;     // the tokens of all bad words, none of them empty
  const int32_t *word_begins;  // [words + 1], where each word begins there, and where the last one ends
  float *logits;               // [count, vocab], overwritten
  int64_t logits_stride;       // elements
  int32_t *table;              // the token table; sampled tokens are written into it
  const int64_t *first;        // [count], where in the table the row's first token is
  const int64_t *positions;    // [count], of the token to sample: so many tokens precede it
  int64_t *tokens;             // [count], out
  float *logprobs;             // [count], out: of the sampled token, where requested
  int32_t *top_ids;            // [count, top_count], out: the best, of equal ones the lowest ids first; in, where listed
  float *top;                  // [count, top_count], out
  const quire_masks *masks;    // null where no row's mask is filled elsewhere
  // [count], of the rows whose masks are filled here; null: no row. A follower's first row may have rows of drafts behind
  // it: the draft of each is the token before its position. They are sampled in order, up to the first draft that is wrong.
  quire_follower *const *followers;
  uint8_t *ended;              // [count], out: which of them have no token to sample; any token stands there
  int32_t *forced;             // [count, forced_count], out: what must follow a follower's samples, at its first row; or null
  int32_t *num_forced;         // [count], out: how many these are
  int32_t count, vocab, top_count, threads, forced_count, reserved;
} quire_sample;

// Fills the mask of a row, where that has a follower and is its first row; `sample` is a quire_sample. Its token need not be sampled yet, and
// sampling fills no mask again.
void quire_follow_row(void *sample, int64_t index);

// Samples all rows; `sample` is a quire_sample. Returns 0.
QUIRE_API int32_t quire_sample_tokens(void *sample);

// The log-probabilities of known tokens.
typedef struct {
  const float *logits;     // [count, vocab]
  const int64_t *targets;  // [count], within the vocabulary
  float *logprobs;         // [count], out
  int32_t *ranks;          // [count], out: how many tokens are more likely, plus one
  int32_t *top_ids;        // [count, top_count], out: the best, of equal ones the lowest ids first
  float *top;              // [count, top_count], out
  int64_t logits_stride;   // elements
  int32_t count, vocab, top_count, threads;
} quire_score;

// Scores all rows; `score` is a quire_score. Returns 0.
QUIRE_API int32_t quire_score_tokens(void *score);

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
