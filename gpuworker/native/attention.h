// Paged attention for a team of threads: a plan made once a step, the cache write, and attention of one layer.
//
// One thread calls `begin`, and `prepare` for each window and chunk that the step's layers have, before the team starts;
// then, for each layer, every member calls `attention_write` (or store_slot in a phase of its own) and `attend`.
#pragma once

#include "quire_attention.h"
#include "threads.h"

namespace quire {

class AttentionPlan;

// The plan behind a handle of the C interface.
AttentionPlan& plan_of(quire_attention*);

// Starts a step; the step's arrays must stay until its last layer. The result of a decode is the same to the bit, whatever
// else the step contains, unless other sequences share its first blocks. With `deterministic`, that of each query is, and
// however its sequence was cut into steps.
void begin(AttentionPlan&, const quire_cache&, const quire_step&, int num_heads, int threads, bool deterministic);

// Makes the work list of layers with this window or this chunk (0: none), unless the step has it.
void prepare(AttentionPlan&, int window, int chunk = 0);

// Writes all tokens of the step into their slots. key [T, kv_heads, head_dim_k], value [T, kv_heads, head_dim_v].
// One phase.
void attention_write(Team&, const quire_cache&, int layer, const quire_step&, const quire_rows& key, const quire_rows& value);

// query [T, num_heads, head_dim_k], out [T, num_heads, head_dim_v]. All members call it, on a plan that was begun for a
// team of this size.
constexpr int kAttendPhases = 2;  // at most
void attend(Team&, const quire_cache&, const quire_layer&, AttentionPlan&, const quire_rows& query, const quire_rows& out);

}  // namespace quire
