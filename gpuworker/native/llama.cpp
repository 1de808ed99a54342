// See llama.h. Every function below is called by all members of a team, and says which barriers it has.
#include "llama.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <vector>

#include "attention.h"
#include "attention_plan.h"
#include "llama_embedding.h"

namespace quire {
namespace {

// ---------------------------------------------------------------- rows

// 1 / sqrt(mean(x²) + eps), the factor of an RMS norm.
float rms_factor(const float* x, int64_t count, float eps) {
  Vec low = Vec::zero(), high = Vec::zero();
  int64_t i = 0;
  for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
    const Vec a = Vec::load(x + i), b = Vec::load(x + i + kLanes);
    low = fma(a, a, low);
    high = fma(b, b, high);
  }
  float total = (low + high).sum();
  for (; i < count; ++i) total += x[i] * x[i];
  return 1.0f / std::sqrt(total / static_cast<float>(count) + eps);
}

float as(float x, float) { return x; }
bf16 as(float x, bf16) { return to_bf16(x); }

// out = x · factor · weight, in the type of `out`, which may be x itself.
template <typename T>
void scale_row(const float* x, const float* weight, float factor, int64_t count, T* out) {
  const Vec by = Vec::all(factor);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) (Vec::load(x + i) * by * Vec::load(weight + i)).store(out + i);
  for (; i < count; ++i) out[i] = as(x[i] * factor * weight[i], T());
}

template <typename T>
void widen_row(const void* from, int64_t row, int64_t count, float* out) {
  const T* x = static_cast<const T*>(from) + row * count;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) Vec::load(x + i).store(out + i);
  for (; i < count; ++i) {
    T padded[kLanes] = {};
    float lanes[kLanes];
    padded[0] = x[i];
    Vec::load(padded).store(lanes);
    out[i] = lanes[0];
  }
}

// Rotates a head in place: element i with element i + half, by the angle whose cosine and sine are given.
void rotate(float* head, const float* cosine, const float* sine, int half) {
  float* second = head + half;
  int i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const Vec a = Vec::load(head + i), b = Vec::load(second + i), c = Vec::load(cosine + i), s = Vec::load(sine + i);
    (a * c - b * s).store(head + i);
    fma(b, c, a * s).store(second + i);
  }
  for (; i < half; ++i) {
    const float a = head[i], b = second[i];
    head[i] = a * cosine[i] - b * sine[i];
    second[i] = b * cosine[i] + a * sine[i];
  }
}

void* row_of(const Input& in, int64_t row) { return static_cast<char*>(in.data) + row * in.stride; }

// Of the inputs of a product that takes them as floats.
int64_t item_size(const quire_linear& w) { return input_type(w) == QUIRE_F32 ? 4 : 2; }

// Writes the zeros behind the k inputs of a row, if its product reads any; other functions write the inputs.
void pad_row(const quire_linear& w, const Input& in, int64_t row) {
  const int64_t size = item_size(w), padding = row_elements(w) - w.k;
  if (padding) std::memset(static_cast<char*>(row_of(in, row)) + w.k * size, 0, padding * size);
}

// Norms a row of the residual stream into row `to` of the inputs of a product.
void norm_row(const float* x, const float* weight, float eps, const quire_linear& w, const Input& in, int64_t to) {
  const float factor = rms_factor(x, w.k, eps);
  if (needs_put_row(w)) {
    static thread_local std::vector<float> normed;
    normed.resize(w.k);
    scale_row(x, weight, factor, w.k, normed.data());
    put_row(w, in, to, normed.data());
    return;
  }
  if (input_type(w) == QUIRE_F32) {
    scale_row(x, weight, factor, w.k, static_cast<float*>(row_of(in, to)));
  } else {
    scale_row(x, weight, factor, w.k, static_cast<bf16*>(row_of(in, to)));
  }
  pad_row(w, in, to);
}

