// Attention of many queries: prefills, and decodes that share a prefix. Tiles of up to 64 (query, head) lanes meet tiles of
// 64 slots, as two matrix products with a softmax between them.
//
// Vectors run across lanes: scores [slot][lane], weights [slot][lane], sums [column][lane]. So a number of K or of V is
// broadcast straight from its block, maxima and sums of the softmax need no shuffles, and each lane has limits of its own.
// Where pairs can be multiplied (bf16 caches; int8 too, whose numbers are bf16 numbers), a broadcast is two neighbouring
// columns of K, or two slots of V, which are interleaved first. Otherwise numbers other than float are widened by tile. On the
// matrix unit rows of K, and columns of V, meet lanes in the same layout: attention_tiles_amx.cpp.
#include "attention_amx.h"
#include "attention_cache_tiles.h"
#include "attention_lanes.h"
#include "unroll.h"

namespace quire {
namespace {

// Where R rows are read now, by few registers: one pointer for `Step` rows, which lie `stride` bytes apart.
template <int R, int Step>
class RowPointers {
 public:
  explicit RowPointers(int64_t stride) : stride_(stride), stride3_(3 * stride) {
    __asm__("" : "+r"(stride3_));  // as a value of its own
  }
  QUIRE_INLINE void set(int row, const void* at) { base_[row / Step] = static_cast<const uint8_t*>(at); }
  QUIRE_INLINE const uint8_t* at(int row) const {
    const uint8_t* base = base_[row / Step];
    row %= Step;
    return row == 0 ? base : row == 1 ? base + stride_ : row == 2 ? base + 2 * stride_ : base + stride3_;
  }
  QUIRE_INLINE void advance(int64_t bytes) {
#pragma GCC unroll 16
    for (int i = 0; i < R / Step; ++i) base_[i] += bytes;
  }

 private:
  const uint8_t* base_[R / Step];
  int64_t stride_, stride3_;
};

template <typename Kind, typename Stored>
class TilesKernel {
  using Number = typename Kind::Number;
  using Tiles = CacheTiles<Kind, Stored, 1>;
  using Group = LaneGroup<Kind>;
  static constexpr int kPer = Kind::kPer;
  static constexpr int kFetchSteps = 16;  // steps of a product between two fetches

 public:
  TilesKernel(const Work& work, const Item& item, float* scratch)
      : work_(work), item_(item), dk_(work.cache.head_dim_k), dv_(work.cache.head_dim_v) {
    take(lanes_.queries, Group::query_numbers(dk_), scratch);
    take(lanes_.sums, Group::sum_floats(dv_), scratch);
    take(scores_, static_cast<size_t>(kTile) * Group::kMost, scratch);
    if constexpr (kPer == 1) {
      weights_ = scores_;  // a weight takes the place of its score
    } else {
      take(weights_, static_cast<size_t>(kTile) * Group::kMost, scratch);
    }
    take(tiles_.own_keys, Tiles::numbers(dk_), scratch);
    take(tiles_.own_values, Tiles::numbers(dv_), scratch);
  }

  static size_t scratch_floats(int dk, int dv) {
    return Group::query_numbers(dk) + Group::sum_floats(dv) + 2 * kTile * Group::kMost + Tiles::numbers(dk) +
           Tiles::numbers(dv) + 1024;
  }

  void run() {
    const int begin = item_.begin & ~(kTile - 1);
    tiles_.find(work_, item_, begin);
    for (int run = 0; run < kRuns; ++run) {
      prefetch(tiles_.next_keys[run], kRun * sizeof(Stored) * dk_);
      prefetch(tiles_.next_values[run], kRun * sizeof(Stored) * dv_);
    }
    lanes_.open(work_, item_, 0, item_.count * item_.heads, tiles_.own_keys);
    for (int base = begin; base < item_.end; base += kTile) {
      tiles_.load(work_.cache, item_);
      tiles_.find(work_, item_, base + kTile);
      fetcher_.start(tiles_.next_keys, kRun * sizeof(Stored) * dk_, tiles_.next_tiles ? score_calls() : 0);
      score();
      weigh();
      fetcher_.start(tiles_.next_values, kRun * sizeof(Stored) * dv_, tiles_.next_tiles ? value_calls() : 0);
      accumulate();
    }
    lanes_.close(work_, item_, reinterpret_cast<float*>(tiles_.own_values));
  }

 private:
  template <typename Body>
  void for_vectors(Body&& body) const {
    int at = 0;
    if constexpr (kVectors == 4) {
      for (; at + 4 <= lanes_.vectors; at += 4) body(std::integral_constant<int, 4>(), at * kLanes);
      if (at + 3 <= lanes_.vectors) body(std::integral_constant<int, 3>(), at * kLanes), at += 3;
      if (at + 2 <= lanes_.vectors) body(std::integral_constant<int, 2>(), at * kLanes), at += 2;
    }
    for (; at < lanes_.vectors; ++at) body(std::integral_constant<int, 1>(), at * kLanes);
  }

