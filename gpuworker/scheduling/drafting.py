"""Guesses the next tokens of a sequence, and decides how many guesses a step verifies.

A guess is called a draft. A step computes a row's drafts behind its last known token, and samples at each of these
positions as it always does. The samples count up to the first one that differs from its draft. So the tokens are those
of plain decoding, whatever is guessed. A draft costs a position of a step, and it gives a token if it is right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from itertools import pairwise
from typing import Final, NamedTuple, Protocol

from common.contracts.types import SamplingParams

MAX_DRAFTS: Final = 16
"""Drafts of one sequence in one step."""

MAX_STEP_DRAFTS: Final = 32
"""Drafts of all sequences in one step: each takes a row of logits."""

NGRAM: Final = 3
"""The last tokens of a sequence that an earlier place must have, before its continuation is a guess.

Where there is no such place, one with the last NGRAM - 1 tokens will do.
"""

MAX_INDEXED: Final = 8192
"""Tokens at the end of a prompt, and of a prediction, among which such places are looked for."""

_NEAR: Final = 64  # tokens behind the last right guess that are searched first: a text goes on behind an edit
_WEIGHT: Final = 0.25  # of the last guess, in the share of right ones
_TRUST: Final = 0.75  # in a prediction, before anything is known
_HOPE: Final = 0.5  # in a repetition, as long: a copy is short, and its first guesses are worth their rows
_LEAST_CHANCE: Final = 0.2  # that a draft is right, with all drafts before it

_OF_A_KEY: Final = 21  # bits: no vocabulary has more than two million tokens


@dataclass(frozen=True, slots=True)
class Speculation:
    """What a sequence drafts from beside its tokens: the client's prediction of the output, which may be empty.

    The last `output_before` tokens of the sequence's prompt are output of an earlier run. A draft model samples as
    `sampling` says.
    """

    prediction: tuple[int, ...] = ()
    output_before: int = 0
    sampling: SamplingParams | None = field(default=None, compare=False)


def speculation_of(sampling: SamplingParams, prediction: tuple[int, ...], output_before: int) -> Speculation | None:
    """Return what a sequence drafts from; None where it may not.

    A budget of thoughts follows the output token by token: no mask of it is made behind a draft. Constraints make
    masks behind drafts. All other sampling reads tokens and positions alone, and those of a draft are known.
    """
    return None if sampling.thought is not None else Speculation(prediction, output_before, sampling)


@dataclass(frozen=True, slots=True)
class DraftPrices:
    """Seconds of a step without drafts, of a draft more, and of the gap before a step that is not planned ahead.

    `guess` is a step of the draft model, which guesses one token of each sequence. `catch_up` is a position that the
    draft model computes of a text that it does not have yet.
    """

    step: float = 1.0
    draft: float = 0.0
    gap: float = 0.0
    guess: float = 0.0
    catch_up: float = 0.0


NO_PRICES: Final = DraftPrices()


class Drafter(Protocol):
    """Follows one sequence, and guesses how it goes on."""

    @property
    def chance(self) -> float:
        """The share of guesses that were right of late, 0 where there is no guess now."""
        ...

    @property
    def behind(self) -> int | None:
        """Positions that a draft model must compute before it guesses; None where the guesses are known already."""
        ...

    def take(self, tokens: Sequence[int]) -> None:
        """Take in the next tokens of the output, and learn whether they were the ones guessed."""
        ...

    def propose(self, most: int) -> tuple[int, ...]:
        """Return up to `most` guesses."""
        ...


NewDrafter = Callable[[Sequence[int], Speculation], Drafter]
"""Makes the drafter of a sequence, from its tokens so far."""


class DraftModel(Protocol):
    """A smaller model that guesses for several sequences at once; its drafters are those that `new_drafter` made."""

    def new_drafter(self, tokens: Sequence[int], speculation: Speculation) -> Drafter:
        """Make the drafter of a sequence, from its tokens so far."""
        ...

    def priced(self, prices: DraftPrices) -> DraftPrices:
        """Return the prices with those of the model's own steps, as it has measured them."""
        ...

    def guess(self, wanted: Sequence[tuple[Drafter, int]]) -> float:
        """Let each drafter have so many guesses, or fewer, when it proposes next; return the seconds that took."""
        ...

    def release(self, drafter: Drafter) -> None:
        """Free what the model keeps for a drafter, whose sequence has ended."""
        ...


