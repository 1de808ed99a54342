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
    constexpr int S = slots_at_once(Q);
    for (int slot = 0; slot < kTile; slot += S) {
      fetcher.some();
      some<Q, S>(runs, slot, dim, queries, to + slot);
    }
  }

 private:
  template <int Q, int S>
  static inline __attribute__((always_inline)) void some(const Number* const* runs, int slot, int dim,
                                                         const float* const (&queries)[Q], float* to) {
    const Number* rows[(S + kRun - 1) / kRun];
#pragma GCC unroll 4
    for (int i = 0; i * kRun < S; ++i) rows[i] = runs[slot / kRun + i] + slot % kRun * dim;
    Acc acc[Q * S];
#pragma GCC unroll 32
    for (int i = 0; i < Q * S; ++i) acc[i] = Numbers::zero();
    int column = 0;
    for (; column + kWidth <= dim; column += kWidth) {
      step<Q, S>(queries, column, acc, [&](int s) { return Numbers::load(rows[s / kRun] + s % kRun * dim + column); });
    }
    if (const int rest = dim - column) {
      step<Q, S>(queries, column, acc, [&](int s) { return Numbers::load(rows[s / kRun] + s % kRun * dim + column, rest); });
    }
#pragma GCC unroll 32
    for (int i = 0; i < Q * S; i += kUnit) {
      if constexpr (S >= kUnit) {
        Numbers::reduce(acc + i, to + i / S * kTile + i % S);
      } else {
        float sums[kUnit];
        Numbers::reduce(acc + i, sums);
#pragma GCC unroll 4
        for (int part = 0; part < kUnit; part += S) std::memcpy(to + (i + part) / S * kTile, sums + part, S * sizeof(float));
      }
    }
  }

  template <int Q, int S, typename Load>
  static inline __attribute__((always_inline)) void step(const float* const (&queries)[Q], int column, Acc (&acc)[Q * S],
                                                         Load&& load) {
    decltype(Numbers::query(queries[0], 0)) query[Q];
#pragma GCC unroll 4
    for (int q = 0; q < Q; ++q) query[q] = Numbers::query(queries[q], column);
#pragma GCC unroll 8
    for (int s = 0; s < S; ++s) {
      const auto row = load(s);
#pragma GCC unroll 4
      for (int q = 0; q < Q; ++q) acc[q * S + s] = Numbers::dot(acc[q * S + s], row, query[q]);
    }
  }
};

// Multiplies floats; numbers of type T are widened as they are read.
template <typename T>
struct Wide : WideNumbers<T>, Scores<WideNumbers<T>> {
  using Number = T;
  static constexpr int kWidth = kLanes;  // columns of `accumulate`
#if defined(__AVX512F__)
  static constexpr int columns_at_once(int lanes) { return std::min(4, 16 / lanes); }
#elif defined(__AVX2__)
  static constexpr int columns_at_once(int lanes) { return lanes == 1 ? 4 : lanes == 4 ? 1 : 2; }
#else
  static constexpr int columns_at_once(int) { return 1; }
#endif

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
};

#if defined(__AVX512F__) || defined(__AVX2__)

// Multiplies pairs of 16-bit numbers. At AVX-512, sums of values lie in the order of `Interleaved`.
template <typename Numbers>
struct Pairs : Numbers, Scores<Numbers> {
  using Number = typename Numbers::Number;
  using Acc = typename Numbers::Acc;
  static constexpr int kWidth = Numbers::kColumns;
#if defined(__AVX512F__)
  static constexpr int columns_at_once(int lanes) { return std::max(1, 4 / lanes); }
  static constexpr int chains(int) { return 2; }
#else
  static constexpr int columns_at_once(int lanes) { return lanes == 1 ? 2 : 1; }
  static constexpr int chains(int lanes) { return lanes <= 2 ? 2 : 1; }
#endif

  static float pack_query(float* query, int dim) { return Numbers::pack_query(query, padded(dim, 32)); }

  // Even and odd pairs of slots have separate accumulators, where registers suffice: dependent sums wait for the latency
  // of each addition.
  template <int Q, int Columns, bool Whole>
  static void accumulate(const Number* const* runs, int dim, int column, const Lanes<Q>& lanes, Fetcher& fetcher) {
    constexpr int kChains = chains(Q);
    Acc low[kChains][Q][Columns], high[kChains][Q][Columns];
    const int rest = dim - column;
    const float* weights = lanes.weights;
#pragma GCC unroll 8
    for (int q = 0; q < Q; ++q) {
#pragma GCC unroll 8
      for (int c = 0; c < Columns; ++c) {
        start(lanes, q, column + c * kWidth, low[0][q][c], high[0][q][c]);
        if constexpr (kChains == 2) low[1][q][c] = high[1][q][c] = Numbers::zero();
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
                                      : interleave(Numbers::load(a, rest), Numbers::load(b, rest));
#pragma GCC unroll 8
          for (int q = 0; q < Q; ++q) {
            const auto weight = broadcast_pair(weights + q * kTile + run * 2 + half);
            constexpr int last = kChains - 1;
            Acc &lower = low[half & last][q][c], &upper = high[half & last][q][c];
            lower = Numbers::dot(lower, weight, v.low);
            upper = Numbers::dot(upper, weight, v.high);
          }
        }
      }
    }
#pragma GCC unroll 8
    for (int q = 0; q < Q; ++q) {
#pragma GCC unroll 8
      for (int c = 0; c < Columns; ++c) {
        if constexpr (kChains == 2) {
          low[0][q][c] = Numbers::sum(low[0][q][c], low[1][q][c]);
          high[0][q][c] = Numbers::sum(high[0][q][c], high[1][q][c]);
        }
        end(lanes, q, column + c * kWidth, low[0][q][c], high[0][q][c]);
      }
    }
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
#else
  static void put_in_order(float*, int) {}

 private:
  static __m256i broadcast_pair(const float* p) { return _mm256_castps_si256(_mm256_broadcast_ss(p)); }
  template <int Q>
  static void start(const Lanes<Q>&, int, int, __m256i& low, __m256i& high) {
    low = high = _mm256_setzero_si256();
  }
  template <int Q>
  static void end(const Lanes<Q>& lanes, int q, int column, __m256i low, __m256i high) {
    const Vec keep = Vec::all(lanes.keep[q]), factor = Vec::all(lanes.factor[q]);
    float* acc = lanes.acc[q] + column;
    fma(in_order(low, high), factor, Vec::load(acc) * keep).store(acc);
  }
#endif
};

#endif

}  // namespace quire
