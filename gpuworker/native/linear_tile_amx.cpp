// The tile functions of the matrix unit: up to 32 rows of activations times a panel, or up to 16 times two.
//
// Registers 0 to 3 have the sums of 16 rows and 16 columns each, 4 and 5 the activations of 16 rows, 6 and 7 the weights of
// 16 columns. Panels of bf16, and of bytes that meet bytes, lie as the unit reads them. Other integers become bf16 for a few
// inputs at a time, or, for many rows, once for all of them (linear.cpp); vectors multiply them by a single row
// (linear_tile_slabs.h). The sums are the same.
#include "amx.h"

#if defined(QUIRE_AMX)

#include <algorithm>
#include <type_traits>

#include "linear_bytes.h"
#include "linear_layout.h"
#include "linear_tile_slabs.h"
#include "linear_tile_table.h"
#include "unroll.h"

namespace quire {
namespace {

constexpr int64_t kSlabBytes = 2 * kTileRegisterRows * kTileRegisterBytes;  // weights of one register of inputs, a panel

// Whether the unit reads the panel itself.
template <typename Loader>
constexpr bool kReadByUnit = Loader::kBytes == kPanel * Loader::kSub * 4;

// A is how many registers of rows there are, P how many panels; A · P is at most two.
template <typename Loader, int A, int P>
class AmxKernel {
 public:
  static void run(const Tile& tile) {
    const FlushSubnormals flush;
    AmxKernel(tile).all();
  }

 private:
  static constexpr bool kOfBytes = std::is_same<Loader, W8A8Loader>::value;
  static constexpr bool kStraight = kReadByUnit<Loader>;
  static constexpr int64_t kRowBytes = kPanel * sizeof(float), kHalf = kTileRegisterBytes;

  explicit AmxKernel(const Tile& tile) : t_(tile), x_(tile.x), w_(tile.weights), ahead_(tile.ahead) {
    if (*t_.shaped_rows == t_.rows) return;
    const int first = std::min(t_.rows, kTileRegisterRows), second = A == 2 ? t_.rows - first : first;
    amx_set(AmxShape(first, first, second, second, first, A == 2 ? second : first, kTileRegisterRows, kTileRegisterRows));
    *t_.shaped_rows = t_.rows;
  }

  void all() {
    if (t_.grouped) return run_groups();
    each([&](auto c) { t_.first ? amx_zero<c>() : amx_load<c>(at(c, t_.sums, t_.sums_stride), kRowBytes); });
    sweep(t_.steps);
    each([&](auto c) { amx_store<c>(at(c, t_.sums, t_.sums_stride), kRowBytes); });
  }

  // Calls f with the number of each register of sums.
  template <typename F>
  static QUIRE_INLINE void each(F&& f) {
    f(std::integral_constant<int, 0>());
    f(std::integral_constant<int, 1>());
    if constexpr (A * P == 2) {
      f(std::integral_constant<int, 2>());
      f(std::integral_constant<int, 3>());
    }
  }

  // The place of a register of sums: the second pair has the second 16 rows, or the second panel.
  static float* at(int c, float* sums, int64_t panel_stride) {
    return sums + c % 2 * kTileRegisterRows + (c < 2 ? 0 : A == 2 ? kTileRegisterRows * kPanel : panel_stride);
  }

  template <int C, int X, int W>
  static QUIRE_INLINE void dot() {
    if constexpr (kOfBytes) {
      amx_dot_bytes<C, X, W>();
    } else {
      amx_dot_bf16<C, X, W>();
    }
  }

  // Adds the products of so many steps to the sums.
  QUIRE_INLINE void sweep(int64_t steps) {
    for (int64_t left = steps; left > 0; left -= kSlabSteps<Loader>) {
      fetch_slab<Loader, P>(t_, w_, ahead_);
      amx_load<4>(x_, t_.x_stride);
      if constexpr (A == 2) amx_load<5>(x_ + kTileRegisterRows * t_.x_stride, t_.x_stride);
      const uint8_t* w = slab(w_);
      amx_load<6>(w, 2 * kHalf);
      dot<0, 4, 6>();
      amx_load<7>(w + kHalf, 2 * kHalf);
      dot<1, 4, 7>();
      if constexpr (A == 2) {
        dot<2, 5, 6>();
        dot<3, 5, 7>();
      } else if constexpr (P == 2) {
        const uint8_t* second = slab(w_ + t_.panel_stride);
        amx_load<6>(second, 2 * kHalf);
        dot<2, 4, 6>();
        amx_load<7>(second + kHalf, 2 * kHalf);
        dot<3, 4, 7>();
      }
      x_ += kTileRegisterBytes;
      w_ += kSlabSteps<Loader> * Loader::kBytes;
    }
  }

