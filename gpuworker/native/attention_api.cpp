// The C interface of paged attention: opens the parallel region around the functions of attention.h.
#include "attention.h"
#include "attention_plan.h"
#include "simd.h"

using namespace quire;

struct quire_attention {
  AttentionPlan plan;
};

namespace {

constexpr int64_t kGrain = 4096;

float read_part(const float* from, Range part) {
  Vec sum[8];
  for (Vec& one : sum) one = Vec::zero();
  int64_t i = part.begin;
  for (; i + 8 * kLanes <= part.end; i += 8 * kLanes) {
    for (int j = 0; j < 8; ++j) sum[j] = sum[j] + Vec::load(from + i + j * kLanes);
  }
  for (; i < part.end; i += kLanes) sum[0] = sum[0] + Vec::load(from + i);
  for (int j = 1; j < 8; ++j) sum[0] = sum[0] + sum[j];
  return sum[0].sum();
}

}  // namespace

AttentionPlan& quire::plan_of(quire_attention* attention) { return attention->plan; }

extern "C" {

quire_attention* quire_attention_new() { return new quire_attention(); }
void quire_attention_free(quire_attention* attention) { delete attention; }

void quire_attention_begin(quire_attention* attention, const quire_cache* cache, const quire_step* step,
                           int32_t num_heads, int32_t threads, int32_t deterministic) {
  begin(attention->plan, *cache, *step, num_heads, threads, deterministic != 0);
}

void quire_attention_layer(quire_attention* attention, const quire_layer* layer, const quire_rows* query,
                           const quire_rows* key, const quire_rows* value, const quire_rows* out) {
  AttentionPlan& plan = attention->plan;
  prepare(plan, layer->window);
  run_team(plan.members, 1 + kAttendPhases, [&](Team& team) {
    attention_write(team, plan.cache, layer->layer, plan.step, *key, *value);
    attend(team, plan.cache, *layer, plan, *query, *out);
  });
}

float quire_read(const void* from, int64_t bytes, int32_t threads) {
  std::atomic<float> total{0.0f};
  run_team(threads, 0, [&](const Team& team) {
    const float sum = read_part(static_cast<const float*>(from), team.share(bytes / 4, kGrain));
    if (team.rank() == 0) total.store(sum);
    if (sum == 1.0f) total.store(sum);  // keeps the compiler from removing the reads
  });
  return total.load();
}

}  // extern "C"
