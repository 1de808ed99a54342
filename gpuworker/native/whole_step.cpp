#include "whole_step.h"

#include <cstring>

namespace {

int64_t bytes_of(int32_t type) { return type == QUIRE_F32 ? 4 : type == QUIRE_I8 ? 1 : 2; }

// A pool [layers, blocks, block_bytes].
void copy_in(const quire_cache& cache, void* pool, int64_t block_bytes, int32_t from, int32_t to) {
  if (!pool) return;
  for (int64_t layer = 0; layer < cache.num_layers; ++layer) {
    char* blocks = static_cast<char*>(pool) + layer * cache.num_blocks * block_bytes;
    std::memcpy(blocks + to * block_bytes, blocks + from * block_bytes, block_bytes);
  }
}

}  // namespace

extern "C" void quire_copy_blocks(const quire_cache* cache, const int32_t* copies, int32_t count) {
  const int64_t slots = static_cast<int64_t>(cache->num_kv_heads) * cache->block_size, size = bytes_of(cache->type);
  for (int32_t i = 0; i < count; ++i) {
    const int32_t from = copies[2 * i], to = copies[2 * i + 1];
    if (from == to) continue;
    copy_in(*cache, cache->keys, slots * cache->head_dim_k * size, from, to);
    copy_in(*cache, cache->values, slots * cache->head_dim_v * size, from, to);
    copy_in(*cache, cache->key_scales, slots * 4, from, to);
    copy_in(*cache, cache->value_scales, slots * 4, from, to);
  }
}

extern "C" int64_t quire_whole_step_bytes(void) { return sizeof(quire_whole_step); }
extern "C" int64_t quire_sample_row_bytes(void) { return sizeof(quire_sample_row); }

extern "C" int32_t quire_run_step(void* argument) {
  quire_whole_step& whole = *static_cast<quire_whole_step*>(argument);
  quire_copy_blocks(whole.cache, whole.copies, whole.num_copies);
  if (!whole.step.num_rows) return 0;
  quire_take_tokens(&whole.take);
  quire_attention_begin(whole.attention, whole.cache, &whole.step, whole.model->num_heads, whole.threads,
                        whole.deterministic);
  const int32_t status = quire_llama_forward(whole.model, whole.attention, &whole.run);
  if (status || !whole.sample.count) return status;
  return quire_sample_tokens(&whole.sample);
}
