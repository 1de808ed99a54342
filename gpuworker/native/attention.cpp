// Paged attention but for its two kernels: what both call (attention_kernels.h), the plan, which cuts a step into pieces of
// similar size (attention_plan.h), the driver, which hands them to the kernels and merges parts, and the C interface.
#include "attention.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <tuple>
#include <utility>

#include "attention_kernels.h"

namespace quire {

// ---- the common parts of the two kernels ---

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

// ---- the plan ---

void Arena::reserve(size_t floats) {
  if (floats <= size_) return;
  data_.reset();
  size_ = (floats + 1023) / 1024 * 1024;
  data_.reset(static_cast<float*>(std::aligned_alloc(64, size_ * sizeof(float))));
  if (!data_) throw std::bad_alloc();
}

const Window& AttentionPlan::window(int size, int chunk) const {
  for (const auto& made : windows) {
    if (made->size == size && made->chunk == chunk) return *made;
  }
  std::abort();  // prepare() was not called for this window or chunk
}

namespace {

// Slots that are worth a piece of tiles of their own; lanes from which on a tile of queries beats one query after the other;
// lanes of a piece of a deterministic prefill, which always takes one after the other.
constexpr int kMinChunk = 128, kTileLanes = 14, kFixedLanes = 32;
// The least number of pieces a member, where the costs allow: uneven work then ends in a small part of the whole.
constexpr int kPiecesEach = 4;
// Positions that a prefix must share, and reads that sharing must save, to be worth parts that are merged later.
constexpr int kMinShared = 64, kMinSaved = 256;

// Queries that attend over [begin, end) of one row's blocks: what is cut into chunks, and repeated for each K/V head.
struct Span {
  int32_t row, begin, end, query, count;
  bool tiles;
  float cost;  // of one item with all positions
  int32_t chunks;
};

class Planner {
 public:
  Planner(const AttentionPlan& plan, Window& window)
      : plan_(plan), step_(plan.step), window_(window), heads_(std::min(plan.group(), kMaxLanes)) {}

  void run() {
    shared_.assign(step_.num_decodes, 0);
    if (window_.size == 0 && window_.chunk == 0 && !plan_.deterministic) share_prefixes();
    for (int row = 0, next; row < step_.num_decodes; row = next) {
      next = after_drafts(row);
      add_decodes(row, next);
    }
    const int tokens = item_tokens();
    for (int row = step_.num_decodes; row < step_.num_rows; ++row) add_prefill(row, tokens);
    cut();
    emit();
  }

 private:
  int first_seen(int position) const {
    if (window_.chunk) return position / window_.chunk * window_.chunk;
    return window_.size ? std::max(0, position + 1 - window_.size) : 0;
  }

  // Whether so many queries, drafts not counted, are enough for tiles. Drafts take the kernel that decodes take without them.
  bool by_tiles(int queries) const { return !plan_.deterministic && queries * heads_ >= kTileLanes; }

  void add_query(int token, int end) { queries_.push_back({token, first_seen(end - 1), end, -1}); }

  // Makes the last `count` queries a span.
  void close_span(int row, int begin, int end, int count, bool tiles) {
    const int lanes = count * heads_;
    // Nanoseconds a slot, as measured at head_dim 64: few lanes wait for memory, more lanes cost a vector each.
    const float slot = tiles ? 8.0f + 12.0f * ((lanes + 15) / 16) : std::max(9.0f, 1.0f + 1.3f * lanes);
    spans_.push_back({row, begin, end, static_cast<int32_t>(queries_.size()) - count, count, tiles, slot * (end - begin), 1});
  }

  // Tokens of a prefill that an item takes: as many as its kernel takes at once, but so few that all members have work.
  int item_tokens() const {
    if (plan_.deterministic) return std::max(1, kFixedLanes / heads_);
    const int64_t all = static_cast<int64_t>(step_.num_tokens - step_.num_decodes) * plan_.num_heads;
    int lanes = tile_lanes(plan_.cache);
    while (lanes > kMaxLanes && all < static_cast<int64_t>(lanes) * plan_.members * kPiecesEach) lanes /= 2;
    return std::max(1, lanes / heads_);
  }

