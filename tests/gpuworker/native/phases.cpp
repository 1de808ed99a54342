// Holds members of teams back, and prints what the others did meanwhile; see test_threads.py.
#include <cstdio>
#include <cstring>
#include <vector>

#include "threads.h"

using namespace quire;

namespace {

constexpr int kPhases = 50, kPieces = 16;

// Sleeps until `word` is 1.
void hold(std::atomic<uint32_t>& word) {
  while (!word.load()) sleep_while(word, 0);
}
void release(std::atomic<uint32_t>& word) {
  word.store(1);
  wake_all(word);
}

// One of three members comes when the others have ended.
int late() {
  std::atomic<uint32_t> over{0};
  std::atomic<int> left{2}, pieces{0}, of_late{0};
  run_team(3, kPhases, [&](Team& team) {
    if (team.rank() == 1) hold(over);
    for (int n = 0; n < kPhases; ++n) {
      team.phase(kPieces, [&](int64_t) {
        ++pieces;
        of_late += team.rank() == 1;
      });
    }
    if (team.rank() != 1 && --left == 0) release(over);
  });
  std::printf("%d pieces, %d of them by the late member\n", pieces.load(), of_late.load());
  return 0;
}

// The member with the first piece of a phase holds it until the other has done the rest, and has begun to wait or will.
int held() {
  std::vector<int> sums(kPhases);
  int early = 0;
  run_team(2, 2 * kPhases, [&](Team& team) {
    for (int n = 0; n < kPhases; ++n) {
      static std::atomic<uint32_t> rest[kPhases];
      static std::atomic<int> done[kPhases];
      std::atomic<int>& mine = done[n];
      static int parts[kPhases][kPieces];
      team.phase(kPieces, [&](int64_t piece) {
        if (piece == 0) hold(rest[n]);
        parts[n][piece] = static_cast<int>(piece);
        if (++mine == kPieces - 1) release(rest[n]);
      });
      team.phase(1, [&](int64_t) {
        early += mine != kPieces;
        for (int part : parts[n]) sums[n] += part;
      });
    }
  });
  int right = 0;
  for (int sum : sums) right += sum == kPieces * (kPieces - 1) / 2;
  std::printf("%d of %d sums are right, %d phases began early\n", right, kPhases, early);
  return 0;
}

// More members than any machine has cores for, and phases of any number of pieces, none among them.
int crowd() {
  constexpr int kRounds = 400;
  std::vector<int> counts(kRounds);
  int wrong = 0;
  run_team(32, 2 * kRounds, [&](Team& team) {
    for (int n = 0; n < kRounds; ++n) {
      static std::atomic<int> seen[kRounds];
      const int64_t count = n % 41;
      team.phase(count, 1 + n % 3, [&](int64_t) { ++seen[n]; });
      team.phase(1, [&](int64_t) { wrong += seen[n] != count; });
    }
  });
  std::printf("%d phases were cut short\n", wrong);
  return 0;
}

}  // namespace

int main(int, char** arguments) {
  if (!std::strcmp(arguments[1], "late")) return late();
  if (!std::strcmp(arguments[1], "held")) return held();
  return crowd();
}
