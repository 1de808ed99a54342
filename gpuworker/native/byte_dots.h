// Which integers the level multiplies and adds at once: at AVX-512 quads of bytes and pairs of 16 bits, at AVX2 pairs alone,
// at NEON quads alone. Of the bytes that x86 multiplies, one has no sign.
#pragma once

#if defined(__AVX512F__) && defined(__AVX512VNNI__)
#define QUIRE_BYTE_DOTS 1
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
#define QUIRE_PAIR_DOTS 1
#elif defined(QUIRE_NEON) && defined(__ARM_FEATURE_DOTPROD)
#define QUIRE_BYTE_DOTS 1
#endif
