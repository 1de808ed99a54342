// Sixteen floats at a time, for the compiled instruction set: AVX-512, AVX2, NEON or plain C++.
//
// The library is built once for each level (build.py) and the loader takes the best one that the processor can run, so
// nothing here is decided at run time. Loads and stores are unaligned; the `count` forms touch only the first elements.
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(QUIRE_NEON)  // set by build.py: compilers for aarch64 have NEON at the scalar level too
#include <arm_neon.h>
#else
#include <cmath>
#if defined(__GNUC__) && !defined(__clang__)
// The lanes of a vector are to become vectors, as straight code does. Vectorised as loops, sums go through memory.
#pragma GCC optimize("no-tree-loop-vectorize")
#endif
#endif

namespace quire {

constexpr int kLanes = 16;

// bfloat16 in memory: the upper half of a float.
struct bf16 {
  uint16_t bits;
};

// IEEE half precision in memory.
struct f16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
  uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

// Exact, subnormal numbers, infinities and NaN too.
inline float to_float(f16 x) {
  const uint32_t sign = (x.bits & 0x8000u) << 16, rest = x.bits & 0x7fffu;
  if (rest < 0x400u) return static_cast<float>(rest) * (sign ? -0x1p-24f : 0x1p-24f);
  // The exponent's bias is 112 more, and infinity and NaN keep all ones.
  const uint32_t bits = sign | ((rest << 13) + (rest < 0x7c00u ? 0x38000000u : 0x70000000u));
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

// Rounds to nearest, ties to even. NaN stays NaN.
inline bf16 to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

#if defined(__AVX512F__)

struct Vec {
  __m512 v;

  static Vec zero() { return {_mm512_setzero_ps()}; }
  static Vec all(float x) { return {_mm512_set1_ps(x)}; }
  static Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static Vec load(const bf16* p) {
    __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
  }
  static Vec load(const f16* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
  }
  static Vec load(const int8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
  }
  void store(float* p) const { _mm512_storeu_ps(p, v); }
  void store(bf16* p) const {
    // As to_bf16, lane by lane.
    const __m512i bits = _mm512_castps_si512(v), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const __m512i kept = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16)));
  }
  void store(f16* p) const {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }
  // Rounds to nearest; lanes beyond [-128, 127] saturate.
  void store(int8_t* p) const {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(v)));
  }
  float sum() const { return _mm512_reduce_add_ps(v); }
  float max() const { return _mm512_reduce_max_ps(v); }
};

inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Vec abs(Vec a) { return {_mm512_abs_ps(a.v)}; }
inline Vec number_or_zero(Vec a) { return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a.v, a.v, _CMP_ORD_Q), a.v)}; }
inline Vec round(Vec a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// a · 2^n for whole n in [-126, 127].
inline Vec scale2(Vec a, Vec n) { return {_mm512_scalef_ps(a.v, n.v)}; }

#elif defined(__AVX2__)

struct Vec {
  __m256 a, b;

  static Vec zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static Vec all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static Vec load(const bf16* p) {
    auto half = [](const bf16* q) {
      __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(q));
      return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
    };
    return {half(p), half(p + 8)};
  }
  static Vec load(const f16* p) {
    auto half = [](const f16* q) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(q))); };
    return {half(p), half(p + 8)};
  }
  static Vec load(const int8_t* p) {
    auto half = [](const int8_t* q) {
      __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(q));
      return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
    };
    return {half(p), half(p + 8)};
  }
  void store(float* p) const {
    _mm256_storeu_ps(p, a);
    _mm256_storeu_ps(p + 8, b);
  }
  void store(bf16* p) const {  // as to_bf16, lane by lane
    auto half = [](__m256 x) {
      const __m256i bits = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
      const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
      const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
      const __m256 kept = _mm256_blendv_ps(_mm256_castsi256_ps(rounded), _mm256_castsi256_ps(quiet), _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
      return _mm256_srli_epi32(_mm256_castps_si256(kept), 16);
    };
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(half(a), half(b)), 0xd8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), words);
  }
  void store(f16* p) const {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(b, _MM_FROUND_TO_NEAREST_INT));
  }
  // Rounds to nearest; lanes beyond [-128, 127] saturate.
  void store(int8_t* p) const {
    __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(a), _mm256_cvtps_epi32(b));
    words = _mm256_permute4x64_epi64(words, 0xd8);
    __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
  }
  float sum() const {
    __m256 both = _mm256_add_ps(a, b);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
  }
  float max() const {
    __m256 both = _mm256_max_ps(a, b);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
  }
};

