// The matrix unit of Intel's processors (AMX): eight registers of up to 16 rows of 64 bytes, here called tile registers, and
// one instruction that multiplies two of them and adds to a third.
//
// C [16][16] += A [16][32] · B, for pairs of bf16; for bytes, A has 64 numbers a row. B lies as dot products of pairs (quads)
// want it: row i has numbers 2i and 2i + 1 (4i to 4i + 3) of each of 16 columns. C adds 32 (64) products at once, in an order
// that depends neither on the number of rows nor on their places.
#pragma once

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define QUIRE_AMX 1
#endif

#if defined(QUIRE_AMX)

#include <cstdint>

namespace quire {

constexpr int kTileRegisterRows = 16, kTileRegisterBytes = 64;  // bytes of a row

// How many rows each of the eight registers has; rows have 64 bytes.
struct alignas(64) AmxShape {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  template <typename... Rows>
  explicit AmxShape(Rows... all) : rows{static_cast<uint8_t>(all)...} {
    for (unsigned i = 0; i < sizeof...(all); ++i) row_bytes[i] = kTileRegisterBytes;
  }
};

// Sets the shape of this thread's registers, which then are zero. A thread that is done with them gives them up: the kernel
// saves registers in use at each switch of threads.
inline void amx_set(const AmxShape& shape) { asm volatile("ldtilecfg %0" ::"m"(shape)); }
inline void amx_release() { asm volatile("tilerelease"); }

template <int Register>
inline void amx_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(Register));
}
// A register from or to rows that lie `stride` bytes apart.
template <int Register>
inline void amx_load(const void* rows, int64_t stride) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(Register), "r"(rows), "r"(stride) : "memory");
}
template <int Register>
inline void amx_store(void* rows, int64_t stride) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(Register), "r"(rows), "r"(stride) : "memory");
}

// Registers C += A · B.
template <int C, int A, int B>
inline void amx_dot_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B>
inline void amx_dot_bytes() {  // A without signs, B with them
  asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

}  // namespace quire

#endif
