#include "sample.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <limits>
#include <vector>

#include "sample_numbers.h"
#include "threads.h"

namespace quire {
namespace {

// ------------------------------------------------------------------ before sampling

void penalise(const quire_sample_row& row, const int32_t* tokens, int64_t known, float* logits, int64_t vocab) {
  Scratch& scratch = Scratch::mine();
  scratch.known.resize(std::max<size_t>(scratch.known.size(), vocab));
  scratch.output.resize(scratch.known.size());
  for (int64_t i = 0; i < known; ++i) {
    ++scratch.known[tokens[i]];
    scratch.output[tokens[i]] += i >= row.prompt_tokens;
  }
  for (int64_t i = 0; i < known; ++i) {
    const int32_t id = tokens[i];
    if (!scratch.known[id]) continue;  // done already
    float value = logits[id];
    value = value > 0.0f ? value / row.repetition : value * row.repetition;
    value -= static_cast<float>(scratch.output[id]) * row.frequency;
    if (scratch.output[id]) value -= row.presence;
    logits[id] = bounded(value);
    scratch.known[id] = scratch.output[id] = 0;
  }
}

constexpr int64_t kWord = 32;  // tokens in a word of a mask

// Forbids the tokens of a block that the mask `bits` does not allow.
void forbid_in(const uint32_t* bits, int64_t begin, int64_t end, float* logits) {
  for (int64_t first = begin; first < end; first += kWord) {
    const uint32_t word = bits[first / kWord];
    if (word == UINT32_MAX) continue;
    const int64_t count = std::min(kWord, end - first);
    for (int64_t i = 0; i < count; ++i)
      if (!(word >> i & 1)) logits[first + i] = -std::numeric_limits<float>::infinity();
  }
}

// Gives the closing token of a row the largest logit of the ends that the mask `bits` does not allow, if it is larger.
void close(const quire_sample& sample, const quire_sample_row& row, const uint32_t* bits, float* logits) {
  float& own = logits[row.closing];
  for (int32_t i = row.ends_begin; i < row.ends_end; ++i) {
    const int32_t end = sample.end_ids[i];
    if (!(bits[end / kWord] >> (end % kWord) & 1)) own = std::max(own, logits[end]);
  }
}

// Finds the blocks in which a mask allows tokens, and forbids their other tokens. The logits of other blocks are not read
// any more.
void forbid(const uint32_t* bits, float* logits, int64_t vocab, Blocks& open) {
  open.clear();
  for (int64_t first = 0; first < vocab; first += kBlock) {
    const int64_t end = std::min(first + kBlock, vocab);
    uint32_t some = 0;
    for (int64_t word = first / kWord; word * kWord < end; ++word) some |= bits[word];
    if (!some) continue;
    open.push_back(static_cast<int32_t>(first));
    forbid_in(bits, first, end, logits);
  }
}

// Forbids each token that would complete a bad word of the row, after output that ends with the rest of the word.
void forbid_words(const quire_sample& sample, const quire_sample_row& row, int64_t index, float* logits) {
  const int32_t* known = sample.table + sample.first[index] + sample.positions[index];
  const int64_t output = sample.positions[index] - row.prompt_tokens;
  for (int32_t word = row.words_begin; word < row.words_end; ++word) {
    const int32_t* begin = sample.word_ids + sample.word_begins[word];
    const int32_t* last = sample.word_ids + sample.word_begins[word + 1] - 1;
    const int64_t rest = last - begin;
    if (rest <= output && std::equal(begin, last, known - rest))
      logits[*last] = -std::numeric_limits<float>::infinity();
  }
}

// Waits until the masks are filled. The forward is done and the team is idle, so the wait need not spin for long.
void await(const quire_masks& masks) {
  std::atomic<uint32_t>& ready = *reinterpret_cast<std::atomic<uint32_t>*>(masks.ready);
  *masks.waited = 0.0;
  if (ready.load(std::memory_order_acquire)) return;
  const auto began = std::chrono::steady_clock::now();
  for (int spin = 0; spin < kSpins && !ready.load(std::memory_order_acquire); ++spin) relax();
  while (!ready.load(std::memory_order_acquire)) sleep_while(ready, 0);
  *masks.waited = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

bool follow(const quire_sample& sample, int64_t index) {
  return quire_follow(sample.followers[index], sample.table + sample.first[index], sample.positions[index]);
}

// Returns the row's mask; null where it may sample any token.
const uint32_t* mask_of(const quire_sample& sample, int64_t index) {
  if (sample.followers && sample.followers[index]) {
    if (follow(sample, index)) return sample.followers[index]->bits;
    sample.ended[index] = 1;
    return nullptr;
  }
  const quire_masks* masks = sample.masks;
  return masks && masks->of[index] >= 0 ? masks->bits + masks->of[index] * masks->words : nullptr;
}

// Leaves in the scratch memory which blocks the row may sample.
void adjust(const quire_sample& sample, const quire_sample_row& row, int64_t index, float* logits) {
  if (row.repetition != 1.0f || row.frequency != 0.0f || row.presence != 0.0f)
    penalise(row, sample.table + sample.first[index], sample.positions[index], logits, sample.vocab);
  for (int32_t i = row.bias_begin; i < row.bias_end; ++i) logits[sample.bias_ids[i]] += sample.bias_values[i];
  Blocks& open = Scratch::mine().open;
  if (const uint32_t* bits = mask_of(sample, index)) {
    if (row.closing >= 0) close(sample, row, bits, logits);
    forbid(bits, logits, sample.vocab, open);
  } else {
    open_all(sample.vocab, open);
  }
  forbid_words(sample, row, index, logits);
  if (sample.positions[index] >= row.ends_from) return;
  for (int32_t i = row.ends_begin; i < row.ends_end; ++i)
    logits[sample.end_ids[i]] = -std::numeric_limits<float>::infinity();
}

// Writes the log-probabilities of the best `count` tokens of open blocks; returns that of a token. What lacks to `count`
// is minus infinity. With `listed`, `top_ids` names the tokens.
float write_logprobs(const float* logits, int64_t vocab, int64_t token, size_t count, int32_t* top_ids, float* top,
                     bool listed = false) {
  Scratch& scratch = Scratch::mine();
  count = std::min<size_t>(count, vocab);  // the arrays have no more
  const float most = largest_of(logits, vocab, scratch.open);
  const double sum = exponentials(logits, vocab, 1.0f, most, scratch.open, scratch.weights);
  const double norm = static_cast<double>(most) + std::log(sum);
  if (listed) {
    for (size_t i = 0; i < count; ++i) {
      const int32_t block = static_cast<int32_t>(top_ids[i] / kBlock * kBlock);
      const bool may_come = std::binary_search(scratch.open.begin(), scratch.open.end(), block);
      top[i] = may_come ? static_cast<float>(logits[top_ids[i]] - norm) : -std::numeric_limits<float>::infinity();
    }
    return static_cast<float>(logits[token] - norm);
  }
  best_of(logits, vocab, count, scratch.open, scratch.candidates);
  const size_t known = scratch.candidates.size();
  for (size_t i = 0; i < count; ++i) {
    top_ids[i] = i < known ? scratch.candidates[i].id : 0;
    top[i] = i < known ? static_cast<float>(scratch.candidates[i].weight - norm)
                       : -std::numeric_limits<float>::infinity();
  }
  return static_cast<float>(logits[token] - norm);
}

void score_row(const quire_score& score, int64_t index) {
  const float* logits = score.logits + index * score.logits_stride;
  const int64_t token = score.targets[index], first = index * score.top_count;
  open_all(score.vocab, Scratch::mine().open);
  score.logprobs[index] = write_logprobs(logits, score.vocab, token, score.top_count, score.top_ids + first,
                                         score.top + first);
  int32_t rank = 1;
  for (int32_t i = 0; i < score.vocab; ++i) rank += logits[i] > logits[token];
  score.ranks[index] = rank;
}

// ------------------------------------------------------------------ sampling

// A number in [0, 1) with 53 random bits for (seed, position): splitmix64, keyed twice, as `uniforms` in rows.py.
uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

double uniform(uint64_t seed, int64_t position) {
  constexpr uint64_t golden = 0x9E3779B97F4A7C15ull;
  const uint64_t at = static_cast<uint64_t>(position) * golden + 0xBF58476D1CE4E5B9ull;
  return static_cast<double>(mix(mix(seed + golden) ^ mix(at)) >> 11) * 0x1p-53;
}

double target_of(double share, double total) { return std::min(share * total, std::nextafter(total, 0.0)); }

// The first id at which the cumulative weight exceeds the target.
int64_t sample_from_all(const std::vector<float>& weights, double total, double share, const Blocks& open) {
  if (open.empty()) return 0;
  const double target = target_of(share, total);
  double sum = 0.0;
  size_t at = 0;
  for (; at + 1 < open.size(); ++at) {
    const double next = sum + sum_of_block(weights.data() + open[at]);
    if (next > target) break;
    sum = next;
  }
  const size_t block = open[at];
  size_t last = block;
  for (size_t i = block; i < block + kBlock; ++i) {
    sum += weights[i];
    if (sum > target) return static_cast<int64_t>(i);
    if (weights[i] > 0.0f) last = i;
  }
  return static_cast<int64_t>(last);  // added up in order of id, the block is a little less than by lanes
}

void at_least(const std::vector<float>& weights, double bound, const Blocks& open, std::vector<Candidate>& found) {
  found.clear();
  for (const size_t block : open) {
    if (!(largest(weights.data() + block, kBlock) >= bound)) continue;
    for (size_t i = block; i < block + kBlock; ++i)
      if (weights[i] >= bound && weights[i] > 0.0f) found.push_back({weights[i], static_cast<int32_t>(i)});
  }
}

// Puts the fewest of the best whose weights together reach the limit in front; returns how many they are, one at least.
size_t best_that_reach(double limit, std::vector<Candidate>& found) {
  auto begin = found.begin(), end = found.end();
  double reached = 0.0;
  while (end - begin > 32) {
    const auto middle = begin + (end - begin) / 2;
    std::nth_element(begin, middle, end, before);
    double front = 0.0;
    for (auto each = begin; each != middle; ++each) front += each->weight;
    if (reached + front >= limit) {
      end = middle;
    } else {
      reached += front;
      begin = middle;
    }
  }
  std::sort(begin, end, before);
  while (begin != end && (reached < limit || begin == found.begin())) reached += (begin++)->weight;
  return begin - found.begin();
}

// Leaves in `found` the tokens that the row may sample, by rising id: the first top_k, of those the fewest whose share
// reaches top_p, of those the ones at least min_p times as likely as the first, whose weight is 1.
void truncate(const quire_sample_row& row, int64_t vocab, double total, Scratch& scratch) {
  std::vector<Candidate>& found = scratch.candidates;
  double whole = total;
  if (row.top_k > 0 && row.top_k < vocab) {
    best_of(scratch.weights.data(), vocab, row.top_k, scratch.open, found);
    whole = 0.0;
    for (const Candidate& each : found) whole += each.weight;
  } else {
    // All tokens lighter than this are together less than what top_p leaves out, so none of them is in.
    const double tail = row.top_p < 1.0f ? (1.0 - row.top_p) * total / static_cast<double>(vocab) : 0.0;
    at_least(scratch.weights, std::max<double>(tail, row.min_p), scratch.open, found);
  }
  if (row.top_p < 1.0f) found.resize(best_that_reach(row.top_p * whole, found));
  const auto unlikely = [&](const Candidate& each) { return each.weight < row.min_p; };
  found.erase(std::remove_if(found.begin(), found.end(), unlikely), found.end());
  std::sort(found.begin(), found.end(), [](const Candidate& a, const Candidate& b) { return a.id < b.id; });
}

int64_t sample_at_random(const quire_sample_row& row, const float* logits, int64_t vocab, int64_t position) {
  Scratch& scratch = Scratch::mine();
  const float most = bounded(largest_of(logits, vocab, scratch.open) / row.temperature);
  const double total = exponentials(logits, vocab, row.temperature, most, scratch.open, scratch.weights);
  if (!std::isfinite(total)) return first_best(logits, vocab, scratch.open);  // some logits are NaN: sorting needs an order
  const double share = uniform(row.seed, position);
  if (row.top_k <= 0 && row.top_p >= 1.0f && row.min_p <= 0.0f)
    return sample_from_all(scratch.weights, total, share, scratch.open);
  truncate(row, vocab, total, scratch);
  double sum = 0.0;
  for (const Candidate& each : scratch.candidates) sum += each.weight;
  const double target = target_of(share, sum);
  sum = 0.0;
  for (const Candidate& each : scratch.candidates) {
    sum += each.weight;
    if (sum > target) return each.id;
  }
  return first_best(logits, vocab, scratch.open);  // no token is left
}

void sample_row(const quire_sample& sample, int64_t index) {
  const quire_sample_row& row = sample.rows[index];
  float* logits = sample.logits + index * sample.logits_stride;
  adjust(sample, row, index, logits);
  const int64_t position = sample.positions[index];
  const int64_t token = row.temperature > 0.0f ? sample_at_random(row, logits, sample.vocab, position)
                                               : first_best(logits, sample.vocab, Scratch::mine().open);
  if (row.logprobs >= 0) {
    const int64_t first = index * sample.top_count;
    sample.logprobs[index] = write_logprobs(logits, sample.vocab, token, row.logprobs, sample.top_ids + first,
                                            sample.top + first, row.listed != 0);
  }
  sample.tokens[index] = token;
  sample.table[sample.first[index] + position] = static_cast<int32_t>(token);
}

// Whether a row stands behind another one of the same follower, for a draft.
bool is_behind(const quire_sample& sample, int64_t index) {
  return sample.followers && index > 0 && sample.followers[index] && sample.followers[index] == sample.followers[index - 1];
}

// Samples a row, and those of its drafts as long as the drafts are right. So a follower takes in nothing but samples that
// count.
void sample_with_drafts(const quire_sample& sample, const int64_t first) {
  int64_t index = first;
  for (;; ++index) {
    const int32_t* token = sample.table + sample.first[index] + sample.positions[index];
    const bool has_draft = index + 1 < sample.count && is_behind(sample, index + 1);
    const int32_t draft = *token;
    sample_row(sample, index);
    if (!has_draft || sample.ended[index] || *token != draft) break;
  }
  if (!sample.forced || !sample.followers[first] || sample.ended[index]) return;
  const int32_t* tokens = sample.table + sample.first[index];
  sample.num_forced[first] = quire_forced(sample.followers[first], tokens, sample.positions[index] + 1,
                                          sample.forced + first * sample.forced_count, sample.forced_count);
}

constexpr int64_t kScan = 1, kExponentials = 8;

// All threads where one would take some hundred microseconds, else one: a region takes a few, and milliseconds on busy
// cores. Never some of them: OpenMP ends the threads that a smaller team leaves out, and starts others for the next one.
int threads_for(int64_t rows, int64_t passes, int64_t vocab, int threads) {
  constexpr int64_t kEnough = 1 << 22;
  return rows > 1 && passes * vocab > kEnough ? threads : 1;
}

int threads_for(const quire_sample& sample) {
  int64_t passes = 0;
  for (int32_t i = 0; i < sample.count; ++i) {
    const quire_sample_row& row = sample.rows[i];
    passes += kScan + (row.temperature > 0.0f) * kExponentials + (row.logprobs >= 0) * kExponentials;
  }
  return threads_for(sample.count, passes, sample.vocab, sample.threads);
}

}  // namespace
}  // namespace quire

extern "C" void quire_follow_row(void* argument, int64_t index) {
  const quire_sample& sample = *static_cast<const quire_sample*>(argument);
  if (sample.followers[index] && !quire::is_behind(sample, index)) quire::follow(sample, index);
}

extern "C" int32_t quire_sample_tokens(void* argument) {
  const quire_sample& sample = *static_cast<const quire_sample*>(argument);
  if (sample.masks) quire::await(*sample.masks);
  quire::Queue rows;
  quire::run_team(quire::threads_for(sample), 0, [&](const quire::Team&) {
    for (int64_t index; (index = rows.take()) < sample.count;) {
      if (!quire::is_behind(sample, index)) quire::sample_with_drafts(sample, index);
    }
  });
  return 0;
}

extern "C" int32_t quire_score_tokens(void* argument) {
  const quire_score& score = *static_cast<const quire_score*>(argument);
  quire::Queue rows;
  const int threads = quire::threads_for(score.count, score.count * quire::kExponentials, score.vocab, score.threads);
  quire::run_team(threads, 0, [&](const quire::Team&) {
    for (int64_t index; (index = rows.take()) < score.count;) quire::score_row(score, index);
  });
  return 0;
}

extern "C" void quire_masks_open(uint32_t* ready) {
  std::atomic<uint32_t>& word = *reinterpret_cast<std::atomic<uint32_t>*>(ready);
  word.store(1, std::memory_order_release);
  quire::wake_all(word);
}

extern "C" int32_t quire_take_tokens(void* argument) {
  const quire_take& take = *static_cast<const quire_take*>(argument);
  for (int64_t i = 0; i < take.count; ++i) take.token_ids[i] = take.table[take.places[i]];
  return 0;
}
