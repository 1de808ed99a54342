// The innermost loops: R rows of activations times one or two panels of 32 columns, sums in registers.
//
// A loader turns one step of a packed panel into vectors of weights; a "math" multiplies those with a broadcast input
// and adds. The same loops serve every kind and every level of vector instructions.
#pragma once

#include <algorithm>
#include <cstdint>

#include "linear_math.h"
#include "row_pointers.h"

namespace quire {

// Rows of a tile, so that the sums of 32 columns fill the registers and leave room for weights and an input. Beyond
// kWholeRows that is so for half of the columns, and the halves take turns: more rows use each weight that is read.
//
// With groups, the sums of a group are added to totals. Both have room in the registers for kHeldRows rows of a panel;
// more rows keep their totals in memory, and run all columns at once while kGroupRoom pairs of vectors hold the sums and
// the weights of a step. Fewer sums than that wait for each other's additions.
#if defined(__AVX512F__)
constexpr int kTileRows = 14, kWholeRows = 14, kGroupTileRows = 8;
constexpr int kPairRows = 6;  // up to so many rows two panels run at once: more streams from memory in flight
constexpr int kHeldRows = 5, kGroupRoom = 16;
#elif defined(__AVX2__)
constexpr int kTileRows = 6, kWholeRows = 3, kGroupTileRows = 6;
constexpr int kPairRows = 1;
constexpr int kHeldRows = 1, kGroupRoom = 16;
#elif defined(QUIRE_NEON)
constexpr int kTileRows = 6, kWholeRows = 2, kGroupTileRows = 6;
constexpr int kPairRows = 1;
constexpr int kHeldRows = 1, kGroupRoom = 16;
#else
constexpr int kTileRows = 2, kWholeRows = 2, kGroupTileRows = 2;
constexpr int kPairRows = 1;
constexpr int kHeldRows = 1, kGroupRoom = 16;
#endif

// Beyond so many rows a block of integer weights with groups becomes floats once for all of them (linear.cpp). Of so many
// rows, cut as evenly as can be, a tile has at least kLeastUnpackedRows.
#if defined(__AVX512F__)
constexpr int kGroupRowsUnpacking = 8 * kGroupTileRows;
#else
constexpr int kGroupRowsUnpacking = 2 * kTileRows;
#endif
constexpr int kLeastUnpackedRows = (kGroupRowsUnpacking + 1) / (kGroupRowsUnpacking / kGroupTileRows + 1);
static_assert(kGroupRowsUnpacking % kGroupTileRows == 0);

struct Tile {
  const uint8_t* weights;  // first step of the block
  int64_t panel_stride;    // bytes to the second panel
  const uint8_t* x;        // first input of the block in the first row
  int64_t x_stride;        // bytes from row to row
  int64_t groups, steps;   // of the block; without groups one "group" is the block
  bool grouped, has_zeros;
  bool first;              // sums start from nothing
  float* sums;             // [panels][sums_stride / 32][32]; int32 for W8A8
  int64_t sums_stride;     // elements from panel to panel
  int rows;
  int* shaped_rows;        // the matrix unit: for how many rows its registers are shaped now
  const float* x_sums;     // weights with zeros: [row][group], from this block's first group
  int64_t x_sums_stride;   // elements from row to row
  // The lines to prefetch meanwhile, for the L2 cache: the L1 cache has few requests in flight, on which loads wait too.
  // With `near`, those kNear bytes later in the panel, and at `panel_end` the first of the next task. Else `ahead_lines`
  // lines from `ahead` on for each kChunk steps.
  bool near;
  const uint8_t* panel_end;
  const uint8_t* next;
  const uint8_t* ahead;  // null for nothing
  int ahead_lines;
};

constexpr int64_t kNear = 8192;  // of two panels half as much each
constexpr int kChunk = 8;        // steps between two bursts of prefetches

// How many steps of so many products of a vector are written out one after the other. At AVX-512 only those of few products,
// for counting them would take as long as they do: others would gain nothing, and take long to compile.
#if defined(__AVX512F__)
constexpr int steps_at_once(int products) { return products > 8 ? 1 : products > 4 ? 2 : products > 2 ? 4 : kChunk; }
#elif defined(__AVX2__) || defined(QUIRE_NEON)
constexpr int steps_at_once(int) { return kChunk; }
#else
constexpr int steps_at_once(int) { return 1; }
#endif

// Vectors of sums and weights of a step that fill the registers. Beyond, the weights of a step of four inputs are made input
// by input.
#if defined(__AVX512F__)
constexpr int kLateRoom = 32;
#elif defined(QUIRE_NEON)
constexpr int kLateRoom = 0;
#else
constexpr int kLateRoom = 1 << 20;
#endif

// ---- the tile ---

template <typename Loader, int R, int P>
struct Kernel {
  using Math = typename Loader::Math;
  using Sum = typename Math::Sum;

  using Rows = RowPointers<R, 4>;  // of the inputs

  static constexpr int kUnrolled = steps_at_once(R * P * Loader::kSub);

