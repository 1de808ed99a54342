// The two products of attention of few queries: scores of 64 slots, and sums of values by their weights, for a few lanes
// (a query's head each) at once: a number of the cache is read and widened once for all of them.
//
// Scores: dot products slot by slot along head_dim, whose vectors are then summed across lanes together. Values: weights
// times rows, added up in registers, a few columns of all slots at a time. A lane's sums are added in an order that does
// not depend on how many lanes there are.
#pragma once

#include "attention_numbers.h"

namespace quire {

// A few lanes that accumulate together: their packed weights of the 64 slots, one lane after the other; what their sums are
// multiplied by first; what one step of the weights stands for; their sums.
template <int Q>
struct Lanes {
  const float* weights;
  float keep[Q], factor[Q];
  float* acc[Q];
};

template <typename Numbers>
struct Scores {
  using Number = typename Numbers::Number;
  using Acc = typename Numbers::Acc;
  static constexpr int kWidth = Numbers::kColumns;

  // How often `run` fetches.
  static constexpr int calls(int lanes) { return kTile / slots_at_once(lanes); }

  // Writes the dot products of each packed query with the 64 slots: to [Q][64].
  template <int Q>
  static void run(const Number* const* runs, int dim, const float* const (&queries)[Q], float* to, Fetcher& fetcher) {
#if defined(__AVX2__) || defined(QUIRE_NEON)
    if (dim == 64) return run<Q, 64>(runs, dim, queries, to, fetcher);
    if (dim == 128) return run<Q, 128>(runs, dim, queries, to, fetcher);
#endif
    run<Q, 0>(runs, dim, queries, to, fetcher);
  }

 private:
  using Row = decltype(Numbers::template load<0, 1>(static_cast<const Number*>(nullptr)));
  using Parts = UpTo<Numbers::kParts>;

  // A function for each of the usual head sizes, `Dim`, where it is not 0: with a loop over columns, or inside of a larger
  // function, GCC 12 keeps sums in memory.
  template <int Q, int Dim>
  static __attribute__((noinline)) void run(const Number* const* runs, int dim, const float* const (&queries)[Q], float* to,
                                            Fetcher& fetcher) {
    constexpr int S = slots_at_once(Q);
    for (int slot = 0; slot < kTile; slot += S) {
      fetcher.some();
      some<S, Dim>(runs + slot / kRun, slot % kRun, Dim ? Dim : dim, queries, to + slot);
    }
  }

  template <int S, int Dim, int Q>
  static QUIRE_INLINE void some(const Number* const* runs, int slot, int dim, const float* const (&queries)[Q], float* to) {
    const Number* rows[S];
#pragma GCC unroll 8
    for (int s = 0; s < S; ++s) rows[s] = runs[s / kRun] + (slot + s % kRun) * dim;
    Acc acc[Q * S];
    clear(acc, UpTo<Q * S>());
    if constexpr (Dim) {
      steps<S>(rows, queries, acc, UpTo<Dim / kWidth>());
    } else {
      int column = 0;
      for (; column + kWidth <= dim; column += kWidth) step<S>(rows, column, kWidth, queries, acc, Parts());
      if (column < dim) step<S>(rows, column, dim - column, queries, acc, Parts());
    }
    deliver<S>(acc, to, UpTo<Q * S / kUnit>());
  }

  template <int S, int N, int Q, int... Step>
  static QUIRE_INLINE void steps(const Number* const (&rows)[S], const float* const (&queries)[Q], Acc (&acc)[N],
                                 Places<Step...>) {
    (step<S>(rows, Step * kWidth, kWidth, queries, acc, Parts()), ...);
  }

  template <int N, int... I>
  static QUIRE_INLINE void clear(Acc (&acc)[N], Places<I...>) {
    ((acc[I] = Numbers::zero()), ...);
  }

  // Adds the products of `count` columns to the sums of all slots and queries, one vector of each row after the other.
  template <int S, int N, int Q, int... Part>
  static QUIRE_INLINE void step(const Number* const (&rows)[S], int column, int count, const float* const (&queries)[Q],
                                Acc (&acc)[N], Places<Part...>) {
    (part<S, Part>(rows, column, count, queries, acc, UpTo<S>(), UpTo<Q>()), ...);
  }

