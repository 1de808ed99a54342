#include "sample.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <limits>
#include <vector>

#include "simd.h"
#include "threads.h"

namespace quire {
namespace {

struct Candidate {
  float weight;
  int32_t id;
};

// Falling weight, of equal weights rising id.
inline bool before(const Candidate& a, const Candidate& b) {
  return a.weight > b.weight || (a.weight == b.weight && a.id < b.id);
}

// The scratch memory of one thread; counts are zero between two rows.
struct Scratch {
  std::vector<float> weights;
  std::vector<int32_t> known, output;
  std::vector<Candidate> candidates;

  static Scratch& mine() {
    thread_local Scratch scratch;
    return scratch;
  }
};

inline Vec load_padded(const float* from, int64_t count, float pad) {
  float lanes[kLanes];
  std::fill(std::copy(from, from + count, lanes), lanes + kLanes, pad);
  return Vec::load(lanes);
}

// Rows are scanned in blocks, most of which one comparison leaves out.
constexpr int64_t kBlock = 256;

float largest(const float* x, int64_t n) {
  Vec most = Vec::all(-std::numeric_limits<float>::infinity());
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) most = max(most, Vec::load(x + i));
  if (i < n) most = max(most, load_padded(x + i, n - i, -std::numeric_limits<float>::infinity()));
  float lanes[kLanes];
  most.store(lanes);
  return *std::max_element(lanes, lanes + kLanes);
}

int64_t first_best(const float* x, int64_t n) {
  float most = -std::numeric_limits<float>::infinity();
  int64_t block = 0;
  for (int64_t i = 0; i < n; i += kBlock) {
    const float here = largest(x + i, std::min(kBlock, n - i));
    if (here > most) most = here, block = i;
  }
  for (int64_t i = block; i < std::min(block + kBlock, n); ++i)
    if (x[i] == most) return i;
  return 0;  // nothing above minus infinity
}

// The sum of a block, whose size is a whole number of vectors: sixteen sums in double, added up in order of lane.
double sum_of_block(const float* x) {
  double lanes[kLanes] = {}, sum = 0.0;
  for (int64_t i = 0; i < kBlock; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += x[i + lane];
  for (double lane : lanes) sum += lane;
  return sum;
}

// e^x, and 0 for x below -87, minus infinity included.
inline Vec exp_or_zero(Vec x) {
  const Vec one = Vec::all(1.0f);
  return exp(x) * max(min((x + Vec::all(87.0f)) * Vec::all(1e30f), one), Vec::zero());
}

// weights[i] = exp(x[i] / temperature - most), then zeros up to a whole number of blocks; returns their sum, block by
// block.
double exponentials(const float* x, int64_t n, float temperature, float most, std::vector<float>& weights) {
  weights.resize((n + kBlock - 1) / kBlock * kBlock);
  const Vec divisor = Vec::all(temperature), shift = Vec::all(most);
  const int64_t whole = n / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes)
    exp_or_zero(Vec::load(x + i) / divisor - shift).store(weights.data() + i);
  if (whole < n) {
    const Vec rest = load_padded(x + whole, n - whole, -std::numeric_limits<float>::infinity());
    exp_or_zero(rest / divisor - shift).store(weights.data() + whole);
  }
  std::fill(weights.begin() + n, weights.end(), 0.0f);
  double sum = 0.0;
  for (size_t i = 0; i < weights.size(); i += kBlock) sum += sum_of_block(weights.data() + i);
  return sum;
}

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
    logits[id] = value;
    scratch.known[id] = scratch.output[id] = 0;
  }
}

constexpr int64_t kWord = 32;  // tokens in a word of a mask

