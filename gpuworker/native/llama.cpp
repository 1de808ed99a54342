// See quire_llama.h. Every function below is called by all members of a team. What they share is written in phases alone.
#include "quire_llama.h"

#include <algorithm>
#include <chrono>

#include "activations.h"
#include "attention.h"
#include "attention_plan.h"
#include "attention_store.h"
#include "experts.h"
#include "llama_embedding.h"
#include "llama_lora.h"
#include "llama_memory.h"
#include "llama_rows.h"
#include "llama_states.h"
#include "ranks.h"

namespace quire {
namespace {

template <typename Of>
size_t most(const quire_llama& model, Of of) {
  size_t found = 0;
  for (int n = 0; n < model.num_layers; ++n) found = std::max<size_t>(found, of(model.layers[n]));
  return found;
}

// Adds up, on the first member, the time from mark to mark.
class Clock {
 public:
  Clock(double* seconds, const Team& team) : seconds_(team.rank() == 0 ? seconds : nullptr) {
    if (seconds_) last_ = now();
  }
  void mark(quire_llama_phase phase) {
    if (!seconds_) return;
    const double at = now();
    seconds_[phase] += at - last_;
    last_ = at;
  }

 private:
  static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
  double* seconds_;
  double last_ = 0.0;
};

// Where a layer's K and V lie: in layer `lane` of the plan's cache.
struct LayerPlace {
  AttentionPlan& plan;
  int lane;
};

// In how many pieces a layer attends.
int pieces_of(const quire_parts& parts, int layer) {
  return parts.first ? parts.first[layer + 1] - parts.first[layer] : 1;
}

LayerPlace layer_place(const quire_parts& parts, int layer, int piece) {
  if (!parts.first) return {plan_of(parts.plans[0]), layer};
  const int at = parts.first[layer] + piece;
  return {plan_of(parts.plans[parts.part[at]]), parts.lane[at]};
}

// The last layer that writes K and V, or a state.
int last_writer(const quire_llama& model) {
  int last = model.num_layers - 1;
  while (last > 0 && model.layers[last].borrows) --last;
  return last;
}

class Step {
 public:
  Step(const quire_llama& model, const quire_parts& parts, const quire_llama_run& run)
      : model_(model), parts_(parts), step_(plan_of(parts.plans[0]).step), run_(run),
        scratch_(lay_out(model, step_.num_tokens, run.num_keep, run.scratch)),
        experts_(model, std::max<int64_t>(step_.num_tokens, run.num_keep), scratch_.experts),
        last_writer_(last_writer(model)) {
    all_kept_ = run.num_keep == step_.num_tokens;
    for (int n = 0; all_kept_ && n < run.num_keep; ++n) all_kept_ = run.keep[n] == n;
    if (!run.adapters) return;
    whole_.adapters.assign(run.adapter_of, run.adapter_of + step_.num_tokens);
    for (int64_t n = 0; n < run.num_keep; ++n) kept_.adapters.push_back(run.adapter_of[run.keep[n]]);
    for (Adapted* each : {&whole_, &kept_}) each->blocks = lora_blocks(each->adapters, run.num_adapters);
  }

  int64_t phases() const {
    int64_t count = 8;
    for (int n = 0; n < model_.num_layers; ++n) {
      count += (model_.layers[n].added ? 22 : 14) + kAttendPhases * pieces_of(parts_, n);
      if (run_.adapters) count += 4;
    }
    if (model_.ranks) count += 4 + 10 * static_cast<int64_t>(model_.num_layers);
    return count;
  }

  // The whole step, as a team.
  void forward(Team& team) {
    Clock clock(run_.seconds, team);
    Member me{team, clock, first_parts_};
    team.phase(run_.num_beside, [&](int64_t piece) { run_.beside(run_.beside_of, piece); });
    embed(me);
    float* residual = scratch_.residual;
    int64_t rows = step_.num_tokens;
    for (int n = 0; n < model_.num_layers; ++n) {
      const quire_llama_layer& layer = model_.layers[n];
      const bool last = n + 1 == model_.num_layers;
      project(me, n, layer, residual);
      Mixed mixed{};
      if (layer.conv) {
        mixed = layer.delta ? update_states(me, n, layer) : convolve_layer(me, n, layer);
        if (n == last_writer_ && !run_.num_keep) return;
      } else {
        write_cache(me, n, layer);
        if (n == last_writer_ && !run_.num_keep) return;
        mixed = attend_layer(me, n, layer);
      }
      if (last && !all_kept_) {
        mixed.in = gather(me, layer, mixed);
        residual = scratch_.kept;
        rows = run_.num_keep;
      }
      const Output out = behind(layer, residual);
      multiply_part(me, layer.output, mixed.in, rows, out, [&](const Output& to) {
        adapt(me, n, &quire_lora_layer::output, layer.output, mixed.in, rows_at(residual), to);
      });
      me.clock.mark(QUIRE_PHASE_OUTPUT);
      if (layer.added) add_normed(me, layer.added->attention, 1.0f, residual, rows);
      if (!layer.experts) {
        mlp(me, n, layer, residual, rows);
      } else if (layer.added) {
        experts_beside(me, layer, residual, rows);
      } else {
        experts(me, layer, residual, rows);
      }
      if (layer.token_gate) take_input(me, layer, residual, rows);
    }
    if (run_.hidden) {
      hidden(me, residual);
    } else {
      logits(me, residual);
    }
  }

 private:
  struct Member {
    Team& team;
    Clock& clock;
    uint32_t turn;  // which of the two sets of parts is next; every member counts alike
  };

  // The inputs of the product behind a mixer; or the place for them, while rows are in scratch.wide as floats.
  struct Mixed {
    Input in;
    bool wide;
  };

  static constexpr float kHalfRoot = 0.70710678f;
  static constexpr int64_t kCapped = 8192;  // logits that a piece caps

  // How many rows of so many floats a piece has: some microseconds of work.
  static int64_t rows_of_piece(int64_t floats) { return std::max<int64_t>(8192 / floats, 1); }

  void multiply(Member& me, const quire_linear& w, const Input& in, int64_t rows, const Output& out) {
    linear(me.team, w, in, rows, out);
  }

  // This rank's part of what is added up at the next meeting: rows of `hidden` floats.
  float* own_part(const Member& me) const { return part_of_rank(*model_.ranks, me.turn, model_.ranks->rank); }

