#include "follow.h"

#include <algorithm>
#include <mutex>
#include <new>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

constexpr int64_t kWord = 32;              // tokens in a word of a mask
constexpr size_t kMostTexts = 1 << 16;     // in a cache
constexpr size_t kLongestText = 256;       // longer ones are rare, and not kept

int64_t words_of(const quire_grammar& grammar) { return (grammar.vocab + kWord - 1) / kWord; }

bool begin(quire_follower& follower) {
  const quire_grammar& grammar = *follower.grammar;
  follower.state = QUIRE_FOLLOWER_GOES_ON;
  if (follower.matcher) return grammar.reset(follower.matcher) == 0;
  follower.matcher = grammar.clone(grammar.prototype);
  return follower.matcher != nullptr;
}

// Returns false where the matcher fails.
bool take_in(quire_follower& follower, const int32_t* tokens, int64_t position) {
  const quire_grammar& grammar = *follower.grammar;
  for (; follower.position < position; ++follower.position) {
    const int32_t token = tokens[follower.position];
    if (token < 0 || token >= grammar.vocab) return false;
    if (grammar.tails) follower.digits = grammar.tails[token] + (grammar.whole[token] ? follower.digits : 0);
    if (grammar.consume(follower.matcher, static_cast<uint32_t>(token))) return false;
    if (!grammar.is_stopped(follower.matcher)) continue;
    follower.state = QUIRE_FOLLOWER_ENDED;
    return true;
  }
  return true;
}

bool is_end(const quire_grammar& grammar, int64_t token) {
  return std::find(grammar.ends, grammar.ends + grammar.num_ends, token) != grammar.ends + grammar.num_ends;
}

// Whether a mask allows a token besides the ends of a text. llguidance fills no mask with nothing.
bool allows_others(const quire_grammar& grammar, const uint32_t* bits) {
  bool ends = false;
  for (int32_t i = 0; i < grammar.num_ends; ++i) {
    const int32_t end = grammar.ends[i];
    ends |= end >= 0 && end < grammar.vocab && (bits[end / kWord] >> (end % kWord) & 1);
  }
  for (int64_t word = 0; ends && word < words_of(grammar); ++word)
    for (uint32_t left = bits[word]; left; left &= left - 1)
      if (!is_end(grammar, word * kWord + __builtin_ctz(left))) return true;
  return !ends;
}

// Fills the mask of a sequence that goes on; returns false where it is Python's to judge.
bool fill(const quire_follower& follower) {
  const quire_grammar& grammar = *follower.grammar;
  if (grammar.tails && follower.digits >= grammar.most_digits) return false;
  const size_t bytes = static_cast<size_t>(words_of(grammar)) * sizeof(uint32_t);
  return grammar.mask(follower.matcher, follower.bits, bytes) == 0 && allows_others(grammar, follower.bits);
}

}  // namespace

bool quire_follow(quire_follower* followed, const int32_t* tokens, int64_t position) {
  quire_follower& follower = *followed;
  if (follower.filled == position) return follower.state != QUIRE_FOLLOWER_ENDED;
  follower.filled = position;
  if (follower.state == QUIRE_FOLLOWER_NEW && !begin(follower)) follower.state = QUIRE_FOLLOWER_LEFT;
  if (follower.state == QUIRE_FOLLOWER_GOES_ON) {
    const bool passed = take_in(follower, tokens, position);
    if (passed && follower.state == QUIRE_FOLLOWER_GOES_ON && fill(follower)) return true;
    if (follower.state == QUIRE_FOLLOWER_GOES_ON) follower.state = QUIRE_FOLLOWER_LEFT;
  }
  if (follower.state == QUIRE_FOLLOWER_LEFT) {
    const int64_t count = position - follower.begin;
    if (follower.grammar->left(follower.id, tokens + follower.begin, count, follower.bits) == QUIRE_LEFT_MASK) return true;
    follower.state = QUIRE_FOLLOWER_ENDED;
  }
  return false;
}

int32_t quire_forced(quire_follower* followed, const int32_t* tokens, int64_t position, int32_t* forced, int32_t room) {
  quire_follower& follower = *followed;
  if (follower.state != QUIRE_FOLLOWER_GOES_ON) return 0;
  if (!take_in(follower, tokens, position)) follower.state = QUIRE_FOLLOWER_LEFT;
  if (follower.state != QUIRE_FOLLOWER_GOES_ON) return 0;
  static_assert(sizeof(uint32_t) == sizeof(int32_t));
  const quire_grammar& grammar = *follower.grammar;
  const int32_t count = grammar.forced(follower.matcher, reinterpret_cast<uint32_t*>(forced), static_cast<size_t>(room));
  if (count < 0) follower.state = QUIRE_FOLLOWER_LEFT;
  return std::clamp(count, 0, room);
}

struct quire_tokenizer {
  quire_slow_tokenize slow;
  std::mutex mutex;
  std::unordered_map<std::string, std::vector<uint32_t>> known;
};

extern "C" {

quire_tokenizer* quire_tokenizer_new(quire_slow_tokenize slow) {
  quire_tokenizer* made = new (std::nothrow) quire_tokenizer;
  if (made) made->slow = slow;
  return made;
}

void quire_tokenizer_free(quire_tokenizer* tokenizer) { delete tokenizer; }

size_t quire_tokenize(const void* user, const uint8_t* bytes, size_t size, uint32_t* tokens, size_t room) {
  quire_tokenizer& tokenizer = *static_cast<quire_tokenizer*>(const_cast<void*>(user));
  if (size > kLongestText) return tokenizer.slow(nullptr, bytes, size, tokens, room);
  const std::string text(reinterpret_cast<const char*>(bytes), size);
  {
    std::lock_guard<std::mutex> lock(tokenizer.mutex);
    const auto found = tokenizer.known.find(text);
    if (found != tokenizer.known.end()) {
      const std::vector<uint32_t>& known = found->second;
      std::copy_n(known.begin(), std::min(room, known.size()), tokens);
      return known.size();
    }
  }
  // Without the lock: Python may be in another call of this function, and waits for nobody here.
  std::vector<uint32_t> made(size + 1);  // no token is empty
  const size_t count = tokenizer.slow(nullptr, bytes, size, made.data(), made.size());
  made.resize(std::min(count, made.size()));
  std::copy_n(made.begin(), std::min(room, made.size()), tokens);
  const size_t result = made.size();
  std::lock_guard<std::mutex> lock(tokenizer.mutex);
  if (tokenizer.known.size() >= kMostTexts) tokenizer.known.clear();
  tokenizer.known.emplace(text, std::move(made));
  return result;
}

int64_t quire_grammar_bytes(void) { return sizeof(quire_grammar); }
int64_t quire_follower_bytes(void) { return sizeof(quire_follower); }

}  // extern "C"
