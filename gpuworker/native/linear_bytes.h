// The products of 8-bit weights with 8-bit activations: quads of bytes where the processor has dot products of them; else
// bytes are widened to pairs of 16-bit numbers.
#pragma once

#include "byte_dots.h"
#include "linear_math.h"

namespace quire {

#if defined(__AVX512F__)

// With dot products of bytes: quads; inputs are 128 + q, which `compensation` takes off in the end. Else pairs of 16 bits.
struct I8Math {
  using Sum = __m512i;
  using Weight = __m512i;
  static constexpr int64_t kInputBytes = 4;
  static __m512i input(const uint8_t* p) { return broadcast4(p); }
  static Sum zero() { return _mm512_setzero_si512(); }
  static Sum load(const float* p) { return _mm512_loadu_si512(p); }
  static void store(Sum s, float* p) { _mm512_storeu_si512(p, s); }
#if defined(QUIRE_BYTE_DOTS)
  static Sum add(Sum s, Weight w, __m512i x) { return _mm512_dpbusd_epi32(s, x, w); }
#else
  static Sum add(Sum s, Weight w, __m512i x) { return _mm512_add_epi32(s, _mm512_madd_epi16(w, x)); }
#endif
  static Sum minus(Sum s, Sum t) { return _mm512_sub_epi32(s, t); }
  static Vec value(Sum s) { return {_mm512_cvtepi32_ps(s)}; }
};

#elif defined(__AVX2__)

struct I8Math {  // pairs of 16-bit numbers
  struct Sum {
    __m256i a, b;
  };
  using Weight = Sum;
  static constexpr int64_t kInputBytes = 4;
  static __m256i input(const uint8_t* p) {
    int32_t pair;
    std::memcpy(&pair, p, 4);
    return _mm256_set1_epi32(pair);
  }
  static Sum zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  static Sum load(const float* p) {
    auto half = [](const float* q) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(q)); };
    return {half(p), half(p + 8)};
  }
  static void store(Sum s, float* p) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), s.a);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), s.b);
  }
#if defined(QUIRE_PAIR_DOTS)
  static Sum add(Sum s, Weight w, __m256i x) {
    return {_mm256_dpwssd_avx_epi32(s.a, w.a, x), _mm256_dpwssd_avx_epi32(s.b, w.b, x)};
  }
#else
  static Sum add(Sum s, Weight w, __m256i x) {
    return {_mm256_add_epi32(s.a, _mm256_madd_epi16(w.a, x)), _mm256_add_epi32(s.b, _mm256_madd_epi16(w.b, x))};
  }
#endif
  static Sum minus(Sum s, Sum t) { return {_mm256_sub_epi32(s.a, t.a), _mm256_sub_epi32(s.b, t.b)}; }
  static Vec value(Sum s) { return {_mm256_cvtepi32_ps(s.a), _mm256_cvtepi32_ps(s.b)}; }
};

#elif defined(QUIRE_NEON)

// With dot products of bytes: quads. Else the two 16-bit numbers of a pair, one after the other.
struct I8Math {
  struct Sum {
    int32x4_t a, b, c, d;
  };
  static constexpr int64_t kInputBytes = 4;
  static Sum zero() { return {vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0)}; }
  static Sum load(const float* p) {
    const int32_t* q = reinterpret_cast<const int32_t*>(p);
    return {vld1q_s32(q), vld1q_s32(q + 4), vld1q_s32(q + 8), vld1q_s32(q + 12)};
  }
  static void store(Sum s, float* p) {
    int32_t* q = reinterpret_cast<int32_t*>(p);
    vst1q_s32(q, s.a);
    vst1q_s32(q + 4, s.b);
    vst1q_s32(q + 8, s.c);
    vst1q_s32(q + 12, s.d);
  }
  static int32x2_t broadcast(const uint8_t* p) {
    int32_t four;
    std::memcpy(&four, p, 4);
    return vdup_n_s32(four);
  }
#if defined(QUIRE_BYTE_DOTS)
  struct Weight {
    int8x16_t a, b, c, d;
  };
  static constexpr int kWeightBytes = 64;
  static int8x8_t input(const uint8_t* p) { return vreinterpret_s8_s32(broadcast(p)); }
  static Weight weight(const int8_t* p) { return {vld1q_s8(p), vld1q_s8(p + 16), vld1q_s8(p + 32), vld1q_s8(p + 48)}; }
  static Sum add(Sum s, const Weight& w, int8x8_t x) {
    return {vdotq_lane_s32(s.a, w.a, x, 0), vdotq_lane_s32(s.b, w.b, x, 0), vdotq_lane_s32(s.c, w.c, x, 0),
            vdotq_lane_s32(s.d, w.d, x, 0)};
  }
