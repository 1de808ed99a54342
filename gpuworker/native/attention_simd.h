// The vector operations of attention beyond simd.h: powers of two, masks by position, and the interleaving of rows for
// dot products of pairs.
#pragma once

#include <limits>

#include "simd.h"

namespace quire {

constexpr float kLog2E = 1.44269504f;
// The largest score before the first one: finite, so that differences are numbers.
constexpr float kNoScore = -1e30f;
constexpr float kMasked = -std::numeric_limits<float>::infinity();

// x · 2^n for whole n <= 0; 0 where n is kNoPower. A result below the least normal float would cost Intel's processors 70 ns:
// as much as a masked slot would cost.
#if defined(__AVX512F__)
constexpr float kNoPower = -126.0f;
inline Vec scale_down(Vec x, Vec n) {
  return {_mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(n.v, _mm512_set1_ps(kNoPower), _CMP_GT_OQ), x.v, n.v)};
}
#elif defined(__AVX2__) || defined(QUIRE_NEON)
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
#if defined(__AVX512F__)
// The same with a relative error below 9e-5, for results that are rounded to bf16, and x up to 100. 2^x = 2^n · 2^r with
// n <= x < n + 1; the polynomial is the minimax fit of degree 3 to 2^r that is 1 at 0.
inline Vec exp2_of_bf16(Vec x) {
  const Vec r{_mm512_reduce_ps(x.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)};
  Vec p = Vec::all(7.70670548e-2f);
  for (float c : {2.27644980e-1f, 6.95116818e-1f, 1.0f}) p = fma(p, r, Vec::all(c));
  return scale_down(p, x);
}
#endif
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

