// The common parts of the two attention kernels; see attention_kernels.h.
#include "attention_kernels.h"

namespace quire {

void find_runs(const Work& work, const Item& item, int base, int64_t* runs) {
  const quire_cache& cache = work.cache;
  const quire_step& step = work.plan.step;
  const int32_t* table = step.block_table + static_cast<int64_t>(item.table_row) * step.max_blocks;
  const int shift = __builtin_ctz(cache.block_size), last = cache.block_size - 1;
  const int kv_head = item.head / work.group();
  const int64_t of_layer = work.layer.layer * static_cast<int64_t>(cache.num_blocks);
  const int lowest = item.begin & ~(kRun - 1), highest = (item.end - 1) & ~(kRun - 1);
  if (cache.block_size >= kNear * kRun && base >= lowest && base + kTile - kRun <= highest) {
    for (int run = 0; run < kRuns; run += kNear) {
      const int position = base + run * kRun;
      const int64_t block = (of_layer + table[position >> shift]) * cache.num_kv_heads + kv_head;
      const int64_t first = (block << shift) + (position & last);
      for (int i = 0; i < kNear; ++i) runs[run + i] = first + i * kRun;
    }
    return;
  }
  for (int run = 0; run < kRuns; ++run) {
    const int position = std::min(std::max(base + run * kRun, lowest), highest);
    const int64_t block = (of_layer + table[position >> shift]) * cache.num_kv_heads + kv_head;
    runs[run] = (block << shift) + (position & last);
  }
}

__attribute__((noinline)) void fold(Part& total, const Part& part, int head_dim_v) {
  const float most = std::max(total.most, part.most);
  const float keep = exp2_falling(total.most - most), add = exp2_falling(part.most - most);
  const Vec kept = Vec::all(keep), added = Vec::all(add);
  total.most = most;
  float sums[kLanes];
  fma(Vec::all(part.sum), added, Vec::all(total.sum) * kept).store(sums);
  total.sum = sums[0];
  int i = 0;
  for (; i + kLanes <= head_dim_v; i += kLanes) {
    fma(Vec::load(part.acc + i), added, Vec::load(total.acc + i) * kept).store(total.acc + i);
  }
  if (const int rest = head_dim_v - i) {
    const Vec both = fma(load_first(part.acc + i, rest), added, load_first(total.acc + i, rest) * kept);
    store_first(both, total.acc + i, rest);
  }
}

namespace {

template <typename T>
void write_row(const float* from, float factor, T* to, int count) {
  // + 0: a zero has no sign that depends on how many masked slots were added to it.
  const Vec scaled = Vec::all(factor), zero = Vec::zero();
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) (Vec::load(from + i) * scaled + zero).store(to + i);
  if (const int rest = count - i) store_first(load_first(from + i, rest) * scaled + zero, to + i, rest);
}

template <typename T>
void read_row(const T* from, float* to, int count) {
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) Vec::load(from + i).store(to + i);
  if (const int rest = count - i) load_first(from + i, rest).store(to + i);
}

}  // namespace

void finish(const Work& work, int32_t token, int head, Part& part) {
  float factor = 1.0f, sum = part.sum;
  if (work.layer.sinks) {
    const float sink = work.layer.sinks[head] * kLog2E, most = std::max(part.most, sink);
    factor = exp2_falling(part.most - most);
    sum = sum * factor + exp2_falling(sink - most);
  }
  factor = sum > 0.0f ? factor / sum : 0.0f;
  const int64_t at = token * work.out.token_stride + head * work.out.head_stride;
  const int count = work.cache.head_dim_v;
  switch (work.out.type) {
    case QUIRE_F32: return write_row(part.acc, factor, static_cast<float*>(work.out.data) + at, count);
    case QUIRE_BF16: return write_row(part.acc, factor, static_cast<bf16*>(work.out.data) + at, count);
    default: return write_row(part.acc, factor, static_cast<f16*>(work.out.data) + at, count);
  }
}

void deliver(const Work& work, const Query& query, int head, Part& part) {
  if (query.part < 0) return finish(work, query.token, head, part);
  float* to = part_at(work, query.part, head);
  to[0] = part.most;
  to[1] = part.sum;
  std::memcpy(to + 2, part.acc, sizeof(float) * work.cache.head_dim_v);
}

void load_query(const Work& work, int32_t token, int head, float* to) {
  const int64_t at = token * work.query.token_stride + head * work.query.head_stride;
  const int count = work.cache.head_dim_k;
  std::fill(to + count / kLanes * kLanes, to + padded(count, 32), 0.0f);
  switch (work.query.type) {
    case QUIRE_F32: return read_row(static_cast<const float*>(work.query.data) + at, to, count);
    case QUIRE_BF16: return read_row(static_cast<const bf16*>(work.query.data) + at, to, count);
    default: return read_row(static_cast<const f16*>(work.query.data) + at, to, count);
  }
}

}  // namespace quire