#else
  struct Weight {
    int16x8_t first[2], second[2];  // the first input of sixteen columns, and the second one
  };
  static constexpr int kWeightBytes = 32;
  static int16x4_t input(const uint8_t* p) { return vreinterpret_s16_s32(broadcast(p)); }
  static Weight weight(const int8_t* p) {
    const int8x16x2_t inputs = vld2q_s8(p);
    const int8x16_t first = inputs.val[0], second = inputs.val[1];
    return {{vmovl_s8(vget_low_s8(first)), vmovl_high_s8(first)}, {vmovl_s8(vget_low_s8(second)), vmovl_high_s8(second)}};
  }
  static Sum add(Sum s, const Weight& w, int16x4_t x) {
    s = {vmlal_lane_s16(s.a, vget_low_s16(w.first[0]), x, 0), vmlal_high_lane_s16(s.b, w.first[0], x, 0),
         vmlal_lane_s16(s.c, vget_low_s16(w.first[1]), x, 0), vmlal_high_lane_s16(s.d, w.first[1], x, 0)};
    return {vmlal_lane_s16(s.a, vget_low_s16(w.second[0]), x, 1), vmlal_high_lane_s16(s.b, w.second[0], x, 1),
            vmlal_lane_s16(s.c, vget_low_s16(w.second[1]), x, 1), vmlal_high_lane_s16(s.d, w.second[1], x, 1)};
  }
#endif
  static Sum minus(Sum s, Sum t) { return {s.a - t.a, s.b - t.b, s.c - t.c, s.d - t.d}; }
  static Vec value(Sum s) { return {vcvtq_f32_s32(s.a), vcvtq_f32_s32(s.b), vcvtq_f32_s32(s.c), vcvtq_f32_s32(s.d)}; }
};

#else

struct I8Math {
  struct Sum {
    int32_t v[kLanes];
  };
  struct Weight {
    int16_t v[kLanes][2];
  };
  struct Pair {
    int16_t v[2];
  };
  static constexpr int64_t kInputBytes = 4;
  static Pair input(const uint8_t* p) {
    Pair pair;
    std::memcpy(&pair, p, 4);
    return pair;
  }
  static Sum zero() { return {}; }
  static Sum load(const float* p) {
    Sum s;
    std::memcpy(&s, p, sizeof s);
    return s;
  }
  static void store(Sum s, float* p) { std::memcpy(p, &s, sizeof s); }
  static Sum add(Sum s, const Weight& w, Pair x) {
    for (int i = 0; i < kLanes; ++i) s.v[i] += w.v[i][0] * x.v[0] + w.v[i][1] * x.v[1];
    return s;
  }
  static Sum minus(Sum s, const Sum& t) {
    for (int i = 0; i < kLanes; ++i) s.v[i] -= t.v[i];
    return s;
  }
  static Vec value(const Sum& s) {
    return each([&](int i) { return static_cast<float>(s.v[i]); });
  }
};

#endif

#if defined(QUIRE_NEON)

struct W8A8Loader {
  using Math = I8Math;
  static constexpr Groups kGroups = Groups::kNone;
  static constexpr int kSub = 1, kBytes = 2 * I8Math::kWeightBytes;
  static void load(const uint8_t* p, I8Math::Weight (&w)[kSub][2]) {
    w[0][0] = I8Math::weight(reinterpret_cast<const int8_t*>(p));
    w[0][1] = I8Math::weight(reinterpret_cast<const int8_t*>(p) + I8Math::kWeightBytes);
  }
};

#elif defined(QUIRE_BYTE_DOTS)

struct W8A8Loader {
  using Math = I8Math;
  static constexpr Groups kGroups = Groups::kNone;
  static constexpr int kSub = 1, kBytes = 128;
  static void load(const uint8_t* p, __m512i (&w)[kSub][2]) {
    w[0][0] = _mm512_loadu_si512(p);
    w[0][1] = _mm512_loadu_si512(p + 64);
  }
};

#else

// The 16-bit numbers of two inputs of sixteen columns.
inline I8Math::Weight widened_pairs(const int8_t* p) {
#if defined(__AVX512F__)
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
  auto widen = [](const int8_t* q) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(q)));
  };
  return {widen(p), widen(p + 16)};
#else
  I8Math::Weight w;
  for (int i = 0; i < 2 * kLanes; ++i) w.v[i / 2][i % 2] = p[i];
  return w;
#endif
}

struct W8A8Loader {
  using Math = I8Math;
  static constexpr Groups kGroups = Groups::kNone;
  static constexpr int kSub = 1, kBytes = 64;
  static void load(const uint8_t* p, I8Math::Weight (&w)[kSub][2]) {
    w[0][0] = widened_pairs(reinterpret_cast<const int8_t*>(p));
    w[0][1] = widened_pairs(reinterpret_cast<const int8_t*>(p) + 32);
  }
};

#endif

}  // namespace quire
