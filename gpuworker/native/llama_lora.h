// Low-rank products of adapters (LoRA): y += B · (A · x), for rows of several adapters in one step.
//
// Rows are gathered into blocks of one adapter, so that A and B are read once for all rows of a block. Each number of a row
// is one sequence of additions, whichever rows stand beside it: the batch changes no bit.
#pragma once

#include <algorithm>
#include <vector>

#include "linear.h"
#include "quire_llama.h"

namespace quire {

constexpr int kLoraRows = 4;  // rows of a block: their sums stay in registers

// The smallest multiple of a vector that holds so many floats.
inline int64_t whole_vectors(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

struct LoraBlock {
  int32_t adapter;
  int32_t count;
  int32_t rows[kLoraRows];
};

// The adapter of each row; below 0: none.
using LoraRows = std::vector<int32_t>;

inline std::vector<LoraBlock> lora_blocks(const LoraRows& adapters, int64_t num_adapters) {
  std::vector<LoraBlock> blocks;
  std::vector<int64_t> open(num_adapters, -1);  // the block of each adapter that has room
  for (size_t row = 0; row < adapters.size(); ++row) {
    const int32_t adapter = adapters[row];
    if (adapter < 0) continue;
    if (open[adapter] < 0 || blocks[open[adapter]].count == kLoraRows) {
      open[adapter] = static_cast<int64_t>(blocks.size());
      blocks.push_back({adapter, 0, {}});
    }
    LoraBlock& block = blocks[open[adapter]];
    block.rows[block.count++] = static_cast<int32_t>(row);
  }
  return blocks;
}

// out[r][j] = x[r] · a[j]. Rows of x and of A [rank, size] have whole vectors.
template <int kRows, typename T>
void shrink_rows(const float* const* x, const T* a, int64_t rank, int64_t size, float* const* out) {
  for (int64_t j = 0; j < rank; j += 2) {
    const bool two = j + 1 < rank;
    const T* first = a + j * size;
    const T* second = two ? first + size : first;
    Vec left[kRows], right[kRows];
    for (int r = 0; r < kRows; ++r) left[r] = right[r] = Vec::zero();
    for (int64_t i = 0; i < size; i += kLanes) {
      const Vec v = Vec::load(first + i), w = Vec::load(second + i);
      for (int r = 0; r < kRows; ++r) {
        const Vec input = Vec::load(x[r] + i);
        left[r] = fma(input, v, left[r]);
        right[r] = fma(input, w, right[r]);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      out[r][j] = left[r].sum();
      if (two) out[r][j + 1] = right[r].sum();
    }
  }
}

// out[r][c] += sum over j of u[r][j] · b[j][c], for `count` columns. Rows of B lie `stride` floats apart.
template <int kRows, typename T>
void expand_rows(const float* const* u, const T* b, int64_t rank, int64_t stride, int64_t count, float* const* out) {
  for (int64_t c = 0; c < count; c += kLanes) {
    Vec sums[kRows];
    for (int r = 0; r < kRows; ++r) sums[r] = Vec::zero();
    for (int64_t j = 0; j < rank; ++j) {
      const Vec w = Vec::load(b + j * stride + c);
      for (int r = 0; r < kRows; ++r) sums[r] = fma(Vec::all(u[r][j]), w, sums[r]);
    }
    for (int r = 0; r < kRows; ++r) {
      float* to = out[r] + c;
      if (count - c >= kLanes) {
        (Vec::load(to) + sums[r]).store(to);
        continue;
      }
      float lanes[kLanes];
      sums[r].store(lanes);
      for (int64_t i = 0; i < count - c; ++i) to[i] += lanes[i];
    }
  }
}

// Adds B · (A · x) to rows of outputs. `sums` has room for kLoraRows times the rank; rows of A have `size` floats.
template <int kRows, typename T>
void add_low_rank(const quire_lora& lora, const float* const* x, int64_t size, float* sums, float* const* out) {
  float* u[kRows];
  for (int r = 0; r < kRows; ++r) u[r] = sums + r * lora.rank;
  shrink_rows<kRows>(x, static_cast<const T*>(lora.a), lora.rank, size, u);
  expand_rows<kRows>(u, static_cast<const T*>(lora.b), lora.rank, whole_vectors(lora.n), lora.n, out);
}

// Calls body with the number of rows of a block as a constant.
template <typename Body>
void with_rows(int32_t count, Body&& body) {
  switch (count) {
    case 1: return body(std::integral_constant<int, 1>());
    case 2: return body(std::integral_constant<int, 2>());
    case 3: return body(std::integral_constant<int, 3>());
    default: return body(std::integral_constant<int, kLoraRows>());
  }
}

}  // namespace quire
