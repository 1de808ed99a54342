// Where the rows of a tile are read, by few registers.
#pragma once

#include <cstdint>

#include "unroll.h"

namespace quire {

// One pointer for `Step` of R rows, at most four, which lie `stride` bytes apart:
//
//   base[0]             row 0        base[1]             row Step
//   base[0] + stride    row 1        base[1] + stride    row Step + 1
//   ...                              ...
template <int R, int Step>
class RowPointers {
 public:
  static_assert(Step <= 4);

  explicit RowPointers(int64_t stride) : stride_(stride), stride3_(3 * stride) {
    __asm__("" : "+r"(stride3_));  // as a value of its own
  }
  // All rows lie `stride` bytes apart. Bases are values of their own, or the compiler makes one pointer for each row.
  RowPointers(const uint8_t* first, int64_t stride) : stride_(stride), stride3_(3 * stride) {
#pragma GCC unroll 4
    for (int i = 0; i < kBases; ++i) {
      base_[i] = first + Step * i * stride;
      __asm__("" : "+r"(base_[i]));
    }
    __asm__("" : "+r"(stride3_));
  }
  QUIRE_INLINE void set(int row, const void* at) { base_[row / Step] = static_cast<const uint8_t*>(at); }
  QUIRE_INLINE const uint8_t* at(int row) const {
    const uint8_t* base = base_[row / Step];
    row %= Step;
    return row == 0 ? base : row == 1 ? base + stride_ : row == 2 ? base + 2 * stride_ : base + stride3_;
  }
  QUIRE_INLINE void advance(int64_t bytes) {
#pragma GCC unroll 16
    for (int i = 0; i < kBases; ++i) base_[i] += bytes;
  }

 private:
  static constexpr int kBases = (R + Step - 1) / Step;
  const uint8_t* base_[kBases];
  int64_t stride_, stride3_;
};

}  // namespace quire