def verified(drafts: Sequence[int], samples: Sequence[int]) -> int:
    """Return how many of the samples count: those that follow right drafts alone, one at least.

    `samples` has one more than `drafts`: sample n follows the first n drafts.
    """
    right = 0
    while right < len(drafts) and drafts[right] == samples[right]:
        right += 1
    return right + 1


class Outlook(NamedTuple):
    """How a sequence may go on: the chance that a guess is right, and how many guesses there are at most.

    `behind` is that of the drafter. The sequence may sample `left` tokens more.
    """

    chance: float
    most: int = MAX_DRAFTS
    behind: int | None = None
    left: int = 0


def drafts_worth_it(chances: Sequence[float], rows: int, prices: DraftPrices, room: int = MAX_STEP_DRAFTS) -> list[int]:
    """Return what `outlooks_worth_it` does, for sequences that have guesses enough."""
    return outlooks_worth_it([Outlook(chance) for chance in chances], rows, prices, room)


def outlooks_worth_it(
    outlooks: Sequence[Outlook], rows: int, prices: DraftPrices, room: int = MAX_STEP_DRAFTS
) -> list[int]:
    """Return how many drafts each sequence gets; all 0 where a step of `rows` rows would make fewer tokens a second.

    The n-th draft of a sequence is right with probability chance ** n. The likeliest drafts come first. A further one
    pays while it brings more tokens in its time than the step makes so far:

        likely / draft > tokens / seconds, with seconds = step + gap + drafts x draft + depth x guess.

    A draft model takes `depth` steps for the n-th draft, n <= depth, of all sequences. The best depth is taken. All
    together pay while tokens / seconds > rows / step.
    """
    hopeful = [each if _worth_catching_up(each, rows, prices) else each._replace(chance=0.0) for each in outlooks]
    best = _likeliest(hopeful, rows, prices, room, depth=0)
    if any(each.behind is not None and each.chance > _LEAST_CHANCE for each in hopeful):
        best = max(best, _best_depth(hopeful, rows, prices, room), key=lambda drafted: drafted.rate)
    return best.counts if best.tokens * prices.step > rows * best.seconds else [0] * len(outlooks)


def _worth_catching_up(outlook: Outlook, rows: int, prices: DraftPrices) -> bool:
    """Whether the rest of an output may save the time in which a draft model computes the text before it.

    One guess a step, right with probability p, saves p / (1 + p) of the sequence's steps, which others share.
    """
    if outlook.behind is None or outlook.behind <= MAX_DRAFTS + 1:
        return True
    saved = outlook.left * prices.step / max(1, rows) * outlook.chance / (1 + outlook.chance)
    return outlook.behind * prices.catch_up <= saved


class _Drafted(NamedTuple):
    """A step with drafts: how many each sequence has, the tokens that it is likely to make, and its seconds."""

    counts: list[int]
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def _best_depth(outlooks: Sequence[Outlook], rows: int, prices: DraftPrices, room: int) -> _Drafted:
    best = _likeliest(outlooks, rows, prices, room, depth=1)
    for depth in range(2, MAX_DRAFTS + 1):
        deeper = _likeliest(outlooks, rows, prices, room, depth)
        if deeper.rate <= best.rate:
            break
        best = deeper
    return best


def _likeliest(outlooks: Sequence[Outlook], rows: int, prices: DraftPrices, room: int, depth: int) -> _Drafted:
    """Return a step with the drafts that pay, of which a draft model guesses at most `depth` of a sequence."""
    counts, room = [0] * len(outlooks), max(0, room)
    bounds = [min(MAX_DRAFTS, each.most if each.behind is None else min(each.most, depth)) for each in outlooks]
    tokens, seconds = float(rows), prices.step + prices.gap + depth * prices.guess
    nexts = [(-each.chance, at) for at, each in enumerate(outlooks) if each.chance > _LEAST_CHANCE and bounds[at]]
    heapify(nexts)
    while nexts and room:
        likely, place = -nexts[0][0], nexts[0][1]
        if likely * seconds <= tokens * prices.draft:
            break
        counts[place], room = counts[place] + 1, room - 1
        tokens, seconds = tokens + likely, seconds + prices.draft
        likely *= outlooks[place].chance
        if likely > _LEAST_CHANCE and counts[place] < bounds[place]:
            heapreplace(nexts, (-likely, place))
        else:
            heappop(nexts)
    return _Drafted(counts, tokens, seconds)


