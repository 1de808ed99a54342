"""What the text of an answer consists of: a thought, words for the user, and calls of tools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Thought:
    """A piece of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class Words:
    """A piece of the answer that the user reads."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The name of a tool that the model calls; `index` counts the calls of an answer from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the JSON object with a call's arguments. All pieces of a call together are the object."""

    index: int
    text: str


Part = Thought | Words | CallBegun | CallArguments


class Parser(Protocol):
    """Reads the output of one sequence, in pieces of any size, and holds back what may yet be a marker.

    The parts that it returns do not depend on how the output is cut.
    """

    def feed(self, text: str) -> Sequence[Part]: ...

    def finish(self, cut: bool = False) -> Sequence[Part]:
        """Return what was held back. A call that the output left incomplete is returned as far as it came.

        An output that was `cut` off by a limit leaves no marks of a call as words.
        """
        ...
