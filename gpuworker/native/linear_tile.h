// The innermost loops: R rows of activations times one or two panels of 32 columns, sums in registers.
//
// A loader turns one step of a packed panel into vectors of weights; a "math" multiplies those with a broadcast input
// and adds. The same loops serve every kind and every level of vector instructions.
#pragma once

#include <cstdint>
#include <cstring>

#include "linear_layout.h"
#include "simd.h"

namespace quire {

// Rows of a tile, so that the sums of 32 columns fill the registers and leave room for weights and an input.
#if defined(__AVX512F__)
constexpr int kTileRows = 14;
constexpr int kPairRows = 6;  // up to so many rows two panels run at once: more streams from memory in flight
#elif defined(__AVX2__)
constexpr int kTileRows = 3;
constexpr int kPairRows = 1;
#else
constexpr int kTileRows = 2;
constexpr int kPairRows = 1;
#endif

struct Tile {
  const uint8_t* weights;  // first step of the block
  int64_t panel_stride;    // bytes to the second panel
  const uint8_t* x;        // first input of the block in the first row
  int64_t x_stride;        // bytes from row to row
  int64_t groups, steps;   // of the block; without groups one "group" is the block
  bool grouped, has_zeros;
  bool first;              // sums start from nothing
  float* sums;             // [panels][sums_stride / 32][32]; int32 for W8A8
  int64_t sums_stride;     // elements from panel to panel
  const float* x_sums;     // weights with zeros: [row][group], from this block's first group
  int64_t x_sums_stride;   // elements from row to row
  // The lines to prefetch meanwhile. With `near`, those kNear bytes later in the panel, and at `panel_end` the first of
  // the next task. Else `ahead_lines` lines from `ahead` on for each kChunk steps, for the L2 cache.
  bool near;
  const uint8_t* panel_end;
  const uint8_t* next;
  const uint8_t* ahead;  // null for nothing
  int ahead_lines;
};

constexpr int64_t kNear = 8192;  // of two panels half as much each

// How many steps between two bursts of prefetches, and how many are written out one after the other.
constexpr int kChunk = 8;
#if defined(__AVX2__)
constexpr int kUnrolled = kChunk;
#else
constexpr int kUnrolled = 1;
#endif

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

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)

struct Bf16Math {  // pairs
  using Sum = Vec;
  using Weight = __m512i;
  static constexpr int64_t kInputBytes = 4;
  static __m512i input(const uint8_t* p) {
    int32_t pair;
    std::memcpy(&pair, p, 4);
    return _mm512_set1_epi32(pair);
  }
  static Sum zero() { return Vec::zero(); }
  static Sum load(const float* p) { return Vec::load(p); }
  static void store(Sum s, float* p) { s.store(p); }
  static Sum add(Sum s, Weight w, __m512i x) {
    return {_mm512_dpbf16_ps(s.v, reinterpret_cast<__m512bh>(w), reinterpret_cast<__m512bh>(x))};
  }
  static Vec value(Sum s) { return s; }
};

struct I8Math {  // quads; inputs are 128 + q, which `compensation` takes off in the end
  using Sum = __m512i;
  using Weight = __m512i;
  static constexpr int64_t kInputBytes = 4;
  static __m512i input(const uint8_t* p) { return Bf16Math::input(p); }
  static Sum zero() { return _mm512_setzero_si512(); }
  static Sum load(const float* p) { return _mm512_loadu_si512(p); }
  static void store(Sum s, float* p) { _mm512_storeu_si512(p, s); }
  static Sum add(Sum s, Weight w, __m512i x) { return _mm512_dpbusd_epi32(s, x, w); }
  static Sum minus(Sum s, Sum t) { return _mm512_sub_epi32(s, t); }
  static Vec value(Sum s) { return {_mm512_cvtepi32_ps(s)}; }
};

#else

struct Bf16Math : F32Math {
  static constexpr int64_t kInputBytes = 2;
  static Vec input(const uint8_t* p) {
    bf16 x;
    std::memcpy(&x, p, 2);
    return Vec::all(to_float(x));
  }
};

#if defined(__AVX2__)

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
  static Sum add(Sum s, Weight w, __m256i x) {
    return {_mm256_add_epi32(s.a, _mm256_madd_epi16(w.a, x)), _mm256_add_epi32(s.b, _mm256_madd_epi16(w.b, x))};
  }
  static Sum minus(Sum s, Sum t) { return {_mm256_sub_epi32(s.a, t.a), _mm256_sub_epi32(s.b, t.b)}; }
  static Vec value(Sum s) { return {_mm256_cvtepi32_ps(s.a), _mm256_cvtepi32_ps(s.b)}; }
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

