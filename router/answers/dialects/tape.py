"""The output of one sequence as a tape that a coroutine reads: it waits where text is missing.

A reader of a dialect is a generator (`Flow`). It reads text as if all of it were there. `Tape` suspends it where the
text so far ends. What a reader sees therefore does not depend on how the output is cut.

While a call is only suspected, the tape holds its text, at most `MOST_HELD` characters. `Mismatch` ends the suspicion,
and the held text becomes words for the user. Each character is read once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import TypeVar

_R = TypeVar("_R")
Flow = Generator[None, None, _R]
Sink = Callable[[str], object]

MOST_HELD = 1 << 15
_SPACES = re.compile(r"\s*")


class Mismatch(Exception):
    """The text is not in the form that its beginning promised."""


class Tape:
    """Text that has come and is not read yet, and text that is held."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._mark: int | None = None
        self._ended = self._cut = False

    # ------------------------------------------------------------ for the owner

    def append(self, text: str) -> None:
        first = self._at if self._mark is None else self._mark
        self._text = self._text[first:] + text
        self._at -= first
        self._mark = None if self._mark is None else 0

    def end(self, cut: bool = False) -> None:
        """End the output; one that is `cut` off may end within a mark, which is then no text."""
        self._ended, self._cut = True, cut

    @property
    def cut_off(self) -> bool:
        """Whether all of an output that was cut off has been read."""
        return self._cut and self._at >= len(self._text)

    # ------------------------------------------------------------ holding

    def hold(self, back: int = 0) -> None:
        """Hold what is read from here on, and the last `back` characters."""
        self._mark = self._at - back

    def release(self) -> str:
        """Return what was held; nothing is held any more."""
        held = "" if self._mark is None else self._text[self._mark : self._at]
        self._mark = None
        return held

    # ------------------------------------------------------------ reading

    def peek(self) -> Flow[str]:
        """Return the next character; "" at the end of the output."""
        while self._at == self._end:
            if not (yield from self._more()):
                return ""
        return self._text[self._at]

    def read(self) -> Flow[str]:
        """Return the next character and pass it; Mismatch at the end of the output."""
        character = yield from self.peek()
        if not character:
            raise Mismatch
        self._at += 1
        return character

    def take(self, literal: str) -> Flow[bool]:
        """Pass a literal if it comes next; return whether it does."""
        while not self._text.startswith(literal, self._at, self._end):
            if not literal.startswith(self._text[self._at : min(self._end, self._at + len(literal))]):
                return False
            if not (yield from self._more()):
                self._drop_rest()
                return False
        self._at += len(literal)
        return True

    def expect(self, literal: str) -> Flow[None]:
        """Pass a literal; Mismatch if something else comes."""
        if not (yield from self.take(literal)):
            raise Mismatch

    def spaces(self) -> Flow[None]:
        """Pass white space."""
        while (yield from self.peek()).isspace():
            yield from self.copy(_SPACES, _nowhere)

    def copy(self, pattern: re.Pattern[str], sink: Sink) -> Flow[None]:
        """Pass what a pattern matches in the text that is there. The pattern is a repeated class of characters."""
        if (yield from self.peek()) and (found := pattern.match(self._text, self._at, self._end)) and found.group():
            self._at = found.end()
            sink(found.group())

    def copy_until(self, markers: Sequence[str], sink: Sink) -> Flow[str]:
        """Pass all text before the first of the markers, and the marker; return it, or "" at the end of the output."""
        search, longest = _search(tuple(markers))
        while True:
            if found := search.search(self._text, self._at, self._end):
                self._pass(found.start(), sink)
                self._at = found.end()
                return found.group()
            self._pass(self._end - _begun(self._text[self._at : self._end], markers, longest), sink)
            if not (yield from self._more()):
                self._drop_rest()
                self._pass(self._end, sink)
                return ""

    def _drop_rest(self) -> None:
        """Leave out the beginning of a mark with which an output that is cut off ends."""
        if self._cut:
            self._text = self._text[: self._at]

    def _pass(self, end: int, sink: Sink) -> None:
        if end > self._at:
            sink(self._text[self._at : end])
            self._at = end

    @property
    def _end(self) -> int:
        """End of what may be read now: the same character ends a suspicion that became too long, in any cut."""
        return len(self._text) if self._mark is None else min(len(self._text), self._mark + MOST_HELD)

    def _more(self) -> Flow[bool]:
        """Wait for text; False at the end of the output. Mismatch where no more may be held."""
        if self._mark is not None and len(self._text) - self._mark >= MOST_HELD:
            raise Mismatch
        if self._ended:
            return False
        yield
        return True


@lru_cache(maxsize=128)
def _search(markers: tuple[str, ...]) -> tuple[re.Pattern[str], int]:
    # Without markers nothing is found: no character stands before the beginning.
    return re.compile("|".join(map(re.escape, markers)) or r"(?!)"), max(map(len, markers), default=1)


def _begun(text: str, markers: Sequence[str], longest: int) -> int:
    """Return how many of the last characters may be the beginning of a marker."""
    for start in range(max(0, len(text) - longest + 1), len(text)):
        if any(marker[0] == text[start] and marker.startswith(text[start:]) for marker in markers):
            return len(text) - start
    return 0


def _nowhere(text: str) -> None:
    """Drop text."""
