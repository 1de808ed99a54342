// The tile functions of the float kinds; linear_tile_whole.cpp has those of the integer kinds.
#include "linear_tile_table.h"

namespace quire {

TileFunction tile_function(int32_t kind, int rows, int panels) {
  static constexpr TileTable<F32Loader> f32;
  static constexpr TileTable<Bf16Loader> bf16;
  static constexpr TileTable<F16Loader> f16;
  if (kind == QUIRE_LINEAR_F32) return f32.at(rows, panels);
  if (kind == QUIRE_LINEAR_BF16) return bf16.at(rows, panels);
  if (kind == QUIRE_LINEAR_F16) return f16.at(rows, panels);
  return whole_tile_function(kind, rows, panels);
}

}  // namespace quire