  template <int S, int Part, int N, int Q, int... Ss, int... Qs>
  static QUIRE_INLINE void part(const Number* const (&rows)[S], int column, int count, const float* const (&queries)[Q],
                                Acc (&acc)[N], Places<Ss...>, Places<Qs...> all) {
    using Query = decltype(Numbers::template query<Part>(nullptr, 0));
    const Query query[] = {Numbers::template query<Part>(queries[Qs], column)...};
    (add<S, Ss>(count == kWidth ? Numbers::template load<Part, Q>(rows[Ss] + column)
                                : Numbers::template load<Part, Q>(rows[Ss] + column, count),
                query, acc, all),
     ...);
  }

  template <int S, int s, int N, typename Query, int Q, int... Qs>
  static QUIRE_INLINE void add(Row row, const Query (&query)[Q], Acc (&acc)[N], Places<Qs...>) {
    ((acc[Qs * S + s] = Numbers::dot(acc[Qs * S + s], row, query[Qs])), ...);
  }

  template <int S, int N, int... Unit>
  static QUIRE_INLINE void deliver(const Acc (&acc)[N], float* to, Places<Unit...>) {
    (deliver<S>(acc + Unit * kUnit, Unit * kUnit, to), ...);
  }

  template <int S>
  static QUIRE_INLINE void deliver(const Acc* acc, int first, float* to) {
    if constexpr (S >= kUnit) {
      Numbers::reduce(acc, to + first / S * kTile + first % S);
    } else {
      float sums[kUnit];
      Numbers::reduce(acc, sums);
#pragma GCC unroll 4
      for (int part = 0; part < kUnit; part += S) {
        std::memcpy(to + (first + part) / S * kTile, sums + part, S * sizeof(float));
      }
    }
  }
};

// Multiplies floats; numbers of type T are widened as they are read. Sums of values lie in the order of their vectors.
template <typename T>
struct Wide : WideNumbers<T>, Scores<WideNumbers<T>> {
  using Number = T;
  using Numbers = WideNumbers<T>;
  static constexpr int kWidth = Numbers::kColumns;  // columns of `accumulate`
  static constexpr int kParts = Numbers::kParts;
#if defined(__AVX512F__)
  static constexpr int columns_at_once(int lanes) { return std::min(4, 16 / lanes); }
#elif defined(__AVX2__)
  static constexpr int columns_at_once(int lanes) { return lanes == 1 ? 4 : lanes == 4 ? 1 : 2; }
#elif defined(QUIRE_NEON)
  static constexpr int columns_at_once(int lanes) { return lanes == 1 ? 4 : lanes == 4 ? 1 : 2; }
#else
  static constexpr int columns_at_once(int) { return 1; }
#endif
  // How often it fetches: for each slot, or each four of them, where it adds few columns at once.
  static constexpr int kFetches = kParts == 1 ? kTile : kRuns;

  // Adds weights · values to `acc`, for `Columns` times kWidth of `dim` columns from `column`; slots are `stride` apart.
  template <int Q, int Columns, bool Whole>
  static __attribute__((noinline)) void accumulate(const T* const* runs, int stride, int dim, int column,
                                                   const Lanes<Q>& lanes, Fetcher& fetcher) {
    constexpr int V = Columns * kParts;
    accumulate<Whole>(runs, stride, dim, column, lanes, fetcher, UpTo<Q>(), UpTo<V>(), UpTo<Q * V>());
  }

