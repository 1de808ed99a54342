// Packing: from the rows of a checkpoint to panels.
#include <cstring>

#include "linear_layout.h"

namespace quire {
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

}  // namespace quire

using quire::Layout;

extern "C" size_t quire_linear_bytes(const quire_linear* w) {
  const bool grouped = w->group != 0;
  if (w->kind < QUIRE_LINEAR_F32 || w->kind > QUIRE_LINEAR_F16 || w->n < 1 || w->k < 1) return 0;
  if (grouped && (!quire::is_weight_only(w->kind) || w->group % 32 || w->k % w->group)) return 0;
  if (w->group > Layout::kBlockInputs || (w->has_zeros && !grouped) || (w->paired && w->n % 2)) return 0;
  // Sums of 255 · 128 · k stay within 32 bits.
  if (w->kind == QUIRE_LINEAR_W8A8 && w->k > 65536) return 0;
  const Layout layout(*w);
  return layout.panels * (layout.panel_bytes + sizeof(quire::PanelEnd));
}

extern "C" int32_t quire_linear_pack(const quire_linear* w, const quire_source* sources, int32_t count,
                                     int32_t threads) {
  if (!quire_linear_bytes(w) || !quire::fits(*w, sources, count)) return 1;
  quire::run_team(threads, 0, [&](const quire::Team& team) { quire::pack(team, *w, sources, count); });
  return 0;
}
