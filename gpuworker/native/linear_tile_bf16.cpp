// The tile functions of the kinds with activations in bf16. A matrix unit takes most of them (linear_layout.h: on_amx).
#include "linear_pairs.h"
#include "linear_tile_table.h"

namespace quire {

#if defined(QUIRE_BF16_DOTS)

TileFunction bf16_tile_function(int32_t kind, int rows, int panels) {
  static constexpr TileTable<Bf16Loader> bf16;
  static constexpr TileTable<I8Bf16Loader> i8;
  static constexpr TileTable<I4Bf16Loader> i4;
  switch (kind) {
    case QUIRE_LINEAR_BF16: return bf16.at(rows, panels);
    case QUIRE_LINEAR_I8_BF16: return i8.at(rows, panels);
    default: return i4.at(rows, panels);
  }
}

#else

TileFunction bf16_tile_function(int32_t kind, int rows, int panels) {
  static constexpr TileTable<Bf16Loader> bf16;
  if (kind == QUIRE_LINEAR_BF16) return bf16.at(rows, panels);
  return whole_tile_function(kind == QUIRE_LINEAR_I8_BF16 ? QUIRE_LINEAR_I8_F32 : QUIRE_LINEAR_I4_F32, rows, panels);
}

#endif

}  // namespace quire