class NgramDrafter:
    """Guesses that a sequence goes on as it did after the same last tokens, or as the client predicts.

    A guess is made for every token, and costs nothing until it is verified: so the chance is known beforehand.
    """

    behind = None

    def __init__(self, tokens: Sequence[int], speculation: Speculation) -> None:
        prompt = len(tokens) - speculation.output_before
        self._prediction = list(speculation.prediction[:MAX_INDEXED])
        self._predicted = _index(self._prediction)
        self._text = list(tokens[max(0, prompt - MAX_INDEXED) : prompt])
        self._places = _index(self._text[:-1])
        # Where the next token is expected, and where it last was; the second stays when a guess was wrong.
        self._source, self._at = self._prediction, 0
        self._followed = bool(self._prediction)
        self._share = _TRUST if self._prediction else _HOPE
        if not self._followed:
            self._look_up()
        self._remember()
        self.take(tokens[prompt:])

    @property
    def chance(self) -> float:
        return self._share if self._followed and self._at < len(self._source) else 0.0

    def take(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._judge(token)
            self._text.append(token)
            if not self._followed and not self._resume():
                self._look_up()
            self._remember()

    def propose(self, most: int) -> tuple[int, ...]:
        if not self._followed:
            return ()
        found = self._source[self._at : self._at + most]
        if self._source is self._text and found:  # what repeats itself goes on doing so
            while len(found) < most:
                found.append(found[len(found) - (len(self._text) - self._at)])
        return tuple(found)

    def _judge(self, token: int) -> None:
        """Compare a token with the guess for it."""
        if not self._followed or self._at >= len(self._source):
            self._followed = False
            return
        right = self._source[self._at] == token
        self._share += _WEIGHT * (right - self._share)
        self._at += 1
        self._followed = right

    def _resume(self) -> bool:
        """Follow the source again at the first of the next places that has the same last tokens, or one less."""
        source, last, pair = self._source, self._text[-NGRAM:], 0
        begin = max(self._at, NGRAM - 1) - 1
        end = min(begin + _NEAR, len(source) - 1)
        while last[-1] in (window := source[begin:end]):
            begin += window.index(last[-1]) + 1
            if source[begin - NGRAM : begin] == last:
                return self._follow(source, begin)
            if not pair and source[begin - NGRAM + 1 : begin] == last[1:]:
                pair = begin
        return bool(pair) and self._follow(source, pair)

    def _follow(self, source: list[int], at: int) -> bool:
        self._source, self._at, self._followed = source, at, True
        return True

    def _look_up(self) -> None:
        for key in _keys(self._text):
            for source, places in ((self._prediction, self._predicted), (self._text, self._places)):
                at = places.get(key)
                if at is not None and at < len(source):
                    self._follow(source, at)
                    return

    def _remember(self) -> None:
        """Make the last tokens a place from which a later text may be guessed."""
        for key in _keys(self._text):
            self._places[key] = len(self._text)


def _index(text: list[int]) -> dict[int, int]:
    """Return where each run of NGRAM tokens, and of one less, ends: the last such place. Their keys differ in sign."""
    first, second = 1 << _OF_A_KEY, 1 << 2 * _OF_A_KEY
    pairs = {~(a * first + b): end for end, (a, b) in enumerate(pairwise(text), start=2)}
    return pairs | {
        a * second + b * first + c: end
        for end, (a, b, c) in enumerate(zip(text, text[1:], text[2:], strict=False), start=3)
    }


def _keys(text: list[int]) -> tuple[int, ...]:
    """Return the last NGRAM tokens as one number, then one less of them, as far as the text has so many."""
    if len(text) < 2:
        return ()
    pair = (text[-2] << _OF_A_KEY) + text[-1]
    return (~pair,) if len(text) < NGRAM else ((text[-3] << 2 * _OF_A_KEY) + pair, ~pair)
