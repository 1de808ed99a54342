// How the kinds of weights are multiplied: "maths", which multiply and add, and loaders, which read steps of a panel.
//
// Where the processor has dot products of bf16 pairs, these are multiplied; else bf16 is widened to floats, as f16 always is.
// linear_bytes.h has what multiplies integers by integers.
#pragma once

#include <cstdint>
#include <cstring>

#include "bf16_dots.h"
#include "linear.h"
#include "simd.h"

namespace quire {

// ---- math: one multiplication of a vector of weights with an input, added to sums ---

struct F32Math {
  using Sum = Vec;
  using Weight = Vec;
  static constexpr int64_t kInputBytes = 4;  // of one broadcast input
  static constexpr bool kGroups = true;      // weights may have scales for groups of inputs
  static Vec input(const uint8_t* p) {
    float x;
    std::memcpy(&x, p, 4);
    return Vec::all(x);
  }
  static Sum zero() { return Vec::zero(); }
  static Sum load(const float* p) { return Vec::load(p); }
  static void store(Sum s, float* p) { s.store(p); }
  static Sum add(Sum s, Weight w, Vec x) { return fma(w, x, s); }
  static Vec value(Sum s) { return s; }
};

#if defined(__AVX512F__)

inline __m512i broadcast4(const uint8_t* p) {
  int32_t four;
  std::memcpy(&four, p, 4);
  return _mm512_set1_epi32(four);
}

#endif
#if defined(QUIRE_BF16_DOTS)

struct Bf16Math {  // pairs
  using Sum = Vec;
  using Weight = __m512i;
  static constexpr int64_t kInputBytes = 4;
  static constexpr bool kGroups = true;
  static __m512i input(const uint8_t* p) { return broadcast4(p); }
  static Sum zero() { return Vec::zero(); }
  static Sum load(const float* p) { return Vec::load(p); }
  static void store(Sum s, float* p) { s.store(p); }
  static Sum add(Sum s, Weight w, __m512i x) {
    return {_mm512_dpbf16_ps(s.v, reinterpret_cast<__m512bh>(w), reinterpret_cast<__m512bh>(x))};
  }
  static Vec value(Sum s) { return s; }
};

#endif
// ---- loaders: kSub times two vectors of weights from one step; the two are columns 0-15 and 16-31 ---

struct F32Loader {
  using Math = F32Math;
  static constexpr int kSub = 1, kBytes = 128;
  static void load(const uint8_t* p, Vec (&w)[kSub][2]) {
    const float* q = reinterpret_cast<const float*>(p);
    w[0][0] = Vec::load(q);
    w[0][1] = Vec::load(q + 16);
  }
};

struct F16Loader {
  using Math = F32Math;
  static constexpr int kSub = 1, kBytes = 64;
  static void load(const uint8_t* p, Vec (&w)[kSub][2]) {
    const f16* q = reinterpret_cast<const f16*>(p);
    w[0][0] = Vec::load(q);
    w[0][1] = Vec::load(q + 16);
  }
};

struct I8F32Loader {
  using Math = F32Math;
  static constexpr int kSub = 1, kBytes = 32;
  static void load(const uint8_t* p, Vec (&w)[kSub][2]) {
    const int8_t* q = reinterpret_cast<const int8_t*>(p);
    w[0][0] = Vec::load(q);
    w[0][1] = Vec::load(q + 16);
  }
};

#if defined(__AVX512F__)

// Nibble `place` of sixteen words, less 8.
inline Vec nibble(__m512i words, int place) {
  const __m512 table = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
  return {_mm512_permutexvar_ps(_mm512_srli_epi32(words, 4 * place), table)};  // the index is the low four bits
}

#endif

// Nibble `place` of sixteen 16-bit words, less 8.
inline Vec nibbles(const uint8_t* p, int place) {
#if defined(__AVX512F__)
  return nibble(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), place);
#elif defined(__AVX2__)
  auto half = [place](const uint8_t* q) {
    __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(q)));
    words = _mm256_and_si256(_mm256_srli_epi32(words, 4 * place), _mm256_set1_epi32(15));
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(words, _mm256_set1_epi32(8)));
  };
  return {half(p), half(p + 16)};
#elif defined(QUIRE_NEON)
  // The nibble less 8 in the upper four bits, 4096 times as much.
  auto half = [place](const uint8_t* q) {
    const uint16x8_t words = veorq_u16(vreinterpretq_u16_u8(vld1q_u8(q)), vdupq_n_u16(0x8888));
    return vreinterpretq_s16_u16(vandq_u16(words << (12 - 4 * place), vdupq_n_u16(0xf000)));
  };
  return Vec::from<12>(half(p), half(p + 16));
#else
  return each([&](int i) {
    uint16_t word;
    std::memcpy(&word, p + 2 * i, 2);
    return static_cast<float>((word >> (4 * place)) & 15) - 8.0f;
  });
#endif
}

struct I4F32Loader {
  using Math = F32Math;
  static constexpr int kSub = 4, kBytes = 64;
  static void load(const uint8_t* p, Vec (&w)[kSub][2]) {
    for (int i = 0; i < 4; ++i) {
      w[i][0] = nibbles(p, i);
      w[i][1] = nibbles(p + 32, i);
    }
  }
  // Of one input alone: kLateLoads.
  static void load(const uint8_t* p, int i, Vec (&w)[2]) {
    w[0] = nibbles(p, i);
    w[1] = nibbles(p + 32, i);
  }
};

#if defined(QUIRE_BF16_DOTS)

struct Bf16Loader {
  using Math = Bf16Math;
  static constexpr int kSub = 1, kBytes = 128;
  static void load(const uint8_t* p, __m512i (&w)[kSub][2]) {
    w[0][0] = _mm512_loadu_si512(p);
    w[0][1] = _mm512_loadu_si512(p + 64);
  }
};

struct I8Bf16Loader {
  using Math = Bf16Math;
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

// Writes the weights of so many steps one after the other, as they are multiplied.
template <typename Loader>
void unpack(const uint8_t* from, int64_t steps, uint8_t* to) {
  constexpr int64_t vector = sizeof(typename Loader::Math::Weight);
  for (int64_t i = 0; i < steps; ++i, from += Loader::kBytes) {
    typename Loader::Math::Weight w[Loader::kSub][2];
    Loader::load(from, w);
    for (int s = 0; s < Loader::kSub; ++s) {
      for (int half = 0; half < 2; ++half) {
        std::memcpy(to, &w[s][half], vector);
        to += vector;
      }
    }
  }
}

}  // namespace quire
