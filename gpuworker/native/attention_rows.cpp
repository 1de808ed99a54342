// Attention of few queries: decodes. K, then V of 64 slots at a time are streamed through once for all query heads that
// share them, while the next 64 are fetched. Each (query, head) is computed by itself, in an order that depends on nothing
// but positions.
//
// Scores: sixteen dot products at once, slot by slot along head_dim, summed across lanes together. Values: weights times
// rows, added up in registers, a few columns of all slots at a time. Three ways to multiply: floats (any type is widened),
// pairs of bf16, and pairs of int16 (for int8: query and weights are rounded to 16 bits, which is finer than bf16).
#include "attention_kernels.h"

namespace quire {
namespace {

#if defined(__AVX512F__)
constexpr int kRunsAtOnce = 4, kColumns = 4;
#else
constexpr int kRunsAtOnce = 1, kColumns = 1;
#endif

// A few lanes that accumulate together: their packed weights of the 64 slots, one lane after the other; what their sums are
// multiplied by first; what one step of the weights stands for; their sums.
template <int Q>
struct Lanes {
  const float* weights;
  float keep[Q], factor[Q];
  float* acc[Q];
};

// Multiplies floats; numbers of type T are widened as they are read.
template <typename T>
struct Wide {
  using Number = T;
  static constexpr int kWidth = kLanes;  // columns of `accumulate`
  static constexpr int kAccumulators = 4 * kColumns;
  static constexpr bool kScaled = std::is_same<T, int8_t>::value;

  static float pack_query(float*, int) { return 1.0f; }

  // Scores of the sixteen slots of four runs.
  static Vec scores(const T* const* runs, int dim, const float* query) {
    Vec acc[kLanes];
    for (int first = 0; first < 4; first += kRunsAtOnce) dots(runs + first, dim, query, acc + first * kRun);
    return sums(acc);
  }

  // Writes weights; returns the factor for `accumulate`.
  static float pack_weights(const Vec (&p)[4], float* to) {
    for (int i = 0; i < 4; ++i) p[i].store(to + i * kLanes);
    return 1.0f;
  }

  // Adds weights · values to `acc`, for `Columns` times kWidth columns from `column`.
  template <int Q, int Columns, bool Whole>
  static void accumulate(const T* const* runs, int dim, int column, const Lanes<Q>& lanes, Fetcher& fetcher) {
    Vec sum[Q][Columns];
    const float* weights = lanes.weights;
#pragma GCC unroll 8
    for (int q = 0; q < Q; ++q) {
#pragma GCC unroll 8
      for (int c = 0; c < Columns; ++c) {
        sum[q][c] = Vec::load(lanes.acc[q] + column + c * kLanes) * Vec::all(lanes.keep[q]);
      }
    }
    for (int slot = 0; slot < kTile; ++slot) {
      const T* row = runs[slot / kRun] + (slot % kRun) * dim + column;
      if (slot % kRun == 0) fetcher.some();
#pragma GCC unroll 8
      for (int c = 0; c < Columns; ++c) {
        const Vec v = Whole ? Vec::load(row + c * kLanes) : load_first(row, dim - column);
#pragma GCC unroll 8
        for (int q = 0; q < Q; ++q) sum[q][c] = fma(Vec::all(weights[q * kTile + slot]), v, sum[q][c]);
      }
    }
#pragma GCC unroll 8
    for (int q = 0; q < Q; ++q) {
#pragma GCC unroll 8
      for (int c = 0; c < Columns; ++c) sum[q][c].store(lanes.acc[q] + column + c * kLanes);
    }
  }

  static void put_in_order(float*, int) {}