  // Decodes [row, next) of one sequence: a token and the drafts behind it, which read K and V together.
  void add_decodes(int row, int next) {
    for (const int at_once = std::max(1, kMaxLanes / heads_); row < next; row += at_once) {
      const int last = std::min(row + at_once, next), end = step_.context_len[last - 1];
      const int begin = std::max(first_seen(step_.context_len[row] - 1), shared_[row]);
      if (begin >= end) continue;
      for (int i = row; i < last; ++i) add_query(i, step_.context_len[i]);
      close_span(row, begin, end, last - row, false);
    }
  }

  // The first row behind this one that is not a draft. Two rows that write into the same block are of one sequence.
  int after_drafts(int row) const {
    int next = row + 1;
    while (next < step_.num_decodes && step_.context_len[next] == step_.context_len[next - 1] + 1) {
      const int written = (step_.context_len[next - 1] - 1) / plan_.cache.block_size;
      if (table(next)[written] != table(next - 1)[written]) break;
      ++next;
    }
    return next;
  }

  void add_prefill(int row, int tokens) {
    const int first = step_.query_start[row], count = step_.query_start[row + 1] - first;
    const int start = step_.context_len[row] - count;
    for (int at = 0; at < count; at += tokens) {
      const int end = std::min(at + tokens, count);
      for (int i = at; i < end; ++i) add_query(first + i, start + i + 1);
      close_span(row, first_seen(start + at), start + end, end - at, by_tiles(end - at));
    }
  }

  // Decodes whose rows begin with the same blocks attend to them together: they are read once.
  void share_prefixes() {
    std::vector<int> rows;
    for (int row = 0; row < step_.num_decodes; row = after_drafts(row)) {
      if (whole_blocks(row) * plan_.cache.block_size >= kMinShared) rows.push_back(row);
    }
    if (rows.size() < 2) return;
    std::sort(rows.begin(), rows.end(), [&](int a, int b) {
      const int alike = common_blocks(a, b), at_a = whole_blocks(a), at_b = whole_blocks(b);
      if (alike == at_a || alike == at_b) return at_a != at_b ? at_a < at_b : a < b;
      return table(a)[alike] < table(b)[alike];
    });
    std::vector<int> alike(rows.size(), 0);  // blocks shared with the row before
    for (size_t i = 1; i < rows.size(); ++i) alike[i] = common_blocks(rows[i - 1], rows[i]);
    share(rows, alike, 0, rows.size(), 0);
  }

  const int32_t* table(int row) const { return step_.block_table + static_cast<int64_t>(row) * step_.max_blocks; }
  // Blocks that the query of a decode sees in full, without that of its own position: it is never shared.
  int whole_blocks(int row) const { return (step_.context_len[row] - 1) / plan_.cache.block_size; }
  int common_blocks(int a, int b) const {
    const int most = std::min(whole_blocks(a), whole_blocks(b));
    return static_cast<int>(std::mismatch(table(a), table(a) + most, table(b)).first - table(a));
  }

  // Rows rows[from : to] agree in their first `depth` blocks, which earlier spans cover.
  void share(const std::vector<int>& rows, const std::vector<int>& alike, size_t from, size_t to, int depth) {
    if (to - from < 2) return;
    const int common = *std::min_element(alike.begin() + from + 1, alike.begin() + to);
    const int slots = (common - depth) * plan_.cache.block_size;
    if (slots >= kMinShared && slots * static_cast<int64_t>(to - from - 1) >= kMinSaved) {
      add_shared(rows, from, to, depth * plan_.cache.block_size, common * plan_.cache.block_size);
      depth = common;
    }
    size_t begin = from;
    for (size_t i = from + 1; i <= to; ++i) {
      if (i < to && alike[i] != common) continue;
      share(rows, alike, begin, i, depth);
      begin = i;
    }
  }

