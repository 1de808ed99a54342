// The tile functions of integer weights and activations, which the matrix unit multiplies where there is one.
#include "amx.h"
#include "linear_bytes.h"
#include "linear_tile_table.h"

namespace quire {

#if defined(QUIRE_AMX)

TileFunction byte_tile_function(int, int) { return nullptr; }

#else

TileFunction byte_tile_function(int rows, int panels) {
  static constexpr TileTable<W8A8Loader> table;
  return table.at(rows, panels);
}

#endif

}  // namespace quire
