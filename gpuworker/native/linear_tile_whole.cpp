// The tile functions of the kinds with integer weights; linear_tile_bytes.cpp has those with integer activations too.
#include "linear_tile_table.h"

namespace quire {

TileFunction whole_tile_function(int32_t kind, int rows, int panels) {
  static constexpr TileTable<I8F32Loader> i8_f32;
  static constexpr TileTable<I8Bf16Loader> i8_bf16;
  static constexpr TileTable<I4F32Loader> i4_f32;
  static constexpr TileTable<I4Bf16Loader> i4_bf16;
  switch (kind) {
    case QUIRE_LINEAR_I8_F32: return i8_f32.at(rows, panels);
    case QUIRE_LINEAR_I8_BF16: return i8_bf16.at(rows, panels);
    case QUIRE_LINEAR_I4_F32: return i4_f32.at(rows, panels);
    case QUIRE_LINEAR_I4_BF16: return i4_bf16.at(rows, panels);
    default: return byte_tile_function(rows, panels);
  }
}

}  // namespace quire