  // A product of which each rank has some of the inputs. Calls add(to), which adds to the rows of this rank's part.
  template <typename Add>
  void multiply_part(Member& me, const quire_linear& w, const Input& in, int64_t rows, const Output& out, Add&& add) {
    const Output to = model_.ranks ? Output{own_part(me), model_.hidden, QUIRE_STORE_F32} : out;
    multiply(me, w, in, rows, to);
    add(to);
    if (model_.ranks) add_parts(me, rows, static_cast<float*>(out.data), out.store == QUIRE_STORE_ADD_F32);
  }

  // Meets the other ranks, and adds up their parts and its own, in the order of ranks: `adds` to rows of `out`, or in
  // their place.
  void add_parts(Member& me, int64_t rows, float* out, bool adds) {
    const quire_ranks& ranks = *model_.ranks;
    const uint32_t turn = me.turn++;
    const int64_t size = model_.hidden;
    me.team.phase(1, [&](int64_t) { meet_ranks(ranks, rows * size); });
    me.team.phase(rows, rows_of_piece(size), [&](int64_t row) {
      float* to = out + row * size;
      const float *first = part_of_rank(ranks, turn, 0) + row * size, *second = part_of_rank(ranks, turn, 1) + row * size;
      if (ranks.size == 2 && adds) {
        for (int64_t i = 0; i < size; ++i) to[i] += first[i] + second[i];
        return;
      }
      static thread_local std::vector<float> total;
      total.assign(first, first + size);
      for (int32_t r = 1; r < ranks.size; ++r) {
        const float* part = part_of_rank(ranks, turn, r) + row * size;
        for (int64_t i = 0; i < size; ++i) total[i] += part[i];
      }
      for (int64_t i = 0; i < size; ++i) to[i] = adds ? to[i] + total[i] : total[i];
    });
  }

  // Returns where rows are gathered that every rank has a part of: zeros, to be added up by `add_parts`; or `out` itself.
  float* zeroed_part(Member& me, int64_t rows, float* out) {
    if (!model_.ranks) return out;
    float* part = own_part(me);
    me.team.phase(rows, rows_of_piece(model_.hidden), [&](int64_t row) {
      std::fill(part + row * model_.hidden, part + (row + 1) * model_.hidden, 0.0f);
    });
    return part;
  }

  void embed(Member& me) {
    const quire_linear& packed = model_.rows.memory ? model_.rows : model_.head;
    const Layout layout(packed);
    const quire_token_inputs* inputs = model_.inputs;
    const Input in = inputs ? input_at(inputs->projection, step_.num_tokens, scratch_.normed) : Input{};
    const quire_ranks* ranks = model_.ranks;
    float* rows = ranks ? own_part(me) : scratch_.residual;
    const auto finish = [&](int64_t t) {
      float* out = scratch_.residual + t * model_.hidden;
      if (model_.embedding_scale != 1.0f) scale_row(out, model_.embedding_scale, model_.hidden);
      if (inputs) put_row(inputs->projection, in, t, out);
    };
    me.team.phase(step_.num_tokens, rows_of_piece(model_.hidden), [&](int64_t t) {
      float* out = rows + t * model_.hidden;
      const int64_t token = run_.token_ids[t] - (ranks ? ranks->first_token : 0);
      if (ranks && (token < 0 || token >= ranks->tokens)) {
        std::fill(out, out + model_.hidden, 0.0f);  // another rank has this row
      } else if (model_.embedding) {
        widen_row(model_.embedding, model_.embedding_type, token, model_.hidden, out);
      } else {
        unpack_row(packed, layout, token, out);
      }
      if (!ranks) finish(t);
    });
    if (ranks) {
      add_parts(me, step_.num_tokens, scratch_.residual, false);
      me.team.phase(step_.num_tokens, rows_of_piece(model_.hidden), finish);
    }
    if (inputs) make_inputs(me, *inputs, in);
  }

  // Makes what layers take of tokens besides, from the projection of embedded tokens and from a table.
  void make_inputs(Member& me, const quire_token_inputs& w, const Input& in) {
    const int64_t columns = w.projection.n;
    multiply(me, w.projection, in, step_.num_tokens, {scratch_.inputs, columns, QUIRE_STORE_F32});
    me.team.phase(step_.num_tokens, rows_of_piece(columns), [&](int64_t t) {
      static thread_local std::vector<float> own;
      own.resize(columns);
      widen_row(w.table, w.table_type, run_.token_ids[t], columns, own.data());
      float* x = scratch_.inputs + t * columns;
      scale_row(x, w.projection_scale, columns);
      for (int64_t at = 0; at < columns; at += w.size) {
        scale_row(x + at, w.norm, rms_factor(x + at, w.size, model_.norm_eps), w.size, x + at);
        for (int64_t i = at; i < at + w.size; ++i) x[i] = (x[i] + own[i] * w.row_scale) * kHalfRoot;
      }
    });
    me.clock.mark(QUIRE_PHASE_NORM);
  }

  // The adapters of rows, and the rows of each in blocks.
  struct Adapted {
    LoraRows adapters;
    std::vector<LoraBlock> blocks;
  };

  const Adapted& rows_at(const float* residual) const { return residual == scratch_.kept ? kept_ : whole_; }

  // Adds what the adapters of rows give for the outputs of a product, which are floats.
  template <int kParts>
  void adapt(Member& me, int n, quire_lora (quire_lora_layer::*role)[kParts], const quire_linear& w, const Input& in,
             const Adapted& rows, const Output& out) {
    if (rows.blocks.empty()) return;
    add_adapters(me, n, role, w, in, rows, static_cast<float*>(out.data), out.stride, 0, [](const LoraBlock&) {});
  }

  // Makes what the adapters of rows add to gate and up, from the inputs of their product; returns the product's output
  // with it.
  Output adapted_gate(Member& me, int n, const quire_linear& w, const Input& in, const Adapted& rows, Output out) {
    if (rows.blocks.empty()) return out;
    const int64_t half = whole_vectors(w.n / 2);
    const auto clear = [&](const LoraBlock& block) {
      for (int r = 0; r < block.count; ++r) {
        float* added = scratch_.lora_added + block.rows[r] * 2 * half;
        std::fill(added, added + 2 * half, 0.0f);
      }
    };
    add_adapters(me, n, &quire_lora_layer::gate_up, w, in, rows, scratch_.lora_added, 2 * half, half, clear);
    out.added = scratch_.lora_added;
    out.added_half = half;
    out.adds = rows.adapters.data();
    return out;
  }

