// Writes K and V of one slot of one head into the paged cache, in the cache's type.
#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>

#include "attention_simd.h"
#include "quire_cpu.h"

namespace quire {

// The index of a slot of a head in [layer, block, kv_head, block_size]; slot = block * block_size + offset.
inline int64_t slot_index(const quire_cache& cache, int layer, int64_t slot, int kv_head) {
  const int64_t block = slot / cache.block_size, offset = slot % cache.block_size;
  return ((layer * static_cast<int64_t>(cache.num_blocks) + block) * cache.num_kv_heads + kv_head) * cache.block_size +
         offset;
}

// The number itself if it is finite, 0 for NaN, ±most for larger numbers. Numbers in the cache are finite, so that a
// masked slot adds nothing (0 * inf is not 0).
inline float finite(float x, float most) { return x != x ? 0.0f : x < -most ? -most : x > most ? most : x; }
inline Vec finite(Vec x, float most) { return min(max(number_or_zero(x), Vec::all(-most)), Vec::all(most)); }

constexpr float kMostFloat = std::numeric_limits<float>::max();
constexpr float kMostBf16 = 3.38953139e38f;
constexpr float kMostF16 = 65504.0f;

template <typename T>
inline void store_numbers(T* to, const float* from, int count, float most) {
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) finite(Vec::load(from + i), most).store(to + i);
  if (i < count) store_first(finite(load_first(from + i, count - i), most), to + i, count - i);
}

// Returns the scale: stored = round(number / scale), and the largest number becomes 127.
inline float store_int8(int8_t* to, const float* from, int count) {
  const int whole = count / kLanes * kLanes, rest = count - whole;
  Vec largest = Vec::zero();
  for (int i = 0; i < whole; i += kLanes) largest = max(largest, abs(finite(Vec::load(from + i), kMostFloat)));
  if (rest) largest = max(largest, abs(finite(load_first(from + whole, rest), kMostFloat)));
  const float scale = std::max(largest.max() / 127.0f, std::numeric_limits<float>::min());
  const Vec step = Vec::all(scale);
  for (int i = 0; i < whole; i += kLanes) (finite(Vec::load(from + i), kMostFloat) / step).store(to + i);
  if (rest) store_first(finite(load_first(from + whole, rest), kMostFloat) / step, to + whole, rest);
  return scale;
}

// Whether V is a prefix of K, and is not written.
inline bool values_in_keys(const quire_cache& cache) { return cache.values == cache.keys; }

template <typename T>
inline void store_both(const quire_cache& cache, int64_t index, const float* k, const float* v, float most) {
  store_numbers(static_cast<T*>(cache.keys) + index * cache.head_dim_k, k, cache.head_dim_k, most);
  if (values_in_keys(cache)) return;
  store_numbers(static_cast<T*>(cache.values) + index * cache.value_stride, v, cache.head_dim_v, most);
}

// k [head_dim_k], v [head_dim_v]. Several threads may call this, each for other (slot, head) pairs.
inline void store_slot(const quire_cache& cache, int layer, int64_t slot, int kv_head, const float* k, const float* v) {
  const int64_t index = slot_index(cache, layer, slot, kv_head);
  const int dk = cache.head_dim_k, dv = cache.head_dim_v;
  switch (cache.type) {
    case QUIRE_F32: return store_both<float>(cache, index, k, v, kMostFloat);
    case QUIRE_BF16: return store_both<bf16>(cache, index, k, v, kMostBf16);
    case QUIRE_F16: return store_both<f16>(cache, index, k, v, kMostF16);
    default:
      cache.key_scales[index] = store_int8(static_cast<int8_t*>(cache.keys) + index * dk, k, dk);
      if (values_in_keys(cache)) return;
      cache.value_scales[index] = store_int8(static_cast<int8_t*>(cache.values) + index * cache.value_stride, v, dv);
  }
}

}  // namespace quire
