// Attention of many queries: prefills, and decodes that share a prefix. Tiles of up to 64 (query, head) lanes meet tiles of
// 64 slots, as two matrix products with a softmax between them.
//
// Vectors run across lanes: scores [slot][lane], weights [slot][lane], sums [column][lane]. So a number of K or of V is
// broadcast straight from its block, maxima and sums of the softmax need no shuffles, and each lane has limits of its own.
// Where pairs can be multiplied (bf16 caches; int8 too, whose numbers are bf16 numbers), a broadcast is two neighbouring
// columns of K, or two slots of V, which are interleaved first. Otherwise numbers other than float are widened by tile. On the
// matrix unit rows of K, and columns of V, meet lanes in the same layout (attention_amx.h); V is transposed by tile.
#include <type_traits>

#include "attention_amx.h"
#include "attention_tile_kinds.h"

namespace quire {
namespace {

template <typename Kind, typename Stored>
class TilesKernel {
  using Number = typename Kind::Number;
  static constexpr int kPer = Kind::kPer;
  static constexpr bool kAmx = Kind::kAmx;
  static constexpr int kKeyUnit = kAmx ? 32 : kPer;  // rows of K are whole numbers of it, or are filled up with zeros
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
    queries_ = reinterpret_cast<Number*>(take(static_cast<size_t>(padded(dk_, kKeyUnit)) * wide_));
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
#if defined(QUIRE_AMX)
    const AmxScope registers;
#endif
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

  void open() {
    float row[2048];
    for (int lane = 0; lane < wide_; ++lane) {
      most_[lane] = kNoScore;
      sum_[lane] = first_[lane] = end_[lane] = 0.0f;
      if (lane < lanes_) {
        const Query& query = query_of(lane);
        first_[lane] = static_cast<float>(query.first);
        end_[lane] = static_cast<float>(query.end);
        all_from_ = std::max(all_from_, query.first);
        all_to_ = std::min(all_to_, query.end);
        load_query(work_, query.token, head_of(lane), row);
      } else {
        std::fill(row, row + padded(dk_, 32), 0.0f);  // what is left there may be no number, or a slow one
      }
      put_query(lane, row);
    }
    if constexpr (kPer == 2) transpose_queries();
    std::fill(sums_, sums_ + static_cast<size_t>(padded(dv_, 16)) * wide_, 0.0f);
  }

  // Queries become [column / kPer][lane][kPer]; pairs are transposed sixteen lanes at a time, by way of rows.
  void put_query(int lane, const float* row) {
    if constexpr (kPer == 1) {
      for (int i = 0; i < dk_; ++i) queries_[i * wide_ + lane] = row[i];
    } else {
      Number* to = keys_ + lane * padded(dk_, 32);
      for (int i = 0; i < padded(dk_, 32); i += kLanes) Vec::load(row + i).store(to + i);
    }
  }

  void transpose_queries() {
#if defined(QUIRE_BF16_DOTS)
    const int stride = padded(dk_, 32);
    for (int lane = 0; lane < wide_; lane += kLanes) {
      for (int column = 0; column < dk_; column += 32) {
        __m512i rows[kLanes];
        for (int i = 0; i < kLanes; ++i) rows[i] = _mm512_loadu_si512(keys_ + (lane + i) * stride + column);
        transpose(rows);
        const int pairs = std::min(kLanes, (padded(dk_, kKeyUnit) - column) / 2);
        for (int i = 0; i < pairs; ++i) {
          std::memcpy(static_cast<void*>(queries_ + ((column / 2 + i) * wide_ + lane) * 2), &rows[i], 64);
        }
      }
    }
#endif
  }

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
      if (kStraight && dk_ % kKeyUnit == 0 && (!kAmx || side_by_side(run))) {
        key_runs_[run] = reinterpret_cast<const Number*>(k);
      } else {
        key_stride_ = padded(dk_, 32);
        Number* to = keys_ + run * kRun * key_stride_;
        for (int i = 0; i < kRun; ++i) widen(k + i * dk_, to + i * key_stride_, dk_);
        key_runs_[run] = to;
      }
      if constexpr (!kAmx) load_values(run, v);
    }
    if constexpr (kAmx) transpose_values();
  }

