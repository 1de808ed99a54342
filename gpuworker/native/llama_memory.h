// The memory of a step's forward beside weights and cache.
#pragma once

#include "quire_llama.h"

namespace quire {

// The layout of a step's scratch memory. Parts that layers share have the size of the largest.
struct LlamaScratch {
  float* residual;      // [T, hidden]
  float* kept;          // [S, hidden], the residual stream of the tokens whose logits are computed
  float* qkv;           // [T, (heads + 2 kv_heads) · head_dim]
  float* wide;          // [T, inputs of `output` or `down`], for products that take their inputs by put_row
  void *normed, *attended, *attended_kept, *inner, *head, *experts;
  size_t bytes;
};

// Floats of a token's queries, keys and values.
inline int64_t qkv_width(const quire_llama& m) {
  return static_cast<int64_t>(m.num_heads + 2 * m.num_kv_heads) * m.head_dim;
}

// `memory` may be null: only the bytes count then.
LlamaScratch lay_out(const quire_llama& model, int64_t tokens, int64_t kept, void* memory);

}  // namespace quire
