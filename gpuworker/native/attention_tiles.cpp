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
#include "row_pointers.h"
#include "unroll.h"

namespace quire {
namespace {

// What tiles are stored as makes no difference once they are loaded: the products are compiled once for each way to multiply.
template <typename Kind>
class TilesKernel {
  using Number = typename Kind::Number;
  template <typename Stored>
  using Tiles = CacheTiles<Kind, Stored, 1>;
  using Group = LaneGroup<Kind>;
  static constexpr int kPer = Kind::kPer;
  static constexpr int kGroups = kItemLanes / Group::kMost;
  static constexpr int kFetchSteps = 16;  // steps of a product between two fetches

 public:
  TilesKernel(const Work& work, const Item& item, float* scratch)
      : work_(work), item_(item), dk_(work.cache.head_dim_k), dv_(work.cache.head_dim_v) {
    for (Group& group : groups_) {
      take(group.queries, Group::query_numbers(dk_), scratch);
      take(group.sums, Group::sum_floats(dv_), scratch);
    }
    take(scores_, static_cast<size_t>(kTile) * Group::kMost, scratch);
    if constexpr (kPer == 1) {
      weights_ = scores_;  // a weight takes the place of its score
    } else {
      take(weights_, static_cast<size_t>(kTile) * Group::kMost, scratch);
    }
    take(own_keys_, Tiles<Number>::numbers(dk_), scratch);
    take(own_values_, Tiles<Number>::numbers(dv_), scratch);
  }

  static size_t scratch_floats(int dk, int dv) {
    return kGroups * (Group::query_numbers(dk) + Group::sum_floats(dv)) + 2 * kTile * Group::kMost +
           Tiles<Number>::numbers(dk) + Tiles<Number>::numbers(dv) + 1024;
  }

  template <typename Stored>
  void run() {
    Tiles<Stored> tiles;
    tiles.own_keys = own_keys_, tiles.own_values = own_values_;
    tiles_ = &tiles, scaled_ = tiles.kScaled;
    const int begin = item_.begin & ~(kTile - 1);
    tiles.find(work_, item_, begin);
    for (int run = 0; run < kRuns; ++run) {
      prefetch(tiles.next_keys[run], kRun * sizeof(Stored) * dk_);
      prefetch(tiles.next_values[run], kRun * sizeof(Stored) * dv_);
    }
    const int groups = open_groups(groups_, work_, item_, own_keys_);
    for (int base = begin; base < item_.end; base += kTile) {
      tiles.load(work_.cache, item_);
      tiles.find(work_, item_, base + kTile);
      bool fetches = tiles.next_tiles > 0;
      for (int group = groups - 1; group >= 0; --group) fetches &= !attend(tiles, groups_[group], fetches);
    }
    auto* rows = reinterpret_cast<float*>(own_values_);
    for (int group = 0; group < groups; ++group) groups_[group].close(work_, item_, rows);
  }

 private:
  // A group of lanes over the tile, if they see any of it. Meanwhile the next tile is fetched.
  template <typename Stored>
  bool attend(const Tiles<Stored>& tiles, Group& lanes, bool fetches) {
    slots_ = std::min(tiles.slots, padded(std::max(0, lanes.none_from - tiles.base), kRun));
    if (slots_ == 0 || tiles.base + slots_ <= lanes.none_to) return false;
    fetcher_.start(tiles.next_keys, kRun * sizeof(Stored) * dk_, fetches ? score_calls(lanes) : 0);
    score(lanes);
    weigh(lanes);
    fetcher_.start(tiles.next_values, kRun * sizeof(Stored) * dv_, fetches ? value_calls(lanes) : 0);
    accumulate(lanes);
    return true;
  }

  template <typename Body>
  static void for_vectors(const Group& lanes, Body&& body) {
    int at = 0;
    if constexpr (kVectors == 4) {
      for (; at + 4 <= lanes.vectors; at += 4) body(std::integral_constant<int, 4>(), at * kLanes);
      if (at + 3 <= lanes.vectors) body(std::integral_constant<int, 3>(), at * kLanes), at += 3;
      if (at + 2 <= lanes.vectors) body(std::integral_constant<int, 2>(), at * kLanes), at += 2;
    }
    for (; at < lanes.vectors; ++at) body(std::integral_constant<int, 1>(), at * kLanes);
  }