  // Whether the 16 slots that a run is part of lie one after the other: in blocks of 16 or more, but for runs that are
  // repeated.
  bool side_by_side(int run) const {
    const int64_t* of = next_runs_ + run / 4 * 4;
    return of[1] - of[0] == kRun && of[2] - of[1] == kRun && of[3] - of[2] == kRun;
  }

  // V of the tile by columns: [column][slot], with zeros for slots from slots_ on.
  void transpose_values() {
#if defined(QUIRE_BF16_DOTS)
    for (int first = 0; first < slots_; first += 32) {
      for (int column = 0; column < dv_; column += 32) {
        __m512i low[kLanes], high[kLanes];
        for (int pair = 0; pair < kLanes; ++pair) {
          const int slot = first + 2 * pair, run = slot / kRun;
          const Stored* v = next_values_[run < slots_ / kRun ? run : 0] + slot % kRun * dv_ + column;
          const int count = run < slots_ / kRun ? dv_ - column : 0;
          const Interleaved both = interleave(row32(v, count), row32(v + dv_, count));
          low[pair] = both.low;
          high[pair] = both.high;
        }
        transpose(low);
        transpose(high);
        for (int i = 0; i < kLanes; ++i) {
          Number* to = values_ + (column + i / 4 * 8 + i % 4) * kTile + first;
          std::memcpy(static_cast<void*>(to), &low[i], 64);
          std::memcpy(static_cast<void*>(to + 4 * kTile), &high[i], 64);
        }
      }
    }
#endif
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
#if defined(QUIRE_AMX)
    if (kAmx) return amx_fetches(padded(slots_, 16) / 16, padded(dk_, 32), vectors_);
#endif
    int calls = 0;
    for_vectors([&](auto vectors, int) { calls += row_steps(rows_at_once(vectors), slots_); });
    return calls * ((dk_ + kFetchSteps * kPer - 1) / (kFetchSteps * kPer));
  }
  int value_calls() const {
#if defined(QUIRE_AMX)
    if (kAmx) return amx_fetches(padded(dv_, 16) / 16, padded(slots_, 32), vectors_);
#endif
    int calls = 0;
    for_vectors([&](auto vectors, int) { calls += row_steps(rows_at_once(vectors), dv_); });
    return calls * ((slots_ + kFetchSteps * kPer - 1) / (kFetchSteps * kPer));
  }

  // scores [slot][lane] = K · queries · factor.
  void score() {
#if defined(QUIRE_AMX)
    if constexpr (kAmx) return score_on_amx();
#endif
    for_vectors([&](auto vectors, int lane) {
      constexpr int V = decltype(vectors)::value;
      for_rows<rows_at_once(V)>(slots_, [&](int slot, auto rows) { score_some<V, decltype(rows)::value>(slot, lane); });
    });
  }

#if defined(QUIRE_AMX)
  void score_on_amx() {
    const auto keys = [&](int group) { return key_runs_[group * kTileRegisterRows / kRun]; };
    amx_multiply<false>(keys, padded(slots_, 16) / 16, key_stride_, padded(dk_, 32), queries_, vectors_, scores_, fetcher_);
  }

  // What is left of `score`: products become scores. Where all have one factor, `weigh` multiplies by it instead.
  void scale() {
    for (int slot = 0; slot < slots_; ++slot) {
      const Vec factor = Vec::all(kScaled ? work_.score_factor * key_scales_[slot] : work_.score_factor);
      float* scores = scores_ + slot * wide_;
      for (int lane = 0; lane < wide_; lane += kLanes) (Vec::load(scores + lane) * factor).store(scores + lane);
    }
  }

