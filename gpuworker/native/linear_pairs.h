// The products of weights with activations in bf16. Where the processor has dot products of bf16 pairs, these are multiplied;
// else bf16 is widened to floats, as f16 always is.
#pragma once

#include "bf16_dots.h"
#include "linear_math.h"

namespace quire {

#if defined(QUIRE_BF16_DOTS)

struct Bf16Math {  // pairs
  using Sum = Vec;
  using Weight = __m512i;
  static constexpr int64_t kInputBytes = 4;
  static __m512i input(const uint8_t* p) { return broadcast4(p); }
  static Sum zero() { return Vec::zero(); }
  static Sum load(const float* p) { return Vec::load(p); }
  static void store(Sum s, float* p) { s.store(p); }
  static Sum add(Sum s, Weight w, __m512i x) {
    return {_mm512_dpbf16_ps(s.v, reinterpret_cast<__m512bh>(w), reinterpret_cast<__m512bh>(x))};
  }
  static Vec value(Sum s) { return s; }
};

struct Bf16Loader {
  using Math = Bf16Math;
  static constexpr Groups kGroups = Groups::kUnpacked;
  static constexpr int kSub = 1, kBytes = 128;
  static void load(const uint8_t* p, __m512i (&w)[kSub][2]) {
    w[0][0] = _mm512_loadu_si512(p);
    w[0][1] = _mm512_loadu_si512(p + 64);
  }
};

struct I8Bf16Loader {
  using Math = Bf16Math;
  static constexpr Groups kGroups = Groups::kAll;
  static constexpr int kSub = 1, kBytes = 64;
  static __m512i vector(const uint8_t* p) {  // whole numbers below 257 are exact in bf16
    auto half = [](const uint8_t* q) { return Vec::load(reinterpret_cast<const int8_t*>(q)).v; };
    return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(half(p + 16), half(p)));
  }
  static void load(const uint8_t* p, __m512i (&w)[kSub][2]) {
    w[0][0] = vector(p);
    w[0][1] = vector(p + 32);
  }
};

struct I4Bf16Loader {
  using Math = Bf16Math;
  static constexpr Groups kGroups = Groups::kAll;
  static constexpr int kSub = 2, kBytes = 64;
  static __m512i table() {  // -8..7 in bf16, twice: an index has five bits, of which four are the number
    alignas(64) static const uint16_t values[32] = {
        0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0,      0x3f80, 0x4000,
        0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040,
        0xc000, 0xbf80, 0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
    return _mm512_load_si512(values);
  }
  static void load(const uint8_t* p, __m512i (&w)[kSub][2]) {
    const __m512i words = _mm512_loadu_si512(p), numbers = table();
    w[0][0] = _mm512_permutexvar_epi16(words, numbers);
    w[0][1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4), numbers);
    w[1][0] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 8), numbers);
    w[1][1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 12), numbers);
  }
};

#else

struct Bf16Loader {
  using Math = F32Math;
  static constexpr Groups kGroups = Groups::kNone;
  static constexpr int kSub = 1, kBytes = 64;
  static void load(const uint8_t* p, Vec (&w)[kSub][2]) {
    const bf16* q = reinterpret_cast<const bf16*>(p);
    w[0][0] = Vec::load(q);
    w[0][1] = Vec::load(q + 16);
  }
};
using I8Bf16Loader = I8F32Loader;
using I4Bf16Loader = I4F32Loader;

#endif

}  // namespace quire
