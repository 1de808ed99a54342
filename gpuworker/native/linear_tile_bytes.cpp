// The tile functions of integer weights and activations.
#include "linear_bytes.h"
#include "linear_tile_table.h"

namespace quire {

TileFunction byte_tile_function(int rows, int panels) {
  static constexpr TileTable<W8A8Loader> table;
  return table.at(rows, panels);
}

}  // namespace quire