  // How often `score` and `accumulate` fetch.
  int score_calls() const {
    int calls = 0;
    for_vectors([&](auto vectors, int) { calls += row_steps(rows_at_once(vectors), tiles_.slots); });
    return calls * ((dk_ + kFetchSteps * kPer - 1) / (kFetchSteps * kPer));
  }
  int value_calls() const {
    int calls = 0;
    for_vectors([&](auto vectors, int) { calls += row_steps(rows_at_once(vectors), dv_); });
    return calls * ((tiles_.slots + kFetchSteps * kPer - 1) / (kFetchSteps * kPer));
  }

  // scores [slot][lane] = K · queries · factor.
  void score() {
    for_vectors([&](auto vectors, int lane) {
      constexpr int V = decltype(vectors)::value;
      for_rows<rows_at_once(V)>(tiles_.slots, [&](int slot, auto rows) { score_some<V, decltype(rows)::value>(slot, lane); });
    });
  }

  template <int V, int R>
  __attribute__((always_inline)) void score_some(int slot, int lane) {
    typename Kind::Acc acc[R][V];
    constexpr int kStep = R % kRun ? 1 : kRun;
    RowPointers<R, kStep> rows(tiles_.key_stride * sizeof(Number));
#pragma GCC unroll 16
    for (int i = 0; i < R; i += kStep) {
      rows.set(i, tiles_.keys[(slot + i) / kRun] + (slot + i) % kRun * tiles_.key_stride);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) acc[r][v] = Kind::zero();
    }
    const Number* query = lanes_.queries + lane * kPer;
    for (int i = 0; i < dk_;) {
      fetcher_.some();
      for (const int end = std::min(dk_, i + kFetchSteps * kPer); i < end; i += kPer, query += lanes_.wide * kPer) {
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
          const auto one = Kind::broadcast(reinterpret_cast<const Number*>(rows.at(r)));
#pragma GCC unroll 4
          for (int v = 0; v < V; ++v) {
            acc[r][v] = Kind::dot(acc[r][v], one, Kind::load(query + v * kLanes * kPer));
          }
        }
        rows.advance(kPer * sizeof(Number));
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Vec factor = Vec::all(Tiles::kScaled ? work_.score_factor * tiles_.key_scales[slot + r] : work_.score_factor);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        (Kind::to_vec(acc[r][v]) * factor).store(scores_ + (slot + r) * lanes_.wide + lane + v * kLanes);
      }
    }
  }

  // Weights from scores, lane by lane: the softmax as far as it goes tile by tile.
  void weigh() {
    const bool masked = tiles_.base < lanes_.all_from || tiles_.base + tiles_.slots > lanes_.all_to;
    for (int lane = 0; lane < lanes_.wide; lane += kLanes) {
      if (work_.layer.softcap != 0.0f) cap(lane);
      if (masked) mask(lane);
      const float* scores = scores_ + lane;
      const Vec before = Vec::load(lanes_.most + lane);
      Vec most[4] = {before, before, before, before};
      for (int slot = 0; slot < tiles_.slots; slot += 4) {
        for (int i = 0; i < 4; ++i) most[i] = max(most[i], Vec::load(scores + (slot + i) * lanes_.wide));
      }
      most[0] = max(max(most[0], most[1]), max(most[2], most[3]));
      const Vec keep = exp2_falling(before - most[0]);
      const Vec sum = exponentiate(lane, most[0]);
      most[0].store(lanes_.most + lane);
      keep.store(lanes_.keep + lane);
      fma(Vec::load(lanes_.sum + lane), keep, sum).store(lanes_.sum + lane);
    }
  }

  void cap(int lane) {
    for (int slot = 0; slot < tiles_.slots; ++slot) {
      float* at = scores_ + slot * lanes_.wide + lane;
      (soft_cap(Vec::load(at), work_.layer.softcap) * Vec::all(kLog2E)).store(at);
    }
  }

  void mask(int lane) {
    const Vec first = Vec::load(lanes_.first + lane), end = Vec::load(lanes_.end + lane);
    for (int slot = 0; slot < tiles_.slots; ++slot) {
      float* at = scores_ + slot * lanes_.wide + lane;
      keep_between(Vec::load(at), Vec::all(static_cast<float>(tiles_.base + slot)), first, end).store(at);
    }
  }