  // The weights at `from` as the unit reads them.
  QUIRE_INLINE const uint8_t* slab(const uint8_t* from) {
    if constexpr (kStraight) return from;
    unpack<Loader>(from, kSlabSteps<Loader>, slab_);
    return slab_;
  }

  // The sums of each group, scaled, are added to the totals in memory.
  void run_groups() {
    const int64_t head = kPanel * 4 * (t_.has_zeros ? 2 : 1);
    for (int p = 0; p < P && t_.first; ++p) std::fill_n(t_.sums + p * t_.sums_stride, t_.rows * kPanel, 0.0f);
    for (int64_t g = 0; g < t_.groups; ++g) {
      const uint8_t* heads = w_;
      if (t_.near) fetch_near<P>(t_, heads, head);
      w_ += head;
      each([](auto c) { amx_zero<c>(); });
      sweep(t_.steps);
      each([&](auto c) { amx_store<c>(at(c, sums_, kTileRegisterRows * kPanel), kRowBytes); });
      for (int p = 0; p < P; ++p) {
        const float* scales = reinterpret_cast<const float*>(heads + p * t_.panel_stride);
        t_.has_zeros ? add_group<true>(g, p, scales) : add_group<false>(g, p, scales);
      }
    }
  }

  template <bool zeros>
  void add_group(int64_t g, int p, const float* scales) {
    const float *sums = sums_ + p * kTileRegisterRows * kPanel, *x_sum = zeros ? t_.x_sums + g : nullptr;
    float *totals = t_.sums + p * t_.sums_stride, *const end = totals + t_.rows * kPanel;
    const int64_t x_sums_stride = t_.x_sums_stride;
    Vec scale[2], shift[2];
    for (int half = 0; half < 2; ++half) {
      scale[half] = Vec::load(scales + half * kLanes);
      if (zeros) shift[half] = Vec::load(scales + kPanel + half * kLanes);
    }
    for (; totals < end; sums += kPanel, totals += kPanel, x_sum += zeros ? x_sums_stride : 0) {
      for (int half = 0; half < 2; ++half) {
        Vec total = fma(Vec::load(sums + half * kLanes), scale[half], Vec::load(totals + half * kLanes));
        if (zeros) total = fma(Vec::all(*x_sum), shift[half], total);
        total.store(totals + half * kLanes);
      }
    }
  }

  const Tile& t_;
  const uint8_t *x_, *w_, *ahead_;
  alignas(64) uint8_t slab_[kStraight ? 64 : kSlabBytes];
  alignas(64) float sums_[2 * kTileRegisterRows * kPanel];  // of a group
};

template <typename Loader>
TileFunction of(int rows, int panels) {
  if constexpr (!kReadByUnit<Loader>) {
    if (rows == 1) return panels == 2 ? &OneRow<Loader, 2>::run : &OneRow<Loader, 1>::run;
  }
  if (panels == 2) return &AmxKernel<Loader, 1, 2>::run;
  if (rows > kTileRegisterRows) return &AmxKernel<Loader, 2, 1>::run;
  return &AmxKernel<Loader, 1, 1>::run;
}

}  // namespace

TileFunction amx_tile_function(int32_t kind, int rows, int panels) {
  switch (kind) {
    case QUIRE_LINEAR_BF16: return of<Bf16Loader>(rows, panels);
    case QUIRE_LINEAR_I8_BF16: return of<I8Bf16Loader>(rows, panels);
    case QUIRE_LINEAR_I4_BF16: return of<I4Bf16Loader>(rows, panels);
    default: return of<W8A8Loader>(rows, panels);
  }
}

}  // namespace quire

#endif
