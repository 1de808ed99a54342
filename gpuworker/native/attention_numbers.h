// How attention of few queries multiplies the numbers of a cache: as floats, to which any type is widened; as pairs of
// bf16; or as pairs of 16-bit integers (int8: query and weights are rounded to 16 bits, which is finer than bf16).
//
// Each struct has: the kParts vectors of kColumns numbers of a row (`load`: all of them, or the first `count`; for how many
// lanes) and of a packed query (`query`), sums of products (`dot`, `reduce`), and the packing of a query, which returns the
// step of a packed integer, or 1, and of the weights of 64 slots, where kStepped as integers with so many steps to 1. The
// numbers of levels: AVX-512 and AVX2 multiply integers in pairs, AVX-512 with bf16 dot products bf16 too. A level that has
// none of these widens.
//
// Where `dot` is an instruction by name, GCC 12 would copy each sum twice a round, or add the products of a row up apart
// from its sum, which takes more registers than there are.
#pragma once

#include <algorithm>
#include <type_traits>

#include "attention_bf16.h"
#include "attention_kernels.h"
#include "byte_dots.h"
#include "unroll.h"

namespace quire {

// Slots whose scores are computed at once for so many lanes: their sums fill the registers.
#if defined(__AVX512F__)
constexpr int slots_at_once(int lanes) { return lanes == 4 ? 4 : 8; }
#elif defined(__AVX2__)
constexpr int slots_at_once(int lanes) { return lanes == 1 ? 8 : lanes == 4 ? 2 : 4; }
#elif defined(QUIRE_NEON)
constexpr int slots_at_once(int lanes) { return lanes == 4 ? 4 : 8; }
#else
constexpr int slots_at_once(int) { return 4; }
#endif

// Sums of a vector's lanes, kUnit vectors at once. Each sum is added up in the same order.
#if defined(__AVX512F__)

constexpr int kUnit = 8;
using FloatSums = __m512;
constexpr int kFloats = 16;  // that are multiplied at once
using Floats = Vec;
inline Floats floats(Vec x) { return x; }
inline FloatSums dot_floats(FloatSums acc, Vec a, Vec b) { return _mm512_fmadd_ps(a.v, b.v, acc); }
inline FloatSums no_floats() { return _mm512_setzero_ps(); }
inline Floats all_floats(float x) { return Vec::all(x); }
inline FloatSums load_sums(const float* p, float factor) { return (Vec::load(p) * Vec::all(factor)).v; }
inline void store_sums(FloatSums x, float* p) { _mm512_storeu_ps(p, x); }

template <typename Add>
QUIRE_INLINE __m512 add_four(__m512 a, __m512 b, __m512 c, __m512 d, Add add) {
  const __m512d x = _mm512_castps_pd(add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
  const __m512d y = _mm512_castps_pd(add(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)));
  return add(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
}
template <typename Add>
QUIRE_INLINE __m512 add_parts(__m512 a, __m512 b, Add add) {
  return add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}
template <typename Add>
QUIRE_INLINE __m256 sum_unit(const __m512* a, Add add) {
  const __m512 both = add_parts(add_four(a[0], a[1], a[2], a[3], add), add_four(a[4], a[5], a[6], a[7], add), add);
  return _mm512_castps512_ps256(add_parts(both, both, add));
}
QUIRE_INLINE void reduce_floats(const FloatSums* a, float* to) {
  _mm256_storeu_ps(to, sum_unit(a, [](__m512 x, __m512 y) { return _mm512_add_ps(x, y); }));
}

#elif defined(__AVX2__)

constexpr int kUnit = 4;
using FloatSums = __m256;
constexpr int kFloats = 8;  // that are multiplied at once
using Floats = __m256;
inline Floats floats(Vec x) { return x.a; }
inline FloatSums dot_floats(FloatSums acc, __m256 a, __m256 b) {
  asm("vfmadd231ps %2, %1, %0" : "+x"(acc) : "x"(a), "x"(b));
  return acc;
}
inline FloatSums no_floats() { return _mm256_setzero_ps(); }
inline Floats all_floats(float x) { return _mm256_set1_ps(x); }
inline FloatSums load_sums(const float* p, float factor) { return _mm256_mul_ps(_mm256_loadu_ps(p), all_floats(factor)); }
inline void store_sums(FloatSums x, float* p) { _mm256_storeu_ps(p, x); }
// Neighbours added, of two vectors or of four, as by the instruction that does it, which takes longer.
template <typename Add>
QUIRE_INLINE __m256 add_pairs(__m256 a, __m256 b, Add add) {
  return add(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xdd));
}
template <typename Add>
QUIRE_INLINE __m256 add_four(__m256 a, __m256 b, __m256 c, __m256 d, Add add) {
  return add_pairs(add_pairs(a, b, add), add_pairs(c, d, add), add);
}
QUIRE_INLINE void reduce_floats(const FloatSums* a, float* to) {
  const __m256 four = add_four(a[0], a[1], a[2], a[3], [](__m256 x, __m256 y) { return _mm256_add_ps(x, y); });
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(four), _mm256_extractf128_ps(four, 1)));
}

