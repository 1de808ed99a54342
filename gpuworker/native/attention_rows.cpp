// Attention of few queries: decodes. K, then V of 64 slots at a time are streamed through once for all query heads that
// share them, while the next 64 are fetched. Each (query, head) is computed by itself, in an order that depends on nothing
// but positions. attention_multiply.h has the products.
#include "attention_multiply.h"

namespace quire {
namespace {

// Heads of so many numbers, and smaller ones, are fetched into the L2 cache alone, which is quicker by up to 4 %. Of larger
// ones, reading takes up to twice as long from there.
constexpr int kSmallHead = 64;

// Attends for one item with one way to multiply.
template <typename Kind>
class RowsKernel {
  using Number = typename Kind::Number;

 public:
  RowsKernel(const Work& work, const Item& item, float* scratch)
      : work_(work), item_(item), dk_(work.cache.head_dim_k), dv_(work.cache.head_dim_v),
        stride_(work.cache.value_stride), lanes_(item.count * item.heads) {
    queries_ = scratch;
    weights_ = queries_ + static_cast<size_t>(lanes_) * padded(dk_, 32);
    acc_ = weights_ + static_cast<size_t>(lanes_) * kTile;
    totals_ = acc_ + static_cast<size_t>(lanes_) * padded(dv_, 32);
  }

  // `fetched`: the last item's run has fetched this one's first tile; this one fetches that of `after`, if there is one.
  void run(bool fetched, const Item* after) {
    const int begin = first_tile(item_);
    load_tile(item_, begin, *next_);
    if (!fetched) {
      for (int run = 0; run < kRuns; ++run) {
        prefetch(next_->keys[run], kRun * sizeof(Number) * dk_);
        prefetch(next_->values[run], kRun * sizeof(Number) * dv_);
      }
    }
    for (int lane = 0; lane < lanes_; ++lane) open(lane);
    for (int base = begin; base < item_.end; base += kTile) {
      if (base > begin && base % kFold == 0) fold_lanes();
      std::swap(now_, next_);
      load_scales(*now_);
      more_ = base + kTile < item_.end;
      if (more_) {
        load_tile(item_, base + kTile, *next_);
      } else if (after) {
        load_tile(*after, first_tile(*after), *next_);
        more_ = true;
      }
      attend_tile(base);
    }
    for (int lane = 0; lane < lanes_; ++lane) close(lane);
  }

 private:
  struct Tile {
    int64_t runs[kRuns];
    const Number *keys[kRuns], *values[kRuns];
    float key_scales[kTile], value_scales[kTile];
  };

  const Query& query_of(int lane) const { return work_.window.queries[item_.query + lane / item_.heads]; }
  int head_of(int lane) const { return item_.head + lane % item_.heads; }
  float* acc(int lane) const { return acc_ + static_cast<size_t>(lane) * padded(dv_, 32); }
  float* total(int lane) const { return totals_ + static_cast<size_t>(lane) * padded(dv_, 32); }

  static int first_tile(const Item& item) { return item.begin & ~(kTile - 1); }

  // Scales are fetched here and read when the tile's turn comes: they lie scattered, as blocks do.
  void load_tile(const Item& item, int base, Tile& tile) const {
    find_runs(work_, item, base, tile.runs);
    for (int run = 0; run < kRuns; ++run) {
      tile.keys[run] = static_cast<const Number*>(work_.cache.keys) + tile.runs[run] * dk_;
      tile.values[run] = static_cast<const Number*>(work_.cache.values) + tile.runs[run] * stride_;
    }
    if (!Kind::kScaled) return;
    for (int run = 0; run < kRuns; run += kNear) {
      const int64_t* of = tile.runs + run;
      for (int i = 0; i < (near(of) ? 1 : kNear); ++i) {
        __builtin_prefetch(work_.cache.key_scales + of[i], 0, 2);
        __builtin_prefetch(work_.cache.value_scales + of[i], 0, 2);
      }
    }
  }

  // Whether kNear runs lie side by side. Those of a smaller block may seem to: the first and the last are as far apart.
  bool near(const int64_t* runs) const {
    return work_.cache.block_size >= kNear * kRun && runs[kNear - 1] - runs[0] == (kNear - 1) * kRun;
  }

  void load_scales(Tile& tile) const {
    if (!Kind::kScaled) return;
    for (int run = 0; run < kRuns; run += kNear) {
      gather(work_.cache.key_scales, tile.runs + run, tile.key_scales + run * kRun);
      gather(work_.cache.value_scales, tile.runs + run, tile.value_scales + run * kRun);
    }
  }

  void gather(const float* scales, const int64_t* runs, float* to) const {
    if (near(runs)) {
      Vec::load(scales + runs[0]).store(to);
      return;
    }
    for (int i = 0; i < kNear; ++i) std::memcpy(to + i * kRun, scales + runs[i], kRun * sizeof(float));
  }

