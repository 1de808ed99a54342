// The tile functions of the kinds with integer weights and float activations.
#include "linear_tile_table.h"

namespace quire {

TileFunction whole_tile_function(int32_t kind, int rows, int panels) {
  static constexpr TileTable<I8F32Loader> i8;
  static constexpr TileTable<I4F32Loader> i4;
  return kind == QUIRE_LINEAR_I8_F32 ? i8.at(rows, panels) : i4.at(rows, panels);
}

}  // namespace quire
