// Products of activations with packed weights, y = x · Wᵀ: packing, and the product for a team or as one call.
//
// A weight W [N, K] is packed once into panels of 32 of its rows ("columns" of the product), K-major, so that a panel
// is read from start to end. Every output is one sequence of additions over k, in an order that the weight alone
// decides: the number of rows in the batch, a row's place in it and the number of threads change no bit of a result.
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
  int32_t paired;    // two sources of n / 2 rows each, gate then up, for the SILU stores
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

// How a result is stored. The SILU stores give n / 2 columns silu(gate) · up of a paired weight.
enum quire_store {
  QUIRE_STORE_F32 = 0,
  QUIRE_STORE_BF16 = 1,
  QUIRE_STORE_ADD_F32 = 2,  // adds into what is there: the residual stream
  QUIRE_STORE_SILU_F32 = 3,
  QUIRE_STORE_SILU_BF16 = 4
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

#include "simd.h"
#include "threads.h"

namespace quire {

constexpr int kPanel = 32;  // columns

// Activations as a weight takes them: rows of float, of bf16, or of 8-bit numbers with a scale.
//
// Callers may write rows of the float and bf16 kinds without zeros directly, without put_row (`data`, `stride`);
// k elements must be followed by zeros up to row_elements(). Otherwise put_row makes a row from floats.
struct Input {
  void* data;
  int64_t stride;  // bytes from row to row; input_stride() avoids strides that collide in the L1 cache
  float* scales;   // W8A8: [rows]
  float* sums;     // weights with zeros: [rows, groups], the sum of the inputs of each group
};

struct Output {
  void* data;
  int64_t stride;  // elements from row to row
  quire_store store;
};

// The type of the activations: QUIRE_F32, QUIRE_BF16 or, for W8A8, QUIRE_I8.
quire_type input_type(const quire_linear& w);
// Elements of a row that are read, k and what pads it.
int64_t row_elements(const quire_linear& w);
// A good stride in bytes for rows of this weight's inputs.
int64_t input_stride(const quire_linear& w);
// Whether rows must come through put_row: they carry a scale, or sums of groups.
bool needs_put_row(const quire_linear& w);
// Bytes for the inputs of `rows` rows, scales and sums included, and their places in such memory (aligned to 64 bytes).
size_t input_bytes(const quire_linear& w, int64_t rows);
Input input_at(const quire_linear& w, int64_t rows, void* memory);
// Makes row m from k values: rounds or quantises them, pads, sums. Rows are independent of each other.
void put_row(const quire_linear& w, const Input& in, int64_t m, const float* x);
void put_row(const quire_linear& w, const Input& in, int64_t m, const bf16* x);

// Packs, as the whole team. No barrier inside.
void pack(const Team& team, const quire_linear& w, const quire_source* sources, int count);

// The product, as a phase of the team.
void linear(Team& team, const quire_linear& w, const Input& x, int64_t rows, const Output& out);

// The product without an end, for several in a row. `queue` must be fresh: reset, and a barrier since. Before it the
// input must be complete, and after it a barrier must stand before the output is read.
void linear(Team& team, Queue& queue, const quire_linear& w, const Input& x, int64_t rows, const Output& out);

}  // namespace quire
#endif
