// What a forward does with single rows: norms, rotations, inputs of products. A row's numbers depend on it alone.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "linear.h"

namespace quire {

// 1 / sqrt(mean(x²) + eps), the factor of an RMS norm.
inline float rms_factor(const float* x, int64_t count, float eps) {
  Vec low = Vec::zero(), high = Vec::zero();
  int64_t i = 0;
  for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
    const Vec a = Vec::load(x + i), b = Vec::load(x + i + kLanes);
    low = fma(a, a, low);
    high = fma(b, b, high);
  }
  float total = (low + high).sum();
  for (; i < count; ++i) total += x[i] * x[i];
  return 1.0f / std::sqrt(total / static_cast<float>(count) + eps);
}

inline float as(float x, float) { return x; }
inline bf16 as(float x, bf16) { return to_bf16(x); }

// out = x · factor · weight, in the type of `out`, which may be x itself.
template <typename T>
void scale_row(const float* x, const float* weight, float factor, int64_t count, T* out) {
  const Vec by = Vec::all(factor);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) (Vec::load(x + i) * by * Vec::load(weight + i)).store(out + i);
  for (; i < count; ++i) out[i] = as(x[i] * factor * weight[i], T());
}

// Brings each number into [-limit, limit]; what is not a number stays so.
inline void clip_row(float* x, float limit, int64_t count) {
  for (int64_t i = 0; i < count; ++i) x[i] = std::clamp(x[i], -limit, limit);
}

template <typename T>
void widen_row(const void* from, int64_t row, int64_t count, float* out) {
  const T* x = static_cast<const T*>(from) + row * count;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) Vec::load(x + i).store(out + i);
  for (; i < count; ++i) {
    T padded[kLanes] = {};
    float lanes[kLanes];
    padded[0] = x[i];
    Vec::load(padded).store(lanes);
    out[i] = lanes[0];
  }
}

// Rotates a head in place: element i with element i + half, by the angle whose cosine and sine are given.
inline void rotate(float* head, const float* cosine, const float* sine, int half) {
  float* second = head + half;
  int i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const Vec a = Vec::load(head + i), b = Vec::load(second + i), c = Vec::load(cosine + i), s = Vec::load(sine + i);
    (a * c - b * s).store(head + i);
    fma(b, c, a * s).store(second + i);
  }
  for (; i < half; ++i) {
    const float a = head[i], b = second[i];
    head[i] = a * cosine[i] - b * sine[i];
    second[i] = b * cosine[i] + a * sine[i];
  }
}

inline void* row_of(const Input& in, int64_t row) { return static_cast<char*>(in.data) + row * in.stride; }

// Of the inputs of a product that takes them as floats.
inline int64_t item_size(const quire_linear& w) { return input_type(w) == QUIRE_F32 ? 4 : 2; }

// Writes the zeros behind the k inputs of a row, if its product reads any; other functions write the inputs.
inline void pad_row(const quire_linear& w, const Input& in, int64_t row) {
  const int64_t size = item_size(w), padding = row_elements(w) - w.k;
  if (padding) std::memset(static_cast<char*>(row_of(in, row)) + w.k * size, 0, padding * size);
}

// Norms a row of the residual stream into row `to` of the inputs of a product.
inline void norm_row(const float* x, const float* weight, float eps, const quire_linear& w, const Input& in,
                     int64_t to) {
  const float factor = rms_factor(x, w.k, eps);
  if (needs_put_row(w)) {
    static thread_local std::vector<float> normed;
    normed.resize(w.k);
    scale_row(x, weight, factor, w.k, normed.data());
    put_row(w, in, to, normed.data());
    return;
  }
  if (input_type(w) == QUIRE_F32) {
    scale_row(x, weight, factor, w.k, static_cast<float*>(row_of(in, to)));
  } else {
    scale_row(x, weight, factor, w.k, static_cast<bf16*>(row_of(in, to)));
  }
  pad_row(w, in, to);
}

}  // namespace quire