  // How often `score` and `accumulate` fetch.
  int score_calls(const Group& lanes) const {
    int calls = 0;
    for_vectors(lanes, [&](auto vectors, int) { calls += row_steps(rows_at_once(vectors), slots_); });
    return calls * ((dk_ + kFetchSteps * kPer - 1) / (kFetchSteps * kPer));
  }
  int value_calls(const Group& lanes) const {
    int calls = 0;
    for_vectors(lanes, [&](auto vectors, int) { calls += row_steps(rows_at_once(vectors), dv_); });
    return calls * ((slots_ + kFetchSteps * kPer - 1) / (kFetchSteps * kPer));
  }

  // scores [slot][lane] = K · queries · factor.
  __attribute__((noinline)) void score(const Group& lanes) {
    for_vectors(lanes, [&](auto vectors, int lane) {
      constexpr int V = decltype(vectors)::value;
      for_rows<rows_at_once(V), kRun>(slots_, [&](int slot, auto rows) {
        score_some<V, decltype(rows)::value>(lanes, slot, lane);
      });
    });
  }

  template <int V, int R>
  __attribute__((always_inline)) void score_some(const Group& lanes, int slot, int lane) {
    typename Kind::Acc acc[R][V];
    constexpr int kStep = R % kRun ? 1 : kRun;
    RowPointers<R, kStep> rows(tiles_->key_stride * sizeof(Number));
#pragma GCC unroll 16
    for (int i = 0; i < R; i += kStep) {
      rows.set(i, tiles_->keys[(slot + i) / kRun] + (slot + i) % kRun * tiles_->key_stride);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) acc[r][v] = Kind::zero();
    }
    const Number* query = lanes.queries + lane * kPer;
    for (int i = 0; i < dk_;) {
      fetcher_.some();
      for (const int end = std::min(dk_, i + kFetchSteps * kPer); i < end; i += kPer, query += lanes.wide * kPer) {
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
      const Vec factor = Vec::all(scaled_ ? work_.score_factor * tiles_->key_scales[slot + r] : work_.score_factor);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        (Kind::to_vec(acc[r][v]) * factor).store(scores_ + (slot + r) * lanes.wide + lane + v * kLanes);
      }
    }
  }

  // Weights from scores, lane by lane: the softmax as far as it goes tile by tile.
  __attribute__((noinline)) void weigh(Group& lanes) {
    const bool masked = tiles_->base < lanes.all_from || tiles_->base + slots_ > lanes.all_to;
    for (int lane = 0; lane < lanes.wide; lane += kLanes) {
      if (work_.layer.softcap != 0.0f) cap(lanes, lane);
      if (masked) mask(lanes, lane);
      const float* scores = scores_ + lane;
      const Vec before = Vec::load(lanes.most + lane);
      Vec most[4] = {before, before, before, before};
      for (int slot = 0; slot < slots_; slot += 4) {
        for (int i = 0; i < 4; ++i) most[i] = max(most[i], Vec::load(scores + (slot + i) * lanes.wide));
      }
      most[0] = max(max(most[0], most[1]), max(most[2], most[3]));
      const Vec keep = exp2_falling(before - most[0]);
      const Vec sum = exponentiate(lanes, lane, most[0]);
      most[0].store(lanes.most + lane);
      keep.store(lanes.keep + lane);
      fma(Vec::load(lanes.sum + lane), keep, sum).store(lanes.sum + lane);
    }
  }

  void cap(const Group& lanes, int lane) {
    for (int slot = 0; slot < slots_; ++slot) {
      float* at = scores_ + slot * lanes.wide + lane;
      (soft_cap(Vec::load(at), work_.layer.softcap) * Vec::all(kLog2E)).store(at);
    }
  }

  void mask(const Group& lanes, int lane) {
    const Vec first = Vec::load(lanes.first + lane), end = Vec::load(lanes.end + lane);
    for (int slot = 0; slot < slots_; ++slot) {
      float* at = scores_ + slot * lanes.wide + lane;
      keep_between(Vec::load(at), Vec::all(static_cast<float>(tiles_->base + slot)), first, end).store(at);
    }
  }

