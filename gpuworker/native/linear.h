// Products of activations with packed weights, y = x · Wᵀ: packing, and the product for a team or as one call.
//
// A weight W [N, K] is packed once into panels of 32 of its rows ("columns" of the product), K-major, so that a panel
// is read from start to end. Every output is one sequence of additions over k, in an order that the weight alone
// decides: the number of rows in the batch, a row's place in it and the number of threads change no bit of a result.
#pragma once

#include "quire_linear.h"
#include "simd.h"
#include "threads.h"

namespace quire {

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
  // Of a paired weight: what is added to gate and up before the store, in rows of two halves of whole vectors each, for
  // the rows whose `adds` is 0 or more. Null: nothing.
  const float* added = nullptr;
  int64_t added_half = 0;  // floats of a half
  const int32_t* adds = nullptr;
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
// Reads the k values of row m as the product takes them: rounded, or of 8 bits times their scale.
void get_row(const quire_linear& w, const Input& in, int64_t m, float* x);

// Packs, as the whole team. No barrier inside.
void pack(const Team& team, const quire_linear& w, const quire_source* sources, int count);

// The product, as a phase of the team.
void linear(Team& team, const quire_linear& w, const Input& x, int64_t rows, const Output& out);

// The product without an end, for several in a row. `queue` must be fresh: reset, and a barrier since. Before it the
// input must be complete, and after it a barrier must stand before the output is read.
void linear(Team& team, Queue& queue, const quire_linear& w, const Input& x, int64_t rows, const Output& out);

}  // namespace quire