  // Adds B · (A · x) to rows of floats, as one phase with a piece for each block; calls before(block) first. The outputs
  // of part p lie p · part_stride floats behind those of the first one.
  template <int kParts, typename Before>
  void add_adapters(Member& me, int n, quire_lora (quire_lora_layer::*role)[kParts], const quire_linear& w,
                    const Input& in, const Adapted& rows, float* data, int64_t stride, int64_t part_stride,
                    Before&& before) {
    const int64_t size = whole_vectors(w.k);
    me.team.phase(static_cast<int64_t>(rows.blocks.size()), [&](int64_t piece) {
      const LoraBlock& block = rows.blocks[piece];
      static thread_local std::vector<float> inputs, sums;
      inputs.resize(kLoraRows * size);
      sums.resize(kLoraRows * model_.lora_rank);
      before(block);
      const float* x[kLoraRows] = {};
      for (int r = 0; r < block.count; ++r) {
        float* row = inputs.data() + r * size;
        std::fill(row + w.k, row + size, 0.0f);
        get_row(w, in, block.rows[r], row);
        x[r] = row;
      }
      for (int part = 0; part < kParts; ++part) {
        const quire_lora& lora = (run_.adapters[block.adapter][n].*role)[part];
        if (!lora.rank) continue;
        float* out[kLoraRows] = {};
        for (int r = 0; r < block.count; ++r) out[r] = data + block.rows[r] * stride + part * part_stride + lora.first;
        with_rows(block.count, [&](auto count) {
          if (lora.type == QUIRE_F32) {
            add_low_rank<count, float>(lora, x, size, sums.data(), out);
          } else {
            add_low_rank<count, bf16>(lora, x, size, sums.data(), out);
          }
        });
      }
    });
  }

  // Norms rows and multiplies them by what the layer mixes.
  void project(Member& me, int n, const quire_llama_layer& layer, const float* residual) {
    const int64_t rows = step_.num_tokens;
    const Input in = input_at(layer.qkv, rows, scratch_.normed);
    if (layer.delta) {
      const quire_linear& gates = layer.delta->gates;
      const Input of_gates = input_at(gates, rows, scratch_.of_gates);
      me.team.phase(rows, rows_of_piece(model_.hidden), [&](int64_t row) {
        const float* x = residual + row * model_.hidden;
        norm_row(x, layer.attention_norm, model_.norm_eps, layer.qkv, in, row);
        norm_row(x, layer.attention_norm, model_.norm_eps, gates, of_gates, row);
      });
      me.clock.mark(QUIRE_PHASE_NORM);
      multiply(me, gates, of_gates, rows, {scratch_.gates, gates.n, QUIRE_STORE_F32});
    } else {
      norm(me, layer.attention_norm, layer.qkv, in, rows, residual);
    }
    const Output out{scratch_.qkv, layer.qkv.n, QUIRE_STORE_F32};
    multiply(me, layer.qkv, in, rows, out);
    adapt(me, n, &quire_lora_layer::qkv, layer.qkv, in, whole_, out);
    me.clock.mark(QUIRE_PHASE_QKV);
  }

  // Norms and rotates heads, and writes K and V into their slots.
  void write_cache(Member& me, int n, const quire_llama_layer& layer) {
    const int64_t rows = step_.num_tokens;
    const int64_t heads = model_.num_heads + (layer.borrows ? 0 : layer.num_kv_heads);
    if (model_.joint_norm) norm_jointly(me, layer, rows);
    const Input attended = input_at(layer.output, rows, scratch_.attended);
    const bool pads = is_padded(layer.output);
    me.team.phase(rows, rows_of_piece(layer.qkv.n), [&](int64_t row) {
      for (int64_t head = 0; head < heads; ++head) turn_head(n, layer, row, head);
      if (pads) pad_row(layer.output, attended, row);
    });
    me.clock.mark(QUIRE_PHASE_ROPE);
  }

  // Norms all queries of a token as one row, and all its keys.
  void norm_jointly(Member& me, const quire_llama_layer& layer, int64_t rows) {
    const int64_t queries = static_cast<int64_t>(model_.num_heads) * layer.head_dim;
    const int64_t keys = static_cast<int64_t>(layer.num_kv_heads) * layer.head_dim;
    if (model_.ranks) return norm_jointly_with_ranks(me, layer, rows, queries, keys);
    me.team.phase(rows, rows_of_piece(queries + keys), [&](int64_t token) {
      float* query = scratch_.qkv + token * layer.qkv.n;
      float* key = query + queries;
      scale_row(query, layer.query_norm, rms_factor(query, queries, model_.norm_eps), queries, query);
      scale_row(key, layer.key_norm, rms_factor(key, keys, model_.norm_eps), keys, key);
    });
  }

  // The same where each rank has some of the heads: it gives the sums of their squares to the others.
  void norm_jointly_with_ranks(Member& me, const quire_llama_layer& layer, int64_t rows, int64_t queries, int64_t keys) {
    const quire_ranks& ranks = *model_.ranks;
    const uint32_t turn = me.turn++;
    float* own = part_of_rank(ranks, turn, ranks.rank);  // [rows, 2]
    me.team.phase(rows, rows_of_piece(queries + keys), [&](int64_t token) {
      const float* query = scratch_.qkv + token * layer.qkv.n;
      own[2 * token] = dot(query, query, queries);
      own[2 * token + 1] = dot(query + queries, query + queries, keys);
    });
    me.team.phase(1, [&](int64_t) { meet_ranks(ranks, 2 * rows); });
    const float count = static_cast<float>(queries * ranks.size);
    const float key_count = static_cast<float>(keys * ranks.size);  // copies count on both sides of the mean
    me.team.phase(rows, rows_of_piece(queries + keys), [&](int64_t token) {
      float of_queries = 0.0f, of_keys = 0.0f;
      for (int32_t r = 0; r < ranks.size; ++r) {
        const float* part = part_of_rank(ranks, turn, r) + 2 * token;
        of_queries += part[0];
        of_keys += part[1];
      }
      float* query = scratch_.qkv + token * layer.qkv.n;
      float* key = query + queries;
      scale_row(query, layer.query_norm, 1.0f / std::sqrt(of_queries / count + model_.norm_eps), queries, query);
      scale_row(key, layer.key_norm, 1.0f / std::sqrt(of_keys / key_count + model_.norm_eps), keys, key);
    });
  }

  // Floats from one head's query to that of the next: its gate may stand behind it.
  int64_t query_stride(const quire_llama_layer& layer) const {
    return static_cast<int64_t>(layer.head_dim) * (model_.gated ? 2 : 1);
  }