// Four floats, repeated in every quarter of a vector: a number for each of four lanes of queries.
#if defined(__AVX512F__)
inline Vec load_four(const float* p) { return {_mm512_broadcast_f32x4(_mm_loadu_ps(p))}; }
// Number `I` of the four, everywhere.
template <int I>
inline Vec spread(Vec four) { return {_mm512_permute_ps(four.v, I * 0x55)}; }
// The largest number of each vector.
inline Vec maxima(Vec a, Vec b, Vec c, Vec d) {
  const auto both = [](__m512 x, __m512 y) { return _mm512_max_ps(_mm512_unpacklo_ps(x, y), _mm512_unpackhi_ps(x, y)); };
  const __m512d x = _mm512_castps_pd(both(a.v, b.v)), y = _mm512_castps_pd(both(c.v, d.v));
  __m512 four = _mm512_max_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  four = _mm512_max_ps(four, _mm512_shuffle_f32x4(four, four, 0x4e));
  return {_mm512_max_ps(four, _mm512_shuffle_f32x4(four, four, 0xb1))};
}
#elif defined(__AVX2__)
inline Vec load_four(const float* p) {
  const __m256 four = _mm256_broadcast_ps(reinterpret_cast<const __m128*>(p));
  return {four, four};
}
template <int I>
inline Vec spread(Vec four) {
  const __m256 all = _mm256_permute_ps(four.a, I * 0x55);
  return {all, all};
}
inline Vec maxima(Vec a, Vec b, Vec c, Vec d) {
  const auto both = [](Vec v, Vec w) {
    const __m256 x = _mm256_max_ps(v.a, v.b), y = _mm256_max_ps(w.a, w.b);
    return _mm256_castps_pd(_mm256_max_ps(_mm256_unpacklo_ps(x, y), _mm256_unpackhi_ps(x, y)));
  };
  const __m256d x = both(a, b), y = both(c, d);
  const __m256 four = _mm256_max_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(x, y)), _mm256_castpd_ps(_mm256_unpackhi_pd(x, y)));
  const __m256 all = _mm256_max_ps(four, _mm256_permute2f128_ps(four, four, 1));
  return {all, all};
}
#elif defined(QUIRE_NEON)
inline Vec load_four(const float* p) {
  const float32x4_t four = vld1q_f32(p);
  return {four, four, four, four};
}
template <int I>
inline Vec spread(Vec four) {
  const float32x4_t all = vdupq_laneq_f32(four.a, I);
  return {all, all, all, all};
}
inline Vec maxima(Vec a, Vec b, Vec c, Vec d) {
  const auto most = [](Vec v) { return vmaxnmq_f32(vmaxnmq_f32(v.a, v.b), vmaxnmq_f32(v.c, v.d)); };
  const float32x4_t all = vpmaxnmq_f32(vpmaxnmq_f32(most(a), most(b)), vpmaxnmq_f32(most(c), most(d)));
  return {all, all, all, all};
}
#else
inline Vec load_four(const float* p) {
  return each([&](int i) { return p[i % 4]; });
}
template <int I>
inline Vec spread(Vec four) { return Vec::all(four.v[I]); }
inline Vec maxima(Vec a, Vec b, Vec c, Vec d) {
  const float most[] = {a.max(), b.max(), c.max(), d.max()};
  return load_four(most);
}
#endif
// Stores the first N of the four.
template <int N>
inline void store_four(Vec four, float* p) {
  float all[kLanes];
  four.store(all);
  std::memcpy(p, all, N * sizeof(float));
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
#elif defined(QUIRE_NEON)
inline Vec keep_between(Vec x, Vec position, Vec first, Vec end) {
  auto quarter = [](float32x4_t y, float32x4_t at, float32x4_t from, float32x4_t to) {
    return vbslq_f32(vandq_u32(vcleq_f32(from, at), vcltq_f32(at, to)), y, vdupq_n_f32(kMasked));
  };
  return quarters(quarter, x, position, first, end);
}
#else
inline Vec keep_between(Vec x, Vec position, Vec first, Vec end) {
  return each([&](int i) {
    return first.v[i] <= position.v[i] && position.v[i] < end.v[i] ? x.v[i] : kMasked;
  });
}
#endif

#if defined(__AVX512F__)

// Two rows a and b of 32 numbers of 16 bits, interleaved: within each 128-bit part numbers 0-3 go to `low`, 4-7 to `high`.
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

// Rows and columns of sixteen vectors of 32-bit numbers change places.
inline void transpose(__m512i (&v)[16]) {
  __m512i w[16];
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {  // numbers 4q to 4q + 3 of each part q: columns of four rows
    const __m512i a = _mm512_unpacklo_epi32(v[i], v[i + 1]), b = _mm512_unpackhi_epi32(v[i], v[i + 1]);
    const __m512i c = _mm512_unpacklo_epi32(v[i + 2], v[i + 3]), d = _mm512_unpackhi_epi32(v[i + 2], v[i + 3]);
    w[i] = _mm512_unpacklo_epi64(a, c);
    w[i + 1] = _mm512_unpackhi_epi64(a, c);
    w[i + 2] = _mm512_unpacklo_epi64(b, d);
    w[i + 3] = _mm512_unpackhi_epi64(b, d);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {  // column c of each part: rows 0-3, 4-7, 8-11 and 12-15 of it lie in four vectors
    const __m512i a = _mm512_shuffle_i32x4(w[c], w[4 + c], 0x88), b = _mm512_shuffle_i32x4(w[c], w[4 + c], 0xdd);
    const __m512i d = _mm512_shuffle_i32x4(w[8 + c], w[12 + c], 0x88), e = _mm512_shuffle_i32x4(w[8 + c], w[12 + c], 0xdd);
    v[c] = _mm512_shuffle_i32x4(a, d, 0x88);
    v[4 + c] = _mm512_shuffle_i32x4(b, e, 0x88);
    v[8 + c] = _mm512_shuffle_i32x4(a, d, 0xdd);
    v[12 + c] = _mm512_shuffle_i32x4(b, e, 0xdd);
  }
}

inline __mmask32 first32(int count) { return count >= 32 ? ~0u : (1u << count) - 1u; }

#endif
#if defined(__AVX2__) && !defined(__AVX512F__)

// The same of 16 numbers.
struct Interleaved {
  __m256i low, high;
};
inline Interleaved interleave(__m256i a, __m256i b) {
  return {_mm256_unpacklo_epi16(a, b), _mm256_unpackhi_epi16(a, b)};
}
inline Vec in_order(__m256i low, __m256i high) {
  return {_mm256_cvtepi32_ps(_mm256_permute2x128_si256(low, high, 0x20)),
          _mm256_cvtepi32_ps(_mm256_permute2x128_si256(low, high, 0x31))};
}

#endif

}  // namespace quire