  // Writes weights [slot / kPer][lane][kPer] and returns their sums.
  Vec exponentiate(int lane, Vec most) {
    Vec sum[2] = {Vec::zero(), Vec::zero()};
    for (int slot = 0; slot < tiles_.slots; slot += 2) {
      const float* scores = scores_ + slot * lanes_.wide + lane;
      Vec a = exp2_falling(Vec::load(scores) - most), b = exp2_falling(Vec::load(scores + lanes_.wide) - most);
      sum[0] = sum[0] + a;
      sum[1] = sum[1] + b;
      if (Tiles::kScaled) {
        a = a * Vec::all(tiles_.value_scales[slot]);
        b = b * Vec::all(tiles_.value_scales[slot + 1]);
      }
      store_weights(slot, lane, a, b);
    }
    return sum[0] + sum[1];
  }

  void store_weights(int slot, int lane, Vec a, Vec b) {
    if constexpr (kPer == 1) {
      a.store(weights_ + slot * lanes_.wide + lane);
      b.store(weights_ + (slot + 1) * lanes_.wide + lane);
    } else {
#if defined(QUIRE_BF16_DOTS)
      const __m512i both = _mm512_permutexvar_epi16(alternate(), round_bf16(a, b));
      std::memcpy(static_cast<void*>(weights_ + slot * lanes_.wide + lane * 2), &both, 64);
#endif
    }
  }

  // sums [column][lane] = sums · keep + V · weights.
  void accumulate() {
    for_vectors([&](auto vectors, int lane) {
      constexpr int V = decltype(vectors)::value;
      for_rows<rows_at_once(V)>(dv_, [&](int column, auto rows) { accumulate_some<V, decltype(rows)::value>(column, lane); });
    });
  }

  template <int V, int R>
  __attribute__((always_inline)) void accumulate_some(int column, int lane) {
    typename Kind::Acc acc[R][V];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        const Vec keep = Vec::load(lanes_.keep + lane + v * kLanes);
        acc[r][v] = Kind::from(Vec::load(lanes_.sums + (column + r) * lanes_.wide + lane + v * kLanes) * keep);
      }
    }
    const Number* weights = weights_ + lane * kPer;
    const int stride = kPer == 1 ? tiles_.value_stride : kPer * padded(dv_, 32);
    for (int slot = 0; slot < tiles_.slots;) {
      fetcher_.some();
      for (const int end = std::min(tiles_.slots, slot + kFetchSteps * kPer); slot < end; slot += kRun) {
        const Number* row =
            kPer == 1 ? tiles_.values[slot / kRun] + column : tiles_.own_values + slot / kPer * stride + kPer * column;
#pragma GCC unroll 4
        for (int step = 0; step < kRun / kPer; ++step, row += stride, weights += lanes_.wide * kPer) {
#pragma GCC unroll 16
          for (int r = 0; r < R; ++r) {
            const auto one = Kind::broadcast(row + r * kPer);
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) {
              acc[r][v] = Kind::dot(acc[r][v], one, Kind::load(weights + v * kLanes * kPer));
            }
          }
        }
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        Kind::to_vec(acc[r][v]).store(lanes_.sums + (column + r) * lanes_.wide + lane + v * kLanes);
      }
    }
  }

  const Work& work_;
  const Item& item_;
  const int dk_, dv_;
  Group lanes_;
  Tiles tiles_;
  Number* weights_;
  float* scores_;
  Fetcher fetcher_;
};

template <typename Kind, typename Stored>
void run(const Work& work, const Item& item, float* scratch) {
  TilesKernel<Kind, Stored>(work, item, scratch).run();
}

}  // namespace

int tile_lanes(const quire_cache& cache) {
#if defined(QUIRE_AMX)
  if (cache.type == QUIRE_BF16 || cache.type == QUIRE_I8) return kAmxItemLanes;
#endif
  (void)cache;
  return kMaxLanes;
}

size_t tiles_scratch(const quire_cache& cache) {
  const size_t floats = TilesKernel<Floats, float>::scratch_floats(cache.head_dim_k, cache.head_dim_v);
#if defined(QUIRE_AMX)
  return std::max(floats, amx_tiles_scratch(cache));
#else
  return floats;
#endif
}

void attend_tiles(const Work& work, const Item& item, float* scratch) {
  switch (work.cache.type) {
    case QUIRE_F32: return run<Floats, float>(work, item, scratch);
    case QUIRE_F16: return run<Floats, f16>(work, item, scratch);
#if defined(QUIRE_AMX)
    default: return attend_tiles_on_amx(work, item, scratch);
#elif defined(QUIRE_BF16_DOTS)
    case QUIRE_BF16: return run<Bf16Pairs, bf16>(work, item, scratch);
    default: return run<Bf16Pairs, int8_t>(work, item, scratch);
#else
    case QUIRE_BF16: return run<Floats, bf16>(work, item, scratch);
    default: return run<Floats, int8_t>(work, item, scratch);
#endif
  }
}

}  // namespace quire
