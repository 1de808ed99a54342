"""Reads outputs with a parser, cut in any way."""

from __future__ import annotations

from collections.abc import Iterable

from router.answers.dialects.offered import OfferedTool
from router.answers.dialects.part_tape import joined
from router.contracts.answer_parts import CallArguments, CallBegun, Parser, Part, Thought, Words

TOOLS = (
    OfferedTool(
        "f",
        {
            "type": "object",
            "properties": {
                "a": {"type": "integer"},
                "s": {"type": "string"},
                "o": {"type": "object"},
                "n": {"type": ["string", "null"]},
                "any": {},
            },
        },
    ),
    OfferedTool("g"),
)


def pieces(text: str, size: int) -> Iterable[str]:
    return (text[start : start + size] for start in range(0, len(text), size))


def read(parser: Parser, cut: Iterable[str]) -> list[Part]:
    """Return the joined parts of an output that comes in pieces."""
    return joined([part for piece in cut for part in parser.feed(piece)] + list(parser.finish()))


def call(index: int, name: str, arguments: str) -> list[Part]:
    return [CallBegun(index, name), CallArguments(index, arguments)]


def text_of(parts: Iterable[Part], kind: type[Thought] | type[Words]) -> str:
    return "".join(part.text for part in parts if isinstance(part, kind))
