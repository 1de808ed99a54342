// Whether the level multiplies and adds quads of bytes, and pairs of 16-bit integers, at once.
#pragma once

#if defined(__AVX512F__) && defined(__AVX512VNNI__)
#define QUIRE_BYTE_DOTS 1
#endif
