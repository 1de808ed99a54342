#include "whole_step.h"

#include <cstring>

#include "ranks.h"
#include "threads.h"

namespace {

void move(const quire_move* moves, int64_t count, int32_t threads) {
  if (!count) return;
  quire::run_team(threads, 1, [&](quire::Team& team) {
    team.phase(count, [&](int64_t n) {
      const quire_move& each = moves[n];
      each.from ? std::memcpy(each.to, each.from, each.bytes) : std::memset(each.to, 0, each.bytes);
    });
  });
}

int64_t bytes_of(int32_t type) { return type == QUIRE_F32 ? 4 : type == QUIRE_I8 ? 1 : 2; }

// A pool [layers, blocks, block_bytes].
void copy_in(const quire_cache& cache, void* pool, int64_t block_bytes, int32_t from, int32_t to) {
  if (!pool) return;
  for (int64_t layer = 0; layer < cache.num_layers; ++layer) {
    char* blocks = static_cast<char*>(pool) + layer * cache.num_blocks * block_bytes;
    std::memcpy(blocks + to * block_bytes, blocks + from * block_bytes, block_bytes);
  }
}

bool within(const int32_t* ids, int64_t count, int64_t end) {
  bool all = true;
  for (int64_t i = 0; i < count; ++i) all &= ids[i] >= 0 && ids[i] < end;
  return all;
}

// Whether the cache has all blocks and slots that the step reads and writes.
bool within_cache(const quire_cache& cache, const quire_step& step) {
  const int64_t slots = static_cast<int64_t>(cache.num_blocks) * cache.block_size;
  bool all = within(step.slot_mapping, step.num_tokens, slots);
  for (int64_t row = 0; row < step.num_rows; ++row) {
    const int64_t blocks = (static_cast<int64_t>(step.context_len[row]) + cache.block_size - 1) / cache.block_size;
    all &= blocks <= step.max_blocks && within(step.block_table + row * step.max_blocks, blocks, cache.num_blocks);
  }
  return all;
}

bool within_cache(const quire_whole_step& whole) {
  bool all = true;
  for (int32_t n = 0; n < whole.num_pools; ++n) {
    all &= within(whole.copies, 2 * static_cast<int64_t>(whole.num_copies), whole.pools[n].num_blocks);
  }
  for (int32_t n = 0; whole.num_rows && n < whole.parts.num_plans; ++n) {
    all &= within_cache(whole.parts.caches[n], whole.steps[n]);
  }
  return all;
}

}  // namespace

extern "C" void quire_copy_blocks(const quire_cache* cache, const int32_t* copies, int32_t count) {
  const int64_t slots = static_cast<int64_t>(cache->num_kv_heads) * cache->block_size, size = bytes_of(cache->type);
  for (int32_t i = 0; i < count; ++i) {
    const int32_t from = copies[2 * i], to = copies[2 * i + 1];
    if (from == to) continue;
    copy_in(*cache, cache->keys, slots * cache->head_dim_k * size, from, to);
    copy_in(*cache, cache->key_scales, slots * 4, from, to);
    if (cache->values == cache->keys) continue;  // V is a prefix of K
    copy_in(*cache, cache->values, slots * cache->head_dim_v * size, from, to);
    copy_in(*cache, cache->value_scales, slots * 4, from, to);
  }
}

extern "C" int64_t quire_whole_step_bytes(void) { return sizeof(quire_whole_step); }
extern "C" int64_t quire_sample_row_bytes(void) { return sizeof(quire_sample_row); }

extern "C" int32_t quire_run_step(void* argument) {
  quire_whole_step& whole = *static_cast<quire_whole_step*>(argument);
  move(whole.before, whole.num_before, whole.threads);
  if (!within_cache(whole)) return QUIRE_STEP_BAD_BLOCK;
  for (int32_t n = 0; n < whole.num_pools; ++n) quire_copy_blocks(&whole.pools[n], whole.copies, whole.num_copies);
  if (!whole.num_rows) return 0;
  const quire_ranks* ranks = whole.model->ranks;
  if (!ranks || ranks->rank == 0) quire_take_tokens(&whole.take);
  if (ranks) quire::share_tokens(*ranks, whole.take.token_ids, whole.take.count);
  for (int32_t n = 0; n < whole.parts.num_plans; ++n) {
    quire_attention_begin(whole.parts.plans[n], &whole.parts.caches[n], &whole.steps[n], whole.parts.heads[n],
                          whole.threads, whole.deterministic);
  }
  quire_llama_run run = whole.run;
  if (whole.sample.followers) {
    run.beside = quire_follow_row;
    run.beside_of = &whole.sample;
    run.num_beside = whole.sample.count;
  }
  const int32_t status = quire_llama_forward(whole.model, &whole.parts, &run);
  if (status) {
    // Every rank refuses alike. Rank 0 may give no further tokens before all have read these.
    if (ranks) quire::meet_ranks(*ranks, 0);
    return status;
  }
  move(whole.behind, whole.num_behind, whole.threads);
  if (whole.score.count) quire_score_tokens(&whole.score);
  return whole.sample.count ? quire_sample_tokens(&whole.sample) : 0;
}