inline Vec operator+(Vec x, Vec y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline Vec operator-(Vec x, Vec y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline Vec operator*(Vec x, Vec y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline Vec operator/(Vec x, Vec y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline Vec fma(Vec x, Vec y, Vec z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline Vec max(Vec x, Vec y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline Vec min(Vec x, Vec y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline Vec abs(Vec x) {
  __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
inline Vec number_or_zero(Vec x) {
  return {_mm256_and_ps(x.a, _mm256_cmp_ps(x.a, x.a, _CMP_ORD_Q)), _mm256_and_ps(x.b, _mm256_cmp_ps(x.b, x.b, _CMP_ORD_Q))};
}
inline Vec round(Vec x) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
inline Vec scale2(Vec x, Vec n) {
  auto half = [](__m256 y, __m256 power) {
    __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(power), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(y, _mm256_castsi256_ps(bits));
  };
  return {half(x.a, n.a), half(x.b, n.b)};
}

#elif defined(QUIRE_NEON)

// Four numbers as floats. A bf16 is the upper half of one: zeros come before it.
inline float32x4_t quad(const float* p) { return vld1q_f32(p); }
inline float32x4_t quad(const bf16* p) {
  const uint16x4_t upper = vld1_u16(&p->bits);
  return vreinterpretq_f32_u16(vzip1q_u16(vdupq_n_u16(0), vcombine_u16(upper, upper)));
}
inline float32x4_t quad(const f16* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits))); }
inline float32x4_t quad(const int8_t* p) {
  uint32_t bytes;
  std::memcpy(&bytes, p, 4);
  return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(bytes)))));
}

struct Vec {
  float32x4_t a, b, c, d;

  static Vec zero() { return all(0.0f); }
  static Vec all(float x) {
    const float32x4_t four = vdupq_n_f32(x);
    return {four, four, four, four};
  }
  static Vec load(const float* p) { return {quad(p), quad(p + 4), quad(p + 8), quad(p + 12)}; }
  static Vec load(const bf16* p) {
    const uint16x8_t none = vdupq_n_u16(0), low = vld1q_u16(&p[0].bits), high = vld1q_u16(&p[8].bits);
    return {vreinterpretq_f32_u16(vzip1q_u16(none, low)), vreinterpretq_f32_u16(vzip2q_u16(none, low)),
            vreinterpretq_f32_u16(vzip1q_u16(none, high)), vreinterpretq_f32_u16(vzip2q_u16(none, high))};
  }
  static Vec load(const f16* p) {
    const float16x8_t low = vreinterpretq_f16_u16(vld1q_u16(&p[0].bits));
    const float16x8_t high = vreinterpretq_f16_u16(vld1q_u16(&p[8].bits));
    return {vcvt_f32_f16(vget_low_f16(low)), vcvt_high_f32_f16(low), vcvt_f32_f16(vget_low_f16(high)),
            vcvt_high_f32_f16(high)};
  }
  static Vec load(const int8_t* p) {
    const int8x16_t bytes = vld1q_s8(p);
    return from(vmovl_s8(vget_low_s8(bytes)), vmovl_high_s8(bytes));
  }
  static Vec from(int16x8_t low, int16x8_t high) {
    return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_high_s16(low)),
            vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_high_s16(high))};
  }
  // Of numbers that are 2^Shift times as large.
  template <int Shift>
  static Vec from(int16x8_t low, int16x8_t high) {
    return {vcvtq_n_f32_s32(vmovl_s16(vget_low_s16(low)), Shift), vcvtq_n_f32_s32(vmovl_high_s16(low), Shift),
            vcvtq_n_f32_s32(vmovl_s16(vget_low_s16(high)), Shift), vcvtq_n_f32_s32(vmovl_high_s16(high), Shift)};
  }
  void store(float* p) const {
    vst1q_f32(p, a);
    vst1q_f32(p + 4, b);
    vst1q_f32(p + 8, c);
    vst1q_f32(p + 12, d);
  }
  void store(bf16* p) const {  // as to_bf16, lane by lane
    auto quarter = [](float32x4_t x) {
      const uint32x4_t bits = vreinterpretq_u32_f32(x), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
      const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
      return vbslq_u32(vceqq_f32(x, x), rounded, vorrq_u32(bits, vdupq_n_u32(0x400000)));
    };
    vst1q_u16(&p[0].bits, vshrn_high_n_u32(vshrn_n_u32(quarter(a), 16), quarter(b), 16));
    vst1q_u16(&p[8].bits, vshrn_high_n_u32(vshrn_n_u32(quarter(c), 16), quarter(d), 16));
  }
  void store(f16* p) const {
    vst1q_u16(&p[0].bits, vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(a), b)));
    vst1q_u16(&p[8].bits, vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(c), d)));
  }
  // Rounds to nearest; lanes beyond [-128, 127] saturate.
  void store(int8_t* p) const {
    auto half = [](float32x4_t x, float32x4_t y) {
      return vqmovn_high_s32(vqmovn_s32(vcvtnq_s32_f32(x)), vcvtnq_s32_f32(y));
    };
    vst1q_s8(p, vqmovn_high_s16(vqmovn_s16(half(a, b)), half(c, d)));
  }
  float sum() const { return vaddvq_f32((a + b) + (c + d)); }
  float max() const { return vmaxnmvq_f32(vmaxnmq_f32(vmaxnmq_f32(a, b), vmaxnmq_f32(c, d))); }
};

