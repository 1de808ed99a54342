// The driver of paged attention: hands the pieces of the plan to the kernels, and merges parts; see attention.h.
#include "attention.h"

#include <new>

#include "attention_kernels.h"

namespace quire {
namespace {

constexpr int kHeadsAtOnce = 16;  // of a piece: some microseconds

size_t scratch_floats(const quire_cache& cache) {
  return (std::max(rows_scratch(cache), tiles_scratch(cache)) + 1023) / 1024 * 1024;
}

// The result of one head of a token from its parts, in their order.
void merge(const Work& work, const Merge& merge, int head, float* scratch) {
  const int dim = work.cache.head_dim_v;
  std::fill(scratch, scratch + dim, 0.0f);
  Part total{kNoScore, 0.0f, scratch};
  for (int i = 0; i < merge.count; ++i) {
    float* part = part_at(work, merge.first + i, head);
    fold(total, Part{part[0], part[1], part + 2}, dim);
  }
  finish(work, merge.token, head, total);
}

template <typename T>
const float* widen(const T* from, int count, float* to) {
  for (int i = 0; i < count; i += kLanes) {
    const int rest = count - i;
    (rest >= kLanes ? Vec::load(from + i) : load_first(from + i, rest)).store(to + i);
  }
  return to;
}

// A head of a token as floats: in place, or converted to `to`, which has room for a multiple of kLanes.
const float* as_floats(const Rows& rows, int64_t token, int head, int count, float* to) {
  const int64_t at = token * rows.token_stride + head * rows.head_stride;
  switch (rows.type) {
    case QUIRE_F32: return static_cast<const float*>(rows.data) + at;
    case QUIRE_BF16: return widen(static_cast<const bf16*>(rows.data) + at, count, to);
    default: return widen(static_cast<const f16*>(rows.data) + at, count, to);
  }
}

}  // namespace

void attention_write(Team& team, const quire_cache& cache, int layer, const quire_step& step, const Rows& key,
                     const Rows& value) {
  constexpr int kMost = 1024;  // of head_dim; the Python side refuses larger ones
  alignas(64) float k[kMost], v[kMost];
  const int heads = cache.num_kv_heads;
  team.phase(static_cast<int64_t>(step.num_tokens) * heads, kHeadsAtOnce, [&](int64_t i) {
    const int64_t token = i / heads;
    const int head = static_cast<int>(i % heads);
    const float* keys = as_floats(key, token, head, cache.head_dim_k, k);
    store_slot(cache, layer, step.slot_mapping[token], head, keys, as_floats(value, token, head, cache.head_dim_v, v));
  });
}

void attend(Team& team, const quire_cache& cache, const quire_layer& layer, AttentionPlan& plan, const Rows& query,
            const Rows& out) {
  const Window& window = plan.window(layer.window);
  const float factor = layer.softcap != 0.0f ? layer.scale : layer.scale * kLog2E;
  float* parts = plan.parts.data();
  const Work work{plan, window, cache, layer, query, out, parts, factor};
  float* scratch = plan.scratch.data() + team.rank() * scratch_floats(cache);
  // The end of an item fetches the start of the one that this member probably takes next: members take turns.
  const int64_t items = static_cast<int64_t>(window.items.size());
  int64_t expected = -1;
  team.phase(items, [&](int64_t at) {
    const Item& item = window.items[at];
    const Item* before = at == expected ? &window.items[at - team.size()] : nullptr;
    expected = at + team.size();
    const Item* after = expected < items ? &window.items[expected] : nullptr;
    item.tiles ? attend_tiles(work, item, scratch) : attend_rows(work, item, before, after, scratch);
  });
  team.phase(static_cast<int64_t>(window.merges.size()) * plan.num_heads, kHeadsAtOnce, [&](int64_t i) {
    merge(work, window.merges[i / plan.num_heads], static_cast<int>(i % plan.num_heads), scratch);
  });
}

void prepare(AttentionPlan& plan, int window) {
  for (const auto& made : plan.windows) {
    if (made->size == window) return;
  }
  plan.windows.push_back(make_window(plan, window));
  plan.parts.reserve(plan.windows.back()->parts * static_cast<size_t>(plan.num_heads) * part_floats(plan.cache));
  plan.scratch.reserve(plan.members * scratch_floats(plan.cache));
}

}  // namespace quire
