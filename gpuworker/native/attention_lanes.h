// Lanes of attention of many queries: (query, head) pairs whose scores are computed together, and what they have summed up.
#pragma once

#include <limits>

#include "attention_tile_kinds.h"

namespace quire {

constexpr int kItemLanes = 256;  // (query, head) pairs of an item where vectors multiply widened numbers

template <typename Kind>
class LaneGroup {
  using Number = typename Kind::Number;

 public:
  // How many go together. On the matrix unit their queries, scores and sums are to lie in the L1 cache.
  static constexpr int kMost = Kind::kAmx ? 32 : kMaxLanes;

  static size_t query_numbers(int head_dim_k) { return padded(head_dim_k, 32) * kMost; }
  static size_t sum_floats(int head_dim_v) { return padded(head_dim_v, 16) * kMost; }

  // Lanes `begin` to `begin + lanes - 1` of an item. `rows` is memory for query_numbers.
  void open(const Work& work, const Item& item, int begin, int lanes, Number* rows) {
    begin_ = begin, lanes_ = lanes;
    vectors = (lanes + kLanes - 1) / kLanes, wide = vectors * kLanes;
    all_from = none_from = 0;
    all_to = none_to = std::numeric_limits<int>::max();
    for (int lane = 0; lane < wide; ++lane) {
      most[lane] = kNoScore;
      sum[lane] = first[lane] = end[lane] = 0.0f;
      if (lane >= lanes) continue;
      const Query& query = query_of(work, item, lane);
      first[lane] = static_cast<float>(query.first);
      end[lane] = static_cast<float>(query.end);
      all_from = std::max(all_from, query.first);
      all_to = std::min(all_to, query.end);
      none_from = std::max(none_from, query.end);
      none_to = std::min(none_to, query.first);
    }
    load_queries(work, item, rows);
    std::fill(sums, sums + static_cast<size_t>(padded(work.cache.head_dim_v, 16)) * wide, 0.0f);
  }

  // Delivers what the lanes have summed up. `rows` is memory for sixteen rows of sums.
  void close(const Work& work, const Item& item, float* rows) const {
    const int dv = work.cache.head_dim_v, stride = padded(dv, 16);
    for (int lane = 0; lane < lanes_; ++lane) {
      if (lane % kLanes == 0) sums_of(lane, dv, rows);
      Part part{most[lane], sum[lane], rows + lane % kLanes * stride};
      deliver(work, query_of(work, item, lane), head_of(item, lane), part);
    }
  }

  int vectors = 0, wide = 0;     // lanes in whole vectors
  Number* queries = nullptr;     // [column / kPer][lane][kPer]
  float* sums = nullptr;         // [column][lane]
  int all_from = 0, all_to = 0;    // positions that every lane sees
  int none_to = 0, none_from = 0;  // no lane sees a position before the one, or from the other on
  // Of each lane: the score that its weights are relative to, the sum of its weights, what its sums are to be multiplied by,
  // and the positions that it sees.
  alignas(64) float most[kMost], sum[kMost], keep[kMost], first[kMost], end[kMost];

 private:
  const Query& query_of(const Work& work, const Item& item, int lane) const {
    return work.window.queries[item.query + (begin_ + lane) / item.heads];
  }
  int head_of(const Item& item, int lane) const { return item.head + (begin_ + lane) % item.heads; }

  void load_queries(const Work& work, const Item& item, Number* rows) {
    const int dk = work.cache.head_dim_k, stride = padded(dk, 32);
    float row[2048];
    const Number* lane_row[kMost];
    for (int lane = 0; lane < wide; ++lane) {
      if (lane < lanes_) {
        const int32_t token = query_of(work, item, lane).token;
        if (Kind::kPer == 2 && work.query.type == QUIRE_BF16 && dk % 32 == 0) {
          const int64_t at = token * work.query.token_stride + head_of(item, lane) * work.query.head_stride;
          lane_row[lane] = static_cast<const Number*>(work.query.data) + at;
          continue;
        }
        load_query(work, token, head_of(item, lane), row);
      } else {
        std::fill(row, row + stride, 0.0f);  // what is left there may not be a number, or a slow one
      }
      if constexpr (Kind::kPer == 1) {
        for (int i = 0; i < dk; ++i) queries[i * wide + lane] = row[i];
      } else {
        Number* to = rows + lane * stride;
        for (int i = 0; i < stride; i += kLanes) Vec::load(row + i).store(to + i);
        lane_row[lane] = to;
      }
    }
    if constexpr (Kind::kPer == 2) this->transpose_queries(lane_row, dk);  // a name that only levels with pairs have
  }

#if defined(QUIRE_BF16_DOTS)
  // Pairs of columns of sixteen lanes at a time.
  void transpose_queries(const Number* const* lane_row, int dk) {
    for (int lane = 0; lane < wide; lane += kLanes) {
      for (int column = 0; column < dk; column += 32) {
        __m512i rows[kLanes];
        for (int i = 0; i < kLanes; ++i) rows[i] = _mm512_loadu_si512(lane_row[lane + i] + column);
        transpose(rows);
        const int pairs = std::min(kLanes, (padded(dk, kKeyUnit<Kind>) - column) / 2);
        for (int i = 0; i < pairs; ++i) {
          std::memcpy(static_cast<void*>(queries + ((column / 2 + i) * wide + lane) * 2), &rows[i], 64);
        }
      }
    }
  }
#endif

  // The sums of sixteen lanes, one lane after the other.
  void sums_of(int lane, int dv, float* rows) const {
    const int stride = padded(dv, 16);
    for (int column = 0; column < dv; column += kLanes) {
      const float* from = sums + column * wide + lane;
#if defined(__AVX512F__)
      __m512i square[kLanes];
      for (int i = 0; i < kLanes; ++i) square[i] = _mm512_loadu_si512(from + i * wide);
      transpose(square);
      for (int i = 0; i < kLanes; ++i) _mm512_storeu_si512(rows + i * stride + column, square[i]);
#else
      for (int i = 0; i < kLanes; ++i) {
        for (int k = 0; k < kLanes; ++k) rows[i * stride + column + k] = from[k * wide + i];
      }
#endif
    }
  }

  int begin_ = 0, lanes_ = 0;
};

// All lanes of an item, in groups. Returns how many groups. `rows` is memory for query_numbers.
template <typename Group, typename Number>
inline int open_groups(Group* groups, const Work& work, const Item& item, Number* rows) {
  int count = 0;
  for (int lane = 0, lanes = item.count * item.heads; lane < lanes; lane += Group::kMost) {
    groups[count++].open(work, item, lane, std::min(lanes - lane, Group::kMost), rows);
  }
  return count;
}

// The next `count` numbers of scratch memory, from a cache line on.
template <typename T>
inline void take(T*& to, size_t count, float*& scratch) {
  to = reinterpret_cast<T*>(scratch);
  scratch += (count * sizeof(T) + 63) / 64 * 16;
}

}  // namespace quire
