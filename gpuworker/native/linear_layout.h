// The memory layout of packed weights: panels of 32 columns, K-major, then a PanelEnd for each panel.
//
// A panel is a row of "steps": as many k as one load of the kind's loader takes (linear_tile.h), for 32 columns. With
// groups, each group starts with its 32 scales and, with zeros, its 32 shifts. The order inside a step
// suits the instructions of the level that the library is built for; nothing outside reads it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "amx.h"
#include "bf16_dots.h"
#include "byte_dots.h"
#include "linear_math.h"
#include "quire_linear.h"

namespace quire {

// Whether pairs of bf16, and quads of bytes, are multiplied and added at once. Without the first, bf16 weights meet
// activations in float32.
#if defined(QUIRE_BF16_DOTS)
constexpr bool kBf16Dots = true;
#else
constexpr bool kBf16Dots = false;
#endif
#if defined(QUIRE_BYTE_DOTS)
constexpr bool kByteDots = true;
#else
constexpr bool kByteDots = false;
#endif
// What is added to an activation of 8 bits that meets quads of bytes.
#if defined(QUIRE_NEON)
constexpr int kByteOffset = 0;
#else
constexpr int kByteOffset = 128;
#endif

#if defined(QUIRE_AMX)
constexpr bool kAmx = true;
#else
constexpr bool kAmx = false;
#endif

// The inputs of a panel's last step, after its sums are complete.
struct PanelEnd {
  float scales[kPanel];         // integer kinds without groups
  float bias[kPanel];
  int32_t compensation[kPanel]; // W8A8: what the offset of the activations adds to the sums
};

inline bool is_i4(int32_t kind) { return kind == QUIRE_LINEAR_I4_F32 || kind == QUIRE_LINEAR_I4_BF16; }
inline bool is_i8(int32_t kind) { return kind == QUIRE_LINEAR_I8_F32 || kind == QUIRE_LINEAR_I8_BF16; }
inline bool is_weight_only(int32_t kind) { return is_i4(kind) || is_i8(kind); }
// Whether weights are integers with scales.
inline bool is_whole(int32_t kind) { return is_weight_only(kind) || kind == QUIRE_LINEAR_W8A8; }
inline bool is_bf16(int32_t kind) {
  return kind == QUIRE_LINEAR_BF16 || kind == QUIRE_LINEAR_I8_BF16 || kind == QUIRE_LINEAR_I4_BF16;
}
// Whether activations are pairs of bf16 in the products of a kind.
inline bool pairs_bf16(int32_t kind) { return kBf16Dots && is_bf16(kind); }
// The kind that a block becomes when it is unpacked for many rows; the kind itself where there is nothing to gain.
inline int32_t unpacked(int32_t kind) {
  if (kind == QUIRE_LINEAR_W8A8) return kind;
  return pairs_bf16(kind) ? QUIRE_LINEAR_BF16 : QUIRE_LINEAR_F32;
}
// Bytes of one activation as the products of a kind read it.
inline int64_t activation_bytes(int32_t kind) {
  if (kind == QUIRE_LINEAR_W8A8) return kByteDots ? 1 : 2;
  return pairs_bf16(kind) ? 2 : 4;
}

inline int64_t step_inputs(int32_t kind) {
  if (is_i4(kind)) return 4;
  if (kind == QUIRE_LINEAR_W8A8) return kByteDots ? 4 : 2;
  return pairs_bf16(kind) ? 2 : 1;
}

inline int64_t step_bytes(int32_t kind) {
  if (is_i4(kind)) return kPanel * 4 / 2;
  const int64_t each = is_whole(kind) ? 1 : kind == QUIRE_LINEAR_F32 ? 4 : 2;
  return kPanel * step_inputs(kind) * each;
}

// Whether the matrix unit multiplies a weight: all rows, so that a result does not depend on their number. Vectors
// multiply groups of 16 inputs, which fill half a row of a register of the unit.
inline bool on_amx(const quire_linear& w) {
  return kAmx && (is_bf16(w.kind) || w.kind == QUIRE_LINEAR_W8A8) && w.group % 32 == 0;
}

// The inputs of a panel are filled up with zeros to a multiple of so many: a row of a register of the matrix unit.
inline int64_t padded_inputs(const quire_linear& w) {
  return on_amx(w) ? 64 / activation_bytes(w.kind) : step_inputs(w.kind);
}

// The place of weight (k, column) of a panel: the byte, and for int4 the bits in the 16-bit word that starts there.
struct Place {
  int64_t byte;
  int shift;
};
inline Place place(int32_t kind, int64_t k, int64_t column) {
  const int64_t inputs = step_inputs(kind), step = k / inputs, rest = k % inputs;
  const int64_t start = step * step_bytes(kind);
  if (kind == QUIRE_LINEAR_I4_BF16 && kBf16Dots) {
    // Word 2c + i holds input i of each of two pairs, for column c and for column 16 + c.
    return {start + (2 * (column % 16) + rest % 2) * 2, static_cast<int>(rest / 2 * 2 + column / 16) * 4};
  }
  if (is_i4(kind)) return {start + column * 2, static_cast<int>(rest) * 4};
  const int64_t each = step_bytes(kind) / (kPanel * inputs);
  return {start + (column * inputs + rest) * each, 0};
}

constexpr int64_t kLeastGroup = 16;  // inputs of a group: a multiple of this

struct Layout {
  int32_t kind;
  bool amx;
  int64_t panels, steps;        // steps: in a whole panel
  int64_t groups, group_steps;  // groups: 0 without groups
  int64_t head;                 // bytes in front of each group
  int64_t panel_bytes;
  int64_t block_steps;          // steps of a block of k that fits the L2 cache beside the activations, on AMX the L1 cache
  int64_t unit;                 // columns of one source in a panel: 32, or 16 of a paired weight

  explicit Layout(const quire_linear& w) : kind(w.kind), amx(on_amx(w)) {
    unit = w.paired ? kPanel / 2 : kPanel;
    panels = w.paired ? (w.n / 2 + unit - 1) / unit : (w.n + kPanel - 1) / kPanel;
    const int64_t inputs = step_inputs(kind);
    const int64_t padded = padded_inputs(w);
    steps = (w.k + padded - 1) / padded * padded / inputs;
    groups = w.group ? w.k / w.group : 0;
    group_steps = w.group ? w.group / inputs : steps;
    head = groups ? kPanel * 4 * (w.has_zeros ? 2 : 1) : 0;
    panel_bytes = (steps * step_bytes(kind) + groups * head + 63) / 64 * 64;
    const int64_t most = (amx || activation_bytes(kind) == 4 ? kBlockInputs : kBlockInputs * 2) / inputs;
    block_steps = groups ? std::max<int64_t>(most / group_steps, 1) * group_steps : most;
  }

  static constexpr int64_t kBlockInputs = 1024;

  const uint8_t* panel(const quire_linear& w, int64_t index) const {
    return static_cast<const uint8_t*>(w.memory) + index * panel_bytes;
  }
  PanelEnd* end(const quire_linear& w, int64_t index) const {
    return reinterpret_cast<PanelEnd*>(static_cast<uint8_t*>(w.memory) + panels * panel_bytes) + index;
  }
  // Offset in a panel of the block that starts with this step (the start of a group where there are groups).
  int64_t offset(int64_t step) const { return step * step_bytes(kind) + (groups ? step / group_steps * head : 0); }
};

}  // namespace quire