 private:
  static void dots(const T* const* runs, int dim, const float* query, Vec* out) {
    constexpr int kSlots = kRunsAtOnce * kRun;
    Vec acc[kSlots];
#pragma GCC unroll 16
    for (int i = 0; i < kSlots; ++i) acc[i] = Vec::zero();
    int column = 0;
    for (; column + kLanes <= dim; column += kLanes) {
      const Vec q = Vec::load(query + column);
#pragma GCC unroll 16
      for (int i = 0; i < kSlots; ++i) {
        acc[i] = fma(Vec::load(runs[i / kRun] + (i % kRun) * dim + column), q, acc[i]);
      }
    }
    if (const int rest = dim - column) {
      const Vec q = Vec::load(query + column);
      for (int i = 0; i < kSlots; ++i) {
        acc[i] = fma(load_first(runs[i / kRun] + (i % kRun) * dim + column, rest), q, acc[i]);
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < kSlots; ++i) out[i] = acc[i];
  }
};

#if defined(QUIRE_PAIRS)

struct Bf16Numbers {
  using Number = bf16;
  using Acc = __m512;
  static constexpr bool kScaled = false;
  static Acc zero() { return _mm512_setzero_ps(); }
  static __m512i load(const bf16* p, __mmask32 mask) { return _mm512_maskz_loadu_epi16(mask, p); }
  static __m512i load(const bf16* p) { return _mm512_loadu_si512(p); }
  static Acc dot(Acc acc, __m512i a, __m512i b) { return dot_bf16(acc, a, b); }
  static Acc sum(Acc a, Acc b) { return _mm512_add_ps(a, b); }
  static Vec sums(const Acc (&acc)[kLanes]) {
    return {sum_lanes(acc, [](Acc a, Acc b) { return _mm512_add_ps(a, b); })};
  }

  static float pack_query(float* query, int dim) {  // in place: 32 bf16 lie where 16 floats did
    for (int i = 0; i < dim; i += 32) {
      const __m512i both = round_bf16(Vec::load(query + i), Vec::load(query + i + kLanes));
      std::memcpy(query + i / 2, &both, 64);
    }
    return 1.0f;
  }
  static float pack_weights(const Vec (&p)[4], float* to) {
    for (int i = 0; i < 2; ++i) {
      const __m512i both = round_bf16(p[2 * i], p[2 * i + 1]);
      std::memcpy(to + i * kLanes, &both, 64);
    }
    return 1.0f;
  }
};

struct Int8Numbers {
  using Number = int8_t;
  using Acc = __m512i;
  static constexpr bool kScaled = true;
  static Acc zero() { return _mm512_setzero_si512(); }
  static __m512i load(const int8_t* p, __mmask32 mask) {
    return _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(mask, p));
  }
  static __m512i load(const int8_t* p) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static Acc dot(Acc acc, __m512i a, __m512i b) { return _mm512_dpwssd_epi32(acc, a, b); }
  static Acc sum(Acc a, Acc b) { return _mm512_add_epi32(a, b); }
  static Vec sums(const Acc (&acc)[kLanes]) {
    __m512 bits[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) bits[i] = _mm512_castsi512_ps(acc[i]);
    const __m512 whole = sum_lanes(bits, [](__m512 x, __m512 y) {
      return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x), _mm512_castps_si512(y)));
    });
    return {_mm512_cvtepi32_ps(_mm512_castps_si512(whole))};
  }

  // Rounds to 16 bits, which the largest number fills; returns the step. 127 · 32767 · 512 stays below 2^31.
  static float pack_query(float* query, int dim) {
    Vec most = Vec::zero();
    for (int i = 0; i < dim; i += kLanes) most = max(most, abs(Vec::load(query + i)));
    const float largest = most.max(), steps = largest > 0.0f ? 32767.0f / largest : 0.0f;
    for (int i = 0; i < dim; i += kLanes) {
      const __m512i whole = _mm512_cvtps_epi32((Vec::load(query + i) * Vec::all(steps)).v);
      const __m256i halves = _mm512_cvtsepi32_epi16(whole);
      std::memcpy(query + i / 2, &halves, 32);
    }
    return largest / 32767.0f;
  }
  static float pack_weights(const Vec (&p)[4], float* to) {
    const float largest = max(max(p[0], p[1]), max(p[2], p[3])).max();
    const Vec steps = Vec::all(largest > 0.0f ? 32767.0f / largest : 0.0f);
    for (int i = 0; i < 4; ++i) {
      const __m256i halves = _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32((p[i] * steps).v));
      std::memcpy(to + i * kLanes / 2, &halves, 32);
    }
    return largest / 32767.0f;
  }
};

