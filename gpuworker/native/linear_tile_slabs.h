// Slabs: the weights that meet one register of activations in the matrix unit, 32 inputs of bf16.
//
// Vectors multiply integer weights by a single row: the unit would wait for registers full of these weights. The sums are the
// unit's, bit for bit (TDPBF16PS in Intel's manual, volume 2): over the pairs of a slab, one sum of the first numbers and one
// of the second ones, then both together are added. The unit takes subnormal numbers for zero, so vectors do too.
#pragma once

#include <immintrin.h>

#include "amx.h"
#include "linear_pairs.h"
#include "linear_tile.h"
#include "unroll.h"

namespace quire {

template <typename Loader>
constexpr int64_t kSlabSteps = kTileRegisterRows / Loader::kSub;

// As Kernel::fetch_near does, for so many bytes of each panel.
template <int P>
QUIRE_INLINE void fetch_near(const Tile& t, const uint8_t* w, int64_t bytes) {
  const uint8_t* soon = w + kNear / P;
  if (soon >= t.panel_end) soon += t.next - t.panel_end;
  for (int64_t at = 0; at < bytes; at += 64) {
    for (int p = 0; p < P; ++p) __builtin_prefetch(soon + p * t.panel_stride + at, 0, 2);
  }
}

// As Kernel::fetch does, for a slab.
template <typename Loader, int P>
QUIRE_INLINE void fetch_slab(const Tile& t, const uint8_t* w, const uint8_t*& ahead) {
  if (t.near) {
    fetch_near<P>(t, w, kSlabSteps<Loader> * Loader::kBytes);
  } else if (ahead) {
    const int64_t lines = t.ahead_lines * kSlabSteps<Loader> / kChunk;
    for (int64_t line = 0; line < lines; ++line) __builtin_prefetch(ahead + line * 64, 0, 2);
    ahead += lines * 64;
  }
}

// Vectors take subnormal numbers for zero, and give zero for them, until the end of a scope.
class FlushSubnormals {
 public:
  FlushSubnormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON); }
  ~FlushSubnormals() { _mm_setcsr(before_); }
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;

 private:
  const unsigned before_;
};

// The weights of a step as floats: of each pair of inputs the first and the second number, of columns 0-15 and 16-31.
template <typename Loader>
using PairsOfStep = Vec[Loader::kSub][2][2];

inline void load_pairs(const uint8_t* p, PairsOfStep<I4Bf16Loader>& w) {
  const __m512i words = _mm512_loadu_si512(p);
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) w[i / 2 % 2][i / 4][i % 2] = nibble(words, i);
}

inline void load_pairs(const uint8_t* p, PairsOfStep<I8Bf16Loader>& w) {
  for (int half = 0; half < 2; ++half) {
    const __m512i words = _mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32 * half)));
    w[0][0][half] = {_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(words, 24), 24))};
    w[0][1][half] = {_mm512_cvtepi32_ps(_mm512_srai_epi32(words, 8))};
  }
}

// One row times P panels.
template <typename Loader, int P>
class OneRow {
 public:
  static void run(const Tile& tile) {
    const FlushSubnormals flush;
    OneRow row(tile);
    tile.grouped ? row.run_groups() : row.run_all();
  }

 private:
  using Sums = Vec[P][2];

  explicit OneRow(const Tile& tile) : t_(tile), x_(tile.x), w_(tile.weights), ahead_(tile.ahead) {}

  void run_all() {
    Sums sums;
    each([&](int p, int half) { sums[p][half] = t_.first ? Vec::zero() : Vec::load(at(p, half)); });
    sweep(sums);
    each([&](int p, int half) { sums[p][half].store(at(p, half)); });
  }

  void run_groups() {
    const int64_t head = kPanel * 4 * (t_.has_zeros ? 2 : 1);
    Sums totals;
    each([&](int p, int half) { totals[p][half] = t_.first ? Vec::zero() : Vec::load(at(p, half)); });
    for (int64_t g = 0; g < t_.groups; ++g) {
      const uint8_t* heads = w_;
      if (t_.near) fetch_near<P>(t_, heads, head);
      w_ += head;
      Sums sums;
      each([&](int p, int half) { sums[p][half] = Vec::zero(); });
      sweep(sums);
      each([&](int p, int half) {
        const float* scales = reinterpret_cast<const float*>(heads + p * t_.panel_stride) + half * kLanes;
        Vec& total = totals[p][half];
        total = fma(sums[p][half], Vec::load(scales), total);
        if (t_.has_zeros) total = fma(Vec::all(t_.x_sums[g]), Vec::load(scales + kPanel), total);
      });
    }
    each([&](int p, int half) { totals[p][half].store(at(p, half)); });
  }

  template <typename F>
  static QUIRE_INLINE void each(F&& f) {
#pragma GCC unroll 2
    for (int p = 0; p < P; ++p) {
      f(p, 0);
      f(p, 1);
    }
  }

  float* at(int p, int half) const { return t_.sums + p * t_.sums_stride + half * kLanes; }

  QUIRE_INLINE void sweep(Sums& sums) {
    for (int64_t left = t_.steps; left > 0; left -= kSlabSteps<Loader>) {
      fetch_slab<Loader, P>(t_, w_, ahead_);
      const __m512i pairs = _mm512_loadu_si512(x_);
      _mm512_store_si512(inputs_[0], _mm512_slli_epi32(pairs, 16));
      _mm512_store_si512(inputs_[1], _mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
#pragma GCC unroll 2
      for (int p = 0; p < P; ++p) add_slab(w_ + p * t_.panel_stride, sums[p]);
      x_ += kTileRegisterBytes;
      w_ += kSlabSteps<Loader> * Loader::kBytes;
    }
  }

  QUIRE_INLINE void add_slab(const uint8_t* w, Vec (&sums)[2]) const {
    Vec parts[2][2];
    for (auto& part : parts) part[0] = part[1] = Vec::zero();
#pragma GCC unroll 4
    for (int64_t step = 0; step < kSlabSteps<Loader>; ++step, w += Loader::kBytes) {
      PairsOfStep<Loader> weights;
      load_pairs(w, weights);
#pragma GCC unroll 2
      for (int i = 0; i < Loader::kSub; ++i) {
#pragma GCC unroll 2
        for (int number = 0; number < 2; ++number) {
          const Vec input = Vec::all(inputs_[number][step * Loader::kSub + i]);
          parts[number][0] = fma(input, weights[i][number][0], parts[number][0]);
          parts[number][1] = fma(input, weights[i][number][1], parts[number][1]);
        }
      }
    }
    for (int half = 0; half < 2; ++half) sums[half] = sums[half] + (parts[0][half] + parts[1][half]);
  }

  const Tile& t_;
  const uint8_t *x_, *w_, *ahead_;
  alignas(64) float inputs_[2][kTileRegisterRows];  // of a slab the first and the second numbers of its pairs
};

}  // namespace quire
