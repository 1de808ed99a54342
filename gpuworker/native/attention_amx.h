// The two products of attention of many queries on the matrix unit: K with queries, and V with the weights of the softmax.
#pragma once

#include "amx.h"
#include "attention_kernels.h"

#if defined(QUIRE_AMX)

namespace quire {

constexpr int kAmxItemLanes = 512;  // (query, head) pairs of an item: V is transposed once for them all

// The registers of this thread in the shape of `amx_multiply`, until the end of a scope.
class AmxScope {
 public:
  AmxScope() {
    constexpr int all = kTileRegisterRows;
    amx_set(AmxShape(all, all, all, all, all, all, all, all));
  }
  ~AmxScope() { amx_release(); }
  AmxScope(const AmxScope&) = delete;
  AmxScope& operator=(const AmxScope&) = delete;
};

// How often `amx_multiply` fetches.
inline int amx_fetches(int groups, int inputs, int vectors) {
  return (groups + 1) / 2 * ((vectors + 1) / 2) * (inputs / 32);
}

// Products of rows [16 · groups][inputs] and lanes [inputs / 2][16 · vectors][2] become sums [row][lane], or are added to them.
// a(g) is where 16 rows begin, each `stride` numbers long. `inputs` is a multiple of 32.
template <bool Adds, typename Rows>
class AmxProduct {
 public:
  AmxProduct(const Rows& a, int stride, int inputs, const bf16* b, int vectors, float* sums, Fetcher& fetcher)
      : a_(a), stride_(stride), inputs_(inputs), wide_(vectors * kLanes), vectors_(vectors), b_(b), sums_(sums),
        fetcher_(fetcher) {}

  void run(int groups) const {
    for (int vector = 0; vector < vectors_; vector += 2) {
      for (int group = 0; group < groups; group += 2) {
        const bool two_groups = group + 1 < groups, two_vectors = vector + 1 < vectors_;
        if (two_groups && two_vectors) run<2, 2>(group, vector);
        if (two_groups && !two_vectors) run<2, 1>(group, vector);
        if (!two_groups && two_vectors) run<1, 2>(group, vector);
        if (!two_groups && !two_vectors) run<1, 1>(group, vector);
      }
    }
  }

 private:
  // Registers 0 to 3 have the sums, 4 and 5 the rows, 6 and 7 the lanes.
  template <int G, int V>
  void run(int group, int vector) const {
    const int64_t row_bytes = stride_ * sizeof(bf16), lane_bytes = wide_ * 2 * sizeof(bf16), sum_bytes = wide_ * sizeof(float);
    const bf16 *first = a_(group), *second = G == 2 ? a_(group + 1) : first, *lanes = b_ + vector * kLanes * 2;
    float* sums = sums_ + static_cast<int64_t>(group) * kTileRegisterRows * wide_ + vector * kLanes;
    float* below = sums + kTileRegisterRows * wide_;
    start<0>(sums, sum_bytes);
    if constexpr (V == 2) start<1>(sums + kLanes, sum_bytes);
    if constexpr (G == 2) start<2>(below, sum_bytes);
    if constexpr (G == 2 && V == 2) start<3>(below + kLanes, sum_bytes);
    for (int i = 0; i < inputs_; i += 32, lanes += 16 * 2 * wide_) {
      fetcher_.some();
      amx_load<4>(first + i, row_bytes);
      amx_load<6>(lanes, lane_bytes);
      amx_dot_bf16<0, 4, 6>();
      if constexpr (V == 2) {
        amx_load<7>(lanes + kLanes * 2, lane_bytes);
        amx_dot_bf16<1, 4, 7>();
      }
      if constexpr (G == 2) {
        amx_load<5>(second + i, row_bytes);
        amx_dot_bf16<2, 5, 6>();
      }
      if constexpr (G == 2 && V == 2) amx_dot_bf16<3, 5, 7>();
    }
    amx_store<0>(sums, sum_bytes);
    if constexpr (V == 2) amx_store<1>(sums + kLanes, sum_bytes);
    if constexpr (G == 2) amx_store<2>(below, sum_bytes);
    if constexpr (G == 2 && V == 2) amx_store<3>(below + kLanes, sum_bytes);
  }

  template <int Register>
  static void start(const float* sums, int64_t bytes) {
    if constexpr (Adds) {
      amx_load<Register>(sums, bytes);
    } else {
      amx_zero<Register>();
    }
  }

  const Rows& a_;
  const int stride_, inputs_, wide_, vectors_;
  const bf16* b_;
  float* sums_;
  Fetcher& fetcher_;
};

template <bool Adds, typename Rows>
inline void amx_multiply(const Rows& a, int groups, int stride, int inputs, const bf16* b, int vectors, float* sums,
                         Fetcher& fetcher) {
  AmxProduct<Adds, Rows>(a, stride, inputs, b, vectors, sums, fetcher).run(groups);
}

}  // namespace quire

#endif