struct I8F32Loader {
  using Math = F32Math;
  static constexpr int kSub = 1, kBytes = 32;
  static void load(const uint8_t* p, Vec (&w)[kSub][2]) {
    const int8_t* q = reinterpret_cast<const int8_t*>(p);
    w[0][0] = Vec::load(q);
    w[0][1] = Vec::load(q + 16);
  }
};

// Nibble `place` of sixteen 16-bit words, less 8.
inline Vec nibbles(const uint8_t* p, int place) {
#if defined(__AVX512F__)
  const __m512 table = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
  const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_permutexvar_ps(_mm512_srli_epi32(words, 4 * place), table)};  // the index is the low four bits
#elif defined(__AVX2__)
  auto half = [place](const uint8_t* q) {
    __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(q)));
    words = _mm256_and_si256(_mm256_srli_epi32(words, 4 * place), _mm256_set1_epi32(15));
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(words, _mm256_set1_epi32(8)));
  };
  return {half(p), half(p + 16)};
#else
  return each([&](int i) {
    uint16_t word;
    std::memcpy(&word, p + 2 * i, 2);
    return static_cast<float>((word >> (4 * place)) & 15) - 8.0f;
  });
#endif
}

template <typename M>
struct I4VecLoader {
  using Math = M;
  static constexpr int kSub = 4, kBytes = 64;
  static void load(const uint8_t* p, Vec (&w)[kSub][2]) {
    for (int i = 0; i < 4; ++i) {
      w[i][0] = nibbles(p, i);
      w[i][1] = nibbles(p + 32, i);
    }
  }
};
using I4F32Loader = I4VecLoader<F32Math>;

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)

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

struct W8A8Loader {
  using Math = I8Math;
  static constexpr int kSub = 1, kBytes = 128;
  static void load(const uint8_t* p, __m512i (&w)[kSub][2]) { Bf16Loader::load(p, w); }
};

#else

struct Bf16Loader {
  using Math = Bf16Math;
  static constexpr int kSub = 1, kBytes = 64;
  static void load(const uint8_t* p, Vec (&w)[kSub][2]) {
    const bf16* q = reinterpret_cast<const bf16*>(p);
    w[0][0] = Vec::load(q);
    w[0][1] = Vec::load(q + 16);
  }
};

struct I8Bf16Loader : I8F32Loader {
  using Math = Bf16Math;
};
using I4Bf16Loader = I4VecLoader<Bf16Math>;

struct W8A8Loader {
  using Math = I8Math;
  static constexpr int kSub = 1, kBytes = 64;
  static void load(const uint8_t* p, I8Math::Weight (&w)[kSub][2]) {
    for (int half = 0; half < 2; ++half) {
      const int8_t* q = reinterpret_cast<const int8_t*>(p) + 32 * half;
#if defined(__AVX2__)
      auto widen = [](const int8_t* r) {
        return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(r)));
      };
      w[0][half] = {widen(q), widen(q + 16)};
#else
      for (int i = 0; i < kLanes; ++i) {
        w[0][half].v[i][0] = q[2 * i];
        w[0][half].v[i][1] = q[2 * i + 1];
      }
#endif
    }
  }
};

#endif

// ---- the tile ---

template <typename Loader, int R, int P>
struct Kernel {
  using Math = typename Loader::Math;
  using Sum = typename Math::Sum;

  // Row r of the inputs through few registers: four rows for each base pointer.
  struct Rows {
    static constexpr int kBases = (R + 3) / 4;
    const uint8_t* base[kBases];
    int64_t stride, stride3;

    Rows(const uint8_t* x, int64_t bytes) : stride(bytes), stride3(3 * bytes) {
#pragma GCC unroll 4
      for (int i = 0; i < kBases; ++i) {
        base[i] = x + 4 * i * bytes;
        __asm__("" : "+r"(base[i]));  // as values of their own, or the compiler makes one pointer for each row
      }
      __asm__("" : "+r"(stride3));
    }
    const uint8_t* at(int r) const {
      const uint8_t* p = base[r / 4];
      return r % 4 == 0 ? p : r % 4 == 1 ? p + stride : r % 4 == 2 ? p + 2 * stride : p + stride3;
    }
    void advance(int64_t bytes) {
#pragma GCC unroll 4
      for (int i = 0; i < kBases; ++i) base[i] += bytes;
    }
  };

