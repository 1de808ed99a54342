// The C interface of paged attention; C++ code inside a team calls attention.h instead.
#pragma once

#include "quire_cpu.h"

#ifdef __cplusplus
extern "C" {
#endif

// A tensor [tokens, heads, head_dim] whose last dimension is contiguous; strides in elements, type as quire_type.
typedef struct {
  void *data;
  int64_t token_stride, head_stride;
  int32_t type;
} quire_rows;

// The work lists of a step. The caller must free them; nothing else here needs that.
typedef struct quire_attention quire_attention;
QUIRE_API quire_attention *quire_attention_new(void);
QUIRE_API void quire_attention_free(quire_attention *);

// Starts a step. The structs are copied; the memory that they point to must stay until the step's last layer.
QUIRE_API void quire_attention_begin(quire_attention *, const quire_cache *, const quire_step *, int32_t num_heads,
                                     int32_t threads, int32_t deterministic);

// One layer of the step, in a parallel region of its own: writes key and value into their slots, then attends. Where `key`
// has no data, another layer has written them.
QUIRE_API void quire_attention_layer(quire_attention *, const quire_layer *, const quire_rows *query,
                                     const quire_rows *key, const quire_rows *value, const quire_rows *out);

// Reads `bytes` from `from` (both multiples of 64) once, in a parallel region of its own, and returns a sum of it. The
// time of this read is a lower bound for attention over a cache of that size.
QUIRE_API float quire_read(const void *from, int64_t bytes, int32_t threads);

#ifdef __cplusplus
}
#endif
