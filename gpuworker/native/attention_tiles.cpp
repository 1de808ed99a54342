// Attention of many queries: prefills, and decodes that share a prefix. Tiles of up to 64 (query, head) lanes meet tiles of
// 64 slots, as two matrix products with a softmax between them.
//
// Vectors run across lanes: scores [slot][lane], weights [slot][lane], sums [column][lane]. So a number of K or of V is
// broadcast straight from its block, maxima and sums of the softmax need no shuffles, and each lane has limits of its own.
// Where pairs can be multiplied (bf16 caches; int8 too, whose numbers are bf16 numbers), a broadcast is two neighbouring
// columns of K, or two slots of V, which are interleaved first. Otherwise numbers other than float are widened by tile.
#include <type_traits>

#include "attention_tile_kinds.h"

namespace quire {
namespace {

template <typename Kind, typename Stored>
class TilesKernel {
  using Number = typename Kind::Number;
  static constexpr int kPer = Kind::kPer;
  static constexpr bool kStraight = std::is_same<Number, Stored>::value;  // K is read where it lies
  static constexpr bool kScaled = std::is_same<Stored, int8_t>::value;
  static constexpr int kFetchSteps = 16;  // steps of a product between two fetches

 public:
  TilesKernel(const Work& work, const Item& item, float* scratch)
      : work_(work),
        item_(item),
        dk_(work.cache.head_dim_k),
        dv_(work.cache.head_dim_v),
        lanes_(item.count * item.heads),
        vectors_((lanes_ + kLanes - 1) / kLanes),
        wide_(vectors_ * kLanes) {
    auto take = [&](size_t floats) {
      float* from = scratch;
      scratch += (floats + 15) / 16 * 16;
      return from;
    };
    queries_ = reinterpret_cast<Number*>(take(static_cast<size_t>(padded(dk_, 2)) * wide_));
    scores_ = take(static_cast<size_t>(kTile) * wide_);
    weights_ = reinterpret_cast<Number*>(take(static_cast<size_t>(kTile) * wide_));
    sums_ = take(static_cast<size_t>(padded(dv_, 16)) * wide_);
    keys_ = reinterpret_cast<Number*>(take(static_cast<size_t>(kTile) * padded(dk_, 32)));
    values_ = reinterpret_cast<Number*>(take(static_cast<size_t>(kTile) * padded(dv_, 32)));
  }

  void run() {
    const int begin = item_.begin & ~(kTile - 1);
    find_next(begin);
    for (int run = 0; run < kRuns; ++run) {
      prefetch(next_keys_[run], kRun * sizeof(Stored) * dk_);
      prefetch(next_values_[run], kRun * sizeof(Stored) * dv_);
    }
    open();
    for (int base = begin; base < item_.end; base += kTile) {
      load_tile(base);
      const bool more = base + kTile < item_.end;
      if (more) find_next(base + kTile);
      fetcher_.start(next_keys_, kRun * sizeof(Stored) * dk_, more ? score_calls() : 0);
      score();
      weigh(base);
      fetcher_.start(next_values_, kRun * sizeof(Stored) * dv_, more ? value_calls() : 0);
      accumulate();
    }
    close();
  }

 private:
  const Query& query_of(int lane) const { return work_.window.queries[item_.query + lane / item_.heads]; }
  int head_of(int lane) const { return item_.head + lane % item_.heads; }

  // Queries transposed: [column / kPer][lane][kPer].
  void open() {
    float row[2048];
    std::memset(static_cast<void*>(queries_), 0, sizeof(Number) * padded(dk_, kPer) * wide_);
    for (int lane = 0; lane < wide_; ++lane) {
      most_[lane] = kNoScore;
      sum_[lane] = first_[lane] = end_[lane] = 0.0f;
      if (lane >= lanes_) continue;
      const Query& query = query_of(lane);
      first_[lane] = static_cast<float>(query.first);
      end_[lane] = static_cast<float>(query.end);
      all_from_ = std::max(all_from_, query.first);
      all_to_ = std::min(all_to_, query.end);
      load_query(work_, query.token, head_of(lane), row);
      for (int i = 0; i < dk_; ++i) put(queries_[(i / kPer * wide_ + lane) * kPer + i % kPer], row[i]);
    }
    std::fill(sums_, sums_ + static_cast<size_t>(padded(dv_, 16)) * wide_, 0.0f);
  }
  static void put(float& to, float x) { to = x; }
  static void put(bf16& to, float x) { to = to_bf16(x); }

