// The C interface of Quire's CPU kernels, called from Python through ctypes (gpuworker/native/library.py).
//
// Tensors are passed as pointers and strides in elements. Nothing here allocates memory that the caller must free, and
// nothing throws: functions that can refuse return 0 for success and else a code that the Python side puts into words.
#pragma once

#include <stdint.h>

#define QUIRE_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

// The types of numbers in memory.
enum quire_type { QUIRE_F32 = 0, QUIRE_BF16 = 1, QUIRE_F16 = 2, QUIRE_I8 = 3 };

// The paged K/V of all layers: pools [layer, block, kv_head, block_size, head_dim]; scale pools
// [layer, block, kv_head, block_size] are null unless `type` is QUIRE_I8 (stored = value / scale). Where V is a prefix of
// K, `values` is `keys` and the scales are the same; `value_stride` are the numbers between slots of V.
typedef struct {
  void *keys, *values;
  float *key_scales, *value_scales;
  int32_t type;
  int32_t num_layers, num_blocks, num_kv_heads, block_size, head_dim_k, head_dim_v, value_stride;
} quire_cache;

// What a step computes: R rows, T tokens; see gpuworker/attention/interface.py. Rows with one query stand first.
typedef struct {
  int32_t num_rows, num_tokens, num_decodes, max_blocks;
  const int32_t *query_start;   // [R + 1]
  const int32_t *context_len;   // [R]
  const int32_t *block_table;   // [R, max_blocks]
  const int32_t *slot_mapping;  // [T]
} quire_step;

// How one layer attends; 0 is no window, no chunk, no softcap, and of window and chunk one is 0; sinks [num_heads] may be
// null. A query at position p sees `window` positions, itself included, or those from p / chunk * chunk on.
typedef struct {
  int32_t layer, window, chunk;
  float scale, softcap;
  const float *sinks;
} quire_layer;

// The version of this interface: the loader refuses a library that was built from another one.
QUIRE_API int32_t quire_abi_version(void);

#ifdef __cplusplus
}
#endif
