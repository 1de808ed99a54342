// Linear layers: packing, from the rows of a checkpoint to panels; activations in the form that a packed weight takes; and the
// product, of tasks of one block of rows and one or two panels, with the stores of the sums.
#include "linear.h"

#include <algorithm>
#include <cstring>

#include "activations.h"
#include "linear_bytes.h"
#include "linear_layout.h"
#include "linear_pairs.h"
#include "linear_tile.h"

namespace quire {

// ---- packing ---
namespace {

// Where a packed column comes from: a row of a source, or nothing (padding).
struct Origin {
  const quire_source* source = nullptr;
  int64_t row = 0;
};

Origin origin(const quire_linear& w, const quire_source* sources, int count, int64_t panel, int column) {
  if (w.paired) {
    const int64_t row = panel * 16 + column % 16;
    return row < w.n / 2 ? Origin{&sources[column / 16], row} : Origin{};
  }
  int64_t row = panel * kPanel + column;
  for (int i = 0; i < count; ++i) {
    if (row < sources[i].rows) return {&sources[i], row};
    row -= sources[i].rows;
  }
  return {};
}

constexpr int64_t kRun = 64;  // inputs of a column that are read at once

void read_floats(const Origin& from, int64_t begin, int64_t count, float* out) {
  const int64_t at = from.row * from.source->row_stride + begin;
  if (from.source->type == QUIRE_F32) {
    std::memcpy(out, static_cast<const float*>(from.source->data) + at, count * sizeof(float));
  } else if (from.source->type == QUIRE_BF16) {
    const bf16* p = static_cast<const bf16*>(from.source->data) + at;
    for (int64_t i = 0; i < count; ++i) out[i] = to_float(p[i]);
  } else {
    alignas(64) f16 padded[kRun] = {};
    std::memcpy(padded, static_cast<const f16*>(from.source->data) + at, count * sizeof(f16));
    float wide[kRun];
    for (int64_t i = 0; i < kRun; i += kLanes) Vec::load(padded + i).store(wide + i);
    std::memcpy(out, wide, count * sizeof(float));
  }
}

void pack_floats(const Layout& layout, const Origin& from, int column, int64_t k, uint8_t* panel) {
  alignas(64) float values[kRun] = {};
  alignas(64) f16 halves[kRun];
  for (int64_t begin = 0; begin < k; begin += kRun) {
    const int64_t count = std::min(kRun, k - begin);
    read_floats(from, begin, count, values);
    if (layout.kind == QUIRE_LINEAR_F16) {
      for (int64_t i = 0; i < kRun; i += kLanes) Vec::load(values + i).store(halves + i);
    }
    for (int64_t i = 0; i < count; ++i) {
      uint8_t* at = panel + place(layout.kind, begin + i, column).byte;
      if (layout.kind == QUIRE_LINEAR_F32) {
        std::memcpy(at, &values[i], 4);
      } else if (layout.kind == QUIRE_LINEAR_BF16) {
        const bf16 rounded = to_bf16(values[i]);
        std::memcpy(at, &rounded, 2);
      } else {
        std::memcpy(at, &halves[i], 2);
      }
    }
  }
}

void pack_integers(const Layout& layout, const Origin& from, int column, int64_t k, uint8_t* panel) {
  const int8_t* row = static_cast<const int8_t*>(from.source->data) + from.row * from.source->row_stride;
  const int64_t group = layout.groups ? k / layout.groups : k;
  for (int64_t i = 0; i < k; ++i) {
    const Place to = place(layout.kind, i, column);
    uint8_t* at = panel + to.byte + (layout.groups ? (i / group + 1) * layout.head : 0);
    if (is_i4(layout.kind)) {
      uint16_t word;
      std::memcpy(&word, at, 2);
      word = static_cast<uint16_t>((word & ~(15 << to.shift)) | (row[i] + 8) << to.shift);
      std::memcpy(at, &word, 2);
    } else {
      *at = static_cast<uint8_t>(row[i]);
    }
  }
}

void pack_scales(const quire_linear& w, const Layout& layout, const Origin& from, int column, uint8_t* panel) {
  const quire_source& source = *from.source;
  for (int64_t g = 0; g < layout.groups; ++g) {
    const int64_t at = from.row * layout.groups + g;
    float* head = reinterpret_cast<float*>(panel + layout.offset(g * layout.group_steps));
    head[column] = source.scales[at];
    if (w.has_zeros) head[kPanel + column] = source.shifts[at];
  }
}

void pack_end(const quire_linear& w, const Layout& layout, const Origin& from, int column, PanelEnd& end) {
  const quire_source& source = *from.source;
  const bool whole = is_whole(w.kind);
  end.scales[column] = whole && !layout.groups ? source.scales[from.row] : 1.0f;
  end.bias[column] = source.bias ? source.bias[from.row] : 0.0f;
  end.compensation[column] = 0;
  if (w.kind == QUIRE_LINEAR_W8A8 && kByteDots) {
    const int8_t* row = static_cast<const int8_t*>(source.data) + from.row * source.row_stride;
    int32_t sum = 0;
    for (int64_t i = 0; i < w.k; ++i) sum += row[i];
    end.compensation[column] = kByteOffset * sum;
  }
}

bool fits(const quire_linear& w, const quire_source* sources, int count) {
  const bool whole = is_whole(w.kind);
  int64_t rows = 0;
  for (int i = 0; i < count; ++i) {
    rows += sources[i].rows;
    if ((sources[i].type == QUIRE_I8) != whole || (whole && !sources[i].scales)) return false;
    if (w.has_zeros && !sources[i].shifts) return false;
  }
  if (w.paired && (count != 2 || sources[0].rows != sources[1].rows)) return false;
  return rows == w.n && w.memory != nullptr;
}

}  // namespace

void pack(const Team& team, const quire_linear& w, const quire_source* sources, int count) {
  const Layout layout(w);
  const Range mine = team.share(layout.panels);
  for (int64_t index = mine.begin; index < mine.end; ++index) {
    uint8_t* panel = const_cast<uint8_t*>(layout.panel(w, index));
    for (int column = 0; column < kPanel; ++column) {
      const Origin from = origin(w, sources, count, index, column);
      if (!from.source) continue;
      if (is_whole(w.kind)) {
        pack_integers(layout, from, column, w.k, panel);
        pack_scales(w, layout, from, column, panel);
      } else {
        pack_floats(layout, from, column, w.k, panel);
      }
      pack_end(w, layout, from, column, *layout.end(w, index));
    }
  }
}

// ---- activations ---

namespace {

// Sixteen of `count` values from `begin`; zeros after the last.
template <typename T>
Vec part(const T* x, int64_t begin, int64_t count) {
  if (begin + kLanes <= count) return Vec::load(x + begin);
  alignas(64) T lanes[kLanes] = {};
  if (begin < count) std::memcpy(lanes, x + begin, (count - begin) * sizeof(T));
  return Vec::load(lanes);
}

template <typename T>
float sum(const T* x, int64_t count) {
  Vec total = Vec::zero();
  for (int64_t i = 0; i < count; i += kLanes) total = total + part(x, i, count);
  return total.sum();
}

template <typename T>
float largest(const T* x, int64_t count) {
  Vec most = Vec::zero();
  for (int64_t i = 0; i < count; i += kLanes) most = max(most, abs(part(x, i, count)));
  return most.max();
}

// q = x · 127 / max|x| to nearest; the kernel of a level with dot products of bytes takes q + kByteOffset.
template <typename T>
void quantise(const T* x, int64_t count, int64_t padded, uint8_t* row, float* scale) {
  const float most = largest(x, count);
  const Vec inverse = Vec::all(most > 0.0f ? 127.0f / most : 0.0f);
  *scale = most / 127.0f;
  for (int64_t begin = 0; begin < padded; begin += kLanes) {
    alignas(64) int8_t q[kLanes];
    (part(x, begin, count) * inverse).store(q);
    for (int64_t i = 0; i < std::min<int64_t>(kLanes, padded - begin); ++i) {
      if (kByteDots) {
        row[begin + i] = static_cast<uint8_t>(q[i] + kByteOffset);
      } else {
        reinterpret_cast<int16_t*>(row)[begin + i] = q[i];
      }
    }
  }
}

template <typename From, typename To>
void copy_row(const From* x, int64_t count, int64_t padded, To* row) {
  for (int64_t i = 0; i < padded; i += kLanes) {
    const Vec values = part(x, i, count);
    if (i + kLanes <= padded) {
      values.store(row + i);
    } else {
      alignas(64) To lanes[kLanes];
      values.store(lanes);
      std::memcpy(row + i, lanes, (padded - i) * sizeof(To));
    }
  }
}

template <typename T>
void sum_groups(const quire_linear& w, const T* row, float* sums) {
  for (int64_t g = 0; g < w.k / w.group; ++g) sums[g] = sum(row + g * w.group, w.group);
}

template <typename T>
void put_any_row(const quire_linear& w, const Input& in, int64_t m, const T* x) {
  uint8_t* row = static_cast<uint8_t*>(in.data) + m * in.stride;
  float* sums = w.has_zeros ? in.sums + m * (w.k / w.group) : nullptr;
  const int64_t padded = row_elements(w);
  if (w.kind == QUIRE_LINEAR_W8A8) {
    quantise(x, w.k, padded, row, in.scales + m);
  } else if (pairs_bf16(w.kind)) {
    copy_row(x, w.k, padded, reinterpret_cast<bf16*>(row));
    if (sums) sum_groups(w, reinterpret_cast<bf16*>(row), sums);
  } else {
    copy_row(x, w.k, padded, reinterpret_cast<float*>(row));
    if (sums) sum_groups(w, reinterpret_cast<float*>(row), sums);
  }
}

size_t rounded(size_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace

quire_type input_type(const quire_linear& w) {
  if (w.kind == QUIRE_LINEAR_W8A8) return QUIRE_I8;
  return pairs_bf16(w.kind) ? QUIRE_BF16 : QUIRE_F32;
}

int64_t row_elements(const quire_linear& w) { return Layout(w).steps * step_inputs(w.kind); }

int64_t input_stride(const quire_linear& w) {
  // An odd number of lines: rows of a tile then lie in different sets of the cache.
  const int64_t lines = (row_elements(w) * activation_bytes(w.kind) + 63) / 64;
  return (lines | 1) * 64;
}

bool needs_put_row(const quire_linear& w) { return w.kind == QUIRE_LINEAR_W8A8 || w.has_zeros; }

size_t input_bytes(const quire_linear& w, int64_t rows) {
  const size_t scales = w.kind == QUIRE_LINEAR_W8A8 ? rows * sizeof(float) : 0;
  const size_t sums = w.has_zeros ? rows * (w.k / w.group) * sizeof(float) : 0;
  return rounded(rows * input_stride(w)) + rounded(scales) + rounded(sums);
}

Input input_at(const quire_linear& w, int64_t rows, void* memory) {
  uint8_t* start = static_cast<uint8_t*>(memory);
  Input in{memory, input_stride(w), nullptr, nullptr};
  float* after = reinterpret_cast<float*>(start + rounded(rows * in.stride));
  if (w.kind == QUIRE_LINEAR_W8A8) in.scales = after;
  if (w.has_zeros) in.sums = after;
  return in;
}

void put_row(const quire_linear& w, const Input& in, int64_t m, const float* x) { put_any_row(w, in, m, x); }
void put_row(const quire_linear& w, const Input& in, int64_t m, const bf16* x) { put_any_row(w, in, m, x); }

void get_row(const quire_linear& w, const Input& in, int64_t m, float* x) {
  const uint8_t* row = static_cast<const uint8_t*>(in.data) + m * in.stride;
  if (w.kind == QUIRE_LINEAR_W8A8) {
    for (int64_t i = 0; i < w.k; ++i) {
      const int q = kByteDots ? static_cast<int>(row[i]) - kByteOffset : reinterpret_cast<const int16_t*>(row)[i];
      x[i] = static_cast<float>(q) * in.scales[m];
    }
  } else if (pairs_bf16(w.kind)) {
    copy_row(reinterpret_cast<const bf16*>(row), w.k, w.k, x);
  } else {
    std::memcpy(x, row, w.k * sizeof(float));
  }
}

// ---- the product ---

namespace {

// Rows of a task: few enough that their inputs stay in the L2 cache while the panels pass by.
constexpr int64_t kBlockRows = (140 + kTileRows - 1) / kTileRows * kTileRows;
// On AMX up to so many, since products are so quick that reading the weights once for each block of rows would count.
constexpr int64_t kAmxBlockRows = 8 * kAmxTileRows, kAmxLeastBlockRows = 2 * kAmxTileRows, kAmxBlockBytes = 1 << 20;
constexpr int64_t kSums = std::max(kBlockRows, kAmxBlockRows) * kPanel;
constexpr int64_t kL1Inputs = 128;

// Beyond so many rows a block of integer weights, of f16 weights, and without dot products of bf16 one of bf16 weights, is
// made floats once for all of them; the sums are the same. Tiles of groups wait less for their integers: only half of the
// columns is converted at a time.
constexpr int64_t kRowsUnpacking = 2 * kTileRows, kHalfRowsUnpacking = 5 * kTileRows;

struct Scratch {
  int shaped_rows = 0;  // of the registers of the matrix unit
  alignas(64) float sums[2 * kSums];
  // A block of a panel whose integers have become floats, with the scales of its groups.
  alignas(64) uint8_t unpacked[(Layout::kBlockInputs * 4 + Layout::kBlockInputs * 2 / kLeastGroup * 8) * kPanel];
};

struct Task {
  int64_t tile, tiles;  // of activations
  int64_t row, rows;    // the same in rows
  int64_t panel;
  int panels;
};

int64_t amx_block_rows(const Layout& layout) {
  const int64_t fit = kAmxBlockBytes / (layout.steps * step_inputs(layout.kind) * activation_bytes(layout.kind));
  return std::clamp(fit / kAmxTileRows * kAmxTileRows, kAmxLeastBlockRows, kAmxBlockRows);
}

// How a product is cut into tasks: panels fastest, so that all members share a block of rows. Tiles have equal rows, as
// nearly as can be: a last one of few rows would cost as much as a full one. On AMX each has `full_rows` but the last one,
// since the unit takes 16 rows at a time.
struct Plan {
  int64_t full_rows, rows, tiles, blocks, panels, per_task, tasks_of_block, tasks;

  Plan(const Layout& layout, int64_t all_rows) : rows(all_rows), panels(layout.panels) {
    const bool amx = layout.amx;
    const int64_t of_tile = amx ? kAmxTileRows : layout.groups ? kGroupTileRows : kTileRows;
    const int64_t of_block = (amx ? amx_block_rows(layout) : kBlockRows) / of_tile;
    full_rows = amx ? of_tile : 0;
    tiles = (rows + of_tile - 1) / of_tile;
    // One row more than has room for all columns is faster as two tiles than as one whose halves take turns.
    if (kWholeRows < kTileRows && rows == kWholeRows + 1) tiles = 2;
    blocks = (tiles + of_block - 1) / of_block;
    per_task = rows <= (amx ? kAmxPairRows : kPairRows) ? 2 : 1;
    tasks_of_block = (panels + per_task - 1) / per_task;
    tasks = blocks * tasks_of_block;
  }
  int64_t row(int64_t tile) const { return full_rows ? std::min(full_rows * tile, rows) : rows * tile / tiles; }
  Task task(int64_t index) const {
    const int64_t block = index / tasks_of_block, panel = index % tasks_of_block * per_task;
    const int64_t tile = tiles * block / blocks, after = tiles * (block + 1) / blocks;
    const int count = static_cast<int>(std::min(per_task, panels - panel));
    return {tile, after - tile, row(tile), row(after) - row(tile), panel, count};
  }
};

Vec silu(Vec x) { return x / (Vec::all(1.0f) + exp(Vec::zero() - x)); }

template <typename T>
void put(Vec value, T* at, int64_t count) {
  if (count >= kLanes) {
    value.store(at);
    return;
  }
  alignas(64) T lanes[kLanes];
  value.store(lanes);
  for (int64_t i = 0; i < count; ++i) at[i] = lanes[i];
}

// Both halves of a row of a panel. Where they are one line of the cache, it is written at once.
void put_both(const Vec (&values)[2], bf16* at, int64_t count) {
#if defined(QUIRE_BF16_DOTS)
  if (count >= kPanel) {
    const __m512bh both = _mm512_cvtne2ps_pbh(values[1].v, values[0].v);
    std::memcpy(at, &both, sizeof both);
    return;
  }
#endif
  put(values[0], at, count);
  if (count > kLanes) put(values[1], at + kLanes, count - kLanes);
}

void add(Vec value, float* at, int64_t count) {
  if (count >= kLanes) {
    (Vec::load(at) + value).store(at);
    return;
  }
  alignas(64) float lanes[kLanes];
  value.store(lanes);
  for (int64_t i = 0; i < count; ++i) at[i] += lanes[i];
}

class Product {
 public:
  Product(const quire_linear& w, const Input& x, int64_t rows, const Output& out)
      : w_(w), layout_(w), plan_(layout_, rows), x_(x), out_(out), block_steps_(steps_of_block(layout_, rows)) {}

  const Plan& plan() const { return plan_; }
  const uint8_t* panel(int64_t index) const { return layout_.panel(w_, index); }

  // `next` is the panel whose start is prefetched in the end, null when there is none.
  void run(const Task& task, const uint8_t* next, Scratch& scratch) const {
    const uint8_t* panel = layout_.panel(w_, task.panel);
    for (int64_t step = 0; step < layout_.steps; step += block_steps_) {
      const int64_t steps = std::min(block_steps_, layout_.steps - step), after = step + steps;
      const uint8_t* ahead = after < layout_.steps ? panel + layout_.offset(after) : next;
      block(task, {step, steps, ahead, next, after == layout_.steps}, scratch);
    }
  }

 private:
  struct Block {
    int64_t step, steps;
    const uint8_t* ahead;  // where the next block begins
    const uint8_t* next;   // where the next task's panel begins
    bool last;             // its sums are complete
  };

  // Where halves of the columns take turns, a block of floats fits the L1 cache. The order of sums stays.
  static int64_t steps_of_block(const Layout& layout, int64_t rows) {
    if (layout.amx) return rows <= kAmxTileRows ? layout.steps : layout.block_steps;
    if (rows <= kWholeRows || kTileRows == kWholeRows || activation_bytes(layout.kind) < 4) return layout.block_steps;
    const int64_t least = layout.groups ? layout.group_steps : kChunk;
    return std::max(kL1Inputs / step_inputs(layout.kind) / least, int64_t{1}) * least;
  }

  void block(const Task& task, const Block& b, Scratch& scratch) const {
    const int64_t step = b.step, steps = b.steps;
    Tile tile{};
    tile.weights = layout_.panel(w_, task.panel) + layout_.offset(step);
    tile.panel_stride = layout_.panel_bytes;
    tile.x_stride = x_.stride;
    tile.grouped = layout_.groups != 0;
    tile.has_zeros = w_.has_zeros;
    tile.groups = tile.grouped ? steps / layout_.group_steps : 1;
    tile.steps = tile.grouped ? layout_.group_steps : steps;
    tile.first = step == 0;
    tile.sums_stride = kSums;
    tile.x_sums_stride = layout_.groups;
    tile.shaped_rows = &scratch.shaped_rows;
    // A single tile reads each weight once and prefetches its own next lines; of several tiles, each prefetches its
    // part of the next block.
    tile.near = task.tiles == 1 && (task.rows <= kWholeRows || layout_.amx);
    tile.panel_end = layout_.panel(w_, task.panel) + layout_.panel_bytes;
    tile.next = b.next ? b.next : tile.panel_end;
    const int64_t block_bytes = layout_.offset(step + steps) - layout_.offset(step);
    const int64_t chunk_bytes = kChunk * block_bytes / steps;  // the heads of groups are read too
    tile.ahead_lines = static_cast<int>((chunk_bytes / 64 + task.tiles - 1) / task.tiles);
    const int64_t ahead_part = tile.groups * (tile.steps / kChunk) * tile.ahead_lines * 64;
    int32_t kind = w_.kind;
    if (unpacked(kind) != kind && task.rows > rows_unpacking()) {
      unpack(tile, scratch);
      kind = unpacked(kind);
    }
    const int64_t x_offset = step * step_inputs(w_.kind) * activation_bytes(w_.kind);
    for (int64_t i = 0; i < task.tiles; ++i) {
      const int64_t begin = plan_.row(task.tile + i) - task.row, end = plan_.row(task.tile + i + 1) - task.row;
      tile.x = static_cast<const uint8_t*>(x_.data) + (task.row + begin) * x_.stride + x_offset;
      tile.sums = scratch.sums + begin * kPanel;
      tile.rows = static_cast<int>(end - begin);
      if (w_.has_zeros) {
        tile.x_sums = x_.sums + (task.row + begin) * layout_.groups + step / layout_.group_steps;
      }
      const int64_t covered = i * ahead_part;
      tile.ahead = b.ahead && covered < block_bytes ? b.ahead + covered : nullptr;
      if (b.last) fetch_outputs(task, begin, end);
      function_of(kind, tile.rows, task.panels)(tile);
      // The sums of a tile are read once the next one runs: those of the matrix unit are late.
      if (b.last && i > 0) store(task, plan_.row(task.tile + i - 1) - task.row, begin, scratch);
      if (b.last && i + 1 == task.tiles) store(task, begin, end, scratch);
    }
  }

  TileFunction function_of(int32_t kind, int rows, int panels) const {
#if defined(QUIRE_AMX)
    if (layout_.amx) return amx_tile_function(kind, rows, panels);
#endif
    return tile_function(kind, rows, panels);
  }

  int64_t rows_unpacking() const {
    if (layout_.amx) return kAmxTileRows;
    if (!is_whole(w_.kind)) return kHalfRowsUnpacking;
    return layout_.groups ? kGroupRowsUnpacking : kRowsUnpacking;
  }

  // Converts the numbers of a block to floats, in the layout of the float kind; the scales keep their place.
  void unpack(Tile& tile, Scratch& scratch) const;

  int64_t output_bytes_each() const {
    const quire_store store = out_.store;
    return store == QUIRE_STORE_BF16 || store == QUIRE_STORE_SILU_BF16 || store == QUIRE_STORE_GELU_BF16 ? 2 : 4;
  }

  // Prefetches the output lines while the sums are computed: the lines of each row are on a separate page.
  void fetch_outputs(const Task& task, int64_t begin, int64_t end) const {
    const int64_t each = output_bytes_each(), bytes = task.panels * layout_.unit * each;
    for (int64_t r = begin; r < end; ++r) {
      const int64_t element = (task.row + r) * out_.stride + task.panel * layout_.unit;
      const uint8_t* line = static_cast<const uint8_t*>(out_.data) + element * each;
      for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(line + i, 1, 3);
    }
  }

  void store(const Task& task, int64_t begin, int64_t end, const Scratch& scratch) const {
    for (int p = 0; p < task.panels; ++p) {
      const PanelEnd& after = *layout_.end(w_, task.panel + p);
      const int64_t column = (task.panel + p) * layout_.unit;
      const int64_t columns = std::min(layout_.unit, (w_.paired ? w_.n / 2 : w_.n) - column);
      for (int64_t r = begin; r < end; ++r) {
        const float* sums = scratch.sums + p * kSums + r * kPanel;
        Vec values[2] = {value(sums, after, 0, task.row + r), value(sums, after, kLanes, task.row + r)};
        if (out_.added && out_.adds[task.row + r] >= 0) {
          const float* added = out_.added + (task.row + r) * 2 * out_.added_half + column;
          values[0] = values[0] + Vec::load(added);
          values[1] = values[1] + Vec::load(added + out_.added_half);
        }
        put_out(values, task.row + r, column, columns);
      }
    }
  }

  Vec value(const float* sums, const PanelEnd& after, int lane, int64_t row) const {
    Vec out;
    if (w_.kind == QUIRE_LINEAR_W8A8) {
      const float* offset = reinterpret_cast<const float*>(after.compensation + lane);
      out = I8Math::value(I8Math::minus(I8Math::load(sums + lane), I8Math::load(offset)));
      out = out * (Vec::load(after.scales + lane) * Vec::all(x_.scales[row]));
    } else {
      out = Vec::load(sums + lane);
      if (is_weight_only(w_.kind) && !layout_.groups) out = out * Vec::load(after.scales + lane);
    }
    return w_.has_bias ? out + Vec::load(after.bias + lane) : out;
  }

  void put_out(const Vec (&values)[2], int64_t row, int64_t column, int64_t columns) const {
    float* floats = static_cast<float*>(out_.data) + row * out_.stride + column;
    bf16* halves = static_cast<bf16*>(out_.data) + row * out_.stride + column;
    if (out_.store == QUIRE_STORE_SILU_F32) return put(silu(values[0]) * values[1], floats, columns);
    if (out_.store == QUIRE_STORE_SILU_BF16) return put(silu(values[0]) * values[1], halves, columns);
    if (out_.store == QUIRE_STORE_GELU_F32) return put(gelu(values[0]) * values[1], floats, columns);
    if (out_.store == QUIRE_STORE_GELU_BF16) return put(gelu(values[0]) * values[1], halves, columns);
    if (out_.store == QUIRE_STORE_BF16) return put_both(values, halves, columns);
    for (int half = 0; half < 2 && columns > half * kLanes; ++half) {
      const int64_t count = columns - half * kLanes;
      if (out_.store == QUIRE_STORE_F32) put(values[half], floats + half * kLanes, count);
      if (out_.store == QUIRE_STORE_ADD_F32) add(values[half], floats + half * kLanes, count);
    }
  }

  const quire_linear& w_;
  const Layout layout_;
  const Plan plan_;
  const Input& x_;
  const Output& out_;
  const int64_t block_steps_;
};

void Product::unpack(Tile& tile, Scratch& scratch) const {
  const int64_t inputs = step_inputs(w_.kind), target = unpacked(w_.kind);
  const int64_t target_steps = tile.steps * inputs / step_inputs(target);
  const uint8_t* from = tile.weights;
  uint8_t* to = scratch.unpacked;
  for (int64_t g = 0; g < tile.groups; ++g) {
    std::memcpy(to, from, layout_.head);
    from += layout_.head;
    to += layout_.head;
    switch (w_.kind) {
      case QUIRE_LINEAR_BF16: quire::unpack<Bf16Loader>(from, tile.steps, to); break;
      case QUIRE_LINEAR_F16: quire::unpack<F16Loader>(from, tile.steps, to); break;
      case QUIRE_LINEAR_I8_F32: quire::unpack<I8F32Loader>(from, tile.steps, to); break;
      case QUIRE_LINEAR_I8_BF16: quire::unpack<I8Bf16Loader>(from, tile.steps, to); break;
      case QUIRE_LINEAR_I4_F32: quire::unpack<I4F32Loader>(from, tile.steps, to); break;
      default: quire::unpack<I4Bf16Loader>(from, tile.steps, to);
    }
    from += tile.steps * step_bytes(w_.kind);
    to += target_steps * step_bytes(target);
  }
  tile.weights = scratch.unpacked;
  tile.steps = target_steps;
}

Scratch& scratch_of_thread() {
  static thread_local Scratch scratch;
  return scratch;
}

// What a member does once it has no more tasks.
void end_tasks(Scratch& scratch) {
#if defined(QUIRE_AMX)
  if (scratch.shaped_rows) amx_release();
#endif
  scratch.shaped_rows = 0;
}

// The end of a task prefetches the start of the one that this member probably takes next: members take turns.
void run_task(const Team& team, const Product& product, int64_t now, Scratch& scratch) {
  const Plan& plan = product.plan();
  const int64_t then = now + team.size();
  const uint8_t* next = then < plan.tasks ? product.panel(plan.task(then).panel) : nullptr;
  product.run(plan.task(now), next, scratch);
}

}  // namespace

void linear(Team& team, const quire_linear& w, const Input& x, int64_t rows, const Output& out) {
  if (rows < 1) return;
  const Product product(w, x, rows, out);
  const Plan& plan = product.plan();
  Scratch& scratch = scratch_of_thread();
  team.phase(plan.tasks, [&](int64_t now) { run_task(team, product, now, scratch); });
  end_tasks(scratch);
}

void linear(Team& team, Queue& queue, const quire_linear& w, const Input& x, int64_t rows, const Output& out) {
  if (rows < 1) return;
  const Product product(w, x, rows, out);
  Scratch& scratch = scratch_of_thread();
  for (int64_t now; (now = queue.take()) < product.plan().tasks;) run_task(team, product, now, scratch);
  end_tasks(scratch);
}

}  // namespace quire

extern "C" size_t quire_linear_bytes(const quire_linear* w) {
  const bool grouped = w->group != 0;
  if (w->kind < QUIRE_LINEAR_F32 || w->kind > QUIRE_LINEAR_F16 || w->n < 1 || w->k < 1) return 0;
  if (grouped && (!quire::is_weight_only(w->kind) || w->group % quire::kLeastGroup || w->k % w->group)) return 0;
  if (w->group > quire::Layout::kBlockInputs || (w->has_zeros && !grouped) || (w->paired && w->n % 2)) return 0;
  // Sums of 255 · 128 · k stay within 32 bits.
  if (w->kind == QUIRE_LINEAR_W8A8 && w->k > 65536) return 0;
  const quire::Layout layout(*w);
  return layout.panels * (layout.panel_bytes + sizeof(quire::PanelEnd));
}

extern "C" int32_t quire_linear_pack(const quire_linear* w, const quire_source* sources, int32_t count,
                                     int32_t threads) {
  if (!quire_linear_bytes(w) || !quire::fits(*w, sources, count)) return 1;
  quire::run_team(threads, 0, [&](const quire::Team& team) { quire::pack(team, *w, sources, count); });
  return 0;
}

extern "C" size_t quire_linear_scratch(const quire_linear* w, int64_t rows) {
  return quire::input_bytes(*w, rows);
}

extern "C" int32_t quire_linear_run(const quire_linear* w, const void* x, int32_t x_type, int64_t x_stride,
                                    int64_t rows, void* out, int64_t out_stride, int32_t store, void* scratch,
                                    int32_t threads) {
  using namespace quire;
  const bool paired = store >= QUIRE_STORE_SILU_F32;
  if (!quire_linear_bytes(w) || (x_type != QUIRE_F32 && x_type != QUIRE_BF16)) return 1;
  if (store < QUIRE_STORE_F32 || store > QUIRE_STORE_GELU_BF16) return 1;
  if (paired != (w->paired != 0)) return 1;
  const bool direct = x_type == input_type(*w) && !needs_put_row(*w) && row_elements(*w) == w->k;
  const int64_t bytes = x_type == QUIRE_F32 ? 4 : 2;
  const Input made = input_at(*w, rows, scratch);
  const Input input = direct ? Input{const_cast<void*>(x), x_stride * bytes, nullptr, nullptr} : made;
  const Output output{out, out_stride, static_cast<quire_store>(store)};
  run_team(threads, 2, [&](Team& team) {
    if (!direct) {
      team.phase(rows, [&](int64_t m) {
        if (x_type == QUIRE_F32) {
          put_row(*w, made, m, static_cast<const float*>(x) + m * x_stride);
        } else {
          put_row(*w, made, m, static_cast<const bf16*>(x) + m * x_stride);
        }
      });
    }
    linear(team, *w, input, rows, output);
  });
  return 0;
}
