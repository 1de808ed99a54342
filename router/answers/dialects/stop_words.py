"""Stop texts in the words of an answer: thoughts and arguments of calls may spell them."""

from __future__ import annotations

from collections.abc import Sequence

from router.answers.dialects.part_tape import joined
from router.answers.stop_matcher import StopMatcher
from router.contracts.answer_parts import Parser, Part, Words


class StopWords:
    """A parser that holds back words which are, or may become, a stop text.

    A stop text does not reach over a thought or a call. Whether one ends the output its owner decides, who knows how
    many tokens there are: the owner calls `stopped`, or feeds more.
    """

    def __init__(self, parser: Parser, stops: Sequence[str]) -> None:
        self._parser, self._stops = parser, stops
        self._matchers = [StopMatcher(stop) for stop in stops]
        self._held = ""
        self.complete: str | None = None
        """The stop text that was completed first by what was fed last; of two that end at one character, the longer."""

    def feed(self, text: str) -> Sequence[Part]:
        parts = self._parser.feed(text)
        return joined(self._read(parts)) if parts else parts

    def finish(self, cut: bool = False) -> Sequence[Part]:
        """Return what was held back: no stop text ended the output."""
        parts = self._read(self._parser.finish(cut))
        return joined([*parts, *self._let_go()])

    def stopped(self, stop: str, includes: bool) -> Sequence[Part]:
        """Return the words before a stop text that ended the output; with it where the output `includes` it."""
        place = self._held.rfind(stop)
        words = self._held[: place + len(stop) if includes else place] if place >= 0 else self._held
        return [Words(words)] if words else []

    def _read(self, parts: Sequence[Part]) -> list[Part]:
        found = list[Part]()
        self.complete, begun = None, None
        for part in parts:
            if not isinstance(part, Words):
                found += [*self._let_go(), part]
                begun = None
                continue
            for character in part.text:
                self._held += character
                complete = [each.stop for each in self._matchers if each.step(character)]
                if complete:
                    longest = max(complete, key=len)
                    self.complete = self.complete or longest
                    begun = min(len(self._held) - len(longest), len(self._held) if begun is None else begun)
        keep = max(each.matched for each in self._matchers)
        end = len(self._held) - keep if begun is None else min(begun, len(self._held) - keep)
        if end:
            found.append(Words(self._held[:end]))
            self._held = self._held[end:]
        return found

    def _let_go(self) -> list[Part]:
        """Return the words that are held; a stop text begins anew behind them."""
        words, self._held = self._held, ""
        self._matchers = [StopMatcher(stop) for stop in self._stops]
        return [Words(words)] if words else []