  // The addresses of the runs of the tile that is loaded next.
  void find_next(int base) {
    find_runs(work_, item_, base, next_runs_);
    for (int run = 0; run < kRuns; ++run) {
      next_keys_[run] = static_cast<const Stored*>(work_.cache.keys) + next_runs_[run] * dk_;
      next_values_[run] = static_cast<const Stored*>(work_.cache.values) + next_runs_[run] * dv_;
    }
  }

  // K of each run in the layout of `score`, and V in that of `accumulate`.
  void load_tile(int base) {
    slots_ = std::min(kTile, padded(item_.end - base, kRun));
    for (int run = 0; run < slots_ / kRun; ++run) {
      const Stored *k = next_keys_[run], *v = next_values_[run];
      if (kScaled) {
        const int64_t at = next_runs_[run];
        std::memcpy(key_scales_ + run * kRun, work_.cache.key_scales + at, kRun * sizeof(float));
        std::memcpy(value_scales_ + run * kRun, work_.cache.value_scales + at, kRun * sizeof(float));
      }
      key_stride_ = dk_;
      if (kStraight && dk_ % kPer == 0) {
        key_runs_[run] = reinterpret_cast<const Number*>(k);
      } else {
        key_stride_ = padded(dk_, 32);
        Number* to = keys_ + run * kRun * key_stride_;
        for (int i = 0; i < kRun; ++i) widen(k + i * dk_, to + i * key_stride_, dk_);
        key_runs_[run] = to;
      }
      load_values(run, v);
    }
  }

  // A row of the cache as numbers that are multiplied, with zeros up to a multiple of 32.
  static void widen(const Stored* from, Number* to, int dim) {
    int i = 0;
    for (; i + kLanes <= dim; i += kLanes) Vec::load(from + i).store(to + i);
    if (i < dim) load_first(from + i, dim - i).store(to + i), i += kLanes;
    for (; i < padded(dim, 32); i += kLanes) Vec::zero().store(to + i);
  }

  void load_values(int run, const Stored* v) {
    if constexpr (kPer == 1) {
      if (kStraight) {
        value_runs_[run] = reinterpret_cast<const Number*>(v);
        value_stride_ = dv_;
        return;
      }
      value_stride_ = padded(dv_, 32);
      Number* to = values_ + run * kRun * value_stride_;
      for (int i = 0; i < kRun; ++i) widen(v + i * dv_, to + i * value_stride_, dv_);
      value_runs_[run] = to;
    } else {
      interleave_run(run, v);
    }
  }

  // Two slots after the other, column by column: [slot / 2][column][2].
  void interleave_run(int run, const Stored* v) {
#if defined(QUIRE_BF16_DOTS)
    const int stride = padded(dv_, 32);
    for (int pair = 0; pair < 2; ++pair) {
      Number* to = values_ + (run * 2 + pair) * 2 * stride;
      const Stored *a = v + pair * 2 * dv_, *b = a + dv_;
      for (int i = 0; i < dv_; i += 32) {
        const Interleaved both = interleave(row32(a + i, dv_ - i), row32(b + i, dv_ - i));
        Vec first, second;
        in_order(_mm512_castsi512_ps(both.low), _mm512_castsi512_ps(both.high), first, second);
        std::memcpy(static_cast<void*>(to + 2 * i), &first, 64);
        std::memcpy(static_cast<void*>(to + 2 * i + 32), &second, 64);
      }
    }
#else
    (void)run, (void)v;
#endif
  }

  template <typename Body>
  void for_vectors(Body&& body) const {
    int at = 0;
    if constexpr (kVectors == 4) {
      for (; at + 4 <= vectors_; at += 4) body(std::integral_constant<int, 4>(), at * kLanes);
      if (at + 3 <= vectors_) body(std::integral_constant<int, 3>(), at * kLanes), at += 3;
      if (at + 2 <= vectors_) body(std::integral_constant<int, 2>(), at * kLanes), at += 2;
    }
    for (; at < vectors_; ++at) body(std::integral_constant<int, 1>(), at * kLanes);
  }

