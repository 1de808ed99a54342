// Attention of many queries on the matrix unit: as in attention_tiles.cpp, for caches of bf16 and int8.
//
// The unit waits for the caches more than they for it. K and V of four tiles wait in the L2 cache, V transposed. The lanes of
// an item meet them in groups, whose queries and scores have room in the L1 cache. A group's sums are read and written once
// for the four tiles. So the weights of these are relative to one score of each lane: it moves where a score exceeds it by far.
#include "amx.h"

#if defined(QUIRE_AMX)

#include "attention_amx.h"
#include "attention_cache_tiles.h"
#include "attention_lanes.h"

namespace quire {
namespace {

using Group = LaneGroup<Bf16Pairs>;
constexpr int kTilesAtOnce = 4;
constexpr int kGroups = kAmxItemLanes / Group::kMost;
constexpr float kSlack = 8.0f;  // powers of two by which a score may exceed what its lane's weights are relative to

template <typename Stored>
class AmxTilesKernel {
  using Tiles = CacheTiles<Bf16Pairs, Stored, kTilesAtOnce>;

 public:
  AmxTilesKernel(const Work& work, const Item& item, float* scratch)
      : work_(work), item_(item), dk_(work.cache.head_dim_k), dv_(work.cache.head_dim_v) {
    for (Group& group : groups_) {
      take(group.queries, Group::query_numbers(dk_), scratch);
      take(group.sums, Group::sum_floats(dv_), scratch);
    }
    take(scores_, static_cast<size_t>(kTile) * Group::kMost, scratch);
    take(weights_, static_cast<size_t>(Tiles::kSlots) * Group::kMost, scratch);
    take(tiles_.own_keys, Tiles::numbers(dk_), scratch);
    take(tiles_.own_values, Tiles::numbers(dv_), scratch);
  }

  static size_t scratch_floats(int dk, int dv) {
    const size_t numbers = kGroups * Group::query_numbers(dk) + Tiles::kSlots * Group::kMost + Tiles::numbers(dk) +
                           Tiles::numbers(dv);
    return kGroups * Group::sum_floats(dv) + kTile * Group::kMost + numbers / 2 + 1024;
  }

  void run() {
    const int begin = item_.begin & ~(kTile - 1);
    tiles_.find(work_, item_, begin);
    for (int run = 0; run < tiles_.next_tiles * kRuns; ++run) {
      prefetch(tiles_.next_keys[run], kRun * sizeof(Stored) * dk_);
      prefetch(tiles_.next_values[run], kRun * sizeof(Stored) * dv_);
    }
    const int groups = open_groups(groups_, work_, item_, tiles_.own_keys);
    const AmxScope registers;
    for (int base = begin; base < item_.end; base += Tiles::kSlots) {
      tiles_.load(work_.cache, item_);
      tiles_.find(work_, item_, base + Tiles::kSlots);
      bool fetches = tiles_.next_tiles > 0;
      for (int group = groups - 1; group >= 0; --group) fetches &= !attend(groups_[group], fetches);
    }
    auto* rows = reinterpret_cast<float*>(tiles_.own_values);
    for (int group = 0; group < groups; ++group) groups_[group].close(work_, item_, rows);
  }

 private:
  // A group of lanes over the tiles, if they see any of them. Meanwhile the next ones are fetched into the L2 cache.
  bool attend(Group& lanes, bool fetches) {
    const int end = std::min(tiles_.slots, padded(std::max(0, lanes.none_from - tiles_.base), kRun));
    const int begin = std::max(0, lanes.none_to - tiles_.base) & ~(kTile - 1);
    if (begin >= end) return false;
    int summed = begin;  // up to where the sums have the weights
    for (int slot = begin; slot < end; slot += kTile) {
      const int count = std::min(kTile, end - slot), groups = padded(count, 16) / 16;
      const bool has_next = fetches && slot / kTile < tiles_.next_tiles;
      fetcher_.start(tiles_.next_keys + slot / kRun, kRun * sizeof(Stored) * dk_,
                     has_next ? amx_fetches(groups, padded(dk_, 32), lanes.vectors) : 0);
      const auto keys = [&](int group) { return tiles_.keys[(slot + group * 16) / kRun]; };
      amx_multiply<false>(keys, groups, tiles_.key_stride, padded(dk_, 32), lanes.queries, lanes.vectors, scores_, fetcher_);
      if (finish_scores(lanes, slot, count)) {
        if (slot > summed) accumulate(lanes, summed, slot);
        scale_sums(lanes);
        summed = slot;
      }
      for (int lane = 0; lane < lanes.wide; lane += kLanes) exponentiate(lanes, lane, slot, count);
    }
    std::memset(static_cast<void*>(weights_ + end * lanes.wide), 0, sizeof(bf16) * (padded(end, 32) - end) * lanes.wide);
    const int calls = amx_fetches(padded(dv_, 16) / 16, padded(end - summed, 32), lanes.vectors);
    fetcher_.start(tiles_.next_values, kRun * sizeof(Stored) * dv_, fetches && tiles_.next_tiles ? calls : 0, false,
                   tiles_.next_tiles * kRuns);
    accumulate(lanes, summed, end);
    return true;
  }