  // Norms, clips and rotates one head of one token; a key goes on into the cache, and its value with it.
  void turn_head(int n, const quire_llama_layer& layer, int64_t token, int64_t head) {
    const quire_rope& rope = model_.ropes[layer.rope];
    const int dim = layer.head_dim;
    const int64_t key = head - model_.num_heads;
    const bool is_key = key >= 0;
    float* row = scratch_.qkv + token * layer.qkv.n;
    float* x = row + (is_key ? model_.num_heads * query_stride(layer) + key * dim : head * query_stride(layer));
    float* value = is_key ? value_of(layer, x) : nullptr;
    const float* weight = is_key ? layer.key_norm : layer.query_norm;
    if (weight && !model_.joint_norm) scale_row(x, weight, rms_factor(x, dim, model_.norm_eps), dim, x);
    if (model_.clip > 0.0f) clip_row(x, model_.clip, dim);
    const float* turn = rope.table + run_.positions[token] * 2 * rope.pairs;
    rotate(x, turn, turn + rope.pairs, rope.pairs, rope.apart);
    if (!is_key) return;
    if (model_.clip > 0.0f) clip_row(value, model_.clip, dim);
    const int64_t each = layer.num_kv_heads / pieces_of(parts_, n);
    const LayerPlace place = layer_place(parts_, n, static_cast<int>(key / each));
    const int32_t slot = place.plan.step.slot_mapping[token];
    store_slot(place.plan.cache, place.lane, slot, static_cast<int>(key % each), x, value);
  }

  // The value that goes with a key, which is not normed yet.
  float* value_of(const quire_llama_layer& layer, float* key) const {
    const int dim = layer.head_dim;
    float* value = key + static_cast<int64_t>(layer.num_kv_heads) * dim;
    if (layer.same_values) {
      static thread_local std::vector<float> own;
      own.assign(key, key + dim);
      value = own.data();
    }
    if (layer.normed_values) scale_row(value, rms_factor(value, dim, model_.norm_eps), dim);
    return value;
  }

  // Returns the inputs of the product that follows, in scratch.attended; in the last layer they may still be in `wide`.
  Mixed attend_layer(Member& me, int n, const quire_llama_layer& layer) {
    const int dim = layer.head_dim;
    const quire_linear& w = layer.output;
    const Input in = input_at(w, step_.num_tokens, scratch_.attended);
    quire_rows out{in.data, in.stride / item_size(w), dim, input_type(w)};
    const bool wide = needs_put_row(w) || model_.gated;
    if (wide) out = {scratch_.wide, w.k, dim, QUIRE_F32};
    attend_pieces(me, n, layer, out);
    const bool left = wide && is_gathered(n);
    if (model_.gated) {
      me.team.phase(step_.num_tokens, rows_of_piece(w.k), [&](int64_t token) {
        float* x = scratch_.wide + token * w.k;
        const float* gates = scratch_.qkv + token * layer.qkv.n + dim;
        for (int64_t head = 0; head < model_.num_heads; ++head) {
          gate_row(x + head * dim, gates + head * query_stride(layer), dim);
        }
        if (!left) put_row(w, in, token, x);
      });
    } else if (wide && !left) {
      put_rows(me, w, in, step_.num_tokens);
    }
    me.clock.mark(QUIRE_PHASE_ATTENTION);
    return {in, left};
  }

  // Attends with the heads of each piece, one piece after the other.
  void attend_pieces(Member& me, int n, const quire_llama_layer& layer, quire_rows out) {
    const int pieces = pieces_of(parts_, n);
    const int64_t heads = model_.num_heads / pieces, item = out.type == QUIRE_F32 ? 4 : 2;
    quire_rows query{scratch_.qkv, layer.qkv.n, query_stride(layer), QUIRE_F32};
    for (int piece = 0; piece < pieces; ++piece) {
      const LayerPlace place = layer_place(parts_, n, piece);
      const quire_layer how{place.lane, layer.window, 0, model_.scale, 0.0f, nullptr};
      attend(me.team, place.plan.cache, how, place.plan, query, out);
      query.data = static_cast<float*>(query.data) + heads * query.head_stride;
      out.data = static_cast<char*>(out.data) + heads * out.head_stride * item;
    }
  }

  bool is_gathered(int n) const { return n + 1 == model_.num_layers && !all_kept_; }

  // The state that a layer keeps of the sequence of a row.
  float* state_of(const quire_llama_layer& layer, int64_t row) const {
    char* states = static_cast<char*>(run_.states) + run_.places[row] * run_.state_stride;
    return reinterpret_cast<float*>(states + layer.state);
  }

  // Calls body(row, tokens) for rows of a step as a phase: for those of several tokens, or for all.
  template <typename Body>
  void rows_phase(Member& me, bool all, Body&& body) {
    const int64_t first = all ? 0 : step_.num_decodes;
    me.team.phase(step_.num_rows - first, [&](int64_t n) { body(first + n, tokens_of(step_, first + n)); });
  }

  // Calls body(row, tokens, token) for all tokens as a phase.
  template <typename Body>
  void tokens_phase(Member& me, int64_t floats, Body&& body) {
    me.team.phase(step_.num_tokens, rows_of_piece(floats), [&](int64_t token) {
      const int32_t* end = step_.query_start + step_.num_rows + 1;
      const int64_t row = std::upper_bound(step_.query_start, end, static_cast<int32_t>(token)) - step_.query_start - 1;
      body(row, tokens_of(step_, row), token);
    });
  }

  // A short convolution of B · x, which C multiplies. A row of one token keeps its inputs at once, others when all of
  // their tokens have read what was kept.
  Mixed convolve_layer(Member& me, int n, const quire_llama_layer& layer) {
    const quire_conv& conv = *layer.conv;
    const quire_linear& w = layer.output;
    const int64_t size = conv.channels, stride = layer.qkv.n;
    const Input in = input_at(w, step_.num_tokens, scratch_.attended);
    const float *first = scratch_.qkv, *by = first + 2 * size;
    auto keep = [&](int64_t row, const Tokens& tokens) {
      keep_inputs(conv.width, tokens, first, by, stride, state_of(layer, row), size, size);
    };
    const bool by_row = needs_put_row(w), left = by_row && is_gathered(n);
    tokens_phase(me, stride, [&](int64_t row, const Tokens& tokens, int64_t token) {
      static thread_local std::vector<float> made;
      made.resize(size);
      float* out = left ? scratch_.wide + token * w.k : made.data();
      const float* gate = first + token * stride + size;
      const Taps taps = taps_at(conv.width, tokens, token, first, by, stride, state_of(layer, row), size);
      convolve(conv, 0, size, taps, Gated{gate, out});
      if (!left) put_row(w, in, token, out);
      if (row < step_.num_decodes) keep(row, tokens);
    });
    rows_phase(me, false, keep);
    me.clock.mark(QUIRE_PHASE_ROPE);
    return {in, left};
  }