  void accumulate_on_amx() {
    for (int lane = 0; lane < wide_; lane += kLanes) {
      const Vec keep = Vec::load(keep_ + lane);
      if (!_mm512_cmpneq_ps_mask(keep.v, _mm512_set1_ps(1.0f))) continue;
      for (float *at = sums_ + lane, *end = at + dv_ * wide_; at < end; at += wide_) (Vec::load(at) * keep).store(at);
    }
    std::memset(static_cast<void*>(weights_ + slots_ * wide_), 0, sizeof(Number) * (padded(slots_, 32) - slots_) * wide_);
    const auto values = [&](int group) { return values_ + group * kTileRegisterRows * kTile; };
    amx_multiply<true>(values, padded(dv_, 16) / 16, kTile, padded(slots_, 32), weights_, vectors_, sums_, fetcher_);
  }
#endif

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
    factor_ = 1.0f;
#if defined(QUIRE_AMX)
    if constexpr (kAmx) {
      if (kScaled || masked || work_.layer.softcap != 0.0f || work_.score_factor < 0.0f) {
        scale();
      } else {
        factor_ = work_.score_factor;
      }
    }
#endif
    for (int lane = 0; lane < wide_; lane += kLanes) {
      if (work_.layer.softcap != 0.0f) cap(lane);
      if (masked) mask(base, lane);
      float* scores = scores_ + lane;
      const Vec before = Vec::load(most_ + lane), least = kAmx ? Vec::all(kNoScore) : before;
      Vec most[4] = {least, least, least, least};
      for (int slot = 0; slot < slots_; slot += 4) {
        for (int i = 0; i < 4; ++i) most[i] = max(most[i], Vec::load(scores + (slot + i) * wide_));
      }
      most[0] = max(max(most[0], most[1]), max(most[2], most[3]));
      if (kAmx) most[0] = max(before, most[0] * Vec::all(factor_));
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
      Vec a = weight(scores, most), b = weight(scores + wide_, most);
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

  Vec weight(const float* scores, Vec most) const {
#if defined(QUIRE_AMX)
    if (kAmx) return exp2_of_bf16(fma(Vec::load(scores), Vec::all(factor_), Vec::zero() - most));
#endif
    return exp2_falling(Vec::load(scores) - most);
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
#if defined(QUIRE_AMX)
    if constexpr (kAmx) return accumulate_on_amx();
#endif
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
    const int stride = padded(dv_, 16);
    float* rows = reinterpret_cast<float*>(values_);  // no longer needed
    for (int lane = 0; lane < lanes_; ++lane) {
      if (lane % kLanes == 0) sums_of(lane, rows, stride);
      Part part{most_[lane], sum_[lane], rows + lane % kLanes * stride};
      deliver(work_, query_of(lane), head_of(lane), part);
    }
  }

  // The sums of sixteen lanes, one lane after the other.
  void sums_of(int lane, float* rows, int stride) const {
    for (int column = 0; column < dv_; column += kLanes) {
      const float* from = sums_ + column * wide_ + lane;
#if defined(__AVX512F__)
      __m512i square[kLanes];
      for (int i = 0; i < kLanes; ++i) square[i] = _mm512_loadu_si512(from + i * wide_);
      transpose(square);
      for (int i = 0; i < kLanes; ++i) _mm512_storeu_si512(rows + i * stride + column, square[i]);
#else
      for (int i = 0; i < kLanes; ++i) {
        for (int k = 0; k < kLanes; ++k) rows[i * stride + column + k] = from[k * wide_ + i];
      }
#endif
    }
  }

  const Work& work_;
  const Item& item_;
  const int dk_, dv_, lanes_, vectors_, wide_;
  Number *queries_, *weights_, *keys_, *values_;
  float *scores_, *sums_;
  float factor_ = 1.0f;  // of the products of a tile that are not scores yet
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
