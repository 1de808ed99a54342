// A table of the tile functions of one loader, by rows and panels.
#pragma once

#include <array>
#include <utility>

#include "linear_tile.h"
#include "quire_linear.h"

namespace quire {

template <typename Loader>
class TileTable {
 public:
  constexpr TileTable() : one_(make<1>(std::make_integer_sequence<int, kTileRows>())),
                          two_(make<2>(std::make_integer_sequence<int, kPairRows>())) {}
  TileFunction at(int rows, int panels) const { return panels == 1 ? one_[rows - 1] : two_[rows - 1]; }

 private:
  template <int P, int... I>
  static constexpr std::array<TileFunction, sizeof...(I)> make(std::integer_sequence<int, I...>) {
    return {{&Kernel<Loader, I + 1, P>::run...}};
  }
  std::array<TileFunction, kTileRows> one_;
  std::array<TileFunction, kPairRows> two_;
};

// Those of tile_function for integer weights with float activations, for activations in bf16, and for activations in bytes.
// The last one is called only where there is no matrix unit, the one before it for what the unit leaves (linear_layout.h:
// on_amx).
TileFunction whole_tile_function(int32_t kind, int rows, int panels);
TileFunction bf16_tile_function(int32_t kind, int rows, int panels);
TileFunction byte_tile_function(int rows, int panels);

}  // namespace quire