  // Writes C · sums.
  struct Gated {
    const float* gate;
    float* out;
    void operator()(int64_t i, Vec sum) const { (sum * Vec::load(gate + i)).store(out + i); }
    void operator()(int64_t i, float sum) const { out[i] = sum * gate[i]; }
  };

  // Writes silu of sums.
  struct Activated {
    float* out;
    void operator()(int64_t i, Vec sum) const { (sum * sigmoid(sum)).store(out + i); }
    void operator()(int64_t i, float sum) const { out[i] = sum * sigmoid(sum); }
  };

  // The channels of a key head: its query, its key and the values that go with it.
  struct Segment {
    int64_t channel, count, at;  // `at` in a row of qkv
  };
  static void segments_of(const quire_delta& delta, int64_t g, Segment (&out)[3]) {
    const int64_t keys = static_cast<int64_t>(delta.key_heads) * delta.key_dim;
    const int64_t values = static_cast<int64_t>(delta.value_heads / delta.key_heads) * delta.value_dim;
    out[0] = {g * delta.key_dim, delta.key_dim, delta.query.first + g * delta.query.step};
    out[1] = {keys + g * delta.key_dim, delta.key_dim, delta.key.first + g * delta.key.step};
    out[2] = {2 * keys + g * values, values, delta.value.first + g * delta.value.step};
  }

  // The convolution of q, k and v, then the gated delta rule, head by head.
  Mixed update_states(Member& me, int n, const quire_llama_layer& layer) {
    const quire_linear& w = layer.output;
    const Input in = input_at(w, step_.num_tokens, scratch_.attended);
    tokens_phase(me, layer.qkv.n, [&](int64_t row, const Tokens& tokens, int64_t token) {
      prepare_token(layer, row, tokens, token);
      if (row < step_.num_decodes) keep_channels(layer, row, tokens);
    });
    me.clock.mark(QUIRE_PHASE_ROPE);
    const quire_delta& delta = *layer.delta;
    me.team.phase(step_.num_rows * static_cast<int64_t>(delta.value_heads), [&](int64_t piece) {
      const int64_t row = piece / delta.value_heads, head = piece % delta.value_heads;
      const Tokens tokens = tokens_of(step_, row);
      update_head(layer, row, tokens, head);
      if (!head && row >= step_.num_decodes) keep_channels(layer, row, tokens);
    });
    const bool left = is_gathered(n);
    if (!left) put_rows(me, w, in, step_.num_tokens);
    me.clock.mark(QUIRE_PHASE_ATTENTION);
    return {in, left};
  }

  void prepare_token(const quire_llama_layer& layer, int64_t row, const Tokens& tokens, int64_t token) {
    const quire_delta& delta = *layer.delta;
    const quire_conv& conv = *layer.conv;
    const float* kept = state_of(layer, row);
    float* mixed = scratch_.mixed + token * conv.channels;
    float* gates = scratch_.gates + token * delta.gates.n;
    const float scale = 1.0f / std::sqrt(static_cast<float>(delta.key_dim));
    const int64_t each = delta.value_heads / delta.key_heads;
    Segment segments[3];
    for (int64_t g = 0; g < delta.key_heads; ++g) {
      segments_of(delta, g, segments);
      for (const Segment& part : segments) {
        const Taps taps = taps_at(conv.width, tokens, token, scratch_.qkv + part.at, nullptr, layer.qkv.n,
                                  kept + part.channel, conv.channels);
        convolve(conv, part.channel, part.count, taps, Activated{mixed + part.channel});
      }
      unit_row(mixed + segments[0].channel, delta.key_dim, scale);
      unit_row(mixed + segments[1].channel, delta.key_dim, 1.0f);
      for (int64_t h = 0; h < each; ++h) {
        float &update = gates[delta.update.first + g * delta.update.step + h];
        float &decay = gates[delta.decay.first + g * delta.decay.step + h];
        const float x = decay + delta.decay_bias[g * each + h];
        const float soft = x > 20.0f ? x : std::log1p(std::exp(x));
        update = sigmoid(update);
        decay = std::exp(-delta.decay_rate[g * each + h] * soft);
      }
    }
  }

  void keep_channels(const quire_llama_layer& layer, int64_t row, const Tokens& tokens) {
    const quire_conv& conv = *layer.conv;
    Segment segments[3];
    for (int64_t g = 0; g < layer.delta->key_heads; ++g) {
      segments_of(*layer.delta, g, segments);
      for (const Segment& part : segments) {
        keep_inputs(conv.width, tokens, scratch_.qkv + part.at, nullptr, layer.qkv.n,
                    state_of(layer, row) + part.channel, conv.channels, part.count);
      }
    }
  }

  // One head of one row; its outputs are normed and gated, in scratch.wide.
  void update_head(const quire_llama_layer& layer, int64_t row, const Tokens& tokens, int64_t head) {
    const quire_delta& delta = *layer.delta;
    const quire_conv& conv = *layer.conv;
    const int64_t each = delta.value_heads / delta.key_heads, g = head / each, h = head % each;
    float* state = state_of(layer, row) + conv_bytes(conv) / 4 + head * head_floats(delta);
    if (tokens.fresh) std::fill(state, state + head_floats(delta), 0.0f);
    Segment segments[3];
    segments_of(delta, g, segments);
    const float* mixed = scratch_.mixed + tokens.begin * conv.channels;
    const float* gates = scratch_.gates + tokens.begin * delta.gates.n;
    const DeltaInputs inputs{mixed + segments[0].channel,
                             mixed + segments[1].channel,
                             mixed + segments[2].channel + h * delta.value_dim,
                             conv.channels,
                             gates + delta.update.first + g * delta.update.step + h,
                             gates + delta.decay.first + g * delta.decay.step + h,
                             delta.gates.n};
    const int64_t stride = layer.output.k;
    float* out = scratch_.wide + tokens.begin * stride + head * delta.value_dim;
    delta_head(delta, inputs, tokens.end - tokens.begin, state, out, stride);
    const float* z = scratch_.qkv + delta.gate.first + g * delta.gate.step + h * delta.value_dim;
    for (int64_t token = tokens.begin; token < tokens.end; ++token, out += stride) {
      const float factor = rms_factor(out, delta.value_dim, model_.norm_eps);
      gate_norm_row(out, delta.norm, factor, z + token * layer.qkv.n, delta.value_dim);
    }
  }

