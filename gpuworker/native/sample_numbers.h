// What sampling reads of a row of logits: maxima, exponentials and the best of them, block by block.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "simd.h"

namespace quire {

struct Candidate {
  float weight;
  int32_t id;
};

// Falling weight, of equal weights rising id.
inline bool before(const Candidate& a, const Candidate& b) {
  return a.weight > b.weight || (a.weight == b.weight && a.id < b.id);
}

// Blocks of a row, by their first tokens, in order. A row is read block by block; one comparison leaves most blocks out.
constexpr int64_t kBlock = 256;
using Blocks = std::vector<int32_t>;

// The scratch memory of one thread; counts are zero between two rows.
struct Scratch {
  std::vector<float> weights;  // only those of the blocks in `open` are valid
  Blocks open;                 // the blocks with tokens that the row may sample
  std::vector<int32_t> known, output;
  std::vector<Candidate> candidates;

  static Scratch& mine() {
    thread_local Scratch scratch;
    return scratch;
  }
};

inline Vec load_padded(const float* from, int64_t count, float pad) {
  float lanes[kLanes];
  std::fill(std::copy(from, from + count, lanes), lanes + kLanes, pad);
  return Vec::load(lanes);
}

inline float largest(const float* x, int64_t n) {
  Vec most = Vec::all(-std::numeric_limits<float>::infinity());
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) most = max(most, Vec::load(x + i));
  if (i < n) most = max(most, load_padded(x + i, n - i, -std::numeric_limits<float>::infinity()));
  float lanes[kLanes];
  most.store(lanes);
  return *std::max_element(lanes, lanes + kLanes);
}

inline void open_all(int64_t n, Blocks& open) {
  open.clear();
  for (int64_t first = 0; first < n; first += kBlock) open.push_back(static_cast<int32_t>(first));
}

inline float largest_of(const float* x, int64_t n, const Blocks& open) {
  Vec most = Vec::all(-std::numeric_limits<float>::infinity());
  for (const int64_t first : open) {
    const int64_t end = std::min(first + kBlock, n);
    int64_t i = first;
    for (; i + kLanes <= end; i += kLanes) most = max(most, Vec::load(x + i));
    if (i < end) most = max(most, load_padded(x + i, end - i, -std::numeric_limits<float>::infinity()));
  }
  float lanes[kLanes];
  most.store(lanes);
  return *std::max_element(lanes, lanes + kLanes);
}

inline int64_t first_best(const float* x, int64_t n, const Blocks& open) {
  float most = -std::numeric_limits<float>::infinity();
  int64_t block = 0;
  for (const int64_t first : open) {
    const float here = largest(x + first, std::min(kBlock, n - first));
    if (here > most) most = here, block = first;
  }
  for (int64_t i = block; i < std::min(block + kBlock, n); ++i)
    if (x[i] == most) return i;
  return 0;  // nothing above minus infinity
}

// The sum of a block, whose size is a whole number of vectors: sixteen sums in double, added up in order of lane.
inline double sum_of_block(const float* x) {
  double lanes[kLanes] = {}, sum = 0.0;
  for (int64_t i = 0; i < kBlock; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += x[i + lane];
  for (double lane : lanes) sum += lane;
  return sum;
}

// e^x, and 0 for x below -87, minus infinity included.
inline Vec exp_or_zero(Vec x) {
  const Vec one = Vec::all(1.0f);
  return exp(x) * max(min((x + Vec::all(87.0f)) * Vec::all(1e30f), one), Vec::zero());
}

// The largest finite number: an extreme penalty or temperature makes infinities, of which no distribution can be made.
constexpr float kMost = std::numeric_limits<float>::max();
inline float bounded(float x) { return x < -kMost ? -kMost : x > kMost ? kMost : x; }

// In open blocks, weights[i] = exp(x[i] / temperature - most), then zeros up to the end of the last block; returns their
// sum, block by block. A block that is not open would add nothing.
inline double exponentials(const float* x, int64_t n, float temperature, float most, const Blocks& open,
                           std::vector<float>& weights) {
  weights.resize((n + kBlock - 1) / kBlock * kBlock);
  float* const into = weights.data();
  const Vec divisor = Vec::all(temperature), shift = Vec::all(most), bound = Vec::all(kMost);
  const auto weight = [&](Vec logit) { return exp_or_zero(min(logit / divisor, bound) - shift); };
  double sum = 0.0;
  for (const int64_t first : open) {
    const int64_t count = std::min(kBlock, n - first);
    if (count == kBlock) {
      for (int64_t i = 0; i < kBlock; i += kLanes) weight(Vec::load(x + first + i)).store(into + first + i);
    } else {
      int64_t i = 0;
      for (; i + kLanes <= count; i += kLanes) weight(Vec::load(x + first + i)).store(into + first + i);
      if (i < count)
        weight(load_padded(x + first + i, count - i, -std::numeric_limits<float>::infinity())).store(into + first + i);
      std::fill(into + first + count, into + first + kBlock, 0.0f);
    }
  }
  for (const int64_t first : open) sum += sum_of_block(into + first);
  return sum;
}

// Collects the best `count` of x in open blocks, in order; all of them where they are fewer.
inline void best_of(const float* x, int64_t n, size_t count, const Blocks& open, std::vector<Candidate>& found) {
  found.clear();
  if (!count) return;
  // The heap's top is the last of the kept ones. Ids rise, so a later equal value is left out.
  for (const int64_t first : open) {
    const int64_t end = std::min(first + kBlock, n);
    int64_t i = first;
    for (; i < end && found.size() < count; ++i) {
      found.push_back({x[i], static_cast<int32_t>(i)});
      std::push_heap(found.begin(), found.end(), before);
    }
    if (i < end && !(largest(x + i, end - i) > found.front().weight)) continue;
    for (; i < end; ++i) {
      if (!(x[i] > found.front().weight)) continue;
      std::pop_heap(found.begin(), found.end(), before);
      found.back() = {x[i], static_cast<int32_t>(i)};
      std::push_heap(found.begin(), found.end(), before);
    }
  }
  std::sort_heap(found.begin(), found.end(), before);
}

}  // namespace quire