#elif defined(QUIRE_NEON)

constexpr int kUnit = 4;
using FloatSums = float32x4_t;
constexpr int kFloats = 4;  // that are multiplied at once
using Floats = float32x4_t;
inline FloatSums dot_floats(FloatSums acc, Floats a, Floats b) { return vfmaq_f32(acc, a, b); }
inline FloatSums no_floats() { return vdupq_n_f32(0.0f); }
inline Floats all_floats(float x) { return vdupq_n_f32(x); }
inline FloatSums load_sums(const float* p, float factor) { return vmulq_n_f32(vld1q_f32(p), factor); }
inline void store_sums(FloatSums x, float* p) { vst1q_f32(p, x); }
QUIRE_INLINE void reduce_floats(const FloatSums* a, float* to) {
  vst1q_f32(to, vpaddq_f32(vpaddq_f32(a[0], a[1]), vpaddq_f32(a[2], a[3])));
}

#else

constexpr int kUnit = 1;
using FloatSums = Vec;
constexpr int kFloats = kLanes;  // that are multiplied at once
using Floats = Vec;
inline Floats floats(Vec x) { return x; }
inline FloatSums dot_floats(FloatSums acc, Vec a, Vec b) { return fma(a, b, acc); }
inline FloatSums no_floats() { return Vec::zero(); }
inline Floats all_floats(float x) { return Vec::all(x); }
inline FloatSums load_sums(const float* p, float factor) { return Vec::load(p) * Vec::all(factor); }
inline void store_sums(FloatSums x, float* p) { x.store(p); }
QUIRE_INLINE void reduce_floats(const FloatSums* a, float* to) { *to = a->sum(); }

#endif

// Numbers of type T, widened as they are read. AVX2 reads 16 of them as two vectors: the first and the last eight, or of
// bf16, the even and the odd ones, each widened by one instruction. NEON reads four vectors.
template <typename T>
struct WideNumbers {
  using Number = T;
  using Acc = FloatSums;
  static constexpr int kColumns = kLanes, kParts = kLanes / kFloats;
  static constexpr bool kScaled = std::is_same<T, int8_t>::value;
  static Acc zero() { return no_floats(); }
#if defined(__AVX2__) && !defined(__AVX512F__)
  template <int Part, int>
  static Floats load(const float* p) { return _mm256_loadu_ps(p + Part * kFloats); }
  template <int Part, int Lanes>
  static Floats load(const bf16* p) {
    const __m256i_u& both = *reinterpret_cast<const __m256i_u*>(p);
    if constexpr (Part == 0) return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(&both), 16));
    if constexpr (Lanes != 3) return _mm256_and_ps(_mm256_loadu_ps(reinterpret_cast<const float*>(&both)), odd_ones());
    // Three lanes have 12 sums. So neither the numbers nor the mask may lie in a register meanwhile: both are read again.
    alignas(32) static constexpr uint32_t kUpper[8] = {kOdd, kOdd, kOdd, kOdd, kOdd, kOdd, kOdd, kOdd};
    __m256 odd;
    asm("vmovdqu %1, %0\n\tvpand %2, %0, %0" : "=&x"(odd) : "m"(both), "m"(*reinterpret_cast<const __m256i*>(kUpper)));
    return odd;
  }
  template <int Part, int>
  static Floats load(const f16* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + Part * kFloats)));
  }
  template <int Part, int>
  static Floats load(const T* p, int count) {
    T padded[kColumns] = {};
    for (int i = 0; i < count; ++i) padded[i] = p[i];
    return load<Part, 1>(padded);
  }
  template <int Part>
  static Floats query(const float* q, int column) {
    __m256 eight = _mm256_loadu_ps(q + column + Part * kFloats);
    asm("" : "+x"(eight));  // read once, and not again for each slot
    return eight;
  }
  static constexpr uint32_t kOdd = 0xffff0000;
  static __m256 odd_ones() { return _mm256_castsi256_ps(_mm256_set1_epi32(kOdd)); }
  static constexpr bool kEvenFirst = std::is_same<T, bf16>::value;
  static float pack_query(float* query, int dim) {
    for (int i = 0; kEvenFirst && i < dim; i += kColumns) {
      const __m256 a = _mm256_loadu_ps(query + i), b = _mm256_loadu_ps(query + i + kFloats);
      const __m256 low = _mm256_permute2f128_ps(a, b, 0x20), high = _mm256_permute2f128_ps(a, b, 0x31);
      _mm256_storeu_ps(query + i, _mm256_shuffle_ps(low, high, 0x88));
      _mm256_storeu_ps(query + i + kFloats, _mm256_shuffle_ps(low, high, 0xdd));
    }
    return 1.0f;
  }
  static void put_in_order(float* acc, int dim) {
    for (int i = 0; kEvenFirst && i < dim; i += kColumns) {
      const __m256 even = _mm256_loadu_ps(acc + i), odd = _mm256_loadu_ps(acc + i + kFloats);
      const __m256 low = _mm256_unpacklo_ps(even, odd), high = _mm256_unpackhi_ps(even, odd);
      _mm256_storeu_ps(acc + i, _mm256_permute2f128_ps(low, high, 0x20));
      _mm256_storeu_ps(acc + i + kFloats, _mm256_permute2f128_ps(low, high, 0x31));
    }
  }