  // Continues with the kept tokens alone: copies their attention outputs and their residual stream.
  Input gather(Member& me, const quire_llama_layer& layer, const Mixed& from) {
    const quire_linear& w = layer.output;
    const Input in = input_at(w, run_.num_keep, scratch_.attended_kept);
    me.team.phase(run_.num_keep, rows_of_piece(model_.hidden), [&](int64_t row) {
      const int64_t token = run_.keep[row];
      const float* x = scratch_.residual + token * model_.hidden;
      std::copy(x, x + model_.hidden, scratch_.kept + row * model_.hidden);
      if (from.wide) {
        put_row(w, in, row, scratch_.wide + token * w.k);
      } else {
        std::memcpy(row_of(in, row), row_of(from.in, token), row_elements(w) * item_size(w));
      }
    });
    return in;
  }

  void mlp(Member& me, int n, const quire_llama_layer& layer, float* residual, int64_t rows) {
    const Input in = input_at(layer.gate_up, rows, scratch_.normed);
    const quire_linear& down = layer.down;
    const Input inner = input_at(down, rows, scratch_.inner);
    norm(me, layer.mlp_norm, layer.gate_up, in, rows, residual, is_padded(down) ? &down : nullptr);
    Output out{inner.data, inner.stride / item_size(down), gated_store(input_type(down), model_.gelu)};
    const bool by_row = needs_put_row(down);
    if (by_row) out = {scratch_.wide, down.k, gated_store(QUIRE_F32, model_.gelu)};
    multiply(me, layer.gate_up, in, rows, adapted_gate(me, n, layer.gate_up, in, rows_at(residual), out));
    if (by_row) put_rows(me, down, inner, rows);
    me.clock.mark(QUIRE_PHASE_GATE_UP);
    const Output to = behind(layer, residual);
    multiply_part(me, down, inner, rows, to, [&](const Output& part) {
      adapt(me, n, &quire_lora_layer::down, down, inner, rows_at(residual), part);
    });
    me.clock.mark(QUIRE_PHASE_DOWN);
    if (layer.added) add_normed(me, layer.added->mlp, behind_mlp(layer), residual, rows);
  }

  // Where a product behind a mixer or an MLP goes: to where `add_normed` takes it, or straight into the residual stream.
  Output behind(const quire_llama_layer& layer, float* residual) const {
    if (layer.added) return {scratch_.added, model_.hidden, QUIRE_STORE_F32};
    return {residual, model_.hidden, QUIRE_STORE_ADD_F32};
  }

  // What multiplies the residual stream behind the MLP: the last part of a layer does it.
  static float behind_mlp(const quire_llama_layer& layer) { return layer.token_gate ? 1.0f : layer.added->scalar; }

  // Norms rows of `added`, and adds them to the residual stream, which is multiplied then.
  void add_normed(Member& me, const float* weight, float scalar, float* residual, int64_t rows) {
    const int64_t size = model_.hidden;
    me.team.phase(rows, rows_of_piece(size), [&](int64_t row) {
      const float* x = scratch_.added + row * size;
      add_scaled_row(x, weight, rms_factor(x, size, model_.norm_eps), scalar, size, residual + row * size);
    });
    me.clock.mark(QUIRE_PHASE_NORM);
  }

  // What a layer takes of its tokens besides.
  void take_input(Member& me, const quire_llama_layer& layer, float* residual, int64_t rows) {
    const quire_token_gate& w = *layer.token_gate;
    const int64_t size = w.gate.n, stride = model_.inputs->projection.n;
    const bool kept = residual == scratch_.kept;
    const Input in = input_at(w.gate, rows, scratch_.normed), inner = input_at(w.output, rows, scratch_.inner);
    me.team.phase(rows, rows_of_piece(model_.hidden), [&](int64_t row) {
      put_row(w.gate, in, row, residual + row * model_.hidden);
    });
    multiply(me, w.gate, in, rows, {scratch_.gated, size, QUIRE_STORE_F32});
    me.team.phase(rows, rows_of_piece(size), [&](int64_t row) {
      const int64_t token = kept ? run_.keep[row] : row;
      float* x = scratch_.gated + row * size;
      gelu_gate_row(x, scratch_.inputs + token * stride + layer.input * size, size);
      put_row(w.output, inner, row, x);
    });
    me.clock.mark(QUIRE_PHASE_GATE_UP);
    multiply(me, w.output, inner, rows, {scratch_.added, model_.hidden, QUIRE_STORE_F32});
    me.clock.mark(QUIRE_PHASE_DOWN);
    add_normed(me, w.norm, layer.added->scalar, residual, rows);
  }

  // Experts beside an MLP: each has a norm of its own before it and behind it.
  void experts_beside(Member& me, const quire_llama_layer& layer, float* residual, int64_t rows) {
    const quire_experts& w = *layer.experts;
    const quire_added_norms& norms = *layer.added;
    const quire_linear &gate_up = w.shared.gate_up, &down = w.shared.down;
    const int64_t size = model_.hidden;
    const float eps = model_.norm_eps;
    const Input in = input_at(w.router, rows, scratch_.normed);
    const Input shared = input_at(gate_up, rows, scratch_.of_shared), inner = input_at(down, rows, scratch_.inner);
    const Input taken{scratch_.of_experts, size * static_cast<int64_t>(sizeof(float)), nullptr, nullptr};
    float* outputs = model_.ranks ? own_part(me) : scratch_.from_experts;
    me.team.phase(rows, rows_of_piece(size), [&](int64_t row) {
      const float* x = residual + row * size;
      norm_row(x, norms.router, eps, w.router, in, row);
      norm_row(x, layer.mlp_norm, eps, gate_up, shared, row);
      scale_row(x, norms.experts, rms_factor(x, size, eps), size, scratch_.of_experts + row * size);
      std::fill(outputs + row * size, outputs + (row + 1) * size, 0.0f);
    });
    me.clock.mark(QUIRE_PHASE_NORM);
    multiply(me, w.router, in, rows, {experts_.logits(), w.count, QUIRE_STORE_F32});
    experts_.gate_up(me.team, w, taken, rows);
    me.clock.mark(QUIRE_PHASE_GATE_UP);
    experts_.down(me.team, w, rows, outputs);
    if (model_.ranks) add_parts(me, rows, scratch_.from_experts, false);
    me.clock.mark(QUIRE_PHASE_DOWN);
    multiply(me, gate_up, shared, rows, {scratch_.wide, down.k, gated_store(QUIRE_F32, model_.gelu)});
    put_rows(me, down, inner, rows);
    me.clock.mark(QUIRE_PHASE_GATE_UP);
    multiply_part(me, down, inner, rows, {scratch_.added, size, QUIRE_STORE_F32}, [](const Output&) {});
    me.clock.mark(QUIRE_PHASE_DOWN);
    me.team.phase(rows, rows_of_piece(size), [&](int64_t row) {
      float *x = scratch_.added + row * size, *y = scratch_.from_experts + row * size;
      scale_row(x, norms.behind_shared, rms_factor(x, size, eps), size, x);
      add_scaled_row(y, norms.behind_experts, rms_factor(y, size, eps), 1.0f, size, x);
      add_scaled_row(x, norms.mlp, rms_factor(x, size, eps), behind_mlp(layer), size, residual + row * size);
    });
    me.clock.mark(QUIRE_PHASE_NORM);
  }

