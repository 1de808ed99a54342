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

// Sums of a kernel beside each other, for each row: as many as registers hold.
#if defined(__AVX512F__)
constexpr int kLoraWide = 4;
#else
constexpr int kLoraWide = 2;
#endif

// out[r][j] = x[r] · a[j]. Rows of x and of A [rank, size] have whole vectors.
template <int kRows, typename T>
void shrink_rows(const float* const* x, const T* a, int64_t rank, int64_t size, float* const* out) {
  for (int64_t j = 0; j < rank; j += kLoraWide) {
    const T* from[kLoraWide];
    for (int64_t w = 0; w < kLoraWide; ++w) from[w] = a + std::min(j + w, rank - 1) * size;
    Vec sums[kRows][kLoraWide];
    for (auto& row : sums) std::fill(std::begin(row), std::end(row), Vec::zero());
    for (int64_t i = 0; i < size; i += kLanes) {
      Vec inputs[kRows];
      for (int r = 0; r < kRows; ++r) inputs[r] = Vec::load(x[r] + i);
      for (int w = 0; w < kLoraWide; ++w) {
        const Vec factor = Vec::load(from[w] + i);
        for (int r = 0; r < kRows; ++r) sums[r][w] = fma(inputs[r], factor, sums[r][w]);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int64_t w = 0; w < kLoraWide && j + w < rank; ++w) out[r][j + w] = sums[r][w].sum();
    }
  }
}

// Adds sums over j of u[r][j] · b[j][c] to kWide vectors of columns from `c` on; of `count` columns in all.
template <int kRows, int kWide, typename T>
void expand_columns(const float* const* u, const T* b, int64_t rank, int64_t stride, int64_t c, int64_t count,
                    float* const* out) {
  Vec sums[kRows][kWide];
  for (auto& row : sums) std::fill(std::begin(row), std::end(row), Vec::zero());
  for (int64_t j = 0; j < rank; ++j) {
    Vec factors[kWide];
    for (int w = 0; w < kWide; ++w) factors[w] = Vec::load(b + j * stride + c + w * kLanes);
    for (int r = 0; r < kRows; ++r) {
      const Vec by = Vec::all(u[r][j]);
      for (int w = 0; w < kWide; ++w) sums[r][w] = fma(by, factors[w], sums[r][w]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int w = 0; w < kWide; ++w) {
      float* to = out[r] + c + w * kLanes;
      const int64_t left = count - c - w * kLanes;
      if (left >= kLanes) {
        (Vec::load(to) + sums[r][w]).store(to);
        continue;
      }
      float lanes[kLanes];
      sums[r][w].store(lanes);
      for (int64_t i = 0; i < left; ++i) to[i] += lanes[i];
    }
  }
}

// out[r][c] += sum over j of u[r][j] · b[j][c], for `count` columns. Rows of B lie `stride` numbers apart.
template <int kRows, typename T>
void expand_rows(const float* const* u, const T* b, int64_t rank, int64_t stride, int64_t count, float* const* out) {
  int64_t c = 0;
  for (; c + kLoraWide * kLanes <= count; c += kLoraWide * kLanes) {
    expand_columns<kRows, kLoraWide>(u, b, rank, stride, c, count, out);
  }
  for (; c < count; c += kLanes) expand_columns<kRows, 1>(u, b, rank, stride, c, count, out);
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
