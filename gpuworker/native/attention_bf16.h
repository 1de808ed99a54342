// Dot products of pairs of bf16, where the level has them.
#pragma once

#include "attention_simd.h"
#include "bf16_dots.h"

#if defined(QUIRE_BF16_DOTS)

namespace quire {

// acc + a.even · b.even + a.odd · b.odd for each pair of bf16.
inline __m512 dot_bf16(__m512 acc, __m512i a, __m512i b) {
  // Casts, where copies would pass through memory.
  return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
}
// The numbers of `low`, then those of `high`, rounded to bf16.
inline __m512i round_bf16(Vec low, Vec high) {
  return (__m512i)_mm512_cvtne2ps_pbh(high.v, low.v);
}

}  // namespace quire

#endif
