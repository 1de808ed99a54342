// The common parts of the two attention kernels: their inputs, the addresses of blocks, and the end of a query.
#pragma once

#include "attention_plan.h"
#include "attention_simd.h"
#include "attention_store.h"
#include "quire_attention.h"

namespace quire {

// One call of attend, for all its items.
struct Work {
  const AttentionPlan& plan;
  const Window& window;
  const quire_cache& cache;
  const quire_layer& layer;
  quire_rows query, out;
  float* parts;
  float score_factor;  // scale · log2 e, or scale where scores are capped first: scores are kept as powers of two

  int group() const { return plan.group(); }
};

constexpr int kRun = 4;  // slots that lie side by side in a block of any size
constexpr int kRuns = kTile / kRun;
constexpr int kNear = 4;  // runs of a block of 16 slots or more: their scales fill a cache line

// Of the 64 positions from `base` (a multiple of 64): each run's first slot as an index into
// [layer, block, kv_head, block_size]. Runs outside the item repeat its first or last one: they are masked later, and
// unwritten memory is not read.
void find_runs(const Work&, const Item&, int base, int64_t* runs);

// Result of a query's head over some positions: acc = sum of 2^(score - most) · value, sum that of the powers.
struct Part {
  float most, sum;
  float* acc;  // [head_dim_v]
};

inline size_t part_floats(const quire_cache& cache) { return (cache.head_dim_v + 2 + 15) / 16 * 16; }
inline float* part_at(const Work& work, int32_t part, int head) {
  return work.parts + (static_cast<size_t>(part) * work.plan.num_heads + head) * part_floats(work.cache);
}

// total := total and part together. Every caller uses this one arithmetic, on which `deterministic` depends.
void fold(Part& total, const Part& part, int head_dim_v);

// Writes acc / sum, with the head's sink in the denominator, to the output. Overwrites acc.
void finish(const Work&, int32_t token, int head, Part& part);

// Writes a result to the query's part, or, finished, to the output.
void deliver(const Work&, const Query&, int head, Part& part);

// The query of a head as floats; `to` has room for a multiple of 32, filled up with zeros.
void load_query(const Work&, int32_t token, int head, float* to);

// Both attend from all queries of an item. `before` and `after` are the member's last item and its next one, or null: the
// first K and V of an item of rows are fetched while the one before it still computes.
void attend_rows(const Work&, const Item&, const Item* before, const Item* after, float* scratch);
void attend_tiles(const Work&, const Item&, float* scratch);
void attend_tiles_on_amx(const Work&, const Item&, float* scratch);  // caches of bf16 and int8, at its level
size_t rows_scratch(const quire_cache&);
size_t tiles_scratch(const quire_cache&);
size_t amx_tiles_scratch(const quire_cache&);

inline int padded(int count, int to) { return (count + to - 1) / to * to; }

inline void prefetch(const void* from, size_t bytes) {
  const char* p = static_cast<const char*>(from);
  for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch(p + at, 0, 2);
}

// Fetches runs of K or V into the L2 cache, or into the L1 cache too, a few lines at a time between other work. A core has a
// limited number of requests in flight; bursts of requests would wait for each other, and the arithmetic for them.
class Fetcher {
 public:
  // So many calls of some() fetch all `bytes` of each of `count` runs; with no calls to come, nothing.
  template <typename T>
  void start(const T* const* runs, size_t bytes, int calls, bool into_l1 = false, int count = kRuns) {
    into_l1_ = into_l1;
    left_ = 0;
    next_run_ = reinterpret_cast<const char* const*>(runs);
    last_run_ = next_run_ + (calls ? count : 0);
    if (!calls) return;
    lines_ = static_cast<int>((bytes + 63) / 64);
    quota_ = (count * lines_ + calls - 1) / calls;
  }

  void some() {
    const char* at = at_;
    int left = left_;
    for (int i = 0; i < quota_; ++i) {
      if (left == 0) {
        if (next_run_ == last_run_) break;
        at = *next_run_++;
        left = lines_;
      }
      into_l1_ ? __builtin_prefetch(at, 0, 3) : __builtin_prefetch(at, 0, 2);
      at += 64;
      --left;
    }
    at_ = at;
    left_ = left;
  }

 private:
  const char *const *next_run_ = nullptr, *const *last_run_ = nullptr;
  const char* at_ = nullptr;
  int lines_ = 0, left_ = 0, quota_ = 0;
  bool into_l1_ = false;
};

}  // namespace quire