  void experts(Member& me, const quire_llama_layer& layer, float* residual, int64_t rows) {
    const quire_experts& w = *layer.experts;
    const Input in = input_at(w.router, rows, scratch_.normed);
    norm(me, layer.mlp_norm, w.router, in, rows, residual);
    multiply(me, w.router, in, rows, {experts_.logits(), w.count, QUIRE_STORE_F32});
    experts_.gate_up(me.team, w, in, rows);
    me.clock.mark(QUIRE_PHASE_GATE_UP);
    float* outputs = zeroed_part(me, rows, residual);
    experts_.down(me.team, w, rows, outputs);
    me.clock.mark(QUIRE_PHASE_DOWN);
    if (w.shared.gate_up.memory) shared_expert(me, w, in, outputs, rows);
    if (model_.ranks) add_parts(me, rows, residual, true);
    me.clock.mark(QUIRE_PHASE_DOWN);
  }

  // Adds the expert that all rows go through. `normed` has rows of floats.
  void shared_expert(Member& me, const quire_experts& w, const Input& normed, float* residual, int64_t rows) {
    const quire_linear &gate_up = w.shared.gate_up, &down = w.shared.down;
    const Input in = input_at(gate_up, rows, scratch_.of_shared), inner = input_at(down, rows, scratch_.inner);
    me.team.phase(rows, rows_of_piece(model_.hidden), [&](int64_t row) {
      const float* x = static_cast<const float*>(row_of(normed, row));
      put_row(gate_up, in, row, x);
      scratch_.shares[row] = sigmoid(dot(x, w.shared_gate, model_.hidden));
    });
    multiply(me, gate_up, in, rows, {scratch_.wide, down.k, gated_store(QUIRE_F32, model_.gelu)});
    me.team.phase(rows, rows_of_piece(down.k), [&](int64_t row) {
      float* x = scratch_.wide + row * down.k;
      for (int64_t i = 0; i < down.k; ++i) x[i] *= scratch_.shares[row];
      put_row(down, inner, row, x);
    });
    me.clock.mark(QUIRE_PHASE_GATE_UP);
    multiply(me, down, inner, rows, {residual, model_.hidden, QUIRE_STORE_ADD_F32});
    me.clock.mark(QUIRE_PHASE_DOWN);
  }

  // Norms the kept rows as the head would take them, in float32.
  void hidden(Member& me, const float* residual) {
    const int64_t size = model_.hidden;
    me.team.phase(run_.num_keep, rows_of_piece(size), [&](int64_t row) {
      const float* x = residual + row * size;
      scale_row(x, model_.final_norm, rms_factor(x, size, model_.norm_eps), size, run_.hidden + row * size);
    });
    me.clock.mark(QUIRE_PHASE_HEAD);
  }

  void logits(Member& me, const float* residual) {
    const Input in = input_at(model_.head, run_.num_keep, scratch_.head);
    norm(me, model_.final_norm, model_.head, in, run_.num_keep, residual);
    // Each rank writes its columns of the logits.
    const quire_ranks* ranks = model_.ranks;
    float* logits = run_.logits + (ranks ? ranks->first_token : 0);
    const int64_t vocab = model_.vocab, columns = ranks ? ranks->tokens : vocab;
    multiply(me, model_.head, in, run_.num_keep, {logits, vocab, QUIRE_STORE_F32});
    if (model_.logit_cap > 0.0f) {
      const int64_t pieces = (columns + kCapped - 1) / kCapped;
      me.team.phase(run_.num_keep * pieces, [&](int64_t piece) {
        const int64_t first = piece % pieces * kCapped;
        cap_row(logits + piece / pieces * vocab + first, model_.logit_cap, std::min(kCapped, columns - first));
      });
    }
    if (ranks) {
      ++me.turn;
      me.team.phase(1, [&](int64_t) { meet_ranks(*ranks, 0, run_.num_keep); });
    }
    me.clock.mark(QUIRE_PHASE_HEAD);
  }

  // Norms rows into the inputs of a product. Also pads rows of `scratch_.inner`, the inputs of `padded`, if there is any.
  void norm(Member& me, const float* weight, const quire_linear& w, const Input& in, int64_t rows,
            const float* residual, const quire_linear* padded = nullptr) {
    const Input inner = padded ? input_at(*padded, rows, scratch_.inner) : Input{};
    me.team.phase(rows, rows_of_piece(model_.hidden), [&](int64_t row) {
      norm_row(residual + row * model_.hidden, weight, model_.norm_eps, w, in, row);
      if (padded) pad_row(*padded, inner, row);
    });
    me.clock.mark(QUIRE_PHASE_NORM);
  }

  // Whether rows of a product's inputs have zeros behind them that other phases do not write.
  static bool is_padded(const quire_linear& w) { return !needs_put_row(w) && row_elements(w) != w.k; }

  // Converts `wide` to inputs.
  void put_rows(Member& me, const quire_linear& w, const Input& in, int64_t rows) {
    me.team.phase(rows, rows_of_piece(w.k), [&](int64_t row) { put_row(w, in, row, scratch_.wide + row * w.k); });
  }

