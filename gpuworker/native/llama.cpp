// See quire_llama.h. Every function below is called by all members of a team. What they share is written in phases alone.
#include "quire_llama.h"

#include <algorithm>
#include <chrono>

#include "attention.h"
#include "attention_plan.h"
#include "attention_store.h"
#include "experts.h"
#include "llama_embedding.h"
#include "llama_memory.h"
#include "llama_rows.h"

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

LayerPlace layer_place(const quire_parts& parts, int layer) {
  if (!parts.part) return {plan_of(parts.plans[0]), layer};
  return {plan_of(parts.plans[parts.part[layer]]), parts.lane[layer]};
}

class Step {
 public:
  Step(const quire_llama& model, const quire_parts& parts, const quire_llama_run& run)
      : model_(model), parts_(parts), step_(plan_of(parts.plans[0]).step), run_(run),
        scratch_(lay_out(model, step_.num_tokens, run.num_keep, run.scratch)),
        experts_(model, std::max<int64_t>(step_.num_tokens, run.num_keep), scratch_.experts) {
    all_kept_ = run.num_keep == step_.num_tokens;
    for (int n = 0; all_kept_ && n < run.num_keep; ++n) all_kept_ = run.keep[n] == n;
  }

  int64_t phases() const { return 4 + model_.num_layers * (11 + kAttendPhases); }

