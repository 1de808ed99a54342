// How the kinds of weights are multiplied: "maths", which multiply and add, and loaders, which read steps of a panel.
//
// Here weights become floats. linear_pairs.h has what multiplies pairs of bf16, and linear_bytes.h integers by integers.
#pragma once

#include <cstdint>
#include <cstring>

#include "simd.h"

namespace quire {

constexpr int kPanel = 32;  // columns of a panel: a step has two vectors of 16 of them

// ---- math: one multiplication of a vector of weights with an input, added to sums ---

struct F32Math {
  using Sum = Vec;
  using Weight = Vec;
  static constexpr int64_t kInputBytes = 4;  // of one broadcast input
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

// Whether weights have scales for groups of inputs: never, only after integers were unpacked for many rows, or always.
enum class Groups { kNone, kUnpacked, kAll };

// ---- loaders: kSub times two vectors of weights from one step; the two are columns 0-15 and 16-31 ---

struct F32Loader {
  using Math = F32Math;
  static constexpr Groups kGroups = Groups::kUnpacked;
  static constexpr int kSub = 1, kBytes = 128;
  static void load(const uint8_t* p, Vec (&w)[kSub][2]) {
    const float* q = reinterpret_cast<const float*>(p);
    w[0][0] = Vec::load(q);
    w[0][1] = Vec::load(q + 16);
  }
};

struct F16Loader {
  using Math = F32Math;
  static constexpr Groups kGroups = Groups::kNone;
  static constexpr int kSub = 1, kBytes = 64;
  static void load(const uint8_t* p, Vec (&w)[kSub][2]) {
    const f16* q = reinterpret_cast<const f16*>(p);
    w[0][0] = Vec::load(q);
    w[0][1] = Vec::load(q + 16);
  }
};

struct I8F32Loader {
  using Math = F32Math;
  static constexpr Groups kGroups = Groups::kAll;
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
  static constexpr Groups kGroups = Groups::kAll;
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