  void open(int lane) {
    float* query = queries_ + static_cast<size_t>(lane) * padded(dk_, 32);
    load_query(work_, query_of(lane).token, head_of(lane), query);
    factor_[lane] = work_.score_factor * Kind::pack_query(query, dk_);
    restart(lane);
    total_most_[lane] = kNoScore;
    total_sum_[lane] = 0.0f;
    std::fill(total(lane), total(lane) + dv_, 0.0f);
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
    if (most_[lane] != kNoScore) fold_lane(lane);
    Part whole{total_most_[lane], total_sum_[lane], total(lane)};
    deliver(work_, query_of(lane), head_of(lane), whole);
  }

  void attend_tile(int base) {
    int seeing[kMaxLanes], count = 0;
    for (int lane = 0; lane < lanes_; ++lane) {
      const Query& query = query_of(lane);
      if (query.first < base + kTile && query.end > base) seeing[count++] = lane;
    }
    int score_steps = count, value_steps = 0;
    for (int at = 0; at < count; at += lanes_at_once(count - at)) {
      const int lanes = lanes_at_once(count - at), width = Kind::columns_at_once(lanes) * Kind::kWidth;
      score_steps += Kind::calls(lanes);
      value_steps += Kind::kFetches * ((dv_ + width - 1) / width);
    }
    fetch_next(next_->keys, dk_, score_steps);
    for_lanes(count, [&](auto lanes, int at) { score<decltype(lanes)::value>(seeing, at); });
#if defined(__AVX2__)
    for_lanes(count, [&](auto lanes, int at) { weigh<decltype(lanes)::value>(seeing, at, base); });
#else
    for (int at = 0; at < count; ++at) weigh<1>(seeing, at, base);  // more at once gain nothing, and take long to compile
#endif
    fetch_next(next_->values, dv_, value_steps);
    for_lanes(count, [&](auto lanes, int at) { accumulate<decltype(lanes)::value>(seeing, at); });
  }

  template <typename Body>
  static void for_lanes(int count, Body&& body) {
    for (int at = 0; at < count; at += lanes_at_once(count - at)) {
      switch (lanes_at_once(count - at)) {
        case 1: body(std::integral_constant<int, 1>(), at); break;
        case 2: body(std::integral_constant<int, 2>(), at); break;
        case 3: body(std::integral_constant<int, 3>(), at); break;
        default: body(std::integral_constant<int, 4>(), at);
      }
    }
  }

  static int lanes_at_once(int left) { return left == 5 || left == 6 ? 3 : std::min(left, 4); }

  void fetch_next(const Number* const* runs, int dim, int steps) {
    fetcher_.start(runs, kRun * sizeof(Number) * dim, more_ ? steps : 0, dim > kSmallHead);
  }

  // Scores of a few lanes against the tile, where their weights will be.
  template <int Q>
  void score(const int* seeing, int at) {
    const float* packed[Q];
    for (int q = 0; q < Q; ++q) packed[q] = queries_ + static_cast<size_t>(seeing[at + q]) * padded(dk_, 32);
    Kind::template run<Q>(now_->keys, dk_, packed, weights_ + at * kTile, fetcher_);
  }

  // The weights of a few lanes' slots, in place of their scores. What is one number a lane is computed for all at once.
  template <int Q>
  void weigh(const int* seeing, int at, int base) {
    weigh(seeing + at, weights_ + at * kTile, base, UpTo<Q>());
  }

  template <int... Qs>
  QUIRE_INLINE void weigh(const int* seeing, float* weights, int base, Places<Qs...>) {
    constexpr int Q = sizeof...(Qs);
    Scores score[] = {load_scores(seeing[Qs], base, weights + Qs * kTile)...};
    for (int q = 0; q < Q; ++q) fetcher_.some();
    const Vec before = of_lanes<Q>(most_, seeing), most = max(before, maxima_of(score));
    const Vec keep = exp2_falling(before - most);
    (use(score[Qs], spread<Qs>(most), spread<Qs>(keep), sum_[seeing[Qs]]), ...);
    Vec steps = Vec::all(1.0f), factor = steps;
    if constexpr (Kind::kStepped) {
      // Weights that are all 0 take any step.
      const Vec top = max(maxima_of(score), Vec::all(1e-30f)), whole = Vec::all(32767.0f);
      steps = whole / top;
      factor = top / whole;
    }
    (Kind::pack_weights(score[Qs].of, spread<Qs>(steps), weights + Qs * kTile), ...);
    to_lanes<Q>(most, most_, seeing);
    to_lanes<Q>(keep, keep_, seeing);
    to_lanes<Q>(factor, weight_factor_, seeing);
  }

