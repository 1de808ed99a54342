// Constraints followed without Python: tokens go into a matcher of llguidance, and masks come out, through the C interface
// of that library. Its functions come as pointers, because the library belongs to a Python package.
//
// What a matcher says is used only where gpuworker/structured/sequence.py would change nothing of it. Everything else is
// left to Python for the rest of the sequence: errors, masks that allow only the end, and too many digits.
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "quire_cpu.h"

#ifdef __cplusplus
extern "C" {
#endif

// The answers of `left`: `bits` holds the mask, or no token follows.
enum quire_left { QUIRE_LEFT_MASK = 0, QUIRE_LEFT_ENDED = 1 };

// A constraint, for all sequences under it.
typedef struct {
  void *(*clone)(const void *matcher);
  int32_t (*reset)(void *matcher);
  int32_t (*consume)(void *matcher, uint32_t token);
  int32_t (*mask)(void *matcher, uint32_t *bits, size_t bytes);
  bool (*is_stopped)(const void *matcher);
  int32_t (*forced)(void *matcher, uint32_t *tokens, size_t room);
  // Follows a sequence that is left to Python, whose output has `count` tokens.
  int32_t (*left)(int64_t id, const int32_t *output, int64_t count, uint32_t *bits);
  const void *prototype;  // a matcher at the beginning
  const int32_t *ends;    // [num_ends], the tokens that mean the end of a text
  const int32_t *tails;   // [vocab], how many digits a token ends with; null where digits are not counted
  const uint8_t *whole;   // [vocab], whether these are all of it
  int64_t vocab;
  int32_t num_ends, most_digits;
} quire_grammar;

enum quire_follower_state { QUIRE_FOLLOWER_NEW, QUIRE_FOLLOWER_GOES_ON, QUIRE_FOLLOWER_LEFT, QUIRE_FOLLOWER_ENDED };

// A sequence under a constraint. Steps that follow each other have it, one at a time.
typedef struct {
  const quire_grammar *grammar;
  void *matcher;     // null until the first mask, unless an earlier sequence of the grammar has left its own
  uint32_t *bits;    // [ceil(vocab / 32)], the mask
  int64_t id;
  int64_t begin;     // the position of the first token of the output
  int64_t position;  // of the next token to take in
  int64_t filled;    // the position of the token that `bits` is for; -1: none
  int32_t digits;    // at the end of the output
  int32_t state;
} quire_follower;

// Takes in the tokens before `position`, of all `tokens` of the sequence, and fills the mask, unless that is done. Returns
// whether a token follows.
bool quire_follow(quire_follower *follower, const int32_t *tokens, int64_t position);

// Takes in the tokens before `position` and writes those that the constraint forces from there on, `room` at most. Returns
// how many they are.
int32_t quire_forced(quire_follower *follower, const int32_t *tokens, int64_t position, int32_t *forced, int32_t room);

// What llguidance tokenizes with: a cache before a function that needs Python. `slow` and quire_tokenize write `room`
// tokens at most, and return how many there are. Any thread may call quire_tokenize.
typedef size_t (*quire_slow_tokenize)(const void *user, const uint8_t *bytes, size_t size, uint32_t *tokens, size_t room);
typedef struct quire_tokenizer quire_tokenizer;
QUIRE_API quire_tokenizer *quire_tokenizer_new(quire_slow_tokenize slow);  // null when there is no memory
QUIRE_API void quire_tokenizer_free(quire_tokenizer *);
QUIRE_API size_t quire_tokenize(const void *tokenizer, const uint8_t *bytes, size_t size, uint32_t *tokens, size_t room);

// Bytes of a quire_grammar and of a quire_follower, for callers that describe them in another language.
QUIRE_API int64_t quire_grammar_bytes(void);
QUIRE_API int64_t quire_follower_bytes(void);

#ifdef __cplusplus
}
#endif
