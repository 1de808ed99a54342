#include "experts.h"

#include <algorithm>
#include <cmath>

#include "llama_rows.h"

namespace quire {
namespace {

// Up to so many pairs, one member chooses, orders and gathers: barriers would take longer.
constexpr int64_t kPairsAlone = 8;

template <typename Of>
int64_t most(const quire_llama& model, Of of) {
  int64_t found = 0;
  for (int n = 0; n < model.num_layers; ++n) {
    if (model.layers[n].experts) found = std::max<int64_t>(found, of(*model.layers[n].experts));
  }
  return found;
}

bool alike(const quire_linear& a, const quire_linear& b) {
  return a.kind == b.kind && a.group == b.group && a.has_zeros == b.has_zeros && a.k == b.k;
}

// Experts are alike, nearly always: a step that asked each for its sizes would take longer.
template <typename Of>
int64_t most_of_each(const quire_llama& model, Of of) {
  return most(model, [&](const quire_experts& w) {
    int64_t found = of(w.each[0]);
    for (int32_t e = 1; e < w.count; ++e) {
      const quire_expert &expert = w.each[e], &before = w.each[e - 1];
      if (alike(expert.gate_up, before.gate_up) && alike(expert.down, before.down)) continue;
      found = std::max<int64_t>(found, of(expert));
    }
    return found;
  });
}

}  // namespace

ExpertScratch lay_out_experts(const quire_llama& model, int64_t rows, void* memory) {
  char* base = static_cast<char*>(memory);
  size_t used = 0;
  auto take = [&](size_t bytes) {
    char* at = base + used;
    used += (bytes + 63) / 64 * 64;
    return at;
  };
  ExpertScratch out{};
  const int64_t count = most(model, [](const quire_experts& w) { return w.count; });
  if (!count) return out;
  const int64_t pairs = rows * most(model, [](const quire_experts& w) { return w.top_k; });
  // The inputs of an expert are followed by scales and sums, each rounded up to 64 bytes.
  const int64_t ends = 2 * 64 * std::min(count, pairs);
  using Expert = const quire_expert&;
  const int64_t normed = most_of_each(model, [&](Expert expert) { return input_bytes(expert.gate_up, pairs); });
  const int64_t inner = most_of_each(model, [&](Expert expert) { return input_bytes(expert.down, pairs); });
  const int64_t wide = most_of_each(model, [](Expert expert) {
    return needs_put_row(expert.down) ? expert.down.k : 0;
  });
  out.logits = reinterpret_cast<float*>(take(rows * count * sizeof(float)));
  out.choices = reinterpret_cast<ExpertScratch::Choice*>(take(pairs * sizeof(ExpertScratch::Choice)));
  out.pairs = reinterpret_cast<ExpertScratch::Pair*>(take(pairs * sizeof(ExpertScratch::Pair)));
  const int64_t outputs = pairs * model.hidden * static_cast<int64_t>(sizeof(float));
  out.normed = take(std::max(normed + ends, outputs));
  out.inner = take(inner + ends);
  out.wide = reinterpret_cast<float*>(take(pairs * wide * sizeof(float)));
  out.bytes = used;
  return out;
}

Experts::Experts(const quire_llama& model, int64_t rows, void* memory)
    : hidden_(model.hidden), gelu_(model.gelu != 0), scratch_(lay_out_experts(model, rows, memory)),
      groups_(most(model, [](const quire_experts& w) { return w.count; })), queues_(2 * groups_.size()) {}

void Experts::gate_up(Team& team, const quire_experts& w, const Input& normed, int64_t rows) {
  const int64_t pairs = rows * w.top_k;
  if (pairs <= kPairsAlone) {
    if (team.rank() == 0) {
      choose(w, {0, rows});
      order(w, rows);
      gather(w, normed, {0, pairs});
    }
  } else {
    choose(w, team.share(rows));
    team.barrier();
    if (team.rank() == 0) order(w, rows);
    team.barrier();
    gather(w, normed, team.share(pairs));
  }
  team.barrier();
  // Each product has a queue, and no barrier ends it: a member that finds no more tasks goes on to the next expert.
  for (int32_t e = 0; e < w.count; ++e) {
    if (!groups_[e].count) continue;
    linear(team, queues_[e], w.each[e].gate_up, normed_of(w, e), groups_[e].count, gated_of(w, e));
  }
  team.barrier();
}

void Experts::down(Team& team, const quire_experts& w, int64_t rows, float* residual) {
  if (wide_) {
    const Range part = team.share(rows * w.top_k);
    for (int64_t p = part.begin; p < part.end; ++p) {
      const int32_t e = scratch_.pairs[p].expert;
      const quire_linear& weight = w.each[e].down;
      if (needs_put_row(weight)) put_row(weight, inner_of(w, e), p - groups_[e].first, scratch_.wide + p * weight.k);
    }
    team.barrier();
  }
  float* outputs = reinterpret_cast<float*>(scratch_.normed);
  for (int32_t e = 0; e < w.count; ++e) {
    if (!groups_[e].count) continue;
    const Output out{outputs + groups_[e].first * hidden_, hidden_, QUIRE_STORE_F32};
    linear(team, queues_[w.count + e], w.each[e].down, inner_of(w, e), groups_[e].count, out);
  }
  team.barrier();
  team.phase(rows, [&](int64_t row) { add_up(w, row, residual + row * hidden_); });
}

// The experts of the largest logits; of equal logits that of the lower number. (torch leaves open which it takes.) The
// weights are a softmax, over the chosen experts or over all.
void Experts::choose(const quire_experts& w, const Range& rows) {
  if (w.sigmoid) return choose_by_sigmoids(w, rows);
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    float* logits = scratch_.logits + row * w.count;
    Choice* choices = scratch_.choices + row * w.top_k;
    const float largest = *std::max_element(logits, logits + w.count);
    float total = 0.0f;
    for (int32_t e = 0; e < w.count && !w.normalised; ++e) total += std::exp(logits[e] - largest);
    for (int32_t rank = 0; rank < w.top_k; ++rank) {
      const int32_t best = static_cast<int32_t>(std::max_element(logits, logits + w.count) - logits);
      choices[rank] = {best, std::exp(logits[best] - largest), 0};
      logits[best] = -INFINITY;
      if (w.normalised) total += choices[rank].weight;
    }
    for (int32_t rank = 0; rank < w.top_k; ++rank) {
      choices[rank].weight /= total;
      if (w.scales) choices[rank].weight *= w.scales[choices[rank].expert];
    }
  }
}

