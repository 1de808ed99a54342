// K and V of tiles of slots, as the two products of attention of many queries read them.
//
// K is read where it lies if it is stored as numbers that are multiplied; else it is widened. V lies as [slot][column], as
// [slot / 2][column][2] for pairs, or, for the matrix unit, as [column][slot].
#pragma once

#include <type_traits>

#include "attention_tile_kinds.h"

namespace quire {

// K and V of up to `Slots` slots as they are multiplied, whatever they are stored as.
template <typename Number, int Slots>
struct TileNumbers {
  static constexpr int kAllRuns = Slots / kRun;

  int base = 0, slots = 0;               // the first position, and how many are there, in whole runs
  int key_stride = 0, value_stride = 0;  // between slots
  const Number *keys[kAllRuns], *values[kAllRuns];
  Number *own_keys = nullptr, *own_values = nullptr;  // what is widened, interleaved or transposed
  float key_scales[Slots], value_scales[Slots];       // of integers
};

// Up to `Tiles` tiles, one after the other.
template <typename Kind, typename Stored, int Tiles>
class CacheTiles : public TileNumbers<typename Kind::Number, Tiles * kTile> {
  using Number = typename Kind::Number;
  using Base = TileNumbers<Number, Tiles * kTile>;
  static constexpr bool kAmx = Kind::kAmx;
  static constexpr bool kStraight = std::is_same<Number, Stored>::value;

 public:
  static constexpr bool kScaled = std::is_same<Stored, int8_t>::value;
  static constexpr int kSlots = Tiles * kTile, kAllRuns = Tiles * kRuns;
  using Base::base, Base::slots, Base::key_stride, Base::value_stride, Base::keys, Base::values;
  using Base::own_keys, Base::own_values, Base::key_scales, Base::value_scales;
  // Of columns of V that are transposed: no power of two, for which many rows share few places of a cache.
  static constexpr int kValueStride = kSlots + 32;

  // How many numbers it keeps, of K and of V.
  static size_t numbers(int dim) { return static_cast<size_t>(kValueStride) * padded(dim, 32); }

  // The addresses of the slots from `base` on that are loaded next; none past the end of the item.
  void find(const Work& work, const Item& item, int base) {
    next_base_ = base;
    next_tiles = std::min(Tiles, std::max(0, (item.end - base + kTile - 1) / kTile));
    for (int tile = 0; tile < next_tiles; ++tile) find_runs(work, item, base + tile * kTile, next_runs_ + tile * kRuns);
    for (int run = 0; run < next_tiles * kRuns; ++run) {
      next_keys[run] = static_cast<const Stored*>(work.cache.keys) + next_runs_[run] * work.cache.head_dim_k;
      next_values[run] = static_cast<const Stored*>(work.cache.values) + next_runs_[run] * work.cache.value_stride;
    }
  }

  void load(const quire_cache& cache, const Item& item) {
    base = next_base_;
    slots = std::min(kSlots, padded(item.end - base, kRun));
    const int dk = cache.head_dim_k, dv = cache.head_dim_v, stored = cache.value_stride;
    key_stride = dk;
    for (int run = 0; run < slots / kRun; ++run) {
      if (kScaled) {
        std::memcpy(key_scales + run * kRun, cache.key_scales + next_runs_[run], kRun * sizeof(float));
        std::memcpy(value_scales + run * kRun, cache.value_scales + next_runs_[run], kRun * sizeof(float));
      }
      if (kStraight && dk % kKeyUnit<Kind> == 0 && (!kAmx || side_by_side(run))) {
        keys[run] = reinterpret_cast<const Number*>(next_keys[run]);
      } else {
        key_stride = padded(dk, 32);
        keys[run] = widen(next_keys[run], dk, dk, own_keys + run * kRun * key_stride);
      }
      if constexpr (!kAmx) load_values(run, stored, dv);
    }
    if constexpr (kAmx) this->transpose_values(stored, dv);  // a name that only levels with pairs have
  }

  int next_tiles = 0;
  const Stored *next_keys[kAllRuns], *next_values[kAllRuns];