  // Products become scores, and the largest ones move what weights are relative to. Returns whether any moved.
  bool finish_scores(Group& lanes, int first, int count) {
    const int base = tiles_.base + first;
    const bool masked = base < lanes.all_from || base + count > lanes.all_to, capped = work_.layer.softcap != 0.0f;
    for (int slot = 0; slot < (Tiles::kScaled ? count : 1); ++slot) {
      factors_[slot] = Tiles::kScaled ? work_.score_factor * tiles_.key_scales[first + slot] : work_.score_factor;
    }
    if (masked || capped || work_.score_factor < 0.0f) {
      for (int lane = 0; lane < lanes.wide; lane += kLanes) {
        scale(scores_ + lane, lanes.wide, count);
        if (capped) cap(scores_ + lane, lanes.wide, count);
        if (masked) mask(scores_ + lane, lanes, lane, base, count);
      }
      std::fill(factors_, factors_ + kTile, 1.0f);
    }
    bool moved = false;
    for (int lane = 0; lane < lanes.wide; lane += kLanes) {
      const Vec largest = largest_of(scores_ + lane, lanes.wide, count), before = Vec::load(lanes.most + lane);
      const __mmask16 exceeds = _mm512_cmp_ps_mask(largest.v, (before + Vec::all(kSlack)).v, _CMP_GT_OQ);
      const Vec most{_mm512_mask_mov_ps(before.v, exceeds, largest.v)}, keep = exp2_falling(before - most);
      moved |= exceeds != 0;
      most.store(lanes.most + lane);
      keep.store(lanes.keep + lane);
      (Vec::load(lanes.sum + lane) * keep).store(lanes.sum + lane);
    }
    return moved;
  }

  void scale(float* scores, int wide, int count) const {
    for (int slot = 0; slot < count; ++slot, scores += wide) {
      (Vec::load(scores) * Vec::all(factors_[Tiles::kScaled ? slot : 0])).store(scores);
    }
  }

  void cap(float* scores, int wide, int count) const {
    for (int slot = 0; slot < count; ++slot, scores += wide) {
      (soft_cap(Vec::load(scores), work_.layer.softcap) * Vec::all(kLog2E)).store(scores);
    }
  }

  static void mask(float* scores, const Group& lanes, int lane, int base, int count) {
    const Vec first = Vec::load(lanes.first + lane), end = Vec::load(lanes.end + lane);
    for (int slot = 0; slot < count; ++slot, scores += lanes.wide) {
      keep_between(Vec::load(scores), Vec::all(static_cast<float>(base + slot)), first, end).store(scores);
    }
  }

  Vec largest_of(const float* scores, int wide, int count) const {
    Vec most[4];
    for (Vec& one : most) one = Vec::all(kMasked);
    for (int slot = 0; slot < count; slot += 4) {
      for (int i = 0; i < 4; ++i) {
        Vec score = Vec::load(scores + (slot + i) * wide);
        if (Tiles::kScaled) score = score * Vec::all(factors_[slot + i]);
        most[i] = max(most[i], score);
      }
    }
    const Vec largest = max(max(most[0], most[1]), max(most[2], most[3]));
    return Tiles::kScaled ? largest : largest * Vec::all(factors_[0]);
  }

  // Writes weights [slot / 2][lane][2] of slots from `first` on, and adds them up.
  void exponentiate(Group& lanes, int lane, int first, int count) {
    const int wide = lanes.wide;
    const Vec factor = Vec::all(factors_[0]), less = Vec::zero() - Vec::load(lanes.most + lane);
    const float* scores = scores_ + lane;
    bf16* to = weights_ + first * wide + lane * 2;
    Vec even = Vec::load(lanes.sum + lane), odd = Vec::zero();
    for (int slot = 0; slot < count; slot += 2, scores += 2 * wide, to += 2 * wide) {
      Vec a = exp2_of_bf16(fma(Vec::load(scores), Tiles::kScaled ? Vec::all(factors_[slot]) : factor, less));
      Vec b = exp2_of_bf16(fma(Vec::load(scores + wide), Tiles::kScaled ? Vec::all(factors_[slot + 1]) : factor, less));
      even = even + a;
      odd = odd + b;
      if (Tiles::kScaled) {
        a = a * Vec::all(tiles_.value_scales[first + slot]);
        b = b * Vec::all(tiles_.value_scales[first + slot + 1]);
      }
      const __m512i both = _mm512_permutexvar_epi16(alternate(), round_bf16(a, b));
      std::memcpy(static_cast<void*>(to), &both, 64);
    }
    (even + odd).store(lanes.sum + lane);
  }

  void scale_sums(Group& lanes) const {
    for (int lane = 0; lane < lanes.wide; lane += kLanes) {
      const Vec keep = Vec::load(lanes.keep + lane);
      float *at = lanes.sums + lane, *end = at + dv_ * lanes.wide;
      for (; at < end; at += lanes.wide) (Vec::load(at) * keep).store(at);
    }
  }

  // sums [column][lane] += V · weights, for slots [from, to).
  void accumulate(Group& lanes, int from, int to) {
    const auto values = [&](int group) { return tiles_.own_values + group * 16 * Tiles::kValueStride + from; };
    amx_multiply<true>(values, padded(dv_, 16) / 16, Tiles::kValueStride, padded(to - from, 32), weights_ + from * lanes.wide,
                       lanes.vectors, lanes.sums, fetcher_);
  }

  const Work& work_;
  const Item& item_;
  const int dk_, dv_;
  Group groups_[kGroups];
  Tiles tiles_;
  bf16* weights_;
  float* scores_;
  float factors_[kTile];  // by which products of a tile become scores: one of each slot where K is scaled, else one of all
  Fetcher fetcher_;
};

}  // namespace

size_t amx_tiles_scratch(const quire_cache& cache) {
  return AmxTilesKernel<bf16>::scratch_floats(cache.head_dim_k, cache.head_dim_v);
}

void attend_tiles_on_amx(const Work& work, const Item& item, float* scratch) {
  if (work.cache.type == QUIRE_BF16) return AmxTilesKernel<bf16>(work, item, scratch).run();
  AmxTilesKernel<int8_t>(work, item, scratch).run();
}

}  // namespace quire

#endif