  void add_shared(const std::vector<int>& rows, size_t from, size_t to, int begin, int end) {
    const bool tiles = by_tiles(static_cast<int>(to - from));
    const int at_once = std::max(1, (tiles ? tile_lanes(plan_.cache) : kMaxLanes) / heads_);
    int count = 0;
    for (size_t i = from; i < to; ++i) {
      for (int row = rows[i], next = after_drafts(row); row < next; ++row) {
        queries_.push_back({row, 0, end, -1});
        shared_[row] = end;
        if (++count == at_once) close_span(rows[i], begin, end, std::exchange(count, 0), tiles);
      }
    }
    if (count > 0) close_span(rows[from], begin, end, count, tiles);
  }

  // Decides into how many chunks each span goes.
  void cut() {
    const int copies = plan_.cache.num_kv_heads * ((plan_.group() + heads_ - 1) / heads_);
    float total = 0.0f;
    for (const Span& span : spans_) total += span.cost * copies;
    const float limit = total / (plan_.members * kPiecesEach);
    for (Span& span : spans_) {
      const int length = span.end - span.begin;
      if (plan_.members == 1 || span.cost <= limit) continue;
      if (span.tiles) {
        span.chunks = std::max(1, std::min(static_cast<int>(span.cost / limit) + 1, length / kMinChunk));
      } else {
        span.chunks = (span.end + kFold - 1) / kFold - span.begin / kFold;  // parts are merged as folds are, one by one
      }
    }
  }

  void emit() {
    std::vector<int32_t> parts(step_.num_tokens, 0), next(step_.num_tokens, 0);
    for (const Span& span : spans_) {
      for (int i = 0; i < span.count; ++i) parts[queries_[span.query + i].token] += span.chunks;
    }
    for (int token = 0; token < step_.num_tokens; ++token) {
      next[token] = window_.parts;
      if (parts[token] < 2) continue;
      window_.merges.push_back({token, window_.parts, parts[token]});
      window_.parts += parts[token];
    }
    for (const Span& span : spans_) {
      const int unit = span.tiles ? kTile : kFold, origin = span.begin / unit * unit;
      const int length = ((span.end - origin + span.chunks - 1) / span.chunks + unit - 1) / unit * unit;
      for (int chunk = 0; chunk < span.chunks; ++chunk) {
        const int begin = std::max(span.begin, origin + chunk * length);
        const int end = chunk == span.chunks - 1 ? span.end : std::min(span.end, origin + (chunk + 1) * length);
        emit_chunk(span, begin, end, parts, next);
      }
    }
    sort_items();
  }

  // The costliest first, so that members end together; but the items of a row that read the same K and V follow each other,
  // and find them in the L2 cache.
  void sort_items() {
    std::vector<float> most(step_.num_rows, 0.0f);
    for (const Item& item : window_.items) most[item.table_row] = std::max(most[item.table_row], item.cost);
    const auto place = [&](const Item& item) {
      return std::make_tuple(-most[item.table_row], item.table_row, item.head / plan_.group(), -item.cost);
    };
    std::stable_sort(window_.items.begin(), window_.items.end(),
                     [&](const Item& a, const Item& b) { return place(a) < place(b); });
  }

  void emit_chunk(const Span& span, int begin, int end, const std::vector<int32_t>& parts, std::vector<int32_t>& next) {
    const int32_t query = static_cast<int32_t>(window_.queries.size());
    for (int i = 0; i < span.count; ++i) {
      Query one = queries_[span.query + i];
      one.first = std::max(one.first, begin);
      one.end = std::min(one.end, end);
      one.part = parts[one.token] < 2 ? -1 : next[one.token]++;
      window_.queries.push_back(one);
    }
    const float cost = span.cost * (end - begin) / (span.end - span.begin);
    for (int head = 0; head < plan_.num_heads; head += plan_.group()) {
      for (int slice = 0; slice < plan_.group(); slice += heads_) {
        const int heads = std::min(heads_, plan_.group() - slice);
        window_.items.push_back({span.row, begin, end, query, span.count, head + slice, heads, span.tiles, cost});
      }
    }
  }

