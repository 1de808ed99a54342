"""Divides the parts of an answer into content blocks, each with its beginning, its text and its end."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from router.contracts.answer_parts import CallArguments, CallBegun, Part, Thought, Words

Kind: TypeAlias = Literal["text", "thinking", "tool_use"]


@dataclass(frozen=True, slots=True)
class BlockBegun:
    """The next block. `id` and `name` are those of a tool_use."""

    index: int
    kind: Kind
    id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class BlockText:
    """A piece of the open block: text, a thought, or the JSON of a tool's input."""

    index: int
    kind: Kind
    text: str


@dataclass(frozen=True, slots=True)
class BlockEnded:
    """The end of the open block. A thought is signed, because clients send back only those with a signature."""

    index: int
    kind: Kind
    signature: str = ""


Step: TypeAlias = BlockBegun | BlockText | BlockEnded


class ContentBlocks:
    """Follows one answer. Without `shows_thoughts` thinking blocks have a signature alone."""

    def __init__(self, new_id: Callable[[], str], shows_thoughts: bool = True) -> None:
        self._new_id, self._shows_thoughts = new_id, shows_thoughts
        self._open: Kind | None = None
        self._index = -1
        # White space that no block has yet: clients refuse a text of nothing else.
        self._space = ""
        self._thought = hashlib.sha256()

    def take(self, parts: Sequence[Part]) -> Iterator[Step]:
        for part in parts:
            match part:
                case Words(text):
                    yield from self._text("text", text)
                case Thought(text):
                    yield from self._text("thinking", text)
                case CallBegun(name=name):
                    yield from self._begin("tool_use", self._new_id(), name)
                case CallArguments(text=text):
                    yield BlockText(self._index, "tool_use", text)

    def finish(self) -> Iterator[Step]:
        """End the block that is open."""
        if self._open is None:
            return
        signature = self._signature() if self._open == "thinking" else ""
        yield BlockEnded(self._index, self._open, signature)
        self._open = None

    def _text(self, kind: Kind, text: str) -> Iterator[Step]:
        if self._open != kind:
            self._space += text
            if not self._space.strip():
                return
            text, before = self._space, self._begin(kind)
            yield from before
        if kind == "thinking":
            self._thought.update(text.encode())
        if text and (kind == "text" or self._shows_thoughts):
            yield BlockText(self._index, kind, text)

    def _begin(self, kind: Kind, call_id: str = "", name: str = "") -> Iterator[Step]:
        yield from self.finish()
        self._open, self._space = kind, ""
        self._index += 1
        yield BlockBegun(self._index, kind, call_id, name)

    def _signature(self) -> str:
        digest, self._thought = self._thought.digest(), hashlib.sha256()
        return base64.b64encode(digest).decode()