inline Vec operator+(Vec x, Vec y) { return {x.a + y.a, x.b + y.b, x.c + y.c, x.d + y.d}; }
inline Vec operator-(Vec x, Vec y) { return {x.a - y.a, x.b - y.b, x.c - y.c, x.d - y.d}; }
inline Vec operator*(Vec x, Vec y) { return {x.a * y.a, x.b * y.b, x.c * y.c, x.d * y.d}; }
inline Vec operator/(Vec x, Vec y) { return {x.a / y.a, x.b / y.b, x.c / y.c, x.d / y.d}; }
// f of the quarters of vectors.
template <typename F, typename... V>
inline Vec quarters(F f, V... x) {
  return {f(x.a...), f(x.b...), f(x.c...), f(x.d...)};
}
inline Vec fma(Vec x, Vec y, Vec z) {
  return {vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b), vfmaq_f32(z.c, x.c, y.c), vfmaq_f32(z.d, x.d, y.d)};
}
// The second where one of the two is not a number, as at the other levels.
inline Vec max(Vec x, Vec y) {
  return quarters([](float32x4_t p, float32x4_t q) { return vbslq_f32(vcgtq_f32(p, q), p, q); }, x, y);
}
inline Vec min(Vec x, Vec y) {
  return quarters([](float32x4_t p, float32x4_t q) { return vbslq_f32(vcltq_f32(p, q), p, q); }, x, y);
}
inline Vec abs(Vec x) { return {vabsq_f32(x.a), vabsq_f32(x.b), vabsq_f32(x.c), vabsq_f32(x.d)}; }
inline Vec number_or_zero(Vec x) {
  return quarters([](float32x4_t p) { return vbslq_f32(vceqq_f32(p, p), p, vdupq_n_f32(0.0f)); }, x);
}
inline Vec round(Vec x) { return {vrndnq_f32(x.a), vrndnq_f32(x.b), vrndnq_f32(x.c), vrndnq_f32(x.d)}; }
inline Vec scale2(Vec x, Vec n) {
  auto quarter = [](float32x4_t y, float32x4_t power) {
    const int32x4_t bits = vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(power), vdupq_n_s32(127)), 23);
    return vmulq_f32(y, vreinterpretq_f32_s32(bits));
  };
  return quarters(quarter, x, n);
}

#else

#if defined(__aarch64__)
using Half = __fp16;  // GCC before 13 has no _Float16 in C++ on ARM
#else
using Half = _Float16;
#endif

struct Vec {
  float v[kLanes];

