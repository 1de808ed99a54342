// Functions of single numbers that linears, experts and the forward apply.
#pragma once

#include "simd.h"

namespace quire {

// x · Φ(x) by its approximation with tanh, as ½ (1 + tanh(u)) = 1 / (1 + e^-2u) for u = √(2/π) (x + 0.044715 x³).
inline Vec gelu(Vec x) {
  const Vec u = fma(x * x * x, Vec::all(0.044715f), x) * Vec::all(1.5957691216f);
  return x / (Vec::all(1.0f) + exp(Vec::zero() - u));
}

// Calls f(Vec) for `count` numbers of a row and of another one, 16 at a time, and writes the results over the first.
template <typename F>
void change_row(float* x, const float* by, int64_t count, F&& f) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) f(Vec::load(x + i), Vec::load(by + i)).store(x + i);
  if (i == count) return;
  float lanes[kLanes] = {}, others[kLanes] = {};
  for (int64_t j = i; j < count; ++j) lanes[j - i] = x[j], others[j - i] = by[j];
  f(Vec::load(lanes), Vec::load(others)).store(lanes);
  for (int64_t j = i; j < count; ++j) x[j] = lanes[j - i];
}

// x = gelu(x) · by.
inline void gelu_gate_row(float* x, const float* by, int64_t count) {
  change_row(x, by, count, [](Vec a, Vec b) { return gelu(a) * b; });
}

// x = cap · tanh(x / cap), by tanh(y) = 1 - 2 / (e^2y + 1).
inline void cap_row(float* x, float cap, int64_t count) {
  change_row(x, x, count, [cap](Vec a, Vec) {
    return Vec::all(cap) - Vec::all(2.0f * cap) / (exp(a * Vec::all(2.0f / cap)) + Vec::all(1.0f));
  });
}

}  // namespace quire