// ---------------------------------------------------------------- memory

// The layout of a step's scratch memory. Parts that layers share have the size of the largest.
struct Scratch {
  float* residual;      // [T, hidden]
  float* kept;          // [S, hidden], the residual stream of the tokens whose logits are computed
  float* qkv;           // [T, (heads + 2 kv_heads) · head_dim]
  float* wide;          // [T, inputs of `output` or `down`], for products that take their inputs by put_row
  void *normed, *attended, *attended_kept, *inner, *head;
  size_t bytes;
};

template <typename Of>
size_t most(const quire_llama& model, Of of) {
  size_t found = 0;
  for (int n = 0; n < model.num_layers; ++n) found = std::max<size_t>(found, of(model.layers[n]));
  return found;
}

int64_t qkv_width(const quire_llama& m) { return static_cast<int64_t>(m.num_heads + 2 * m.num_kv_heads) * m.head_dim; }

Scratch lay_out(const quire_llama& model, int64_t tokens, int64_t kept, void* memory) {
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
  Scratch out;
  out.residual = floats(tokens * hidden);
  out.kept = floats(kept * hidden);
  out.qkv = floats(tokens * qkv_width(model));
  out.wide = floats(tokens * widest);
  out.normed = take(most(model, [&](Layer layer) {
    return std::max(input_bytes(layer.qkv, tokens), input_bytes(layer.gate_up, tokens));
  }));
  out.attended = take(most(model, [&](Layer layer) { return input_bytes(layer.output, tokens); }));
  out.attended_kept = take(most(model, [&](Layer layer) { return input_bytes(layer.output, kept); }));
  out.inner = take(most(model, [&](Layer layer) { return input_bytes(layer.down, tokens); }));
  out.head = take(input_bytes(model.head, kept));
  out.bytes = used;
  return out;
}

// ---------------------------------------------------------------- the step

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

class Step {
 public:
  Step(const quire_llama& model, AttentionPlan& plan, const quire_llama_run& run)
      : model_(model), cache_(plan.cache), step_(plan.step), plan_(plan), run_(run),
        scratch_(lay_out(model, plan.step.num_tokens, run.num_keep, run.scratch)) {
    all_kept_ = run.num_keep == step_.num_tokens;
    for (int n = 0; all_kept_ && n < run.num_keep; ++n) all_kept_ = run.keep[n] == n;
  }