  const AttentionPlan& plan_;
  const quire_step& step_;
  Window& window_;
  const int heads_;            // of an item
  std::vector<int> shared_;    // [num_decodes], positions that spans of shared prefixes cover
  std::vector<Query> queries_;
  std::vector<Span> spans_;
};

}  // namespace

std::unique_ptr<Window> make_window(const AttentionPlan& plan, int size, int chunk) {
  auto window = std::make_unique<Window>();
  window->size = size;
  window->chunk = chunk;
  Planner(plan, *window).run();
  return window;
}

void begin(AttentionPlan& plan, const quire_cache& cache, const quire_step& step, int num_heads, int threads,
           bool deterministic) {
  plan.cache = cache;
  plan.step = step;
  plan.num_heads = num_heads;
  plan.members = std::max(1, threads);
  plan.deterministic = deterministic;
  plan.windows.clear();
}

// ---- the driver ---

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
const float* as_floats(const quire_rows& rows, int64_t token, int head, int count, float* to) {
  const int64_t at = token * rows.token_stride + head * rows.head_stride;
  switch (rows.type) {
    case QUIRE_F32: return static_cast<const float*>(rows.data) + at;
    case QUIRE_BF16: return widen(static_cast<const bf16*>(rows.data) + at, count, to);
    default: return widen(static_cast<const f16*>(rows.data) + at, count, to);
  }
}

}  // namespace

void attention_write(Team& team, const quire_cache& cache, int layer, const quire_step& step, const quire_rows& key,
                     const quire_rows& value) {
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

void attend(Team& team, const quire_cache& cache, const quire_layer& layer, AttentionPlan& plan, const quire_rows& query,
            const quire_rows& out) {
  const Window& window = plan.window(layer.window, layer.chunk);
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

void prepare(AttentionPlan& plan, int window, int chunk) {
  for (const auto& made : plan.windows) {
    if (made->size == window && made->chunk == chunk) return;
  }
  plan.windows.push_back(make_window(plan, window, chunk));
  plan.parts.reserve(plan.windows.back()->parts * static_cast<size_t>(plan.num_heads) * part_floats(plan.cache));
  plan.scratch.reserve(plan.members * scratch_floats(plan.cache));
}

}  // namespace quire

// ---- the C interface: opens the parallel region ---

using namespace quire;

struct quire_attention {
  AttentionPlan plan;
};

namespace {

constexpr int64_t kGrain = 4096;

float read_part(const float* from, Range part) {
  Vec sum[8];
  for (Vec& one : sum) one = Vec::zero();
  int64_t i = part.begin;
  for (; i + 8 * kLanes <= part.end; i += 8 * kLanes) {
    for (int j = 0; j < 8; ++j) sum[j] = sum[j] + Vec::load(from + i + j * kLanes);
  }
  for (; i < part.end; i += kLanes) sum[0] = sum[0] + Vec::load(from + i);
  for (int j = 1; j < 8; ++j) sum[0] = sum[0] + sum[j];
  return sum[0].sum();
}

}  // namespace

AttentionPlan& quire::plan_of(quire_attention* attention) { return attention->plan; }

extern "C" {

quire_attention* quire_attention_new() { return new quire_attention(); }
void quire_attention_free(quire_attention* attention) { delete attention; }

void quire_attention_begin(quire_attention* attention, const quire_cache* cache, const quire_step* step,
                           int32_t num_heads, int32_t threads, int32_t deterministic) {
  begin(attention->plan, *cache, *step, num_heads, threads, deterministic != 0);
}

void quire_attention_layer(quire_attention* attention, const quire_layer* layer, const quire_rows* query,
                           const quire_rows* key, const quire_rows* value, const quire_rows* out) {
  AttentionPlan& plan = attention->plan;
  prepare(plan, layer->window, layer->chunk);
  run_team(plan.members, 1 + kAttendPhases, [&](Team& team) {
    if (key->data) attention_write(team, plan.cache, layer->layer, plan.step, *key, *value);
    attend(team, plan.cache, *layer, plan, *query, *out);
  });
}

float quire_read(const void* from, int64_t bytes, int32_t threads) {
  std::atomic<float> total{0.0f};
  run_team(threads, 0, [&](const Team& team) {
    const float sum = read_part(static_cast<const float*>(from), team.share(bytes / 4, kGrain));
    if (team.rank() == 0) total.store(sum);
    if (sum == 1.0f) total.store(sum);  // keeps the compiler from removing the reads
  });
  return total.load();
}

}  // extern "C"
