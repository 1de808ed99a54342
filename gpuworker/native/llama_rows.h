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

// x = x · factor.
inline void scale_row(float* x, float factor, int64_t count) {
  for (int64_t i = 0; i < count; ++i) x[i] *= factor;
}

// out = (out + x · factor · weight) · scalar.
inline void add_scaled_row(const float* x, const float* weight, float factor, float scalar, int64_t count, float* out) {
  const Vec by = Vec::all(factor), whole = Vec::all(scalar);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    ((Vec::load(out + i) + Vec::load(x + i) * by * Vec::load(weight + i)) * whole).store(out + i);
  }
  for (; i < count; ++i) out[i] = (out[i] + x[i] * factor * weight[i]) * scalar;
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

// Widens a row of numbers of a quire_type.
inline void widen_row(const void* from, int32_t type, int64_t row, int64_t count, float* out) {
  if (type == QUIRE_F32) return widen_row<float>(from, row, count, out);
  return type == QUIRE_F16 ? widen_row<f16>(from, row, count, out) : widen_row<bf16>(from, row, count, out);
}

// Rotates a head in place: element i with element i + apart, by the angle whose cosine and sine are given.
inline void rotate(float* head, const float* cosine, const float* sine, int pairs, int apart) {
  float* second = head + apart;
  int i = 0;
  for (; i + kLanes <= pairs; i += kLanes) {
    const Vec a = Vec::load(head + i), b = Vec::load(second + i), c = Vec::load(cosine + i), s = Vec::load(sine + i);
    (a * c - b * s).store(head + i);
    fma(b, c, a * s).store(second + i);
  }
  for (; i < pairs; ++i) {
    const float a = head[i], b = second[i];
    head[i] = a * cosine[i] - b * sine[i];
    second[i] = b * cosine[i] + a * sine[i];
  }
}

// The store of a paired product whose outputs have this type.
inline quire_store gated_store(quire_type type, bool gelu) {
  if (type == QUIRE_F32) return gelu ? QUIRE_STORE_GELU_F32 : QUIRE_STORE_SILU_F32;
  return gelu ? QUIRE_STORE_GELU_BF16 : QUIRE_STORE_SILU_BF16;
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
