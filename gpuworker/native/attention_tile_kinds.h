// How attention of many queries multiplies: how many lanes and rows at once, as floats or as pairs of bf16.
#pragma once

#include <type_traits>

#include "amx.h"
#include "attention_bf16.h"
#include "attention_kernels.h"

namespace quire {

#if defined(__AVX512F__)
constexpr int kVectors = 4;  // of lanes at once, if the item has that many
constexpr int rows_at_once(int vectors) { return vectors == 1 ? 16 : vectors == 2 ? 8 : 4; }
#elif defined(__AVX2__) || defined(QUIRE_NEON)
constexpr int kVectors = 1;
constexpr int rows_at_once(int) { return 6; }
#else
constexpr int kVectors = 1;
constexpr int rows_at_once(int) { return 4; }
#endif

// Rows of K are whole numbers of it, or are filled up with zeros.
template <typename Kind>
constexpr int kKeyUnit = Kind::kAmx ? 32 : Kind::kPer;

// Calls body(row, std::integral_constant of rows) for `count` rows, a multiple of `Unit`: most at once, then by fours, and what
// is left singly.
template <int Most, int Unit, typename Body>
inline void for_rows(int count, Body&& body) {
  int row = 0;
  for (; row + Most <= count; row += Most) body(row, std::integral_constant<int, Most>());
  if constexpr (Most != kRun) {
    for (; row + kRun <= count; row += kRun) body(row, std::integral_constant<int, kRun>());
  }
  if constexpr (Most % kRun != 0 || Unit % kRun != 0) {
    for (; row < count; ++row) body(row, std::integral_constant<int, 1>());
  }
}
inline int row_steps(int most, int count) { return count / most + count % most / kRun + count % most % kRun; }

// Sums `steps` products of broadcast a[row][step] and vectors b[step][vector], for `Rows` rows and `V` vectors of lanes.
// row(r) says where row r begins; steps are `a_step` numbers apart in it.
struct Floats {
  using Number = float;
  using Acc = Vec;
  static Acc zero() { return Vec::zero(); }
  static Acc from(Vec v) { return v; }
  static Vec to_vec(Acc acc) { return acc; }
  static Acc load(const Number* p) { return Vec::load(p); }
  static Acc broadcast(const Number* p) { return Vec::all(*p); }
  static Acc dot(Acc acc, Acc a, Acc b) { return fma(a, b, acc); }
  static constexpr int kPer = 1;  // numbers in a step
  static constexpr bool kAmx = false;
};

#if defined(QUIRE_BF16_DOTS)
struct Bf16Pairs {
  using Number = bf16;
  using Acc = __m512;
  static Acc zero() { return _mm512_setzero_ps(); }
  static Acc from(Vec v) { return v.v; }
  static Vec to_vec(Acc acc) { return {acc}; }
  static __m512i load(const Number* p) { return _mm512_loadu_si512(p); }
  static __m512i broadcast(const Number* p) {
    float both;
    std::memcpy(&both, p, 4);
    return _mm512_castps_si512(_mm512_set1_ps(both));
  }
  static Acc dot(Acc acc, __m512i a, __m512i b) { return dot_bf16(acc, a, b); }
  static constexpr int kPer = 2;
#if defined(QUIRE_AMX)
  static constexpr bool kAmx = true;  // both products run on the matrix unit
#else
  static constexpr bool kAmx = false;
#endif
};

// 32 numbers of a row, of which `count` are there, as bf16; and lanes 0-15 and 16-31 alternating.
inline __m512i row32(const bf16* from, int count) { return _mm512_maskz_loadu_epi16(first32(count), from); }
inline __m512i row32(const int8_t* from, int count) {
  const __m256i bytes = _mm256_maskz_loadu_epi8(first32(count), from);
  const Vec low{_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes)))};
  const Vec high{_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1)))};
  return round_bf16(low, high);
}
inline __m512i alternate() {
  alignas(64) static const uint16_t from[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_load_si512(from);
}

#endif

}  // namespace quire
