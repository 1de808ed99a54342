// Rows of a packed weight as floats: a model whose last linear is its embedding needs no second copy of it, and one whose
// embedding is stored in integers keeps them.
#pragma once

#include "linear_layout.h"

namespace quire {

// Writes the w.k numbers of a row of a float kind. They lie one step apart, `step_inputs` of them together.
inline void unpack_float_row(const quire_linear& w, const Layout& layout, int64_t row, float* out) {
  const uint8_t* panel = layout.panel(w, row / kPanel);
  const int64_t inputs = step_inputs(w.kind), stride = step_bytes(w.kind);
  for (int64_t first = 0; first < inputs; ++first) {
    const uint8_t* at = panel + place(w.kind, first, row % kPanel).byte;
    for (int64_t k = first; k < w.k; k += inputs, at += stride) {
      if (w.kind == QUIRE_LINEAR_F32) {
        std::memcpy(out + k, at, sizeof(float));
      } else if (w.kind == QUIRE_LINEAR_BF16) {
        bf16 number;
        std::memcpy(&number, at, sizeof number);
        out[k] = to_float(number);
      } else {
        f16 number;
        std::memcpy(&number, at, sizeof number);
        out[k] = to_float(number);
      }
    }
  }
}

// The same for integers: q · scale + shift.
inline void unpack_integer_row(const quire_linear& w, const Layout& layout, int64_t row, float* out) {
  const uint8_t* panel = layout.panel(w, row / kPanel);
  const int64_t column = row % kPanel, group = layout.groups ? w.group : w.k;
  for (int64_t begin = 0; begin < w.k; begin += group) {
    const int64_t g = begin / group;
    const float* head = reinterpret_cast<const float*>(panel + layout.offset(g * layout.group_steps));
    const float scale = layout.groups ? head[column] : layout.end(w, row / kPanel)->scales[column];
    const float shift = w.has_zeros ? head[kPanel + column] : 0.0f;
    const uint8_t* values = panel + (g + 1) * layout.head;
    for (int64_t k = begin; k < begin + group; ++k) {
      const Place at = place(w.kind, k, column);
      uint16_t word;
      std::memcpy(&word, values + at.byte, is_i4(w.kind) ? 2 : 1);
      const int q = is_i4(w.kind) ? (word >> at.shift & 15) - 8 : static_cast<int8_t>(word);
      out[k] = static_cast<float>(q) * scale + shift;
    }
  }
}

// Writes the w.k numbers of a row of any kind.
inline void unpack_row(const quire_linear& w, const Layout& layout, int64_t row, float* out) {
  return is_weight_only(w.kind) ? unpack_integer_row(w, layout, row, out) : unpack_float_row(w, layout, row, out);
}

}  // namespace quire
