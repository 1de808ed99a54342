// Layers that keep a state of fixed size in place of K and V: short convolutions, and the gated delta rule.
//
// The state of a layer for one sequence, in a row of the states at the place of the sequence; all of it is float:
//
//   columns [width - 1, channels]                    the last inputs of the convolution, the oldest first
//   heads [value_heads, value_dim / 16, key_dim, 16] of the delta rule: a block of 16 columns stays in the L1 cache
//
// A token's numbers depend on its sequence alone: sums have one order, however the sequence was cut into steps.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "llama_rows.h"
#include "quire_llama.h"

namespace quire {

constexpr int kMostTaps = 8;  // the widest convolution

inline Vec sigmoid(Vec x) { return Vec::all(1.0f) / (Vec::all(1.0f) + exp(Vec::zero() - x)); }
inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

inline int64_t round_up(int64_t count, int64_t to) { return (count + to - 1) / to * to; }

inline int64_t conv_bytes(const quire_conv& conv) {
  return round_up(static_cast<int64_t>(conv.width - 1) * conv.channels * 4, 64);
}

// Floats of one head's state.
inline int64_t head_floats(const quire_delta& delta) { return round_up(delta.value_dim, kLanes) * delta.key_dim; }

inline int64_t state_bytes(const quire_llama_layer& layer) {
  if (!layer.conv) return 0;
  return conv_bytes(*layer.conv) + (layer.delta ? layer.delta->value_heads * head_floats(*layer.delta) * 4 : 0);
}

// The tokens of a row of a step, and whether the sequence begins with them.
struct Tokens {
  int64_t begin, end;
  bool fresh;
};

inline Tokens tokens_of(const quire_step& step, int64_t row) {
  const int64_t begin = step.query_start[row], end = step.query_start[row + 1];
  return {begin, end, step.context_len[row] == end - begin};
}

// The inputs of a convolution at one token, the oldest first. An input is x, or x · by; without x it is 0.
struct Taps {
  const float *x[kMostTaps], *by[kMostTaps];
};

// `x` and `by` are where the first token of the step has its inputs, every `stride` floats one; by may be null.
inline Taps taps_at(int width, const Tokens& row, int64_t token, const float* x, const float* by, int64_t stride,
                    const float* kept, int64_t channels) {
  Taps taps{};
  for (int j = 0; j < width; ++j) {
    const int64_t at = token - (width - 1) + j;
    if (at >= row.begin) {
      taps.x[j] = x + at * stride;
      taps.by[j] = by ? by + at * stride : nullptr;
    } else if (!row.fresh) {
      taps.x[j] = kept + (at - row.begin + width - 1) * channels;
    }
  }
  return taps;
}

inline float tap(const Taps& taps, int j, int64_t i) { return taps.by[j] ? taps.x[j][i] * taps.by[j][i] : taps.x[j][i]; }
inline Vec tap_lanes(const Taps& taps, int j, int64_t i) {
  const Vec x = Vec::load(taps.x[j] + i);
  return taps.by[j] ? x * Vec::load(taps.by[j] + i) : x;
}

// Calls put(i, sums) for all of `count` channels from `first` on, 16 or one at a time.
template <typename Put>
void convolve(const quire_conv& conv, int64_t first, int64_t count, const Taps& taps, Put&& put) {
  const float *weight = conv.weight + first, *bias = conv.bias ? conv.bias + first : nullptr;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    Vec sum = bias ? Vec::load(bias + i) : Vec::zero();
    for (int j = 0; j < conv.width; ++j) {
      if (taps.x[j]) sum = fma(Vec::load(weight + j * conv.channels + i), tap_lanes(taps, j, i), sum);
    }
    put(i, sum);
  }
  for (; i < count; ++i) {
    float sum = bias ? bias[i] : 0.0f;
    for (int j = 0; j < conv.width; ++j) {
      if (taps.x[j]) sum += weight[j * conv.channels + i] * tap(taps, j, i);
    }
    put(i, sum);
  }
}

// Keeps the last inputs of a row, of `count` channels. Arguments are those of taps_at.
inline void keep_inputs(int width, const Tokens& row, const float* x, const float* by, int64_t stride, float* kept,
                        int64_t channels, int64_t count) {
  const Taps last = taps_at(width, row, row.end, x, by, stride, kept, channels);
  for (int j = 0; j + 1 < width; ++j) {  // an input that was kept before moves towards the front
    float* out = kept + j * channels;
    if (!last.x[j]) {
      std::fill(out, out + count, 0.0f);
    } else {
      for (int64_t i = 0; i < count; ++i) out[i] = tap(last, j, i);
    }
  }
}

inline float dot(const float* x, const float* y, int64_t count) {
  Vec sums = Vec::zero();
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) sums = fma(Vec::load(x + i), Vec::load(y + i), sums);
  float total = sums.sum();
  for (; i < count; ++i) total += x[i] * y[i];
  return total;
}