  const quire_llama& model_;
  const quire_parts& parts_;
  const quire_step& step_;  // tables and slots are those of the first plan alone
  const quire_llama_run& run_;
  const LlamaScratch scratch_;
  Experts experts_;
  const int last_writer_;
  const uint32_t first_parts_ = model_.ranks ? next_parts(*model_.ranks) : 0;
  bool all_kept_;
  Adapted whole_, kept_;  // of all rows of the step, and of those that are kept
};

int32_t refusal(const quire_llama& model, const quire_llama_run& run, const quire_step& step) {
  for (int64_t t = 0; t < step.num_tokens; ++t) {
    if (run.token_ids[t] < 0 || run.token_ids[t] >= model.vocab) return QUIRE_LLAMA_BAD_TOKEN;
    if (run.positions[t] < 0 || run.positions[t] >= model.num_positions) return QUIRE_LLAMA_BAD_POSITION;
  }
  const bool keeps = std::any_of(model.layers, model.layers + model.num_layers, [](auto& layer) { return layer.conv; });
  for (int64_t row = 0; keeps && row < step.num_rows; ++row) {
    if (!run.states || run.places[row] < 0 || run.places[row] >= run.num_places) return QUIRE_LLAMA_BAD_PLACE;
  }
  for (int64_t t = 0; run.adapters && t < step.num_tokens; ++t) {
    if (run.adapter_of[t] >= run.num_adapters) return QUIRE_LLAMA_BAD_ADAPTER;
  }
  const auto larger = [&](const quire_lora& part) { return part.rank > model.lora_rank; };
  for (int64_t each = 0; run.adapters && each < run.num_adapters; ++each) {
    for (int n = 0; n < model.num_layers; ++n) {
      const quire_lora_layer& layer = run.adapters[each][n];
      const bool refused = std::any_of(std::begin(layer.qkv), std::end(layer.qkv), larger) || larger(layer.output[0]) ||
                           std::any_of(std::begin(layer.gate_up), std::end(layer.gate_up), larger) ||
                           larger(layer.down[0]);
      if (refused) return QUIRE_LLAMA_BAD_ADAPTER;
    }
  }
  return QUIRE_LLAMA_DONE;
}

}  // namespace

LlamaScratch lay_out(const quire_llama& model, int64_t tokens, int64_t kept, void* memory) {
  char* base = static_cast<char*>(memory);
  size_t used = 0;
  auto take = [&](size_t bytes) {
    char* at = base + used;
    used += (bytes + 63) / 64 * 64;
    return at;
  };
  auto floats = [&](int64_t count) { return reinterpret_cast<float*>(take(count * sizeof(float))); };
  using Layer = const quire_llama_layer&;
  const int64_t hidden = model.hidden;
  const size_t widest = most(model, [&](Layer layer) {
    const bool wide = layer.conv ? layer.delta != nullptr : model.gated;
    const int64_t attended = wide || needs_put_row(layer.output) ? layer.output.k : 0;
    const int64_t shared = layer.experts ? layer.experts->shared.down.k : 0;
    return std::max({attended, shared, needs_put_row(layer.down) ? layer.down.k : 0});
  });
  const int64_t most_rows = std::max(tokens, kept);
  LlamaScratch out;
  out.residual = floats(tokens * hidden);
  out.kept = floats(kept * hidden);
  out.qkv = floats(tokens * most(model, [](Layer layer) { return layer.qkv.n; }));
  out.wide = floats(most_rows * widest);
  out.mixed = floats(tokens * most(model, [](Layer layer) { return layer.delta ? layer.conv->channels : 0; }));
  out.gates = floats(tokens * most(model, [](Layer layer) { return layer.delta ? layer.delta->gates.n : 0; }));
  out.of_gates = take(most(model, [&](Layer layer) {
    return layer.delta ? input_bytes(layer.delta->gates, tokens) : 0;
  }));
  const int64_t most_added = most(model, [](Layer layer) { return layer.added != nullptr; }) * most_rows * hidden;
  const int64_t beside = most(model, [](Layer layer) { return layer.added && layer.experts; }) * most_rows * hidden;
  const int64_t input = model.inputs ? model.inputs->size : 0;
  out.added = floats(most_added);
  out.of_experts = floats(beside);
  out.from_experts = floats(beside);
  out.inputs = floats(model.inputs ? tokens * model.inputs->projection.n : 0);
  out.gated = floats(most_rows * input);
  const int64_t adapted = model.lora_rank ? most_rows : 0;
  out.lora_added = floats(adapted * 2 * most(model, [](Layer layer) { return whole_vectors(layer.gate_up.n / 2); }));
  const auto has_shared = [](Layer layer) { return layer.experts && layer.experts->shared.gate_up.memory; };
  out.shares = floats(most_rows * most(model, has_shared));
  out.of_shared = take(most(model, [&](Layer layer) {
    return has_shared(layer) ? input_bytes(layer.experts->shared.gate_up, most_rows) : 0;
  }));
  out.normed = take(most(model, [&](Layer layer) {
    const quire_linear& mlp = layer.experts ? layer.experts->router : layer.gate_up;
    const size_t gate = layer.token_gate ? input_bytes(layer.token_gate->gate, most_rows) : 0;
    const size_t projection = model.inputs ? input_bytes(model.inputs->projection, tokens) : 0;
    return std::max({input_bytes(layer.qkv, tokens), input_bytes(mlp, most_rows), gate, projection});
  }));
  out.attended = take(most(model, [&](Layer layer) { return input_bytes(layer.output, tokens); }));
  out.attended_kept = take(most(model, [&](Layer layer) { return input_bytes(layer.output, kept); }));
  out.inner = take(most(model, [&](Layer layer) {
    return std::max({input_bytes(layer.down, tokens),
                     has_shared(layer) ? input_bytes(layer.experts->shared.down, most_rows) : 0,
                     layer.token_gate ? input_bytes(layer.token_gate->output, most_rows) : 0});
  }));
  out.head = take(input_bytes(model.head, kept));
  out.experts = take(lay_out_experts(model, std::max(tokens, kept), nullptr).bytes);
  out.bytes = used;
  return out;
}

}  // namespace quire

extern "C" int32_t quire_llama_forward(const quire_llama* model, const quire_parts* parts,
                                       const quire_llama_run* run) {
  const auto& plan = quire::plan_of(parts->plans[0]);
  const int32_t refused = quire::refusal(*model, *run, plan.step);
  if (refused != QUIRE_LLAMA_DONE || !plan.step.num_tokens) return refused;
  for (int n = 0; n < model->num_layers; ++n) {
    if (model->layers[n].conv) continue;
    for (int piece = 0; piece < quire::pieces_of(*parts, n); ++piece) {
      quire::prepare(quire::layer_place(*parts, n, piece).plan, model->layers[n].window);
    }
  }
  quire::Step step(*model, *parts, *run);
  quire::run_team(plan.members, step.phases(), [&](quire::Team& team) { step.forward(team); });
  return QUIRE_LLAMA_DONE;
}

extern "C" size_t quire_llama_scratch(const quire_llama* model, int64_t tokens, int64_t num_keep) {
  return quire::lay_out(*model, tokens, num_keep, nullptr).bytes;
}

extern "C" size_t quire_llama_state_bytes(const quire_llama_layer* layer) { return quire::state_bytes(*layer); }