// The experts of the largest sigmoids, each with its bias. Their weights are the sigmoids alone.
void Experts::choose_by_sigmoids(const quire_experts& w, const Range& rows) {
  constexpr float kLeast = 1e-6f;  // keeps a sum of none from dividing
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    float* shares = scratch_.logits + row * w.count;
    Choice* choices = scratch_.choices + row * w.top_k;
    for (int32_t e = 0; e < w.count; ++e) shares[e] = 1.0f / (1.0f + std::exp(-shares[e]));
    float total = kLeast;
    for (int32_t rank = 0; rank < w.top_k; ++rank) {
      int32_t best = 0;
      float most = -INFINITY;
      for (int32_t e = 0; e < w.count; ++e) {
        const float score = w.bias ? shares[e] + w.bias[e] : shares[e];
        if (score > most) best = e, most = score;
      }
      choices[rank] = {best, shares[best], 0};
      total += shares[best];
      shares[best] = -INFINITY;
    }
    const float factor = w.normalised ? w.factor / total : w.factor;
    for (int32_t rank = 0; rank < w.top_k; ++rank) choices[rank].weight *= factor;
  }
}

// One member counts the pairs of each expert and gives each pair its place.
void Experts::order(const quire_experts& w, int64_t rows) {
  for (Queue& queue : queues_) queue.reset();
  for (Group& group : groups_) group = {};
  for (int64_t p = 0; p < rows * w.top_k; ++p) ++groups_[scratch_.choices[p].expert].count;
  Group next{};
  wide_ = false;
  for (int32_t e = 0; e < w.count; ++e) {
    Group& group = groups_[e];
    if (!group.count) continue;
    group.first = next.first;
    group.normed = next.normed;
    group.inner = next.inner;
    next.first += group.count;
    next.normed += input_bytes(w.each[e].gate_up, group.count);
    next.inner += input_bytes(w.each[e].down, group.count);
    wide_ |= needs_put_row(w.each[e].down);
    group.count = 0;
  }
  for (int64_t row = 0; row < rows; ++row) {
    for (int32_t rank = 0; rank < w.top_k; ++rank) {
      Choice& choice = scratch_.choices[row * w.top_k + rank];
      Group& group = groups_[choice.expert];
      choice.place = group.first + group.count++;
      scratch_.pairs[choice.place] = {static_cast<int32_t>(row), choice.expert};
    }
  }
}

// Makes the inputs of the experts from normed rows.
void Experts::gather(const quire_experts& w, const Input& normed, const Range& pairs) {
  for (int64_t p = pairs.begin; p < pairs.end; ++p) {
    const auto [row, e] = scratch_.pairs[p];
    const int64_t place = p - groups_[e].first;
    put_row(w.each[e].gate_up, normed_of(w, e), place, static_cast<const float*>(row_of(normed, row)));
    if (!needs_put_row(w.each[e].down)) pad_row(w.each[e].down, inner_of(w, e), place);
  }
}

void Experts::add_up(const quire_experts& w, int64_t row, float* out) const {
  const float* outputs = reinterpret_cast<const float*>(scratch_.normed);
  for (int32_t rank = 0; rank < w.top_k; ++rank) {
    const Choice& choice = scratch_.choices[row * w.top_k + rank];
    const float* x = outputs + choice.place * hidden_;
    const Vec weight = Vec::all(choice.weight);
    int64_t i = 0;
    for (; i + kLanes <= hidden_; i += kLanes) fma(weight, Vec::load(x + i), Vec::load(out + i)).store(out + i);
    for (; i < hidden_; ++i) out[i] += choice.weight * x[i];
  }
}

Input Experts::normed_of(const quire_experts& w, int32_t expert) const {
  return input_at(w.each[expert].gate_up, groups_[expert].count, scratch_.normed + groups_[expert].normed);
}

Input Experts::inner_of(const quire_experts& w, int32_t expert) const {
  return input_at(w.each[expert].down, groups_[expert].count, scratch_.inner + groups_[expert].inner);
}

Output Experts::gated_of(const quire_experts& w, int32_t expert) const {
  const quire_linear& down = w.each[expert].down;
  if (needs_put_row(down)) {
    return {scratch_.wide + groups_[expert].first * down.k, down.k, gated_store(QUIRE_F32, gelu_)};
  }
  const Input inner = inner_of(w, expert);
  return {inner.data, inner.stride / item_size(down), gated_store(input_type(down), gelu_)};
}

}  // namespace quire
