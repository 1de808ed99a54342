// The vector operations of attention beyond simd.h: powers of two, masks by position, sums of sixteen vectors at once,
// and (AVX-512) dot products of pairs of bf16 or of 16-bit integers.
#pragma once

#include <limits>

#include "simd.h"

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define QUIRE_PAIRS 1
#endif

namespace quire {

constexpr float kLog2E = 1.44269504f;
// The largest score before the first one: finite, so that differences are numbers.
constexpr float kNoScore = -1e30f;
constexpr float kMasked = -std::numeric_limits<float>::infinity();

// x · 2^n for whole n <= 0; 0 where n is kNoPower.
#if defined(__AVX512F__)
constexpr float kNoPower = -160.0f;
inline Vec scale_down(Vec x, Vec n) { return {_mm512_scalef_ps(x.v, n.v)}; }
#elif defined(__AVX2__)
constexpr float kNoPower = -127.0f;
inline Vec scale_down(Vec x, Vec n) { return scale2(x, n); }
#else
constexpr float kNoPower = -127.0f;
inline Vec scale_down(Vec x, Vec n) {
  return each([&](int i) {
    const uint32_t bits = static_cast<uint32_t>(static_cast<int32_t>(n.v[i]) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, 4);
    return x.v[i] * power;
  });
}
#endif

// 2^x for x <= 0, relative error below 2e-7, exactly 1 for 0 and exactly 0 from kNoPower down. 2^x = 2^n · 2^r with whole n
// and |r| <= 1/2; the polynomial is the minimax fit of degree 5 to 2^r that is 1 at 0.
inline Vec exp2_falling(Vec x) {
  const Vec kept = max(x, Vec::all(kNoPower));
  const Vec n = round(kept);
  const Vec r = kept - n;
  Vec p = Vec::all(1.32647273e-3f);
  for (float c : {9.67151299e-3f, 5.55073358e-2f, 2.40222424e-1f, 6.93147004e-1f, 1.0f}) p = fma(p, r, Vec::all(c));
  return scale_down(p, n);
}
inline float exp2_falling(float x) {
  float lanes[kLanes];
  exp2_falling(Vec::all(x)).store(lanes);
  return lanes[0];
}

// cap · tanh(x / cap), by tanh(y) = 1 - 2 / (e^2y + 1).
inline Vec soft_cap(Vec x, float cap) {
  const Vec e = exp(x * Vec::all(2.0f / cap));
  return Vec::all(cap) - Vec::all(2.0f * cap) / (e + Vec::all(1.0f));
}

// The first `count` numbers (less than kLanes), zeros after them; touches no more memory than that.
template <typename T>
inline Vec load_first(const T* p, int count) {
  T padded[kLanes] = {};
  for (int i = 0; i < count; ++i) padded[i] = p[i];
  return Vec::load(padded);
}
template <typename T>
inline void store_first(Vec v, T* p, int count) {
  T padded[kLanes];
  v.store(padded);
  for (int i = 0; i < count; ++i) p[i] = padded[i];
}

inline Vec counting() {
  alignas(64) static const float lanes[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return Vec::load(lanes);
}

#if defined(__AVX512F__)

// Lane i is the sum of the lanes of a[i], by shuffles and `add` on registers of floats or integers.
template <typename Add>
inline __m512 sum_lanes(const __m512 (&a)[kLanes], Add add) {
  __m512 fours[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512 *p = a + 4 * i;
    const __m512d x = _mm512_castps_pd(add(_mm512_unpacklo_ps(p[0], p[1]), _mm512_unpackhi_ps(p[0], p[1])));
    const __m512d y = _mm512_castps_pd(add(_mm512_unpacklo_ps(p[2], p[3]), _mm512_unpackhi_ps(p[2], p[3])));
    fours[i] = add(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  }
  const auto parts = [&](__m512 x, __m512 y) {
    return add(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xdd));
  };
  return parts(parts(fours[0], fours[1]), parts(fours[2], fours[3]));
}
inline Vec sums(const Vec (&a)[kLanes]) {
  __m512 floats[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) floats[i] = a[i].v;
  return {sum_lanes(floats, [](__m512 x, __m512 y) { return _mm512_add_ps(x, y); })};
}

#else

inline Vec sums(const Vec (&a)[kLanes]) {
  float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = a[i].sum();
  return Vec::load(lanes);
}

#endif

// x where first <= position < end, else kMasked.
#if defined(__AVX512F__)
inline Vec keep_between(Vec x, Vec position, Vec first, Vec end) {
  const __mmask16 from = _mm512_cmp_ps_mask(first.v, position.v, _CMP_LE_OQ);
  const __mmask16 kept = _mm512_mask_cmp_ps_mask(from, position.v, end.v, _CMP_LT_OQ);
  return {_mm512_mask_mov_ps(_mm512_set1_ps(kMasked), kept, x.v)};
}
#elif defined(__AVX2__)
inline Vec keep_between(Vec x, Vec position, Vec first, Vec end) {
  auto half = [](__m256 y, __m256 at, __m256 from, __m256 to) {
    const __m256 kept = _mm256_and_ps(_mm256_cmp_ps(from, at, _CMP_LE_OQ), _mm256_cmp_ps(at, to, _CMP_LT_OQ));
    return _mm256_blendv_ps(_mm256_set1_ps(kMasked), y, kept);
  };
  return {half(x.a, position.a, first.a, end.a), half(x.b, position.b, first.b, end.b)};
}
#else
inline Vec keep_between(Vec x, Vec position, Vec first, Vec end) {
  return each([&](int i) {
    return first.v[i] <= position.v[i] && position.v[i] < end.v[i] ? x.v[i] : kMasked;
  });
}
#endif

#if defined(QUIRE_PAIRS)

// Two bf16 rows a and b of 32 numbers, interleaved: within each 128-bit part numbers 0-3 go to `low`, 4-7 to `high`.
struct Interleaved {
  __m512i low, high;
};
inline Interleaved interleave(__m512i a, __m512i b) {
  return {_mm512_unpacklo_epi16(a, b), _mm512_unpackhi_epi16(a, b)};
}
// The sums accumulated on the two halves of Interleaved, in the order of the numbers: 0-15 and 16-31.
inline void in_order(__m512 low, __m512 high, Vec& first, Vec& second) {
  const __m512i lower = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i upper = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  first.v = _mm512_permutex2var_ps(low, lower, high);
  second.v = _mm512_permutex2var_ps(low, upper, high);
}

inline __mmask32 first32(int count) { return count >= 32 ? ~0u : (1u << count) - 1u; }

// acc + a.even · b.even + a.odd · b.odd for each pair of bf16.
inline __m512 dot_bf16(__m512 acc, __m512i a, __m512i b) {
  __m512bh x, y;
  std::memcpy(&x, &a, 64);
  std::memcpy(&y, &b, 64);
  return _mm512_dpbf16_ps(acc, x, y);
}
// The numbers of `low`, then those of `high`, rounded to bf16.
inline __m512i round_bf16(Vec low, Vec high) {
  const __m512bh both = _mm512_cvtne2ps_pbh(high.v, low.v);
  __m512i out;
  std::memcpy(&out, &both, 64);
  return out;
}

#endif

}  // namespace quire
