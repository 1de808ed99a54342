// Activations in the form that a packed weight takes: rounded, or quantised row by row.
#include <cstring>

#include "linear_layout.h"

namespace quire {
namespace {

// Sixteen of `count` values from `begin`; zeros after the last.
template <typename T>
Vec part(const T* x, int64_t begin, int64_t count) {
  if (begin + kLanes <= count) return Vec::load(x + begin);
  alignas(64) T lanes[kLanes] = {};
  if (begin < count) std::memcpy(lanes, x + begin, (count - begin) * sizeof(T));
  return Vec::load(lanes);
}

template <typename T>
float sum(const T* x, int64_t count) {
  Vec total = Vec::zero();
  for (int64_t i = 0; i < count; i += kLanes) total = total + part(x, i, count);
  return total.sum();
}

template <typename T>
float largest(const T* x, int64_t count) {
  Vec most = Vec::zero();
  for (int64_t i = 0; i < count; i += kLanes) most = max(most, abs(part(x, i, count)));
  return most.max();
}

// q = x · 127 / max|x| to nearest; the kernel of a level with dot products of bytes takes q + kByteOffset.
template <typename T>
void quantise(const T* x, int64_t count, int64_t padded, uint8_t* row, float* scale) {
  const float most = largest(x, count);
  const Vec inverse = Vec::all(most > 0.0f ? 127.0f / most : 0.0f);
  *scale = most / 127.0f;
  for (int64_t begin = 0; begin < padded; begin += kLanes) {
    alignas(64) int8_t q[kLanes];
    (part(x, begin, count) * inverse).store(q);
    for (int64_t i = 0; i < std::min<int64_t>(kLanes, padded - begin); ++i) {
      if (kByteDots) {
        row[begin + i] = static_cast<uint8_t>(q[i] + kByteOffset);
      } else {
        reinterpret_cast<int16_t*>(row)[begin + i] = q[i];
      }
    }
  }
}

template <typename From, typename To>
void copy_row(const From* x, int64_t count, int64_t padded, To* row) {
  for (int64_t i = 0; i < padded; i += kLanes) {
    const Vec values = part(x, i, count);
    if (i + kLanes <= padded) {
      values.store(row + i);
    } else {
      alignas(64) To lanes[kLanes];
      values.store(lanes);
      std::memcpy(row + i, lanes, (padded - i) * sizeof(To));
    }
  }
}

template <typename T>
void sum_groups(const quire_linear& w, const T* row, float* sums) {
  for (int64_t g = 0; g < w.k / w.group; ++g) sums[g] = sum(row + g * w.group, w.group);
}

template <typename T>
void put_any_row(const quire_linear& w, const Input& in, int64_t m, const T* x) {
  uint8_t* row = static_cast<uint8_t*>(in.data) + m * in.stride;
  float* sums = w.has_zeros ? in.sums + m * (w.k / w.group) : nullptr;
  const int64_t padded = row_elements(w);
  if (w.kind == QUIRE_LINEAR_W8A8) {
    quantise(x, w.k, padded, row, in.scales + m);
  } else if (pairs_bf16(w.kind)) {
    copy_row(x, w.k, padded, reinterpret_cast<bf16*>(row));
    if (sums) sum_groups(w, reinterpret_cast<bf16*>(row), sums);
  } else {
    copy_row(x, w.k, padded, reinterpret_cast<float*>(row));
    if (sums) sum_groups(w, reinterpret_cast<float*>(row), sums);
  }
}

size_t rounded(size_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace

quire_type input_type(const quire_linear& w) {
  if (w.kind == QUIRE_LINEAR_W8A8) return QUIRE_I8;
  return pairs_bf16(w.kind) ? QUIRE_BF16 : QUIRE_F32;
}

int64_t row_elements(const quire_linear& w) { return Layout(w).steps * step_inputs(w.kind); }

int64_t input_stride(const quire_linear& w) {
  // An odd number of lines: rows of a tile then lie in different sets of the cache.
  const int64_t lines = (row_elements(w) * activation_bytes(w.kind) + 63) / 64;
  return (lines | 1) * 64;
}

bool needs_put_row(const quire_linear& w) { return w.kind == QUIRE_LINEAR_W8A8 || w.has_zeros; }

size_t input_bytes(const quire_linear& w, int64_t rows) {
  const size_t scales = w.kind == QUIRE_LINEAR_W8A8 ? rows * sizeof(float) : 0;
  const size_t sums = w.has_zeros ? rows * (w.k / w.group) * sizeof(float) : 0;
  return rounded(rows * input_stride(w)) + rounded(scales) + rounded(sums);
}

Input input_at(const quire_linear& w, int64_t rows, void* memory) {
  uint8_t* start = static_cast<uint8_t*>(memory);
  Input in{memory, input_stride(w), nullptr, nullptr};
  float* after = reinterpret_cast<float*>(start + rounded(rows * in.stride));
  if (w.kind == QUIRE_LINEAR_W8A8) in.scales = after;
  if (w.has_zeros) in.sums = after;
  return in;
}

void put_row(const quire_linear& w, const Input& in, int64_t m, const float* x) { put_any_row(w, in, m, x); }
void put_row(const quire_linear& w, const Input& in, int64_t m, const bf16* x) { put_any_row(w, in, m, x); }

}  // namespace quire