  struct Scores {
    Vec of[4];
    QUIRE_INLINE Vec largest() const { return max(max(of[0], of[1]), max(of[2], of[3])); }
  };

  QUIRE_INLINE Scores load_scores(int lane, int base, const float* from) const {
    const Query& query = query_of(lane);
    const Vec factor = Vec::all(factor_[lane]);
    Scores score;
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      score.of[i] = Vec::load(from + i * kLanes) * factor;
      if (Kind::kScaled) score.of[i] = score.of[i] * Vec::load(now_->key_scales + i * kLanes);
    }
    const bool masked = query.first > base || query.end < base + kTile;
    return work_.layer.softcap != 0.0f || masked ? limited(score, query.first - base, query.end - base) : score;
  }

  // Few tiles come here. In the callers, a copy for each of their lanes would take long to compile.
  __attribute__((noinline)) Scores limited(Scores score, int first, int end) const {
    if (work_.layer.softcap != 0.0f) {
      for (Vec& some : score.of) some = soft_cap(some, work_.layer.softcap) * Vec::all(kLog2E);
    }
    for (int i = 0; i < 4; ++i) {
      score.of[i] = keep_between(score.of[i], counting() + Vec::all(i * kLanes), Vec::all(first), Vec::all(end));
    }
    return score;
  }

  // Makes weights of scores, and adds them to the lane's sum.
  QUIRE_INLINE void use(Scores& score, Vec most, Vec keep, Vec& sum) const {
#pragma GCC unroll 4
    for (Vec& some : score.of) some = exp2_falling(some - most);
    sum = fma(sum, keep, (score.of[0] + score.of[1]) + (score.of[2] + score.of[3]));
    if constexpr (Kind::kScaled) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) score.of[i] = score.of[i] * Vec::load(now_->value_scales + i * kLanes);
    }
  }

  template <int Q>
  static QUIRE_INLINE Vec maxima_of(const Scores (&of)[Q]) {
    return maxima(of[0].largest(), of[Q > 1 ? 1 : 0].largest(), of[Q > 2 ? 2 : 0].largest(), of[Q > 3 ? 3 : 0].largest());
  }

  // The numbers of Q lanes out of an array with one for each lane, and back.
  template <int Q>
  static QUIRE_INLINE Vec of_lanes(const float* from, const int* lanes) {
    if (lanes[Q - 1] - lanes[0] == Q - 1) return load_four(from + lanes[0]);
    float four[4] = {};
    for (int q = 0; q < Q; ++q) four[q] = from[lanes[q]];
    return load_four(four);
  }
  template <int Q>
  static QUIRE_INLINE void to_lanes(Vec four, float* to, const int* lanes) {
    if (lanes[Q - 1] - lanes[0] == Q - 1) return store_four<Q>(four, to + lanes[0]);
    float of_lane[Q];
    store_four<Q>(four, of_lane);
    for (int q = 0; q < Q; ++q) to[lanes[q]] = of_lane[q];
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
    constexpr int kAtOnce = Kind::columns_at_once(Q);
    int column = 0;
    for (; column + kAtOnce * Kind::kWidth <= dv_; column += kAtOnce * Kind::kWidth) {
      Kind::template accumulate<Q, kAtOnce, true>(now_->values, stride_, dv_, column, lanes, fetcher_);
    }
    for (; column + Kind::kWidth <= dv_; column += Kind::kWidth) {
      Kind::template accumulate<Q, 1, true>(now_->values, stride_, dv_, column, lanes, fetcher_);
    }
    if (column < dv_) Kind::template accumulate<Q, 1, false>(now_->values, stride_, dv_, column, lanes, fetcher_);
  }

  const Work& work_;
  const Item& item_;
  const int dk_, dv_, stride_, lanes_;
  float *queries_, *weights_, *acc_, *totals_;
  Tile tiles_[2];
  Tile *now_ = tiles_, *next_ = tiles_ + 1;
  Fetcher fetcher_;
  bool more_ = false;
  float factor_[kMaxLanes], most_[kMaxLanes + 3], keep_[kMaxLanes], weight_factor_[kMaxLanes];  // 3: load_four
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
#if defined(QUIRE_BF16_DOTS)
    case QUIRE_BF16: return run<Pairs<Bf16Numbers>>(work, item, before, after, scratch);
#else
    case QUIRE_BF16: return run<Wide<bf16>>(work, item, before, after, scratch);
#endif
#if defined(__AVX512F__) || defined(__AVX2__)
    default: return run<Pairs<Int8Numbers>>(work, item, before, after, scratch);
#else
    default: return run<Wide<int8_t>>(work, item, before, after, scratch);
#endif
  }
}

}  // namespace quire