#elif defined(QUIRE_NEON)
  template <int Part, int>
  static Floats load(const T* p) { return quad(p + Part * kFloats); }
  template <int Part, int>
  static Floats load(const T* p, int count) {
    T padded[kColumns] = {};
    for (int i = 0; i < count; ++i) padded[i] = p[i];
    return quad(padded + Part * kFloats);
  }
  template <int Part>
  static Floats query(const float* q, int column) { return vld1q_f32(q + column + Part * kFloats); }
  static float pack_query(float*, int) { return 1.0f; }
  static void put_in_order(float*, int) {}
#else
  template <int, int>
  static Floats load(const T* p) { return Vec::load(p); }
  template <int, int>
  static Floats load(const T* p, int count) { return floats(load_first(p, count)); }
  template <int>
  static Floats query(const float* q, int column) { return Vec::load(q + column); }
  static float pack_query(float*, int) { return 1.0f; }
  static void put_in_order(float*, int) {}
#endif
  static Acc dot(Acc acc, Floats k, Floats q) { return dot_floats(acc, k, q); }
  static QUIRE_INLINE void reduce(const Acc* a, float* to) { reduce_floats(a, to); }
  static constexpr bool kStepped = false;
  static QUIRE_INLINE void pack_weights(const Vec (&p)[4], Vec, float* to) {
    for (int i = 0; i < 4; ++i) p[i].store(to + i * kLanes);
  }
};

#if defined(QUIRE_BF16_DOTS)

struct Bf16Numbers {
  using Number = bf16;
  using Acc = __m512;
  static constexpr int kColumns = 32, kParts = 1;
  static constexpr bool kScaled = false;
  static Acc zero() { return _mm512_setzero_ps(); }
  template <int, int>
  static __m512i load(const bf16* p, int count) { return _mm512_maskz_loadu_epi16(first32(count), p); }
  template <int, int>
  static __m512i load(const bf16* p) { return _mm512_loadu_si512(p); }
  template <int>
  static __m512i query(const float* q, int column) { return _mm512_loadu_si512(q + column / 2); }
  static Acc dot(Acc acc, __m512i a, __m512i b) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
    return acc;
  }
  static Acc sum(Acc a, Acc b) { return _mm512_add_ps(a, b); }
  static QUIRE_INLINE void reduce(const Acc* a, float* to) { reduce_floats(a, to); }

  static float pack_query(float* query, int dim) {  // in place: 32 bf16 lie where 16 floats did
    for (int i = 0; i < dim; i += 32) {
      const __m512i both = round_bf16(Vec::load(query + i), Vec::load(query + i + kLanes));
      std::memcpy(query + i / 2, &both, 64);
    }
    return 1.0f;
  }
  static constexpr bool kStepped = false;
  static QUIRE_INLINE void pack_weights(const Vec (&p)[4], Vec, float* to) {
    for (int i = 0; i < 2; ++i) _mm512_storeu_si512(to + i * kLanes, round_bf16(p[2 * i], p[2 * i + 1]));
  }
};

#endif
#if defined(__AVX512F__) || defined(__AVX2__)

// Rounds numbers to 16 bits, of which the largest magnitude takes 32767, in place or to `to`; returns the step.
// 127 · 32767 · 512 stays below 2^31.
inline void store16(Vec x, float* to) {
#if defined(__AVX512F__)
  const __m256i halves = _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(x.v));
