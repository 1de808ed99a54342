// The work list of a step: which queries attend over which positions on which K/V head, as pieces for a queue.
//
// A piece (Item) is a chunk of positions of one row's context for some queries of it and some heads that share a K/V head.
// Where a query's positions are cut into several pieces, each leaves a part (largest score, sum, weighted values) and
// the parts are merged once all pieces are done.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "quire_cpu.h"

namespace quire {

constexpr int kTile = 64;      // positions that a kernel scores at once; tiles begin at multiples of it
constexpr int kMaxLanes = 64;  // (query, head) pairs that a kernel takes at once; an item of tiles may have more
constexpr int kFold = 256;     // positions that a decode sums up before it adds them to the rest

// A query of an item: a token of the step that sees positions [first, end).
struct Query {
  int32_t token, first, end;
  int32_t part;  // where its result goes; -1: straight to the output
};

struct Item {
  int32_t table_row;     // the row whose block table names the blocks
  int32_t begin, end;    // positions that any of its queries attends to here
  int32_t query, count;  // its queries: window.queries[query : query + count]
  int32_t head, heads;   // query heads head : head + heads, which share a K/V head
  bool tiles;            // the kernel: a tile of queries against tiles of keys, or one query after the other
  float cost;
};

// A token's result is in parts first .. first + count - 1.
struct Merge {
  int32_t token, first, count;
};

struct Window {
  int32_t size, chunk;  // 0: none
  std::vector<Query> queries;
  std::vector<Item> items;  // those of a row follow each other, the costliest row first
  std::vector<Merge> merges;
  int32_t parts = 0;
};

// Memory that grows and never shrinks, aligned to a cache line; its contents are lost when it grows.
class Arena {
 public:
  void reserve(size_t floats);
  float* data() const { return data_.get(); }

 private:
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  std::unique_ptr<float, Free> data_;
  size_t size_ = 0;
};

class AttentionPlan {
 public:
  quire_cache cache;
  quire_step step;
  int num_heads = 0, members = 0;
  bool deterministic = false;
  std::vector<std::unique_ptr<Window>> windows;
  Arena parts;    // [part, head]: see Part in attention_kernels.h
  Arena scratch;  // [member]

  const Window& window(int size, int chunk) const;
  int group() const { return num_heads / cache.num_kv_heads; }
};

// (query, head) pairs of an item of tiles, at most.
int tile_lanes(const quire_cache&);

std::unique_ptr<Window> make_window(const AttentionPlan&, int size, int chunk);

}  // namespace quire
