// The memory of a step's forward beside weights and cache.
#pragma once

#include "quire_llama.h"

namespace quire {

// The layout of a step's scratch memory. Parts that layers share have the size of the largest.
struct LlamaScratch {
  float* residual;      // [T, hidden]
  float* kept;          // [S, hidden], the residual stream of the tokens whose logits are computed
  float* qkv;           // [T, outputs of qkv]
  float* wide;          // [T, inputs of `output` or `down`], for products that take their inputs by put_row
  float* mixed;         // [T, channels], behind the convolution before a delta rule
  float* gates;         // [T, 2 value_heads]
  float* shares;        // [T], by which rows of a shared expert are multiplied
  float* added;         // [T, hidden], what is normed before it is added to the residual stream
  float* of_experts;    // [T, hidden], the inputs of experts beside an MLP
  float* from_experts;  // [T, hidden], their outputs
  float* inputs;        // [T, count · size], what layers take of tokens besides
  float* gated;         // [T, size], by what that is multiplied
  float* lora_added;    // [T, 2 halves of gate_up], what adapters add before the gate is applied
  void *normed, *attended, *attended_kept, *inner, *head, *experts, *of_gates, *of_shared;
  size_t bytes;
};

// `memory` may be null: only the bytes count then.
LlamaScratch lay_out(const quire_llama& model, int64_t tokens, int64_t kept, void* memory);

}  // namespace quire