  // The whole step, as a team.
  void forward(Team& team) {
    Clock clock(run_.seconds, team);
    Member me{team, clock};
    team.phase(run_.num_beside, [&](int64_t piece) { run_.beside(run_.beside_of, piece); });
    embed(me);
    float* residual = scratch_.residual;
    int64_t rows = step_.num_tokens;
    for (int n = 0; n < model_.num_layers; ++n) {
      const quire_llama_layer& layer = model_.layers[n];
      const bool last = n + 1 == model_.num_layers;
      write_cache(me, n, layer, residual);
      if (last && !run_.num_keep) return;
      Input attended = attend_layer(me, n, layer);
      if (last && !all_kept_) {
        attended = gather(me, layer, attended);
        residual = scratch_.kept;
        rows = run_.num_keep;
      }
      multiply(me, layer.output, attended, rows, {residual, model_.hidden, QUIRE_STORE_ADD_F32});
      me.clock.mark(QUIRE_PHASE_OUTPUT);
      if (layer.experts) {
        experts(me, layer, residual, rows);
      } else {
        mlp(me, layer, residual, rows);
      }
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
  };

  // How many rows of so many floats a piece has: some microseconds of work.
  static int64_t rows_of_piece(int64_t floats) { return std::max<int64_t>(8192 / floats, 1); }

  void multiply(Member& me, const quire_linear& w, const Input& in, int64_t rows, const Output& out) {
    linear(me.team, w, in, rows, out);
  }

  void embed(Member& me) {
    const quire_linear& packed = model_.rows.memory ? model_.rows : model_.head;
    const Layout layout(packed);
    me.team.phase(step_.num_tokens, rows_of_piece(model_.hidden), [&](int64_t t) {
      float* out = scratch_.residual + t * model_.hidden;
      const int64_t token = run_.token_ids[t];
      if (!model_.embedding) {
        unpack_row(packed, layout, token, out);
      } else if (model_.embedding_type == QUIRE_F32) {
        widen_row<float>(model_.embedding, token, model_.hidden, out);
      } else if (model_.embedding_type == QUIRE_F16) {
        widen_row<f16>(model_.embedding, token, model_.hidden, out);
      } else {
        widen_row<bf16>(model_.embedding, token, model_.hidden, out);
      }
    });
  }

  // Norms, multiplies by q, k and v, norms and rotates heads, and writes K and V into their slots.
  void write_cache(Member& me, int n, const quire_llama_layer& layer, const float* residual) {
    const int64_t rows = step_.num_tokens;
    const Input in = input_at(layer.qkv, rows, scratch_.normed);
    norm(me, layer.attention_norm, layer.qkv, in, rows, residual);
    multiply(me, layer.qkv, in, rows, {scratch_.qkv, qkv_width(model_), QUIRE_STORE_F32});
    me.clock.mark(QUIRE_PHASE_QKV);
    const int64_t heads = model_.num_heads + model_.num_kv_heads;
    if (model_.joint_norm) norm_jointly(me, layer, rows);
    const Input attended = input_at(layer.output, rows, scratch_.attended);
    const LayerPlace place = layer_place(parts_, n);
    const bool pads = is_padded(layer.output);
    me.team.phase(rows, rows_of_piece(qkv_width(model_)), [&](int64_t row) {
      for (int64_t head = 0; head < heads; ++head) turn_head(place, layer, row, head);
      if (pads) pad_row(layer.output, attended, row);
    });
    me.clock.mark(QUIRE_PHASE_ROPE);
  }

  // Norms all queries of a token as one row, and all its keys.
  void norm_jointly(Member& me, const quire_llama_layer& layer, int64_t rows) {
    const int64_t queries = static_cast<int64_t>(model_.num_heads) * model_.head_dim;
    const int64_t keys = static_cast<int64_t>(model_.num_kv_heads) * model_.head_dim;
    me.team.phase(rows, rows_of_piece(queries + keys), [&](int64_t token) {
      float* query = scratch_.qkv + token * qkv_width(model_);
      float* key = query + queries;
      scale_row(query, layer.query_norm, rms_factor(query, queries, model_.norm_eps), queries, query);
      scale_row(key, layer.key_norm, rms_factor(key, keys, model_.norm_eps), keys, key);
    });
  }

  // Norms, clips and rotates one head of one token; a key goes on into the cache, and its value with it.
  void turn_head(const LayerPlace& place, const quire_llama_layer& layer, int64_t token, int64_t head) {
    const int dim = model_.head_dim, half = dim / 2;
    float* row = scratch_.qkv + token * qkv_width(model_);
    float* x = row + head * dim;
    const bool is_key = head >= model_.num_heads;
    const float* weight = is_key ? layer.key_norm : layer.query_norm;
    if (weight && !model_.joint_norm) scale_row(x, weight, rms_factor(x, dim, model_.norm_eps), dim, x);
    if (model_.clip > 0.0f) clip_row(x, model_.clip, dim);
    const float* turn = model_.rope_table + run_.positions[token] * dim;
    rotate(x, turn, turn + half, half);
    if (!is_key) return;
    float* value = x + static_cast<int64_t>(model_.num_kv_heads) * dim;
    if (model_.clip > 0.0f) clip_row(value, model_.clip, dim);
    const int32_t slot = place.plan.step.slot_mapping[token];
    store_slot(place.plan.cache, place.lane, slot, static_cast<int>(head) - model_.num_heads, x, value);
  }

  // Returns the inputs of the product that follows, in scratch.attended; in the last layer they may still be in `wide`.
  Input attend_layer(Member& me, int n, const quire_llama_layer& layer) {
    const int dim = model_.head_dim;
    const Input in = input_at(layer.output, step_.num_tokens, scratch_.attended);
    const quire_rows query{scratch_.qkv, qkv_width(model_), dim, QUIRE_F32};
    quire_rows out{in.data, in.stride / item_size(layer.output), dim, input_type(layer.output)};
    const bool by_row = needs_put_row(layer.output);
    if (by_row) out = {scratch_.wide, layer.output.k, dim, QUIRE_F32};
    const LayerPlace place = layer_place(parts_, n);
    const quire_layer how{place.lane, layer.window, 0, model_.scale, 0.0f, nullptr};
    attend(me.team, place.plan.cache, how, place.plan, query, out);
    const bool gathered = n + 1 == model_.num_layers && !all_kept_;
    if (by_row && !gathered) put_rows(me, layer.output, in, step_.num_tokens);
    me.clock.mark(QUIRE_PHASE_ATTENTION);
    return in;
  }

  // Continues with the kept tokens alone: copies their attention outputs and their residual stream.
  Input gather(Member& me, const quire_llama_layer& layer, const Input& from) {
    const quire_linear& w = layer.output;
    const Input in = input_at(w, run_.num_keep, scratch_.attended_kept);
    me.team.phase(run_.num_keep, rows_of_piece(model_.hidden), [&](int64_t row) {
      const int64_t token = run_.keep[row];
      const float* x = scratch_.residual + token * model_.hidden;
      std::copy(x, x + model_.hidden, scratch_.kept + row * model_.hidden);
      if (needs_put_row(w)) {
        put_row(w, in, row, scratch_.wide + token * w.k);
      } else {
        std::memcpy(row_of(in, row), row_of(from, token), row_elements(w) * item_size(w));
      }
    });
    return in;
  }

  void mlp(Member& me, const quire_llama_layer& layer, float* residual, int64_t rows) {
    const Input in = input_at(layer.gate_up, rows, scratch_.normed);
    const quire_linear& down = layer.down;
    const Input inner = input_at(down, rows, scratch_.inner);
    norm(me, layer.mlp_norm, layer.gate_up, in, rows, residual, is_padded(down) ? &down : nullptr);
    Output out{inner.data, inner.stride / item_size(down),
               input_type(down) == QUIRE_F32 ? QUIRE_STORE_SILU_F32 : QUIRE_STORE_SILU_BF16};
    const bool by_row = needs_put_row(down);
    if (by_row) out = {scratch_.wide, down.k, QUIRE_STORE_SILU_F32};
    multiply(me, layer.gate_up, in, rows, out);
    if (by_row) put_rows(me, down, inner, rows);
    me.clock.mark(QUIRE_PHASE_GATE_UP);
    multiply(me, down, inner, rows, {residual, model_.hidden, QUIRE_STORE_ADD_F32});
    me.clock.mark(QUIRE_PHASE_DOWN);
  }

  void experts(Member& me, const quire_llama_layer& layer, float* residual, int64_t rows) {
    const quire_experts& w = *layer.experts;
    const Input in = input_at(w.router, rows, scratch_.normed);
    norm(me, layer.mlp_norm, w.router, in, rows, residual);
    multiply(me, w.router, in, rows, {experts_.logits(), w.count, QUIRE_STORE_F32});
    experts_.gate_up(me.team, w, in, rows);
    me.clock.mark(QUIRE_PHASE_GATE_UP);
    experts_.down(me.team, w, rows, residual);
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
    multiply(me, model_.head, in, run_.num_keep, {run_.logits, model_.vocab, QUIRE_STORE_F32});
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
  bool all_kept_;
};

int32_t refusal(const quire_llama& model, const quire_llama_run& run, int64_t tokens) {
  for (int64_t t = 0; t < tokens; ++t) {
    if (run.token_ids[t] < 0 || run.token_ids[t] >= model.vocab) return QUIRE_LLAMA_BAD_TOKEN;
    if (run.positions[t] < 0 || run.positions[t] >= model.num_positions) return QUIRE_LLAMA_BAD_POSITION;
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
  const size_t widest = most(model, [](Layer layer) {
    const int64_t attended = needs_put_row(layer.output) ? layer.output.k : 0;
    return std::max(attended, needs_put_row(layer.down) ? layer.down.k : 0);
  });
  LlamaScratch out;
  out.residual = floats(tokens * hidden);
  out.kept = floats(kept * hidden);
  out.qkv = floats(tokens * qkv_width(model));
  out.wide = floats(tokens * widest);
  out.normed = take(most(model, [&](Layer layer) {
    const quire_linear& mlp = layer.experts ? layer.experts->router : layer.gate_up;
    return std::max(input_bytes(layer.qkv, tokens), input_bytes(mlp, std::max(tokens, kept)));
  }));
  out.attended = take(most(model, [&](Layer layer) { return input_bytes(layer.output, tokens); }));
  out.attended_kept = take(most(model, [&](Layer layer) { return input_bytes(layer.output, kept); }));
  out.inner = take(most(model, [&](Layer layer) { return input_bytes(layer.down, tokens); }));
  out.head = take(input_bytes(model.head, kept));
  out.experts = take(lay_out_experts(model, std::max(tokens, kept), nullptr).bytes);
  out.bytes = used;
  return out;
}

}  // namespace quire

extern "C" int32_t quire_llama_forward(const quire_llama* model, const quire_parts* parts,
                                       const quire_llama_run* run) {
  const auto& plan = quire::plan_of(parts->plans[0]);
  const int32_t refused = quire::refusal(*model, *run, plan.step.num_tokens);
  if (refused != QUIRE_LLAMA_DONE || !plan.step.num_tokens) return refused;
  for (int n = 0; n < model->num_layers; ++n) quire::prepare(quire::layer_place(*parts, n).plan, model->layers[n].window);
  quire::Step step(*model, *parts, *run);
  quire::run_team(plan.members, step.phases(), [&](quire::Team& team) { step.forward(team); });
  return QUIRE_LLAMA_DONE;
}

extern "C" size_t quire_llama_scratch(const quire_llama* model, int64_t tokens, int64_t num_keep) {
  return quire::lay_out(*model, tokens, num_keep, nullptr).bytes;
}