  // How often `score` and `accumulate` fetch.
  int score_calls() const {
    int calls = 0;
    for_vectors([&](auto vectors, int) { calls += row_steps(rows_at_once(vectors), slots_); });
    return calls * ((dk_ + kFetchSteps * kPer - 1) / (kFetchSteps * kPer));
  }
  int value_calls() const {
    int calls = 0;
    for_vectors([&](auto vectors, int) { calls += row_steps(rows_at_once(vectors), dv_); });
    return calls * ((slots_ + kFetchSteps * kPer - 1) / (kFetchSteps * kPer));
  }

  // scores [slot][lane] = K · queries · factor.
  void score() {
    for_vectors([&](auto vectors, int lane) {
      constexpr int V = decltype(vectors)::value;
      for_rows<rows_at_once(V)>(slots_, [&](int slot, auto rows) { score_some<V, decltype(rows)::value>(slot, lane); });
    });
  }

  template <int V, int R>
  __attribute__((always_inline)) void score_some(int slot, int lane) {
    typename Kind::Acc acc[R][V];
    constexpr int kStep = R % kRun ? 1 : kRun;  // rows of one pointer
    const Number* rows[R / kStep];
#pragma GCC unroll 16
    for (int i = 0; i < R; i += kStep) rows[i / kStep] = key_runs_[(slot + i) / kRun] + (slot + i) % kRun * key_stride_;
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) acc[r][v] = Kind::zero();
    }
    const Number* query = queries_ + lane * kPer;
    for (int i = 0; i < dk_;) {
      fetcher_.some();
      for (const int end = std::min(dk_, i + kFetchSteps * kPer); i < end; i += kPer, query += wide_ * kPer) {
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
          const auto one = Kind::broadcast(rows[r / kStep] + r % kStep * key_stride_ + i);
#pragma GCC unroll 4
          for (int v = 0; v < V; ++v) {
            acc[r][v] = Kind::dot(acc[r][v], one, Kind::load(query + v * kLanes * kPer));
          }
        }
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Vec factor = Vec::all(kScaled ? work_.score_factor * key_scales_[slot + r] : work_.score_factor);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        (Kind::to_vec(acc[r][v]) * factor).store(scores_ + (slot + r) * wide_ + lane + v * kLanes);
      }
    }
  }

  // Weights from scores, lane by lane: the softmax as far as it goes tile by tile.
  void weigh(int base) {
    const bool masked = base < all_from_ || base + slots_ > all_to_;
    for (int lane = 0; lane < wide_; lane += kLanes) {
      if (work_.layer.softcap != 0.0f) cap(lane);
      if (masked) mask(base, lane);
      float* scores = scores_ + lane;
      const Vec before = Vec::load(most_ + lane);
      Vec most[4] = {before, before, before, before};
      for (int slot = 0; slot < slots_; slot += 4) {
        for (int i = 0; i < 4; ++i) most[i] = max(most[i], Vec::load(scores + (slot + i) * wide_));
      }
      most[0] = max(max(most[0], most[1]), max(most[2], most[3]));
      const Vec keep = exp2_falling(before - most[0]);
      const Vec sum = exponentiate(lane, most[0]);
      most[0].store(most_ + lane);
      keep.store(keep_ + lane);
      fma(Vec::load(sum_ + lane), keep, sum).store(sum_ + lane);
    }
  }

  void cap(int lane) {
    for (int slot = 0; slot < slots_; ++slot) {
      float* at = scores_ + slot * wide_ + lane;
      (soft_cap(Vec::load(at), work_.layer.softcap) * Vec::all(kLog2E)).store(at);
    }
  }

  void mask(int base, int lane) {
    const Vec first = Vec::load(first_ + lane), end = Vec::load(end_ + lane);
    for (int slot = 0; slot < slots_; ++slot) {
      float* at = scores_ + slot * wide_ + lane;
      keep_between(Vec::load(at), Vec::all(static_cast<float>(base + slot)), first, end).store(at);
    }
  }

  // Writes weights [slot / kPer][lane][kPer] and returns their sums.
  Vec exponentiate(int lane, Vec most) {
    Vec sum[2] = {Vec::zero(), Vec::zero()};
    for (int slot = 0; slot < slots_; slot += 2) {
      const float* scores = scores_ + slot * wide_ + lane;
      Vec a = exp2_falling(Vec::load(scores) - most), b = exp2_falling(Vec::load(scores + wide_) - most);
      sum[0] = sum[0] + a;
      sum[1] = sum[1] + b;
      if (kScaled) {
        a = a * Vec::all(value_scales_[slot]);
        b = b * Vec::all(value_scales_[slot + 1]);
      }
      store_weights(slot, lane, a, b);
    }
    return sum[0] + sum[1];
  }

  void store_weights(int slot, int lane, Vec a, Vec b) {
    if constexpr (kPer == 1) {
      a.store(weights_ + slot * wide_ + lane);
      b.store(weights_ + (slot + 1) * wide_ + lane);
    } else {
#if defined(QUIRE_BF16_DOTS)
      const __m512i both = _mm512_permutexvar_epi16(alternate(), round_bf16(a, b));
      std::memcpy(static_cast<void*>(weights_ + slot * wide_ + lane * 2), &both, 64);
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
        const Vec keep = Vec::load(keep_ + lane + v * kLanes);
        acc[r][v] = Kind::from(Vec::load(sums_ + (column + r) * wide_ + lane + v * kLanes) * keep);
      }
    }
    const Number* weights = weights_ + lane * kPer;
    for (int slot = 0; slot < slots_;) {
      fetcher_.some();
      for (const int end = std::min(slots_, slot + kFetchSteps * kPer); slot < end; slot += kPer, weights += wide_ * kPer) {
        const Number* row;
        if constexpr (kPer == 1) {
          row = value_runs_[slot / kRun] + (slot % kRun) * value_stride_ + column;
        } else {
          row = values_ + slot * padded(dv_, 32) + 2 * column;
        }
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
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        Kind::to_vec(acc[r][v]).store(sums_ + (column + r) * wide_ + lane + v * kLanes);
      }
    }
  }

  void close() {
    for (int lane = 0; lane < lanes_; ++lane) {
      float* row = scores_;  // no longer needed
      for (int i = 0; i < dv_; ++i) row[i] = sums_[i * wide_ + lane];
      Part part{most_[lane], sum_[lane], row};
      deliver(work_, query_of(lane), head_of(lane), part);
    }
  }

  const Work& work_;
  const Item& item_;
  const int dk_, dv_, lanes_, vectors_, wide_;
  Number *queries_, *weights_, *keys_, *values_;
  float *scores_, *sums_;
  int slots_ = 0, key_stride_ = 0, value_stride_ = 0;
  int all_from_ = 0, all_to_ = std::numeric_limits<int>::max();  // positions that every lane sees
  const Number *key_runs_[kRuns], *value_runs_[kRuns];
  int64_t next_runs_[kRuns];
  const Stored *next_keys_[kRuns], *next_values_[kRuns];
  Fetcher fetcher_;
  float key_scales_[kTile], value_scales_[kTile];
  alignas(64) float most_[kMaxLanes], sum_[kMaxLanes], keep_[kMaxLanes], first_[kMaxLanes], end_[kMaxLanes];
};

template <typename Kind, typename Stored>
void run(const Work& work, const Item& item, float* scratch) {
  TilesKernel<Kind, Stored>(work, item, scratch).run();
}

}  // namespace

size_t tiles_scratch(const quire_cache& cache) {
  const size_t k = padded(cache.head_dim_k, 32), v = padded(cache.head_dim_v, 32);
  return kMaxLanes * (k + v) + 2 * kTile * std::max<size_t>(kMaxLanes, v) + kTile * (k + v) + 1024;
}

void attend_tiles(const Work& work, const Item& item, float* scratch) {
  switch (work.cache.type) {
    case QUIRE_F32: return run<Floats, float>(work, item, scratch);
    case QUIRE_F16: return run<Floats, f16>(work, item, scratch);
#if defined(QUIRE_BF16_DOTS)
    case QUIRE_BF16: return run<Bf16Pairs, bf16>(work, item, scratch);
    default: return run<Bf16Pairs, int8_t>(work, item, scratch);
#else
    case QUIRE_BF16: return run<Floats, bf16>(work, item, scratch);
    default: return run<Floats, int8_t>(work, item, scratch);
#endif
  }
}

}  // namespace quire
