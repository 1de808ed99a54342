// Parts of loops that the compiler unrolls before it decides what lies in registers: f(I) for each I of a Places<I...>, by a
// fold expression over functions that are always inlined. Arrays that only constants index are then registers. Where a
// pragma or a lambda unrolls, GCC 12 keeps the sums of an array in memory, or copies each of them once a round.
#pragma once

#include <utility>

#define QUIRE_INLINE inline __attribute__((always_inline))

namespace quire {

template <int... I>
using Places = std::integer_sequence<int, I...>;
template <int N>
using UpTo = std::make_integer_sequence<int, N>;

}  // namespace quire
