// Whether the level multiplies and adds pairs of bf16 at once.
#pragma once

#if defined(__AVX512F__) && defined(__AVX512BF16__)
#define QUIRE_BF16_DOTS 1
#endif