  static inline __attribute__((always_inline)) void step(const uint8_t* w, int64_t panel_stride, const Rows& x,
                                                         int64_t offset, Sum (&sums)[R][2 * P]) {
    typename Math::Weight weights[P][Loader::kSub][2];
#pragma GCC unroll 2
    for (int p = 0; p < P; ++p) Loader::load(w + p * panel_stride, weights[p]);
#pragma GCC unroll 4
    for (int i = 0; i < Loader::kSub; ++i) {
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const auto input = Math::input(x.at(r) + offset + i * Math::kInputBytes);
#pragma GCC unroll 2
        for (int p = 0; p < P; ++p) {
          sums[r][2 * p] = Math::add(sums[r][2 * p], weights[p][i][0], input);
          sums[r][2 * p + 1] = Math::add(sums[r][2 * p + 1], weights[p][i][1], input);
        }
      }
    }
  }

  static void run(const Tile& t) {
    constexpr int64_t kInputs = Loader::kSub * Math::kInputBytes;
    const uint8_t* w = t.weights;
    const int64_t panel_stride = t.panel_stride;
    const uint8_t* ahead = t.ahead;
    Rows x(t.x, t.x_stride);
    for (int64_t g = 0; g < t.groups; ++g) {
      const uint8_t* head = w;
      if (t.grouped) w += kPanel * 4 * (t.has_zeros ? 2 : 1);
      Sum sums[R][2 * P];
      begin(t, sums);
      int64_t left = t.steps;
      for (; left >= kChunk; left -= kChunk) {
        if (t.near) {
          const uint8_t* soon = w + kNear / P;
          if (soon >= t.panel_end) soon += t.next - t.panel_end;
#pragma GCC unroll 16
          for (int line = 0; line < kChunk * Loader::kBytes / 64; ++line) {
#pragma GCC unroll 2
            for (int p = 0; p < P; ++p) __builtin_prefetch(soon + p * panel_stride + line * 64, 0, 3);
          }
        } else if (ahead) {
          for (int line = 0; line < t.ahead_lines; ++line, ahead += 64) __builtin_prefetch(ahead, 0, 2);
        }
#pragma GCC unroll kUnrolled
        for (int i = 0; i < kChunk; ++i) {
          step(w + i * Loader::kBytes, panel_stride, x, i * kInputs, sums);
        }
        w += kChunk * Loader::kBytes;
        x.advance(kChunk * kInputs);
      }
      for (; left > 0; --left) {
        step(w, panel_stride, x, 0, sums);
        w += Loader::kBytes;
        x.advance(kInputs);
      }
      finish(t, g, head, sums);
    }
  }

  static float* at(const Tile& t, int r, int v) { return t.sums + v / 2 * t.sums_stride + r * kPanel + v % 2 * 16; }

  static inline __attribute__((always_inline)) void begin(const Tile& t, Sum (&sums)[R][2 * P]) {
    if (t.grouped || t.first) {
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < 2 * P; ++v) sums[r][v] = Math::zero();
      }
    } else {
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < 2 * P; ++v) sums[r][v] = Math::load(at(t, r, v));
      }
    }
  }

  static inline __attribute__((always_inline)) void finish(const Tile& t, int64_t g, const uint8_t* head,
                                                           Sum (&sums)[R][2 * P]) {
    if (!t.grouped) {
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < 2 * P; ++v) Math::store(sums[r][v], at(t, r, v));
      }
      return;
    }
#pragma GCC unroll 4
    for (int v = 0; v < 2 * P; ++v) {
      const float* scales = reinterpret_cast<const float*>(head + v / 2 * t.panel_stride) + v % 2 * 16;
      const Vec scale = Vec::load(scales);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        float* total = at(t, r, v);
        const Vec before = t.first && g == 0 ? Vec::zero() : Vec::load(total);
        fma(Math::value(sums[r][v]), scale, before).store(total);
      }
      if (t.has_zeros) {
        const Vec shift = Vec::load(scales + kPanel);
        for (int r = 0; r < R; ++r) {
          float* total = at(t, r, v);
          fma(Vec::all(t.x_sums[r * t.x_sums_stride + g]), shift, Vec::load(total)).store(total);
        }
      }
    }
  }
};

using TileFunction = void (*)(const Tile&);

// The function for a kind, a number of rows (1 to kTileRows) and of panels (2 up to kPairRows rows).
TileFunction tile_function(int32_t kind, int rows, int panels);

}  // namespace quire
