"""Texts of clients that spell a control token of the model, and must not become it.

A tokenizer takes the text of a special token for that token wherever it stands: "<|im_end|>" in a file that an agent
reads would end the user's turn. So each such text in the variables of a template is cut behind its first character. The
parts of the prompt are encoded apart: none spells the token, and together they are the same text. (The library's own
switch, `encode_special_tokens`, is of a whole tokenizer: no thread may encode when it is set, and the template's tokens
would be text too.)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, Final

# A template keeps the place of a cut by one of these. Unicode has them for such use: no text to exchange has one.
_MARKS: Final = tuple(map(chr, range(0xFDD0, 0xFDF0)))

# Characters by which a text is known: one that begins as a longer one does is cut too, which does no harm.
_TELLING: Final = 64


class ControlTexts:
    """The texts of a tokenizer's special tokens. One of a single character cannot be cut, and is left out."""

    def __init__(self, texts: Iterable[str]) -> None:
        found = sorted({text[:_TELLING] for text in texts if len(text) > 1})
        self._pattern = re.compile(_any_of(found)) if found else None

    def cut(self, variables: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """Return variables (JSON) with a mark at each cut, and that mark; "" where nothing spells a token.

        Raises ValueError when the texts have all marks.
        """
        pattern = self._pattern
        if pattern is None or not any(pattern.search(text) for text in _texts(variables)):
            return variables, ""
        mark = next((mark for mark in _MARKS if not any(_has(text, mark) for text in _texts(variables))), "")
        if not mark:
            raise ValueError(f"the texts have all of the noncharacters U+{ord(_MARKS[0]):X} to U+{ord(_MARKS[-1]):X}")
        return self._cut(variables, mark), mark

    def _cut(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            return self._cut_text(value, mark)
        if isinstance(value, dict):
            return {self._cut(key, mark): self._cut(each, mark) for key, each in value.items()}
        return [self._cut(each, mark) for each in value] if isinstance(value, list | tuple) else value

    def _cut_text(self, text: str, mark: str) -> str:
        assert self._pattern is not None
        parts, start = [], 0
        while found := self._pattern.search(text, start):  # texts may overlap: the next one may begin within this one
            parts.append(text[start : found.start() + 1])
            start = found.start() + 1
        return mark.join([*parts, text[start:]])


NO_TEXTS: Final = ControlTexts(())


def parted(text: str, mark: str) -> tuple[str, ...]:
    """Return the parts of a rendered text between marks; a template may have written them as JSON in ASCII."""
    return tuple(re.split(f"{mark}|{re.escape(_escaped(mark))}", text)) if mark else (text,)


def _escaped(mark: str) -> str:
    return f"\\u{ord(mark):04x}"


def _has(text: str, mark: str) -> bool:
    return mark in text or _escaped(mark) in text


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _texts(key)
            yield from _texts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)


def _any_of(texts: list[str]) -> str:
    """Return a pattern of any of the sorted texts, which reads each character once however many they are."""
    if len(texts) == 1:
        return re.escape(texts[0])
    first, last = texts[0], texts[-1]
    same = next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    rests = [text[same:] for text in texts]
    branches = [
        _any_of([rest for rest in rests if rest[:1] == begin]) for begin in dict.fromkeys(rest[:1] for rest in rests)
    ]
    return re.escape(first[:same]) + f"(?:{'|'.join(branches)})"
