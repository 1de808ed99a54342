#include "llama_memory.h"

#include <algorithm>

#include "experts.h"

namespace quire {
namespace {

template <typename Of>
size_t most(const quire_llama& model, Of of) {
  size_t found = 0;
  for (int n = 0; n < model.num_layers; ++n) found = std::max<size_t>(found, of(model.layers[n]));
  return found;
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

extern "C" size_t quire_llama_scratch(const quire_llama* model, int64_t tokens, int64_t num_keep) {
  return quire::lay_out(*model, tokens, num_keep, nullptr).bytes;
}