// Forbids all tokens that the row's mask does not allow.
void forbid(const quire_masks& masks, int64_t index, float* logits, int64_t vocab) {
  if (masks.of[index] < 0) return;
  const uint32_t* bits = masks.bits + masks.of[index] * masks.words;
  for (int64_t first = 0; first < vocab; first += kWord) {
    const uint32_t word = bits[first / kWord];
    if (word == UINT32_MAX) continue;
    const int64_t count = std::min(kWord, vocab - first);
    if (!word) {
      std::fill_n(logits + first, count, -std::numeric_limits<float>::infinity());
      continue;
    }
    for (int64_t i = 0; i < count; ++i)
      if (!(word >> i & 1)) logits[first + i] = -std::numeric_limits<float>::infinity();
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

void adjust(const quire_sample& sample, const quire_sample_row& row, int64_t index, float* logits) {
  if (row.repetition != 1.0f || row.frequency != 0.0f || row.presence != 0.0f)
    penalise(row, sample.table + sample.first[index], sample.positions[index], logits, sample.vocab);
  for (int32_t i = row.bias_begin; i < row.bias_end; ++i) logits[sample.bias_ids[i]] += sample.bias_values[i];
  if (sample.masks) forbid(*sample.masks, index, logits, sample.vocab);
  if (sample.positions[index] >= row.ends_from) return;
  for (int32_t i = row.ends_begin; i < row.ends_end; ++i)
    logits[sample.end_ids[i]] = -std::numeric_limits<float>::infinity();
}

// Collects the best `count` of x, in order.
void best_of(const float* x, int64_t n, size_t count, std::vector<Candidate>& found) {
  found.clear();
  count = std::min<size_t>(count, n);
  if (!count) return;
  // The heap's top is the last of the kept ones. Ids rise, so a later equal value is left out.
  int64_t i = 0;
  for (; i < static_cast<int64_t>(count); ++i) found.push_back({x[i], static_cast<int32_t>(i)});
  std::make_heap(found.begin(), found.end(), before);
  while (i < n) {
    const int64_t end = std::min(i + kBlock, n);
    if (!(largest(x + i, end - i) > found.front().weight)) i = end;
    for (; i < end; ++i) {
      if (!(x[i] > found.front().weight)) continue;
      std::pop_heap(found.begin(), found.end(), before);
      found.back() = {x[i], static_cast<int32_t>(i)};
      std::push_heap(found.begin(), found.end(), before);
    }
  }
  std::sort_heap(found.begin(), found.end(), before);
}

void write_logprobs(const quire_sample& sample, int64_t index, const float* logits, int64_t token) {
  Scratch& scratch = Scratch::mine();
  const float most = largest(logits, sample.vocab);
  const double sum = exponentials(logits, sample.vocab, 1.0f, most, scratch.weights);
  const double norm = static_cast<double>(most) + std::log(sum);
  sample.logprobs[index] = static_cast<float>(logits[token] - norm);
  best_of(logits, sample.vocab, sample.rows[index].logprobs, scratch.candidates);
  for (size_t i = 0; i < scratch.candidates.size(); ++i) {
    sample.top_ids[index * sample.top_count + i] = scratch.candidates[i].id;
    sample.top[index * sample.top_count + i] = static_cast<float>(scratch.candidates[i].weight - norm);
  }
}

// ------------------------------------------------------------------ sampling

// A number in [0, 1) with 53 random bits for (seed, position): splitmix64, keyed twice, as `uniforms` in sampler.py.
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
int64_t sample_from_all(const std::vector<float>& weights, double total, double share) {
  const double target = target_of(share, total);
  double sum = 0.0;
  size_t block = 0;
  for (; block + kBlock < weights.size(); block += kBlock) {
    const double next = sum + sum_of_block(weights.data() + block);
    if (next > target) break;
    sum = next;
  }
  size_t last = block;
  for (size_t i = block; i < block + kBlock; ++i) {
    sum += weights[i];
    if (sum > target) return static_cast<int64_t>(i);
    if (weights[i] > 0.0f) last = i;
  }
  return static_cast<int64_t>(last);  // added up in order of id, the block is a little less than by lanes
}

void at_least(const std::vector<float>& weights, double bound, std::vector<Candidate>& found) {
  found.clear();
  for (size_t block = 0; block < weights.size(); block += kBlock) {
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
    best_of(scratch.weights.data(), vocab, row.top_k, found);
    whole = 0.0;
    for (const Candidate& each : found) whole += each.weight;
  } else {
    // All tokens lighter than this are together less than what top_p leaves out, so none of them is in.
    const double tail = row.top_p < 1.0f ? (1.0 - row.top_p) * total / static_cast<double>(vocab) : 0.0;
    at_least(scratch.weights, std::max<double>(tail, row.min_p), found);
  }
  if (row.top_p < 1.0f) found.resize(best_that_reach(row.top_p * whole, found));
  const auto unlikely = [&](const Candidate& each) { return each.weight < row.min_p; };
  found.erase(std::remove_if(found.begin(), found.end(), unlikely), found.end());
  std::sort(found.begin(), found.end(), [](const Candidate& a, const Candidate& b) { return a.id < b.id; });
}

int64_t sample_at_random(const quire_sample_row& row, const float* logits, int64_t vocab, int64_t position) {
  Scratch& scratch = Scratch::mine();
  const float most = largest(logits, vocab) / row.temperature;
  const double total = exponentials(logits, vocab, row.temperature, most, scratch.weights);
  const double share = uniform(row.seed, position);
  if (row.top_k <= 0 && row.top_p >= 1.0f && row.min_p <= 0.0f)
    return sample_from_all(scratch.weights, total, share);
  truncate(row, vocab, total, scratch);
  double sum = 0.0;
  for (const Candidate& each : scratch.candidates) sum += each.weight;
  const double target = target_of(share, sum);
  sum = 0.0;
  for (const Candidate& each : scratch.candidates) {
    sum += each.weight;
    if (sum > target) return each.id;
  }
  return first_best(logits, vocab);  // all weights are NaN
}

void sample_row(const quire_sample& sample, int64_t index) {
  const quire_sample_row& row = sample.rows[index];
  float* logits = sample.logits + index * sample.logits_stride;
  adjust(sample, row, index, logits);
  const int64_t position = sample.positions[index];
  const int64_t token =
      row.temperature > 0.0f ? sample_at_random(row, logits, sample.vocab, position) : first_best(logits, sample.vocab);
  if (row.logprobs >= 0) write_logprobs(sample, index, logits, token);
  sample.tokens[index] = token;
  sample.table[sample.first[index] + position] = static_cast<int32_t>(token);
}

// All threads where one would take some hundred microseconds, else one: a region takes a few, and milliseconds on busy
// cores. Never some of them: OpenMP ends the threads that a smaller team leaves out, and starts others for the next one.
int threads_for(const quire_sample& sample) {
  constexpr int64_t kScan = 1, kExponentials = 8, kEnough = 1 << 22;
  int64_t passes = 0;
  for (int32_t i = 0; i < sample.count; ++i) {
    const quire_sample_row& row = sample.rows[i];
    passes += kScan + (row.temperature > 0.0f) * kExponentials + (row.logprobs >= 0) * kExponentials;
  }
  return sample.count > 1 && passes * sample.vocab > kEnough ? sample.threads : 1;
}

}  // namespace
}  // namespace quire

extern "C" int32_t quire_sample_tokens(void* argument) {
  const quire_sample& sample = *static_cast<const quire_sample*>(argument);
  if (sample.masks) quire::await(*sample.masks);
  quire::Queue rows;
  quire::run_team(quire::threads_for(sample), [&](const quire::Team&) {
    for (int64_t index; (index = rows.take()) < sample.count;) quire::sample_row(sample, index);
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