#else
  const __m256i parts = _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));
  const __m256i halves = _mm256_permute4x64_epi64(parts, 0xd8);
#endif
  std::memcpy(to, &halves, 32);
}
inline float pack_query16(float* query, int dim) {
  Vec most = Vec::zero();
  for (int i = 0; i < dim; i += kLanes) most = max(most, abs(Vec::load(query + i)));
  const float largest = most.max(), steps = largest > 0.0f ? 32767.0f / largest : 0.0f;
  for (int i = 0; i < dim; i += kLanes) store16(Vec::load(query + i) * Vec::all(steps), query + i / 2);
  return largest / 32767.0f;
}

struct Int8Numbers {
  using Number = int8_t;
  static constexpr bool kScaled = true;
  static float pack_query(float* query, int dim) { return pack_query16(query, dim); }
  static constexpr bool kStepped = true;
  static QUIRE_INLINE void pack_weights(const Vec (&p)[4], Vec steps, float* to) {
    for (int i = 0; i < 4; ++i) store16(p[i] * steps, to + i * kLanes / 2);
  }

#if defined(__AVX512F__)
  using Acc = __m512i;
  static constexpr int kColumns = 32, kParts = 1;
  static Acc zero() { return _mm512_setzero_si512(); }
  template <int, int>
  static __m512i load(const int8_t* p, int count) {
    return _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(first32(count), p));
  }
  template <int, int>
  static __m512i load(const int8_t* p) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  template <int>
  static __m512i query(const float* q, int column) { return _mm512_loadu_si512(q + column / 2); }
  static Acc sum(Acc a, Acc b) { return _mm512_add_epi32(a, b); }
#if defined(QUIRE_BYTE_DOTS)
  static Acc dot(Acc acc, __m512i a, __m512i b) {
    asm("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
    return acc;
  }
#else
  static Acc dot(Acc acc, __m512i a, __m512i b) {
    asm("vpaddd %1, %0, %0" : "+v"(acc) : "v"(_mm512_madd_epi16(a, b)));
    return acc;
  }
#endif
  static QUIRE_INLINE void reduce(const Acc* a, float* to) {
    const __m512 bits[] = {_mm512_castsi512_ps(a[0]), _mm512_castsi512_ps(a[1]), _mm512_castsi512_ps(a[2]),
                           _mm512_castsi512_ps(a[3]), _mm512_castsi512_ps(a[4]), _mm512_castsi512_ps(a[5]),
                           _mm512_castsi512_ps(a[6]), _mm512_castsi512_ps(a[7])};
    const __m256 whole = sum_unit(bits, [](__m512 x, __m512 y) {
      return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x), _mm512_castps_si512(y)));
    });
    _mm256_storeu_ps(to, _mm256_cvtepi32_ps(_mm256_castps_si256(whole)));
  }
#else
  using Acc = __m256i;
  static constexpr int kColumns = 16, kParts = 1;
  static Acc zero() { return _mm256_setzero_si256(); }
  template <int, int>
  static __m256i load(const int8_t* p, int count) {
    int8_t padded[kColumns] = {};
    std::memcpy(padded, p, std::min(count, kColumns));
    return load<0, 1>(padded);
  }
  template <int, int>
  static __m256i load(const int8_t* p) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  template <int>
  static __m256i query(const float* q, int column) {
    __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(q + column / 2));
    asm("" : "+x"(pairs));  // read once, and not again for each slot
    return pairs;
  }
  static Acc sum(Acc a, Acc b) { return _mm256_add_epi32(a, b); }
#if defined(QUIRE_PAIR_DOTS)
  static Acc dot(Acc acc, __m256i a, __m256i b) {
    asm("%{vex%} vpdpwssd %2, %1, %0" : "+x"(acc) : "x"(a), "x"(b));
    return acc;
  }
#else
  static Acc dot(Acc acc, __m256i a, __m256i b) {
    asm("vpaddd %1, %0, %0" : "+x"(acc) : "x"(_mm256_madd_epi16(a, b)));
    return acc;
  }
#endif
  static QUIRE_INLINE void reduce(const Acc* a, float* to) {
    const __m256i four = _mm256_castps_si256(
        add_four(_mm256_castsi256_ps(a[0]), _mm256_castsi256_ps(a[1]), _mm256_castsi256_ps(a[2]), _mm256_castsi256_ps(a[3]),
                 [](__m256 x, __m256 y) {
                   return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), _mm256_castps_si256(y)));
                 }));
    const __m128i whole = _mm_add_epi32(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1));
    _mm_storeu_ps(to, _mm_cvtepi32_ps(whole));
  }
#endif
};

#endif

}  // namespace quire