// Multiplies pairs of 16-bit numbers, 32 columns at a time. Sums of values lie in the order of `Interleaved`.
template <typename Numbers>
struct Pairs {
  using Number = typename Numbers::Number;
  using Acc = typename Numbers::Acc;
  static constexpr int kWidth = 2 * kLanes;
  static constexpr int kAccumulators = 4;  // of four registers
  static constexpr bool kScaled = Numbers::kScaled;

  static float pack_query(float* query, int dim) { return Numbers::pack_query(query, padded(dim, kWidth)); }
  static float pack_weights(const Vec (&p)[4], float* to) { return Numbers::pack_weights(p, to); }

  static Vec scores(const Number* const* runs, int dim, const float* query) {
    Acc acc[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) acc[i] = Numbers::zero();
    int column = 0;
    for (; column + kWidth <= dim; column += kWidth) {
      const __m512i q = _mm512_loadu_si512(query + column / 2);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        acc[i] = Numbers::dot(acc[i], Numbers::load(runs[i / kRun] + (i % kRun) * dim + column), q);
      }
    }
    if (column < dim) {
      const __m512i q = _mm512_loadu_si512(query + column / 2);
      const __mmask32 mask = first32(dim - column);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        acc[i] = Numbers::dot(acc[i], Numbers::load(runs[i / kRun] + (i % kRun) * dim + column, mask), q);
      }
    }
    return Numbers::sums(acc);
  }

  // Even and odd pairs of slots have separate accumulators: dependent sums wait for the latency of each addition.
  template <int Q, int Columns, bool Whole>
  static void accumulate(const Number* const* runs, int dim, int column, const Lanes<Q>& lanes, Fetcher& fetcher) {
    Acc low[2][Q][Columns], high[2][Q][Columns];
    const __mmask32 mask = first32(dim - column);
    const float* weights = lanes.weights;
#pragma GCC unroll 8
    for (int q = 0; q < Q; ++q) {
#pragma GCC unroll 8
      for (int c = 0; c < Columns; ++c) {
        start(lanes, q, column + c * kWidth, low[0][q][c], high[0][q][c]);
        low[1][q][c] = high[1][q][c] = Numbers::zero();
      }
    }
    for (int run = 0; run < kRuns; ++run) {
      fetcher.some();
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const int at = half * 2 * dim + column;
#pragma GCC unroll 8
        for (int c = 0; c < Columns; ++c) {
          const Number *a = runs[run] + at + c * kWidth, *b = a + dim;
          const Interleaved v = Whole ? interleave(Numbers::load(a), Numbers::load(b))
                                      : interleave(Numbers::load(a, mask), Numbers::load(b, mask));
#pragma GCC unroll 8
          for (int q = 0; q < Q; ++q) {
            const __m512i weight = _mm512_castps_si512(_mm512_set1_ps(weights[q * kTile + run * 2 + half]));
            low[half][q][c] = Numbers::dot(low[half][q][c], weight, v.low);
            high[half][q][c] = Numbers::dot(high[half][q][c], weight, v.high);
          }
        }
      }
    }
