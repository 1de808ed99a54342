// The experts of a layer (quire_llama.h): the choice of each row, and the products of all rows that chose the same
// expert.
//
// Rows are grouped by expert, so that a step reads the weights of an expert once, and only of experts that some row
// chose. A row's numbers depend on it alone: the products keep them apart from other rows (linear.h), and the outputs of
// a row are added in the order of its own choice.
#pragma once

#include <vector>

#include "linear.h"
#include "quire_llama.h"

namespace quire {

// The memory for steps of up to `rows` rows, for the largest layer.
struct ExpertScratch {
  struct Choice {
    int32_t expert;
    float weight;
    int64_t place;  // of this row's pair in the order of experts
  };
  struct Pair {
    int32_t row, expert;
  };

  float* logits;     // [rows, experts]
  Choice* choices;   // [rows, top_k], the largest weight first
  Pair* pairs;       // [rows · top_k], by expert and then by row
  char* normed;      // inputs of gate_up, expert by expert; afterwards the outputs of down, float [pairs, hidden]
  char* inner;       // inputs of down, expert by expert
  float* wide;       // [pairs, inputs of down], for experts that take those by put_row
  size_t bytes;
};

// `memory` may be null: only the bytes count then. No bytes for a model without experts.
ExpertScratch lay_out_experts(const quire_llama& model, int64_t rows, void* memory);

// Runs the experts of one layer after the other. All members of a team call the functions; both have barriers inside.
class Experts {
 public:
  Experts(const quire_llama& model, int64_t rows, void* memory);

  // Where the router's logits are to be, complete before gate_up.
  float* logits() const { return scratch_.logits; }

  // Chooses experts, and leaves silu(gate) · up of their rows, or gelu(gate) · up; a barrier at its end. `normed` has rows of floats.
  void gate_up(Team& team, const quire_experts& w, const Input& normed, int64_t rows);

  // Adds to each row its experts' outputs, as a phase.
  void down(Team& team, const quire_experts& w, int64_t rows, float* residual);

 private:
  using Choice = ExpertScratch::Choice;
  // The rows of one expert in this step.
  struct Group {
    int64_t first, count;  // pairs
    size_t normed, inner;  // bytes before its inputs
  };

  void choose(const quire_experts& w, const Range& rows);
  void choose_by_sigmoids(const quire_experts& w, const Range& rows);
  void order(const quire_experts& w, int64_t rows);
  void gather(const quire_experts& w, const Input& normed, const Range& pairs);
  void add_up(const quire_experts& w, int64_t row, float* out) const;
  Input normed_of(const quire_experts& w, int32_t expert) const;
  Input inner_of(const quire_experts& w, int32_t expert) const;
  Output gated_of(const quire_experts& w, int32_t expert) const;

  const int64_t hidden_;
  const bool gelu_;
  const ExpertScratch scratch_;
  std::vector<Group> groups_;       // by expert
  std::vector<Queue> queues_;       // by expert, of gate_up and then of down
  bool wide_ = false;               // whether an expert of this layer takes its inputs of down by put_row
};

}  // namespace quire
