"""Counts the tokens of an answer's thought."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from router.contracts.answer_parts import CallBegun, Part, Thought
from router.contracts.ports import TextCodec


class TokenTexts:
    """Divides the text of several tokens among them, where the tokenizer spells tokens as bytes.

    A thought has then as many tokens however the output was cut. Marks count for nothing, nor do end tokens: a thought
    that the model opened is as long as one that the prompt opened, and one that it closed as one that it broke off.
    """

    def __init__(self, codec: TextCodec, kept: Collection[str]) -> None:
        self._codec = codec
        self._hidden = {token for text, token in codec.hidden_tokens.items() if text not in kept}
        added = codec.added_tokens
        self._marks = frozenset(token for text, token, special in added if special or text in kept)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def divided(self, token_ids: Sequence[int], text: str) -> Iterator[tuple[int, str]]:
        """Yield how many tokens count, and their text: one by one, or all at once where texts are not known."""
        sizes = [len(self._utf8.decode(self._spelt(token))) for token in token_ids]
        if sum(sizes) != len(text):
            yield sum(token not in self._marks for token in token_ids), text
            return
        place = 0
        for token, size in zip(token_ids, sizes, strict=True):
            yield int(token not in self._marks), text[place : place + size]
            place += size

    def _spelt(self, token: int) -> bytes:
        return b"" if token in self._hidden else self._codec.token_bytes(token) or b""


@dataclass(slots=True)
class ThoughtTokens:
    """Counts tokens of thoughts: exactly where tokens come one by one, else by the characters of the parts."""

    count: int = 0
    _pending: int = 0
    _thinking: bool = False
    _began: bool = False

    @property
    def may_grow(self) -> bool:
        """Whether a thought goes on, or may still begin."""
        return self._thinking or not self._began

    def take(self, tokens: int, parts: Sequence[Part]) -> None:
        """Count tokens whose text, with what was held back before, completed these parts."""
        self._pending += tokens
        lengths = [len(part.name if isinstance(part, CallBegun) else part.text) for part in parts]
        if not any(lengths):
            if not tokens and self._thinking:  # behind a mark nothing of the thought is left to come
                self.count, self._pending = self.count + self._pending, 0
            return
        thought = sum(length for length, part in zip(lengths, parts, strict=True) if isinstance(part, Thought))
        self.count += round(self._pending * thought / sum(lengths))
        self._pending, self._thinking, self._began = 0, isinstance(parts[-1], Thought), True

    def end(self) -> int:
        """Return the count, with tokens at the end of a thought that was cut off."""
        return self.count + (self._pending if self._thinking else 0)