#pragma GCC unroll 8
    for (int q = 0; q < Q; ++q) {
#pragma GCC unroll 8
      for (int c = 0; c < Columns; ++c) {
        end(lanes, q, column + c * kWidth, Numbers::sum(low[0][q][c], low[1][q][c]),
            Numbers::sum(high[0][q][c], high[1][q][c]));
      }
    }
  }

  static void put_in_order(float* acc, int dim) {
    for (int i = 0; i < dim; i += kWidth) {
      Vec first, second;
      in_order(Vec::load(acc + i).v, Vec::load(acc + i + kLanes).v, first, second);
      first.store(acc + i);
      second.store(acc + i + kLanes);
    }
  }

 private:
  template <int Q>
  static void start(const Lanes<Q>& lanes, int q, int column, __m512& low, __m512& high) {
    const Vec keep = Vec::all(lanes.keep[q]);
    low = (Vec::load(lanes.acc[q] + column) * keep).v;
    high = (Vec::load(lanes.acc[q] + column + kLanes) * keep).v;
  }
  template <int Q>
  static void end(const Lanes<Q>& lanes, int q, int column, __m512 low, __m512 high) {
    Vec{low}.store(lanes.acc[q] + column);
    Vec{high}.store(lanes.acc[q] + column + kLanes);
  }
  template <int Q>
  static void start(const Lanes<Q>&, int, int, __m512i& low, __m512i& high) {
    low = high = _mm512_setzero_si512();
  }
  template <int Q>
  static void end(const Lanes<Q>& lanes, int q, int column, __m512i low, __m512i high) {
    const Vec keep = Vec::all(lanes.keep[q]), factor = Vec::all(lanes.factor[q]);
    float* acc = lanes.acc[q] + column;
    fma(Vec{_mm512_cvtepi32_ps(low)}, factor, Vec::load(acc) * keep).store(acc);
    fma(Vec{_mm512_cvtepi32_ps(high)}, factor, Vec::load(acc + kLanes) * keep).store(acc + kLanes);
  }
};

#endif

// Attends for one item with one way to multiply.
template <typename Kind>
class RowsKernel {
  using Number = typename Kind::Number;

 public:
  RowsKernel(const Work& work, const Item& item, float* scratch)
      : work_(work), item_(item), dk_(work.cache.head_dim_k), dv_(work.cache.head_dim_v), lanes_(item.count * item.heads) {
    queries_ = scratch;
    weights_ = queries_ + static_cast<size_t>(lanes_) * padded(dk_, 32);
    acc_ = weights_ + static_cast<size_t>(lanes_) * kTile;
    totals_ = acc_ + static_cast<size_t>(lanes_) * padded(dv_, 32);
  }

  // `fetched`: the last item's run has fetched this one's first tile; this one fetches that of `after`, if there is one.
  void run(bool fetched, const Item* after) {
    const int begin = first_tile(item_);
    load_tile(item_, begin, next_);
    if (!fetched) {
      for (int run = 0; run < kRuns; ++run) {
        prefetch(next_.keys[run], kRun * sizeof(Number) * dk_);
        prefetch(next_.values[run], kRun * sizeof(Number) * dv_);
      }
    }
    for (int lane = 0; lane < lanes_; ++lane) open(lane);
    for (int base = begin; base < item_.end; base += kTile) {
      if (work_.plan.deterministic && base > begin && base % kFold == 0) fold_lanes();
      tile_ = next_;
      more_ = base + kTile < item_.end;
      if (more_) {
        load_tile(item_, base + kTile, next_);
      } else if (after) {
        load_tile(*after, first_tile(*after), next_);
        more_ = true;
      }
      attend_tile(base);
    }
    for (int lane = 0; lane < lanes_; ++lane) close(lane);
  }

 private:
  struct Tile {
    const Number *keys[kRuns], *values[kRuns];
    float key_scales[kTile], value_scales[kTile];
  };

  const Query& query_of(int lane) const { return work_.window.queries[item_.query + lane / item_.heads]; }
  int head_of(int lane) const { return item_.head + lane % item_.heads; }
  float* acc(int lane) const { return acc_ + static_cast<size_t>(lane) * padded(dv_, 32); }
  float* total(int lane) const { return totals_ + static_cast<size_t>(lane) * padded(dv_, 32); }

  static int first_tile(const Item& item) { return item.begin & ~(kTile - 1); }

  void load_tile(const Item& item, int base, Tile& tile) const {
    int64_t runs[kRuns];
    find_runs(work_, item, base, runs);
    for (int run = 0; run < kRuns; ++run) {
      tile.keys[run] = static_cast<const Number*>(work_.cache.keys) + runs[run] * dk_;
      tile.values[run] = static_cast<const Number*>(work_.cache.values) + runs[run] * dv_;
      if (Kind::kScaled) {
        std::memcpy(tile.key_scales + run * kRun, work_.cache.key_scales + runs[run], kRun * sizeof(float));
        std::memcpy(tile.value_scales + run * kRun, work_.cache.value_scales + runs[run], kRun * sizeof(float));
      }
    }
  }

