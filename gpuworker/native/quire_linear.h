// The C interface of products of activations with packed weights, y = x · Wᵀ; C++ code inside a team calls linear.h.
#pragma once

#include <stddef.h>

#include "quire_cpu.h"

#ifdef __cplusplus
extern "C" {
#endif

// How a weight is stored and in what type it is multiplied. Activations are float32 for *_F32 and F16, bfloat16 for *_BF16
// where the level has dot products of bf16 (else float32), 8-bit integers with a scale for each row for W8A8. Sums are
// float32 (W8A8: int32, exact). F16 gives every bit that F32 gives for the same numbers: each is widened as it is read.
enum quire_linear_kind {
  QUIRE_LINEAR_F32 = 0,
  QUIRE_LINEAR_BF16 = 1,
  QUIRE_LINEAR_I8_F32 = 2,  // weight-only: whole numbers in the product, the scale on its sums
  QUIRE_LINEAR_I8_BF16 = 3,
  QUIRE_LINEAR_I4_F32 = 4,
  QUIRE_LINEAR_I4_BF16 = 5,
  QUIRE_LINEAR_W8A8 = 6,
  QUIRE_LINEAR_F16 = 7
};

// A packed weight. Fill in all but `memory`, query its bytes, provide zeroed memory aligned to 64 bytes, and pack.
typedef struct {
  int32_t kind;      // quire_linear_kind
  int32_t group;     // inputs (k) that share a scale, a multiple of 16 that divides k; 0: one scale for each of the n
  int32_t has_zeros; // weights are q · scale + shift, such as those with a zero point; needs groups
  int32_t has_bias;
  int32_t paired;    // two sources of n / 2 rows each, gate then up, for the SILU and GELU stores
  int32_t reserved;
  int64_t n, k;      // of all sources together
  void *memory;
} quire_linear;

// Rows of a weight in the layout of a checkpoint; several sources stand one below the other (or paired).
typedef struct {
  const void *data;     // [rows, k] of `type`, a row every `row_stride` elements; QUIRE_I8 for all the integer kinds
  const float *scales;  // integer kinds: [rows, groups] (groups = 1 without groups), dense
  const float *shifts;  // [rows, groups] or null; that of a zero point is -zero · scale
  const float *bias;    // [rows] or null (counts as zeros)
  int64_t rows, row_stride;
  int32_t type;         // quire_type
  int32_t reserved;
} quire_source;

// How a result is stored. The SILU stores give n / 2 columns silu(gate) · up of a paired weight, the GELU stores
// gelu(gate) · up by tanh.
enum quire_store {
  QUIRE_STORE_F32 = 0,
  QUIRE_STORE_BF16 = 1,
  QUIRE_STORE_ADD_F32 = 2,  // adds into what is there: the residual stream
  QUIRE_STORE_SILU_F32 = 3,
  QUIRE_STORE_SILU_BF16 = 4,
  QUIRE_STORE_GELU_F32 = 5,
  QUIRE_STORE_GELU_BF16 = 6
};

// Bytes of memory that a weight takes once packed; 0 when the description cannot be served.
QUIRE_API size_t quire_linear_bytes(const quire_linear *linear);

// Packs the sources into linear->memory. Returns 0, or 1 when the sources do not fit the description.
QUIRE_API int32_t quire_linear_pack(const quire_linear *linear, const quire_source *sources, int32_t count,
                                    int32_t threads);

// Bytes of scratch for quire_linear_run with so many rows.
QUIRE_API size_t quire_linear_scratch(const quire_linear *linear, int64_t rows);

// out = x · Wᵀ (+ bias), as `store` says: x [rows, k] of x_type (QUIRE_F32 or QUIRE_BF16), out [rows, n]; strides in
// elements. `scratch` is aligned to 64 bytes. Returns 0, or 1 for an unsupported argument.
QUIRE_API int32_t quire_linear_run(const quire_linear *linear, const void *x, int32_t x_type, int64_t x_stride,
                                   int64_t rows, void *out, int64_t out_stride, int32_t store, void *scratch,
                                   int32_t threads);

#ifdef __cplusplus
}
#endif