  // The whole step, as a team.
  void forward(const Team& team) {
    Clock clock(run_.seconds, team);
    Member me{team, clock, 0};
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
      mlp(me, layer, residual, rows);
    }
    logits(me, residual);
  }

 private:
  struct Member {
    const Team& team;
    Clock& clock;
    int products;  // so far; all members count alike
  };

  // One product, between barriers. Two queues alternate: while one is used, no member reads the other.
  void multiply(Member& me, const quire_linear& w, const Input& in, int64_t rows, const Output& out) {
    const int turn = me.products++ % 2;
    if (me.team.rank() == 0) queues_[1 - turn].reset();
    linear(me.team, queues_[turn], w, in, rows, out);
    me.team.barrier();
  }

  void embed(Member& me) {
    const Layout layout(model_.head);
    const Range part = me.team.share(step_.num_tokens);
    for (int64_t t = part.begin; t < part.end; ++t) {
      float* out = scratch_.residual + t * model_.hidden;
      const int64_t token = run_.token_ids[t];
      if (!model_.embedding) {
        unpack_row(model_.head, layout, token, out);
      } else if (model_.embedding_type == QUIRE_F32) {
        widen_row<float>(model_.embedding, token, model_.hidden, out);
      } else if (model_.embedding_type == QUIRE_F16) {
        widen_row<f16>(model_.embedding, token, model_.hidden, out);
      } else {
        widen_row<bf16>(model_.embedding, token, model_.hidden, out);
      }
    }
  }

  // Norms, multiplies by q, k and v, norms and rotates heads, and writes K and V into their slots.
  //
  // A member norms the rows of its share, which it has embedded: no barrier is needed in between.
  void write_cache(Member& me, int n, const quire_llama_layer& layer, const float* residual) {
    const int64_t rows = step_.num_tokens;
    const Input in = input_at(layer.qkv, rows, scratch_.normed);
    norm(me, layer.attention_norm, layer.qkv, in, rows, residual);
    multiply(me, layer.qkv, in, rows, {scratch_.qkv, qkv_width(model_), QUIRE_STORE_F32});
    me.clock.mark(QUIRE_PHASE_QKV);
    const int64_t heads = model_.num_heads + model_.num_kv_heads;
    const Range part = me.team.share(rows * heads);
    for (int64_t item = part.begin; item < part.end; ++item) turn_head(n, layer, item / heads, item % heads);
    if (!needs_put_row(layer.output)) pad_rows(me, layer.output, input_at(layer.output, rows, scratch_.attended), rows);
    me.team.barrier();
    me.clock.mark(QUIRE_PHASE_ROPE);
  }

  // Norms and rotates one head of one token; a key goes on into the cache, and its value with it.
  void turn_head(int n, const quire_llama_layer& layer, int64_t token, int64_t head) {
    const int dim = model_.head_dim, half = dim / 2;
    float* row = scratch_.qkv + token * qkv_width(model_);
    float* x = row + head * dim;
    const bool is_key = head >= model_.num_heads;
    const float* weight = is_key ? layer.key_norm : layer.query_norm;
    if (weight) scale_row(x, weight, rms_factor(x, dim, model_.norm_eps), dim, x);
    const float* turn = model_.rope_table + run_.positions[token] * dim;
    rotate(x, turn, turn + half, half);
    if (!is_key) return;
    const float* value = x + static_cast<int64_t>(model_.num_kv_heads) * dim;
    store_slot(cache_, n, step_.slot_mapping[token], static_cast<int>(head) - model_.num_heads, x, value);
  }

  // Returns the inputs of the product that follows, in scratch.attended; in the last layer they may still be in `wide`.
  Input attend_layer(Member& me, int n, const quire_llama_layer& layer) {
    const int dim = model_.head_dim;
    const Input in = input_at(layer.output, step_.num_tokens, scratch_.attended);
    const Rows query{scratch_.qkv, qkv_width(model_), dim, QUIRE_F32};
    Rows out{in.data, in.stride / item_size(layer.output), dim, input_type(layer.output)};
    const bool by_row = needs_put_row(layer.output);
    if (by_row) out = {scratch_.wide, layer.output.k, dim, QUIRE_F32};
    const quire_layer how{n, layer.window, model_.scale, 0.0f, nullptr};
    attend(me.team, cache_, how, plan_, query, out);
    me.team.barrier();
    const bool gathered = n + 1 == model_.num_layers && !all_kept_;
    if (by_row && !gathered) put_rows(me, layer.output, in, step_.num_tokens);
    me.clock.mark(QUIRE_PHASE_ATTENTION);
    return in;
  }

  // Continues with the kept tokens alone: copies their attention outputs and their residual stream.
  Input gather(Member& me, const quire_llama_layer& layer, const Input& from) {
    const quire_linear& w = layer.output;
    const Input in = input_at(w, run_.num_keep, scratch_.attended_kept);
    const Range part = me.team.share(run_.num_keep);
    for (int64_t row = part.begin; row < part.end; ++row) {
      const int64_t token = run_.keep[row];
      const float* x = scratch_.residual + token * model_.hidden;
      std::copy(x, x + model_.hidden, scratch_.kept + row * model_.hidden);
      if (needs_put_row(w)) {
        put_row(w, in, row, scratch_.wide + token * w.k);
      } else {
        std::memcpy(row_of(in, row), row_of(from, token), row_elements(w) * item_size(w));
      }
    }
    me.team.barrier();
    return in;
  }

  void mlp(Member& me, const quire_llama_layer& layer, float* residual, int64_t rows) {
    const Input in = input_at(layer.gate_up, rows, scratch_.normed);
    norm(me, layer.mlp_norm, layer.gate_up, in, rows, residual);
    const quire_linear& down = layer.down;
    const Input inner = input_at(down, rows, scratch_.inner);
    Output out{inner.data, inner.stride / item_size(down),
               input_type(down) == QUIRE_F32 ? QUIRE_STORE_SILU_F32 : QUIRE_STORE_SILU_BF16};
    const bool by_row = needs_put_row(down);
    if (by_row) out = {scratch_.wide, down.k, QUIRE_STORE_SILU_F32};
    if (!by_row) pad_rows(me, down, inner, rows);
    multiply(me, layer.gate_up, in, rows, out);
    if (by_row) put_rows(me, down, inner, rows);
    me.clock.mark(QUIRE_PHASE_GATE_UP);
    multiply(me, down, inner, rows, {residual, model_.hidden, QUIRE_STORE_ADD_F32});
    me.clock.mark(QUIRE_PHASE_DOWN);
  }

  void logits(Member& me, const float* residual) {
    const Input in = input_at(model_.head, run_.num_keep, scratch_.head);
    norm(me, model_.final_norm, model_.head, in, run_.num_keep, residual);
    multiply(me, model_.head, in, run_.num_keep, {run_.logits, model_.vocab, QUIRE_STORE_F32});
    me.clock.mark(QUIRE_PHASE_HEAD);
  }

  // Norms rows into the inputs of a product. A barrier at its end.
  void norm(Member& me, const float* weight, const quire_linear& w, const Input& in, int64_t rows,
            const float* residual) {
    const Range part = me.team.share(rows);
    for (int64_t row = part.begin; row < part.end; ++row) {
      norm_row(residual + row * model_.hidden, weight, model_.norm_eps, w, in, row);
    }
    me.team.barrier();
    me.clock.mark(QUIRE_PHASE_NORM);
  }

  // Pads rows that other phases fill. Few weights have inputs to pad, so one member does it.
  void pad_rows(Member& me, const quire_linear& w, const Input& in, int64_t rows) {
    if (me.team.rank() != 0 || row_elements(w) == w.k) return;
    for (int64_t row = 0; row < rows; ++row) pad_row(w, in, row);
  }

  // Converts `wide` to inputs. A barrier at its end.
  void put_rows(Member& me, const quire_linear& w, const Input& in, int64_t rows) {
    const Range part = me.team.share(rows);
    for (int64_t row = part.begin; row < part.end; ++row) put_row(w, in, row, scratch_.wide + row * w.k);
    me.team.barrier();
  }

  const quire_llama& model_;
  const quire_cache& cache_;
  const quire_step& step_;
  AttentionPlan& plan_;
  const quire_llama_run& run_;
  const Scratch scratch_;
  Queue queues_[2];
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
}  // namespace quire

extern "C" size_t quire_llama_scratch(const quire_llama* model, int64_t tokens, int64_t num_keep) {
  return quire::lay_out(*model, tokens, num_keep, nullptr).bytes;
}

extern "C" int32_t quire_llama_forward(const quire_llama* model, quire_attention* attention,
                                       const quire_llama_run* run) {
  auto& plan = quire::plan_of(attention);
  const int32_t refused = quire::refusal(*model, *run, plan.step.num_tokens);
  if (refused != QUIRE_LLAMA_DONE || !plan.step.num_tokens) return refused;
  for (int n = 0; n < model->num_layers; ++n) quire::prepare(plan, model->layers[n].window);
  quire::Step step(*model, plan, *run);
  quire::run_team(plan.members, [&](const quire::Team& team) { step.forward(team); });
  return QUIRE_LLAMA_DONE;
}