  void open(int lane) {
    float* query = queries_ + static_cast<size_t>(lane) * padded(dk_, 32);
    load_query(work_, query_of(lane).token, head_of(lane), query);
    factor_[lane] = work_.score_factor * Kind::pack_query(query, dk_);
    restart(lane);
    total_most_[lane] = kNoScore;
    total_sum_[lane] = 0.0f;
    if (work_.plan.deterministic) std::fill(total(lane), total(lane) + dv_, 0.0f);
  }

  void restart(int lane) {
    most_[lane] = kNoScore;
    sum_[lane] = Vec::zero();
    std::fill(acc(lane), acc(lane) + padded(dv_, 32), 0.0f);
  }

  void fold_lanes() {
    for (int lane = 0; lane < lanes_; ++lane) {
      if (most_[lane] == kNoScore) continue;
      fold_lane(lane);
      restart(lane);
    }
  }

  void fold_lane(int lane) {
    Kind::put_in_order(acc(lane), dv_);
    Part whole{total_most_[lane], total_sum_[lane], total(lane)};
    fold(whole, Part{most_[lane], sum_[lane].sum(), acc(lane)}, dv_);
    total_most_[lane] = whole.most;
    total_sum_[lane] = whole.sum;
  }

  void close(int lane) {
    if (work_.plan.deterministic) {
      if (most_[lane] != kNoScore) fold_lane(lane);
      Part whole{total_most_[lane], total_sum_[lane], total(lane)};
      return deliver(work_, query_of(lane), head_of(lane), whole);
    }
    Kind::put_in_order(acc(lane), dv_);
    Part whole{most_[lane], sum_[lane].sum(), acc(lane)};
    deliver(work_, query_of(lane), head_of(lane), whole);
  }

  void attend_tile(int base) {
    int seeing[kMaxLanes], count = 0;
    for (int lane = 0; lane < lanes_; ++lane) {
      const Query& query = query_of(lane);
      if (query.first < base + kTile && query.end > base) seeing[count++] = lane;
    }
    fetch_next(next_.keys, dk_, 5 * count);  // calls in `weigh`
    for (int i = 0; i < count; ++i) weigh(seeing[i], base, weights_ + i * kTile);
    int steps = 0;
    for (int at = 0; at < count; at += lanes_at_once(count - at)) {
      const int width = columns_at_once(lanes_at_once(count - at)) * Kind::kWidth;
      steps += kRuns * ((dv_ + width - 1) / width);
    }
    fetch_next(next_.values, dv_, steps);
    for (int at = 0; at < count; at += lanes_at_once(count - at)) {
      switch (lanes_at_once(count - at)) {
        case 1: accumulate<1>(seeing, at); break;
        case 2: accumulate<2>(seeing, at); break;
        case 3: accumulate<3>(seeing, at); break;
        default: accumulate<4>(seeing, at);
      }
    }
  }

  static int lanes_at_once(int left) { return left == 5 || left == 6 ? 3 : std::min(left, 4); }

  void fetch_next(const Number* const* runs, int dim, int steps) {
    fetcher_.start(runs, kRun * sizeof(Number) * dim, more_ ? steps : 0);
  }