  static void run(const Tile& t) {
    if constexpr (kTakesGroups) {
      if (t.grouped) return run_groups(t);
    }
    if constexpr (R > kWholeRows) {
      run_columns<0, 1>(t);
      run_columns<1, 1>(t);
    } else {
      run_columns<0, 2>(t);
    }
  }

  // Of each panel the columns from 16 · H on, so many vectors.
  template <int H, int vectors>
  static inline __attribute__((always_inline)) void run_columns(const Tile& t) {
    Rows x(t.x, t.x_stride);
    const uint8_t* ahead = t.ahead;
    Sum sums[R][vectors * P];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < vectors * P; ++v) {
        sums[r][v] = t.first ? Math::zero() : Math::load(at(t, r, v / vectors * 2 + H + v % vectors));
      }
    }
    sweep<H, vectors, 2 / vectors>(t, t.weights, x, ahead, sums);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < vectors * P; ++v) Math::store(sums[r][v], at(t, r, v / vectors * 2 + H + v % vectors));
    }
  }

  static float* at(const Tile& t, int r, int v) { return t.sums + v / 2 * t.sums_stride + r * kPanel + v % 2 * 16; }

  // ---- one run of steps: columns 16 · H and so many vectors of each panel, sums[row][vectors · panel + vector] ---

  template <int H, int vectors>
  static inline __attribute__((always_inline)) void step(const uint8_t* w, int64_t panel_stride, const Rows& x,
                                                         int64_t offset, Sum (&sums)[R][vectors * P]) {
    constexpr bool late = Loader::kSub == 4 && vectors * P * (R + Loader::kSub) > kLateRoom;
    typename Math::Weight weights[P][Loader::kSub][2];
#pragma GCC unroll 2
    for (int p = 0; p < P && !late; ++p) Loader::load(w + p * panel_stride, weights[p]);
#pragma GCC unroll 4
    for (int i = 0; i < Loader::kSub; ++i) {
      if constexpr (late) {
#pragma GCC unroll 2
        for (int p = 0; p < P; ++p) Loader::load(w + p * panel_stride, i, weights[p][i]);
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const auto input = Math::input(x.at(r) + offset + i * Math::kInputBytes);
#pragma GCC unroll 2
        for (int p = 0; p < P; ++p) {
#pragma GCC unroll 2
          for (int v = 0; v < vectors; ++v) {
            Sum& sum = sums[r][vectors * p + v];
            sum = Math::add(sum, weights[p][i][H + v], input);
          }
        }
      }
    }
  }

  // Of the lines to fetch, columns that take turns fetch `Parts` shares, each its own.
  template <int H, int vectors, int Parts>
  static inline __attribute__((always_inline)) void sweep(const Tile& t, const uint8_t* w, Rows x,
                                                          const uint8_t*& ahead, Sum (&sums)[R][vectors * P]) {
    int64_t left = t.steps;
    if constexpr (kUnrolled == kChunk) {
      for (; left >= kChunk; left -= kChunk) {
        if (H < Parts) fetch<H, Parts>(t, w, ahead);
        steps<kChunk, H, vectors>(t.panel_stride, w, x, sums);
      }
      for (; left > 0; --left) steps<1, H, vectors>(t.panel_stride, w, x, sums);
      return;
    }
    // Without `steps`: GCC 12 then keeps sums of eight rows in memory.
    constexpr int64_t kInputs = Loader::kSub * Math::kInputBytes;
    const int64_t panel_stride = t.panel_stride;
    while (left > 0) {
      if (H < Parts && left >= kChunk) fetch<H, Parts>(t, w, ahead);
      const int64_t after = std::max<int64_t>(left - kChunk, 0);
#pragma GCC unroll 1
      for (; left >= after + kUnrolled; left -= kUnrolled) {
#pragma GCC unroll 8
        for (int i = 0; i < kUnrolled; ++i) step<H, vectors>(w + i * Loader::kBytes, panel_stride, x, i * kInputs, sums);
        w += kUnrolled * Loader::kBytes;
        x.advance(kUnrolled * kInputs);
      }
      for (; kUnrolled > 1 && left > after; --left) {
        step<H, vectors>(w, panel_stride, x, 0, sums);
        w += Loader::kBytes;
        x.advance(kInputs);
      }
    }
  }

  // So many steps, written out one after the other.
  template <int Count, int H, int vectors>
  static inline __attribute__((always_inline)) void steps(int64_t panel_stride, const uint8_t*& w, Rows& x,
                                                          Sum (&sums)[R][vectors * P]) {
    constexpr int64_t kInputs = Loader::kSub * Math::kInputBytes;
#pragma GCC unroll 8
    for (int i = 0; i < Count; ++i) step<H, vectors>(w + i * Loader::kBytes, panel_stride, x, i * kInputs, sums);
    w += Count * Loader::kBytes;
    x.advance(Count * kInputs);
  }

  template <int Part, int Parts>
  static inline __attribute__((always_inline)) void fetch(const Tile& t, const uint8_t* w, const uint8_t*& ahead) {
    if (t.near) {
      fetch_near<Part, Parts>(t, w, kChunk * Loader::kBytes / 64);
    } else if (ahead) {
      for (int line = Part; line < t.ahead_lines; line += Parts) __builtin_prefetch(ahead + line * 64, 0, 2);
      ahead += t.ahead_lines * 64;
    }
  }

  template <int Part, int Parts>
  static inline __attribute__((always_inline)) void fetch_near(const Tile& t, const uint8_t* w, int lines) {
    const uint8_t* soon = w + kNear / P;
    if (soon >= t.panel_end) soon += t.next - t.panel_end;
#pragma GCC unroll 16
    for (int line = Part; line < lines; line += Parts) {
#pragma GCC unroll 2
      for (int p = 0; p < P; ++p) __builtin_prefetch(soon + p * t.panel_stride + line * 64, 0, 2);
    }
  }

  // ---- groups: the totals stay in registers where these suffice, else in memory ---

  static constexpr bool kTakesGroups =
      R <= kGroupTileRows && (Loader::kGroups == Groups::kAll ||
                              (Loader::kGroups == Groups::kUnpacked && P == 1 && R >= kLeastUnpackedRows));
  static constexpr bool kHalves = R > kWholeRows || P * (R + Loader::kSub) > kGroupRoom;
  static constexpr bool kHeld = R * P <= kHeldRows;

  static void run_groups(const Tile& t) {
    const uint8_t* w = t.weights;
    const uint8_t* ahead = t.ahead;
    Rows x(t.x, t.x_stride);
    Vec totals[R][2 * P];
    if (kHeld) {
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < 2 * P; ++v) totals[r][v] = t.first ? Vec::zero() : Vec::load(at(t, r, v));
      }
    }
    for (int64_t g = 0; g < t.groups; ++g) {
      if (kHalves) {
        group<0, 1>(t, g, w, x, ahead, totals);
        group<1, 1>(t, g, w, x, ahead, totals);
      } else {
        group<0, 2>(t, g, w, x, ahead, totals);
      }
      w += head_bytes(t) + t.steps * Loader::kBytes;
      x.advance(t.steps * Loader::kSub * Math::kInputBytes);
    }
    if (kHeld) {
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < 2 * P; ++v) totals[r][v].store(at(t, r, v));
      }
    }
  }

  static int64_t head_bytes(const Tile& t) { return kPanel * 4 * (t.has_zeros ? 2 : 1); }

  template <int H, int vectors>
  static inline __attribute__((always_inline)) void group(const Tile& t, int64_t g, const uint8_t* head, const Rows& x,
                                                          const uint8_t*& ahead, Vec (&totals)[R][2 * P]) {
    Sum sums[R][vectors * P];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < vectors * P; ++v) sums[r][v] = Math::zero();
    }
    if (H == 0 && t.near) fetch_near<0, 1>(t, head, static_cast<int>(head_bytes(t) / 64));
    sweep<H, vectors, 1>(t, head + head_bytes(t), x, ahead, sums);
    if (t.has_zeros) {
      add_group<H, vectors, true>(t, g, head, sums, totals);
    } else {
      add_group<H, vectors, false>(t, g, head, sums, totals);
    }
  }

  // Adds the sums, scaled, to the totals; with zeros, the shift times the sum of the group's inputs too.
  template <int H, int vectors, bool zeros>
  static inline __attribute__((always_inline)) void add_group(const Tile& t, int64_t g, const uint8_t* head,
                                                              const Sum (&sums)[R][vectors * P],
                                                              Vec (&totals)[R][2 * P]) {
#pragma GCC unroll 4
    for (int v = 0; v < vectors * P; ++v) {
      const int column = H + v % vectors, to = v / vectors * 2 + column;
      const float* scales = reinterpret_cast<const float*>(head + v / vectors * t.panel_stride) + column * 16;
      const Vec scale = Vec::load(scales), shift = zeros ? Vec::load(scales + kPanel) : Vec::zero();
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        Vec total = kHeld ? totals[r][to] : t.first && g == 0 ? Vec::zero() : Vec::load(at(t, r, to));
        total = fma(Math::value(sums[r][v]), scale, total);
        if (zeros) total = fma(Vec::all(t.x_sums[r * t.x_sums_stride + g]), shift, total);
        if (kHeld) {
          totals[r][to] = total;
        } else {
          total.store(at(t, r, to));
        }
      }
    }
  }
};

using TileFunction = void (*)(const Tile&);

// The function for a kind, a number of rows (1 to kTileRows) and of panels (2 up to kPairRows rows).
TileFunction tile_function(int32_t kind, int rows, int panels);

// The same for kinds that the matrix unit multiplies (linear_layout.h: on_amx).
constexpr int kAmxTileRows = 32, kAmxPairRows = 16;
TileFunction amx_tile_function(int32_t kind, int rows, int panels);

}  // namespace quire