  static Vec zero() { return all(0.0f); }
  static Vec all(float x) {
    Vec out;
    for (int i = 0; i < kLanes; ++i) out.v[i] = x;
    return out;
  }
  template <typename T>
  static Vec load(const T* p) {
    Vec out;
    for (int i = 0; i < kLanes; ++i) out.v[i] = static_cast<float>(p[i]);
    return out;
  }
  static Vec load(const bf16* p) {
    Vec out;
    for (int i = 0; i < kLanes; ++i) out.v[i] = to_float(p[i]);
    return out;
  }
  static Vec load(const f16* p) {
    Vec out;
    for (int i = 0; i < kLanes; ++i) {
      Half half;
      std::memcpy(&half, &p[i], 2);
      out.v[i] = static_cast<float>(half);
    }
    return out;
  }
  void store(float* p) const { std::memcpy(p, v, sizeof v); }
  void store(bf16* p) const {
    for (int i = 0; i < kLanes; ++i) p[i] = to_bf16(v[i]);
  }
  void store(f16* p) const {
    for (int i = 0; i < kLanes; ++i) {
      Half half = static_cast<Half>(v[i]);
      std::memcpy(&p[i], &half, 2);
    }
  }
  // Rounds to nearest; lanes beyond [-128, 127] saturate.
  void store(int8_t* p) const {
    for (int i = 0; i < kLanes; ++i) {
      float x = std::nearbyint(v[i]);
      p[i] = static_cast<int8_t>(x < -128.0f ? -128.0f : x > 127.0f ? 127.0f : x);
    }
  }
  float sum() const {
    float total = 0.0f;
    for (float x : v) total += x;
    return total;
  }
  float max() const {
    float most = v[0];
    for (float x : v) most = x > most ? x : most;
    return most;
  }
};

template <typename F>
inline Vec each(F f) {
  Vec out;
  for (int i = 0; i < kLanes; ++i) out.v[i] = f(i);
  return out;
}
inline Vec operator+(Vec a, Vec b) { return each([&](int i) { return a.v[i] + b.v[i]; }); }
inline Vec operator-(Vec a, Vec b) { return each([&](int i) { return a.v[i] - b.v[i]; }); }
inline Vec operator*(Vec a, Vec b) { return each([&](int i) { return a.v[i] * b.v[i]; }); }
inline Vec operator/(Vec a, Vec b) { return each([&](int i) { return a.v[i] / b.v[i]; }); }
inline Vec fma(Vec a, Vec b, Vec c) { return each([&](int i) { return a.v[i] * b.v[i] + c.v[i]; }); }
inline Vec max(Vec a, Vec b) { return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
inline Vec min(Vec a, Vec b) { return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
inline Vec number_or_zero(Vec a) { return each([&](int i) { return a.v[i] == a.v[i] ? a.v[i] : 0.0f; }); }
inline Vec abs(Vec a) { return each([&](int i) { return std::fabs(a.v[i]); }); }
inline Vec round(Vec a) { return each([&](int i) { return std::nearbyint(a.v[i]); }); }
inline Vec scale2(Vec a, Vec n) { return each([&](int i) { return std::ldexp(a.v[i], static_cast<int>(n.v[i])); }); }

#endif

// e^x to 2 ulp for x in [-87, 88]; less gives 0 and more gives e^88. x = n ln 2 + r, |r| <= ln 2 / 2, and e^r by its
// Taylor polynomial of degree 7 (remainder below 2^-27).
inline Vec exp(Vec x) {
  const Vec low = Vec::all(-87.0f);
  const Vec kept = min(max(x, low), Vec::all(88.0f));
  const Vec n = round(kept * Vec::all(1.44269504f));
  Vec r = fma(n, Vec::all(-0.693359375f), kept);
  r = fma(n, Vec::all(2.12194440e-4f), r);
  Vec p = Vec::all(1.0f / 5040.0f);
  for (float c : {1.0f / 720.0f, 1.0f / 120.0f, 1.0f / 24.0f, 1.0f / 6.0f, 0.5f, 1.0f, 1.0f}) p = fma(p, r, Vec::all(c));
  return scale2(p, n);
}

}  // namespace quire
