// The tile functions of the float kinds without bf16; linear_tile_whole.cpp and linear_tile_bf16.cpp have the others.
#include "linear_tile_table.h"

namespace quire {

TileFunction tile_function(int32_t kind, int rows, int panels) {
  static constexpr TileTable<F32Loader> f32;
  static constexpr TileTable<F16Loader> f16;
  switch (kind) {
    case QUIRE_LINEAR_F32: return f32.at(rows, panels);
    case QUIRE_LINEAR_F16: return f16.at(rows, panels);
    case QUIRE_LINEAR_BF16:
    case QUIRE_LINEAR_I8_BF16:
    case QUIRE_LINEAR_I4_BF16: return bf16_tile_function(kind, rows, panels);
    case QUIRE_LINEAR_W8A8: return byte_tile_function(rows, panels);
    default: return whole_tile_function(kind, rows, panels);
  }
}

}  // namespace quire