  // One vector of values after the other: at AVX2 it, the weights of a slot and the sums fill the registers.
  template <bool Whole, int Q, int... Qs, int... Vs, int... Is>
  static QUIRE_INLINE void accumulate(const T* const* runs, int stride, int dim, int column, const Lanes<Q>& lanes,
                                      Fetcher& fetcher, Places<Qs...> all, Places<Vs...>, Places<Is...>) {
    constexpr int V = sizeof...(Vs);
    FloatSums sum[] = {load_sums(lanes.acc[Is / V] + column + Is % V * kFloats, lanes.keep[Is / V])...};
    for (int run = 0; run < kRuns; ++run) {
      if (kFetches == kRuns) fetcher.some();
#pragma GCC unroll 4
      for (int slot = 0; slot < kRun; ++slot) {
        if (kFetches == kTile) fetcher.some();
        const T* row = runs[run] + slot * stride + column;
        const float* weights = lanes.weights + run * kRun + slot;
        const Floats weight[] = {all_floats(weights[Qs * kTile])...};
        (add<V, Vs>(Whole ? Numbers::template load<Vs % kParts, Q>(row + Vs / kParts * kWidth)
                          : Numbers::template load<Vs % kParts, Q>(row, dim - column),
                    weight, sum, all),
         ...);
      }
    }
    (store_sums(sum[Is], lanes.acc[Is / V] + column + Is % V * kFloats), ...);
  }

  template <int V, int v, int N, int Q, int... Qs>
  static QUIRE_INLINE void add(Floats value, const Floats (&weight)[Q], FloatSums (&sum)[N], Places<Qs...>) {
    ((sum[Qs * V + v] = dot_floats(sum[Qs * V + v], weight[Qs], value)), ...);
  }

  static void put_in_order(float* acc, int dim) { Numbers::put_in_order(acc, dim); }
};

#if defined(__AVX512F__) || defined(__AVX2__)

// Multiplies pairs of 16-bit numbers. At AVX-512, sums of values lie in the order of `Interleaved`.
template <typename Numbers>
struct Pairs : Numbers, Scores<Numbers> {
  using Number = typename Numbers::Number;
  using Acc = typename Numbers::Acc;
  static constexpr int kWidth = Numbers::kColumns;
  static constexpr int kFetches = kRuns;
#if defined(__AVX512F__)
  static constexpr int columns_at_once(int lanes) { return std::max(1, 4 / lanes); }
  static constexpr int chains(int) { return 2; }
#else
  static constexpr int columns_at_once(int lanes) { return lanes == 1 ? 2 : 1; }
  static constexpr int chains(int lanes) { return lanes <= 2 ? 2 : 1; }
#endif

  static float pack_query(float* query, int dim) { return Numbers::pack_query(query, padded(dim, 32)); }

  template <int Q, int Columns, bool Whole>
  static __attribute__((noinline)) void accumulate(const Number* const* runs, int stride, int dim, int column,
                                                   const Lanes<Q>& lanes, Fetcher& fetcher) {
    accumulate<Whole, chains(Q)>(runs, stride, dim, column, lanes, fetcher, UpTo<Q>(), UpTo<Columns>(), UpTo<Q * Columns>());
  }

  // Even and odd pairs of slots have separate accumulators, where registers suffice: dependent sums wait for the latency
  // of each addition.
  template <bool Whole, int Chains, int Q, int... Qs, int... Cs, int... Is>
  static QUIRE_INLINE void accumulate(const Number* const* runs, int stride, int dim, int column, const Lanes<Q>& lanes,
                                      Fetcher& fetcher, Places<Qs...> all, Places<Cs...>, Places<Is...>) {
    constexpr int C = sizeof...(Cs), N = Q * C, odd = (Chains - 1) * N;
    const int rest = Whole ? kWidth : dim - column;
    Acc low[Chains * N], high[Chains * N];
    (start(lanes, Is / C, column + Is % C * kWidth, low[Is], high[Is]), ...);
    if constexpr (Chains == 2) ((low[N + Is] = high[N + Is] = Numbers::zero()), ...);
    for (int run = 0; run < kRuns; ++run) {
      fetcher.some();
      const Number* from = runs[run] + column;
      const float* weights = lanes.weights + run * 2;
      (add<C, Cs>(pair<Whole>(from + Cs * kWidth, stride, rest), weights, low, high, all), ...);
      (add<C, odd + Cs>(pair<Whole>(from + 2 * stride + Cs * kWidth, stride, rest), weights + 1, low, high, all), ...);
    }
    if constexpr (Chains == 2) {
      ((low[Is] = Numbers::sum(low[Is], low[N + Is]), high[Is] = Numbers::sum(high[Is], high[N + Is])), ...);
    }
    (end(lanes, Is / C, column + Is % C * kWidth, low[Is], high[Is]), ...);
  }

