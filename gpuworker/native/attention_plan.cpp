// Cuts a step's attention into pieces of similar size; see attention_plan.h.
#include "attention_plan.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <tuple>
#include <utility>

namespace quire {

void Arena::reserve(size_t floats) {
  if (floats <= size_) return;
  data_.reset();
  size_ = (floats + 1023) / 1024 * 1024;
  data_.reset(static_cast<float*>(std::aligned_alloc(64, size_ * sizeof(float))));
  if (!data_) throw std::bad_alloc();
}

const Window& AttentionPlan::window(int size) const {
  for (const auto& made : windows) {
    if (made->size == size) return *made;
  }
  std::abort();  // prepare() was not called for this window
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
    if (window_.size == 0 && !plan_.deterministic) share_prefixes();
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
  int first_seen(int position) const { return window_.size ? std::max(0, position + 1 - window_.size) : 0; }

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

  // The first row that is no draft behind this one. Of two rows that write into the same block, both are of one sequence.
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

std::unique_ptr<Window> make_window(const AttentionPlan& plan, int size) {
  auto window = std::make_unique<Window>();
  window->size = size;
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

}  // namespace quire