  // Writes weights [slot / kPer][lane][kPer] and returns their sums.
  Vec exponentiate(const Group& lanes, int lane, Vec most) {
    Vec sum[2] = {Vec::zero(), Vec::zero()};
    for (int slot = 0; slot < slots_; slot += 2) {
      const float* scores = scores_ + slot * lanes.wide + lane;
      Vec a = exp2_falling(Vec::load(scores) - most), b = exp2_falling(Vec::load(scores + lanes.wide) - most);
      sum[0] = sum[0] + a;
      sum[1] = sum[1] + b;
      if (scaled_) {
        a = a * Vec::all(tiles_->value_scales[slot]);
        b = b * Vec::all(tiles_->value_scales[slot + 1]);
      }
      store_weights(lanes, slot, lane, a, b);
    }
    return sum[0] + sum[1];
  }

  void store_weights(const Group& lanes, int slot, int lane, Vec a, Vec b) {
    if constexpr (kPer == 1) {
      a.store(weights_ + slot * lanes.wide + lane);
      b.store(weights_ + (slot + 1) * lanes.wide + lane);
    } else {
#if defined(QUIRE_BF16_DOTS)
      const __m512i both = _mm512_permutexvar_epi16(alternate(), round_bf16(a, b));
      std::memcpy(static_cast<void*>(weights_ + slot * lanes.wide + lane * 2), &both, 64);
#endif
    }
  }

  // sums [column][lane] = sums · keep + V · weights.
  __attribute__((noinline)) void accumulate(Group& lanes) {
    for_vectors(lanes, [&](auto vectors, int lane) {
      constexpr int V = decltype(vectors)::value;
      for_rows<rows_at_once(V), 1>(dv_, [&](int column, auto rows) {
        accumulate_some<V, decltype(rows)::value>(lanes, column, lane);
      });
    });
  }

  template <int V, int R>
  __attribute__((always_inline)) void accumulate_some(Group& lanes, int column, int lane) {
    typename Kind::Acc acc[R][V];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        const Vec keep = Vec::load(lanes.keep + lane + v * kLanes);
        acc[r][v] = Kind::from(Vec::load(lanes.sums + (column + r) * lanes.wide + lane + v * kLanes) * keep);
      }
    }
    const Number* weights = weights_ + lane * kPer;
    const int stride = kPer == 1 ? tiles_->value_stride : kPer * padded(dv_, 32);
    for (int slot = 0; slot < slots_;) {
      fetcher_.some();
      for (const int end = std::min(slots_, slot + kFetchSteps * kPer); slot < end; slot += kRun) {
        const Number* row =
            kPer == 1 ? tiles_->values[slot / kRun] + column : tiles_->own_values + slot / kPer * stride + kPer * column;
#pragma GCC unroll 4
        for (int step = 0; step < kRun / kPer; ++step, row += stride, weights += lanes.wide * kPer) {
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
        Kind::to_vec(acc[r][v]).store(lanes.sums + (column + r) * lanes.wide + lane + v * kLanes);
      }
    }
  }

  const Work& work_;
  const Item& item_;
  const int dk_, dv_;
  Group groups_[kGroups];
  const TileNumbers<Number, kTile>* tiles_ = nullptr;
  bool scaled_ = false;
  Number *own_keys_, *own_values_;
  int slots_ = 0;  // of the tile that the lanes of a group see
  Number* weights_;
  float* scores_;
  Fetcher fetcher_;
};

template <typename Kind, typename Stored>
void run(const Work& work, const Item& item, float* scratch) {
  TilesKernel<Kind>(work, item, scratch).template run<Stored>();
}

}  // namespace

int tile_lanes(const quire_cache& cache) {
  if (cache.type == QUIRE_F32) return kMaxLanes;  // nothing is widened
#if defined(QUIRE_AMX)
  if (cache.type != QUIRE_F16) return kAmxItemLanes;
#endif
  return kItemLanes;
}

size_t tiles_scratch(const quire_cache& cache) {
  const size_t floats = TilesKernel<Floats>::scratch_floats(cache.head_dim_k, cache.head_dim_v);
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