  // Scores of a lane against the tile, and from them the weights of its slots.
  void weigh(int lane, int base, float* weights) {
    const Query& query = query_of(lane);
    const float* packed = queries_ + static_cast<size_t>(lane) * padded(dk_, 32);
    const Vec factor = Vec::all(factor_[lane]);
    Vec score[4];
    for (int group = 0; group < 4; ++group) {
      fetcher_.some();
      score[group] = Kind::scores(tile_.keys + group * 4, dk_, packed) * factor;
      if (Kind::kScaled) score[group] = score[group] * Vec::load(tile_.key_scales + group * kLanes);
    }
    if (work_.layer.softcap != 0.0f) {
      for (Vec& some : score) some = soft_cap(some, work_.layer.softcap) * Vec::all(kLog2E);
    }
    if (query.first > base || query.end < base + kTile) {
      const Vec first = Vec::all(query.first - base), end = Vec::all(query.end - base);
      for (int group = 0; group < 4; ++group) {
        score[group] = keep_between(score[group], counting() + Vec::all(group * kLanes), first, end);
      }
    }
    const float before = most_[lane];
    const float most = std::max(before, max(max(score[0], score[1]), max(score[2], score[3])).max());
    keep_[lane] = exp2_falling(before - most);
    most_[lane] = most;
    fetcher_.some();
    for (Vec& some : score) some = exp2_falling(some - Vec::all(most));
    sum_[lane] = fma(sum_[lane], Vec::all(keep_[lane]), (score[0] + score[1]) + (score[2] + score[3]));
    if (Kind::kScaled) {
      for (int group = 0; group < 4; ++group) {
        score[group] = score[group] * Vec::load(tile_.value_scales + group * kLanes);
      }
    }
    weight_factor_[lane] = Kind::pack_weights(score, weights);
  }

  template <int Q>
  void accumulate(const int* seeing, int at) {
    Lanes<Q> lanes;
    lanes.weights = weights_ + at * kTile;
    for (int q = 0; q < Q; ++q) {
      const int lane = seeing[at + q];
      lanes.keep[q] = keep_[lane];
      lanes.factor[q] = weight_factor_[lane];
      lanes.acc[q] = acc(lane);
    }
    constexpr int kAtOnce = columns_at_once(Q);
    int column = 0;
    for (; column + kAtOnce * Kind::kWidth <= dv_; column += kAtOnce * Kind::kWidth) {
      Kind::template accumulate<Q, kAtOnce, true>(tile_.values, dv_, column, lanes, fetcher_);
    }
    for (; column + Kind::kWidth <= dv_; column += Kind::kWidth) {
      Kind::template accumulate<Q, 1, true>(tile_.values, dv_, column, lanes, fetcher_);
    }
    if (column < dv_) Kind::template accumulate<Q, 1, false>(tile_.values, dv_, column, lanes, fetcher_);
  }

  static constexpr int columns_at_once(int lanes) { return std::max(1, std::min(kColumns, Kind::kAccumulators / lanes)); }

  const Work& work_;
  const Item& item_;
  const int dk_, dv_, lanes_;
  float *queries_, *weights_, *acc_, *totals_;
  Tile tile_, next_;
  Fetcher fetcher_;
  bool more_ = false;
  float factor_[kMaxLanes], most_[kMaxLanes], keep_[kMaxLanes], weight_factor_[kMaxLanes];
  float total_most_[kMaxLanes], total_sum_[kMaxLanes];
  Vec sum_[kMaxLanes];
};

template <typename Kind>
void run(const Work& work, const Item& item, const Item* before, const Item* after, float* scratch) {
  // An item of tiles in between would have evicted the fetched lines.
  RowsKernel<Kind>(work, item, scratch).run(before && !before->tiles, after && !after->tiles ? after : nullptr);
}

}  // namespace

size_t rows_scratch(const quire_cache& cache) {
  const size_t k = padded(cache.head_dim_k, 32), v = padded(cache.head_dim_v, 32);
  return kMaxLanes * (k + kTile + 2 * v);
}

void attend_rows(const Work& work, const Item& item, const Item* before, const Item* after, float* scratch) {
  switch (work.cache.type) {
    case QUIRE_F32: return run<Wide<float>>(work, item, before, after, scratch);
    case QUIRE_F16: return run<Wide<f16>>(work, item, before, after, scratch);
#if defined(QUIRE_PAIRS)
    case QUIRE_BF16: return run<Pairs<Bf16Numbers>>(work, item, before, after, scratch);
    default: return run<Pairs<Int8Numbers>>(work, item, before, after, scratch);
#else
    case QUIRE_BF16: return run<Wide<bf16>>(work, item, before, after, scratch);
    default: return run<Wide<int8_t>>(work, item, before, after, scratch);
#endif
  }
}

}  // namespace quire
