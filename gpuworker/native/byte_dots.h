// Which integers the level multiplies and adds at once: at AVX-512 quads of bytes and pairs of 16 bits, at AVX2 pairs alone.
#pragma once

#if defined(__AVX512F__) && defined(__AVX512VNNI__)
#define QUIRE_BYTE_DOTS 1
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
#define QUIRE_PAIR_DOTS 1
#endif