 private:
  // Whether the 16 slots that a run is part of lie one after the other: in blocks of 16 or more, but for runs that are
  // repeated.
  bool side_by_side(int run) const {
    const int64_t* of = next_runs_ + run / 4 * 4;
    return of[1] - of[0] == kRun && of[2] - of[1] == kRun && of[3] - of[2] == kRun;
  }

  // A run of slots `apart` numbers apart as numbers that are multiplied, with zeros up to a multiple of 32.
  static const Number* widen(const Stored* from, int apart, int dim, Number* to) {
    const int stride = padded(dim, 32);
    for (int slot = 0; slot < kRun; ++slot) widen_row(from + slot * apart, dim, to + slot * stride);
    return to;
  }

  static void widen_row(const Stored* from, int dim, Number* to) {
#if defined(QUIRE_BF16_DOTS)
    if constexpr (Kind::kPer == 2) {
      for (int i = 0; i < dim; i += 32) {
        const __m512i numbers = row32(from + i, dim - i);
        std::memcpy(static_cast<void*>(to + i), &numbers, 64);
      }
      return;
    }
#endif
    int i = 0;
    for (; i + kLanes <= dim; i += kLanes) Vec::load(from + i).store(to + i);
    if (i < dim) load_first(from + i, dim - i).store(to + i), i += kLanes;
    for (; i < padded(dim, 32); i += kLanes) Vec::zero().store(to + i);
  }

  void load_values(int run, int stored, int dv) {
    if constexpr (kStraight && Kind::kPer == 1) {
      values[run] = reinterpret_cast<const Number*>(next_values[run]);
      value_stride = stored;
    } else if constexpr (Kind::kPer == 1) {
      value_stride = padded(dv, 32);
      values[run] = widen(next_values[run], stored, dv, own_values + run * kRun * value_stride);
    } else {
      this->interleave_run(run, stored, dv);
    }
  }

#if defined(QUIRE_BF16_DOTS)
  // Two slots after the other, column by column: [slot / 2][column][2].
  void interleave_run(int run, int stored, int dv) {
    const int stride = padded(dv, 32);
    for (int pair = 0; pair < 2; ++pair) {
      Number* to = own_values + (run * 2 + pair) * 2 * stride;
      const Stored *a = next_values[run] + pair * 2 * stored, *b = a + stored;
      for (int i = 0; i < dv; i += 32) {
        const Interleaved both = interleave(row32(a + i, dv - i), row32(b + i, dv - i));
        Vec first, second;
        in_order(_mm512_castsi512_ps(both.low), _mm512_castsi512_ps(both.high), first, second);
        std::memcpy(static_cast<void*>(to + 2 * i), &first, 64);
        std::memcpy(static_cast<void*>(to + 2 * i + 32), &second, 64);
      }
    }
  }

  // By columns, [column][slot], with zeros for slots that are not there.
  void transpose_values(int stored, int dv) {
    for (int first = 0; first < slots; first += 32) {
      for (int column = 0; column < dv; column += 32) {
        __m512i low[kLanes], high[kLanes];
        for (int pair = 0; pair < kLanes; ++pair) {
          const int slot = first + 2 * pair, run = slot / kRun;
          const Stored* v = next_values[run < slots / kRun ? run : 0] + slot % kRun * stored + column;
          const int count = run < slots / kRun ? dv - column : 0;
          const Interleaved both = interleave(row32(v, count), row32(v + stored, count));
          low[pair] = both.low;
          high[pair] = both.high;
        }
        transpose(low);
        transpose(high);
        for (int i = 0; i < kLanes; ++i) {
          Number* to = own_values + (column + i / 4 * 8 + i % 4) * kValueStride + first;
          std::memcpy(static_cast<void*>(to), &low[i], 64);
          std::memcpy(static_cast<void*>(to + 4 * kValueStride), &high[i], 64);
        }
      }
    }
  }
#endif

  int next_base_ = 0;
  int64_t next_runs_[kAllRuns];
};

}  // namespace quire