  // The numbers of a slot and of the next one.
  template <bool Whole>
  static QUIRE_INLINE Interleaved pair(const Number* a, int stride, int rest) {
    return Whole ? interleave(Numbers::template load<0, 1>(a), Numbers::template load<0, 1>(a + stride))
                 : interleave(Numbers::template load<0, 1>(a, rest), Numbers::template load<0, 1>(a + stride, rest));
  }

  template <int C, int first, int N, int... Qs>
  static QUIRE_INLINE void add(Interleaved v, const float* weights, Acc (&low)[N], Acc (&high)[N], Places<Qs...>) {
    ((low[first + Qs * C] = Numbers::dot(low[first + Qs * C], broadcast_pair(weights + Qs * kTile), v.low),
      high[first + Qs * C] = Numbers::dot(high[first + Qs * C], broadcast_pair(weights + Qs * kTile), v.high)),
     ...);
  }

#if defined(__AVX512F__)
  static void put_in_order(float* acc, int dim) {
    for (int i = 0; i < dim; i += kWidth) {
      Vec first, second;
      in_order(Vec::load(acc + i).v, Vec::load(acc + i + kLanes).v, first, second);
      first.store(acc + i);
      second.store(acc + i + kLanes);
    }
  }

 private:
  static __m512i broadcast_pair(const float* p) { return _mm512_castps_si512(_mm512_set1_ps(*p)); }
  template <int Q>
  static QUIRE_INLINE void start(const Lanes<Q>& lanes, int q, int column, __m512& low, __m512& high) {
    const Vec keep = Vec::all(lanes.keep[q]);
    low = (Vec::load(lanes.acc[q] + column) * keep).v;
    high = (Vec::load(lanes.acc[q] + column + kLanes) * keep).v;
  }
  template <int Q>
  static QUIRE_INLINE void end(const Lanes<Q>& lanes, int q, int column, __m512 low, __m512 high) {
    Vec{low}.store(lanes.acc[q] + column);
    Vec{high}.store(lanes.acc[q] + column + kLanes);
  }
  template <int Q>
  static QUIRE_INLINE void start(const Lanes<Q>&, int, int, __m512i& low, __m512i& high) {
    low = high = _mm512_setzero_si512();
  }
  template <int Q>
  static QUIRE_INLINE void end(const Lanes<Q>& lanes, int q, int column, __m512i low, __m512i high) {
    const Vec keep = Vec::all(lanes.keep[q]), factor = Vec::all(lanes.factor[q]);
    float* acc = lanes.acc[q] + column;
    fma(Vec{_mm512_cvtepi32_ps(low)}, factor, Vec::load(acc) * keep).store(acc);
    fma(Vec{_mm512_cvtepi32_ps(high)}, factor, Vec::load(acc + kLanes) * keep).store(acc + kLanes);
  }
#else
  static void put_in_order(float*, int) {}

 private:
  static __m256i broadcast_pair(const float* p) { return _mm256_castps_si256(_mm256_broadcast_ss(p)); }
  template <int Q>
  static QUIRE_INLINE void start(const Lanes<Q>&, int, int, __m256i& low, __m256i& high) {
    low = high = _mm256_setzero_si256();
  }
  template <int Q>
  static QUIRE_INLINE void end(const Lanes<Q>& lanes, int q, int column, __m256i low, __m256i high) {
    const Vec keep = Vec::all(lanes.keep[q]), factor = Vec::all(lanes.factor[q]);
    float* acc = lanes.acc[q] + column;
    fma(in_order(low, high), factor, Vec::load(acc) * keep).store(acc);
  }
#endif
};

#endif

}  // namespace quire
