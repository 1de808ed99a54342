// The C interface of the forward of a step of a model of the Llama family (Llama, Qwen2, Qwen3, Mistral, Mixtral, Qwen3-MoE, OLMoE),
// of one with layers that keep a state (LFM2, Qwen3-Next, Qwen3.5), or of Gemma 4, in one call and one parallel region.
//
// The residual stream is float32; the input of a product has that product's type. All work but attention is done row by
// row, so a row's numbers do not depend on other rows of the step; for attention see `begin` in attention.h.
#pragma once

#include "quire_attention.h"
#include "quire_linear.h"
#include "quire_ranks.h"

#ifdef __cplusplus
extern "C" {
#endif

// Experts in place of a layer's MLP, or beside it: a row goes through the `top_k` of the largest router logits, and adds up
// their outputs by weight.
typedef struct {
  quire_linear gate_up, down;  // gate_up is paired
} quire_expert;

typedef struct {
  quire_linear router;       // [count, hidden], of kind QUIRE_LINEAR_F32
  const quire_expert *each;  // [count]
  quire_expert shared;       // what each row goes through besides; without memory there is none
  const float *shared_gate;  // [hidden]: its output is multiplied by the sigmoid of the row's product with this
  const float *bias;         // [count], or null: added to the sigmoids by which experts are chosen, and to no weight
  const float *scales;       // [count], or null: multiply the weights of experts
  int32_t count, top_k;
  int32_t normalised;        // weights are a softmax over the chosen experts; 0: over all
  int32_t sigmoid;           // weights are sigmoids in place of a softmax; `normalised` divides them by their sum
  float factor;              // with `sigmoid`: multiplies all weights
  int32_t reserved;
} quire_experts;

// A convolution of each channel over the tokens of a sequence, of which it keeps the last `width` - 1 inputs.
typedef struct {
  const float *weight;  // [width, channels], for the oldest input first
  const float *bias;    // [channels], or null
  int32_t width, channels;
} quire_conv;

// Where the numbers of key head g begin in a row: at first + g · step.
typedef struct {
  int32_t first, step;
} quire_spread;

// The gated delta rule. Behind the convolution and SiLU, head h of a token has k, q [key_dim] of unit length and v
// [value_dim]. Its state S [key_dim, value_dim] becomes d S + k ⊗ u (v - d Sᵀk), and o = Sᵀq / √key_dim is normed, and
// gated by silu(z). u is the sigmoid of a number, d = exp(-rate · softplus(a + bias)) of another one.
typedef struct {
  quire_linear gates;        // [2 · value_heads, hidden], of kind QUIRE_LINEAR_F32
  const float *decay_rate, *decay_bias;  // [value_heads]
  const float *norm;         // [value_dim]
  quire_spread query, key, value, gate;  // in a row of qkv: q, k of one head, v, z of value_heads / key_heads heads
  quire_spread update, decay;            // in a row of gates: of as many heads each
  int32_t key_heads, value_heads, key_dim, value_dim;
} quire_delta;

// Norms of what a layer adds to the residual stream, [hidden] each. With experts the MLP is their `shared`, the layer's
// mlp_norm is its own, and what both give is normed, added up, and normed by `mlp`.
typedef struct {
  const float *attention, *mlp;
  const float *router, *experts;                 // of the inputs; null without experts
  const float *behind_shared, *behind_experts;
  float scalar;                                  // multiplies the residual stream behind the layer
  int32_t reserved;
} quire_added_norms;

// What a layer takes of its tokens besides: gelu(gate(x)) · input goes through `output` and a norm into the residual stream.
typedef struct {
  quire_linear gate, output;  // [size, hidden], [hidden, size]
  const float *norm;          // [hidden]
} quire_token_gate;

// Those inputs, `size` numbers for each of `count` layers: (norm(projection(x) · projection_scale) + row · row_scale) / √2
// for the embedded token x and its row in a table.
typedef struct {
  quire_linear projection;  // [count · size, hidden]
  const void *table;        // [vocab, count · size] of table_type
  const float *norm;        // [size]
  float projection_scale, row_scale;
  int32_t table_type, size, count, reserved;
} quire_token_inputs;

// A rotation of heads: cosines and sines [num_positions, 2, pairs], by which numbers i and i + apart are turned.
typedef struct {
  const float *table;
  int32_t pairs, apart;
} quire_rope;

typedef struct {
  quire_linear qkv, output, gate_up, down;  // qkv: q, k, v one below the other, or what `conv` says; gate_up is paired
  const quire_experts *experts;             // null, or what runs in place of gate_up and down
  const quire_conv *conv;    // null: the layer attends. Without `delta` qkv gives B, C, x: C · conv(B · x) goes on
  const quire_delta *delta;  // null, or what runs behind a convolution of q, k and v of all heads
  const quire_added_norms *added;           // null: what the layer gives is added as it is
  const quire_token_gate *token_gate;       // null, or what runs behind the MLP; only with `added`
  const float *attention_norm, *mlp_norm;   // [hidden]
  const float *query_norm, *key_norm;       // [head_dim], or null: queries and keys are not normed; see joint_norm
  int64_t state;                            // bytes before its state in a row of states
  int32_t window;                           // positions that a query sees; 0: all
  int32_t head_dim, num_kv_heads;
  int32_t rope;          // which of the model's rotations its heads have
  int32_t borrows;       // qkv has queries alone: K and V are those of an earlier layer, at whose place the layer attends
  int32_t same_values;   // qkv has no values: they are the keys, before norm and rope
  int32_t normed_values; // values are divided by their root mean square
  int32_t input;         // which of the token inputs `token_gate` takes
} quire_llama_layer;

typedef struct {
  int32_t num_layers, hidden, num_heads, vocab;
  float norm_eps, scale;
  const quire_llama_layer *layers;
  const float *final_norm;   // [hidden]
  quire_linear head;         // [vocab, hidden]
  const void *embedding;     // [vocab, hidden] of embedding_type, or null: its rows are those of a packed weight
  quire_linear rows;         // that weight, [vocab, hidden]; without memory it is `head`
  const quire_token_inputs *inputs;  // null where no layer has a token_gate
  quire_rope ropes[2];
  int32_t embedding_type, num_positions;
  float embedding_scale;  // multiplies the rows of the embedding
  float logit_cap;        // logits become cap · tanh(logit / cap); 0: they stay
  int32_t gelu;        // gates of MLPs and experts go through gelu; 0: through silu
  int32_t gated;       // qkv has a gate [head_dim] behind each head's query: its sigmoid multiplies what is attended
  float clip;          // queries, keys and values are brought into [-clip, clip] before rope; 0: they are not
  int32_t joint_norm;  // all query heads are normed as one row, and all key heads: weights [heads · head_dim]
  const quire_ranks *ranks;  // null: this process has the whole model; else sizes are its own, but hidden and vocab
  int32_t lora_rank;   // the largest rank of an adapter that a step may have; 0: no adapters
  int32_t reserved;
} quire_llama;

// What an adapter adds to some outputs of a linear: B · (A · x). Rows of A and of the transposed B are padded with zeros
// to whole vectors of 16.
typedef struct {
  const void *a;       // [rank, k]
  const void *b;       // [rank, n], times the adapter's scale
  int64_t first, n;    // the outputs; of gate_up counted within gate, or within up
  int32_t rank;        // 0: nothing
  int32_t type;        // quire_type of A and B: float32 or bfloat16
} quire_lora;

// Of one layer: q, k, v; what the mixer's product is; gate, up; down.
typedef struct {
  quire_lora qkv[3], output[1], gate_up[2], down[1];
} quire_lora_layer;

// The phases of a step; QUIRE_PHASE_NORM includes the norms before products, and the embedding.
enum quire_llama_phase {
  QUIRE_PHASE_NORM,
  QUIRE_PHASE_QKV,
  QUIRE_PHASE_ROPE,  // and the cache write, or a convolution
  QUIRE_PHASE_ATTENTION,  // or the delta rule
  QUIRE_PHASE_OUTPUT,
  QUIRE_PHASE_GATE_UP,  // with experts: their choice, and the gathering of rows too
  QUIRE_PHASE_DOWN,     // with experts: the sum of outputs too
  QUIRE_PHASE_HEAD,
  QUIRE_NUM_PHASES
};

typedef struct {
  const int64_t *token_ids, *positions;  // [T]
  const int64_t *keep;                   // [num_keep]: the tokens whose logits are computed
  float *logits;                         // [num_keep, vocab]; ranks share it
  float *hidden;                         // [num_keep, hidden], the last norm's output in place of logits, or null
  void *scratch;                         // quire_llama_scratch bytes, aligned to 64
  double *seconds;                       // [QUIRE_NUM_PHASES] to add to, or null
  int64_t num_keep;
  void (*beside)(void *of, int64_t piece);  // called for pieces 0 .. num_beside - 1 by the team, before all else
  void *beside_of;
  int64_t num_beside;
  void *states;                          // [num_places, state_stride] bytes, aligned to 64; null in a model without
  const int32_t *places;                 // [R]: whose states each row goes on with; from position 0 on it begins without
  int64_t state_stride, num_places;
  const quire_lora_layer *const *adapters;  // [num_adapters]: layers of each adapter of the step; null: rows have none
  const int32_t *adapter_of;                // [T]: the adapter of each token; below 0: none
  int64_t num_adapters;
} quire_llama_run;

// The plans of a step, and where the K and V of each layer lie. Where layers are groups, those that one table serves have
// a plan, and so have layers of one shape. Layer n attends in pieces first[n] .. first[n + 1] - 1, which have equally many
// of its heads, in order: piece i attends by plans[part[i]], and is layer lane[i] of its cache. A layer that does not attend
// has no piece. Without `first` layer n is one piece, layer n of the only plan.
typedef struct {
  quire_attention *const *plans;
  const quire_cache *caches;           // [num_plans], for which plans are begun
  const int32_t *heads;                // [num_plans]: query heads of a piece
  const int32_t *first, *part, *lane;  // [num_layers + 1], [first[num_layers]] twice; or null
  int32_t num_plans, reserved;
} quire_parts;

enum quire_llama_refusal {
  QUIRE_LLAMA_DONE = 0,
  QUIRE_LLAMA_BAD_TOKEN = 1,
  QUIRE_LLAMA_BAD_POSITION = 2,
  QUIRE_LLAMA_BAD_PLACE = 4,  // beside those of whole_step.h
  QUIRE_LLAMA_BAD_ADAPTER = 5
};

// Bytes of the state that a layer keeps of a sequence, a multiple of 64; 0 for one that attends. `conv` and `delta` count.
QUIRE_API size_t quire_llama_state_bytes(const quire_llama_layer *layer);

// Bytes of scratch for steps of up to so many tokens, of which up to num_keep are kept.
QUIRE_API size_t quire_llama_scratch(const quire_llama *model, int64_t tokens, int64_t num_keep);

// Computes the step for which all plans were begun, on as many threads: writes K and V, and the logits (or the hidden
// states) of the kept tokens. Refuses a token outside of the vocabulary, a position that `rope_table` lacks, a place beyond
// the states, and an adapter that is not there or of a larger rank than the model's, before any computation.
QUIRE_API int32_t quire_llama_forward(const quire_llama *model, const quire_parts *parts, const quire_llama_run *run);

#ifdef __cplusplus
}
#endif