// Makes a head's numbers of unit length, times `scale`.
inline void unit_row(float* x, int64_t count, float scale) {
  const float factor = scale / std::sqrt(dot(x, x, count) + 1e-6f);
  for (int64_t i = 0; i < count; ++i) x[i] *= factor;
}

// The inputs of a head's tokens: numbers of token t stand `stride` floats behind those of token t - 1.
struct DeltaInputs {
  const float *query, *key, *value;  // [T] rows
  int64_t stride;
  const float *update, *decay;  // [T] numbers
  int64_t gate_stride;
};

// Runs `Blocks` blocks of 16 columns of a head's state over its tokens. Of the first one `columns` are values.
template <int Blocks>
void delta_blocks(const DeltaInputs& in, int64_t tokens, int64_t key_dim, float* state, int64_t columns, float* out,
                  int64_t out_stride) {
  const int64_t block = key_dim * kLanes;
  for (int64_t t = 0; t < tokens; ++t) {
    const float *k = in.key + t * in.stride, *q = in.query + t * in.stride, *v = in.value + t * in.stride;
    const Vec decay = Vec::all(in.decay[t * in.gate_stride]), update = Vec::all(in.update[t * in.gate_stride]);
    Vec low[Blocks], high[Blocks], change[Blocks];
    for (int b = 0; b < Blocks; ++b) low[b] = high[b] = Vec::zero();
    int64_t i = 0;
    for (; i + 2 <= key_dim; i += 2) {
      for (int b = 0; b < Blocks; ++b) {
        low[b] = fma(Vec::all(k[i]), Vec::load(state + b * block + i * kLanes), low[b]);
        high[b] = fma(Vec::all(k[i + 1]), Vec::load(state + b * block + (i + 1) * kLanes), high[b]);
      }
    }
    for (; i < key_dim; ++i) {
      for (int b = 0; b < Blocks; ++b) low[b] = fma(Vec::all(k[i]), Vec::load(state + b * block + i * kLanes), low[b]);
    }
    for (int b = 0; b < Blocks; ++b) {
      float wanted[kLanes] = {};
      const int64_t count = std::min<int64_t>(columns - b * kLanes, kLanes);
      std::copy(v + b * kLanes, v + b * kLanes + count, wanted);
      change[b] = (Vec::load(wanted) - decay * (low[b] + high[b])) * update;
      low[b] = high[b] = Vec::zero();
    }
    auto step = [&](int64_t row, Vec (&sums)[Blocks]) {
      for (int b = 0; b < Blocks; ++b) {
        float* at = state + b * block + row * kLanes;
        const Vec fresh = fma(Vec::all(k[row]), change[b], Vec::load(at) * decay);
        fresh.store(at);
        sums[b] = fma(Vec::all(q[row]), fresh, sums[b]);
      }
    };
    for (i = 0; i + 2 <= key_dim; i += 2) {
      step(i, low);
      step(i + 1, high);
    }
    for (; i < key_dim; ++i) step(i, low);
    for (int b = 0; b < Blocks; ++b) {
      float sums[kLanes];
      (low[b] + high[b]).store(sums);
      const int64_t count = std::min<int64_t>(columns - b * kLanes, kLanes);
      std::copy(sums, sums + count, out + t * out_stride + b * kLanes);
    }
  }
}

// Runs a head over its tokens from the state that is there; writes [tokens, value_dim].
inline void delta_head(const quire_delta& delta, DeltaInputs in, int64_t tokens, float* state, float* out,
                       int64_t out_stride) {
  const int64_t block = delta.key_dim * static_cast<int64_t>(kLanes);
  int64_t first = 0;
  for (; first + kLanes < delta.value_dim; first += 2 * kLanes) {
    delta_blocks<2>(in, tokens, delta.key_dim, state, delta.value_dim - first, out + first, out_stride);
    in.value += 2 * kLanes;
    state += 2 * block;
  }
  if (first < delta.value_dim) {
    delta_blocks<1>(in, tokens, delta.key_dim, state, delta.value_dim - first, out + first, out_stride);
  }
}

// x = x · factor · weight · silu(gate).
inline void gate_norm_row(float* x, const float* weight, float factor, const float* gate, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Vec z = Vec::load(gate + i);
    (Vec::load(x + i) * Vec::all(factor) * Vec::load(weight + i) * z * sigmoid(z)).store(x + i);
  }
  for (; i < count; ++i) x[i] *= factor * weight[i] * gate[i] * sigmoid(gate[i]);
}

// x = x · sigmoid(gate).
inline void gate_row(float* x, const float* gate, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) (Vec::load(x + i) * sigmoid(Vec::load(gate + i))).store(x + i);
  for (; i < count; ++i) x[i] *= sigmoid(gate[i]);
}

}  // namespace quire
