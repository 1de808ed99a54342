// Rows of a packed weight as floats: a model whose last linear is its embedding needs no second copy of it.
#pragma once

#include "linear_layout.h"

namespace quire {

// Whether the rows of a packed weight can be read back: the float kinds.
inline bool has_rows(const quire_linear& w) {
  return (w.kind == QUIRE_LINEAR_F32 || w.kind == QUIRE_LINEAR_BF16) && !w.paired;
}

// Writes the w.k numbers of a row. They lie one step apart, `step_inputs` of them together.
inline void unpack_row(const quire_linear& w, const Layout& layout, int64_t row, float* out) {
  const uint8_t* panel = layout.panel(w, row / kPanel);
  const int64_t inputs = step_inputs(w.kind), stride = step_bytes(w.kind);
  for (int64_t first = 0; first < inputs; ++first) {
    const uint8_t* at = panel + place(w.kind, first, row % kPanel).byte;
    for (int64_t k = first; k < w.k; k += inputs, at += stride) {
      if (w.kind == QUIRE_LINEAR_F32) {
        std::memcpy(out + k, at, sizeof(float));
      } else {
        bf16 number;
        std::memcpy(&number, at, sizeof number);
        out[k] = to_float(number);
      }
    }
  }
}

}  // namespace quire
