"""Thoughts between two marks before the answer: `<think>` of DeepSeek-R1, Qwen3 and GLM, `[THINK]` of Mistral.

A thought stands at the start alone: later marks are words of the answer. Blank lines around it belong to neither side;
chat templates write them again.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from router.answers.dialects.part_tape import FlowParser, PartTape
from router.answers.dialects.tape import Flow, Mismatch, Sink
from router.contracts.answer_parts import Parser

_THINK = ("<think>", "</think>")
MARKS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {"deepseek_r1": _THINK, "qwen3": _THINK, "glm45": _THINK, "mistral": ("[THINK]", "[/THINK]")}
)
# As many line breaks at the end of a thought may belong to its mark.
_MOST_BREAKS = 16


def thought_parser(dialect: str, is_open: bool) -> Parser:
    """Return the parser of an output that may begin with a thought, or inside one that the prompt opened."""
    opener, closer = MARKS[dialect]
    return FlowParser(PartTape(), lambda tape: _output(tape, opener, closer, is_open))


def _output(tape: PartTape, opener: str, closer: str, is_open: bool) -> Flow[None]:
    tape.hold()
    opened = yield from _opened(tape, opener)
    blank = tape.release()
    if opened or is_open:
        yield from _thought(tape, closer)
    else:
        tape.words(blank)
    yield from tape.copy_until((), tape.words)


def _opened(tape: PartTape, opener: str) -> Flow[bool]:
    """Pass the mark that opens a thought, after blanks; return whether it came."""
    try:
        yield from tape.spaces()
        return (yield from tape.take(opener))
    except Mismatch:  # more blanks than may be held
        return False


def _thought(tape: PartTape, closer: str) -> Flow[None]:
    trimmed = _WithoutLastBreaks(tape.thought)
    yield from tape.spaces()
    if (yield from tape.copy_until((closer,), trimmed.write)):
        yield from tape.spaces()
    else:
        trimmed.flush()


class _WithoutLastBreaks:
    """Passes text on, except line breaks at its end."""

    def __init__(self, sink: Sink) -> None:
        self._sink, self._breaks = sink, ""

    def write(self, text: str) -> None:
        text = self._breaks + text
        kept = min(_MOST_BREAKS, len(text) - len(text.rstrip("\n")))
        end = len(text) - kept
        self._breaks = text[end:]
        if end:
            self._sink(text[:end])

    def flush(self) -> None:
        if self._breaks:
            self._sink(self._breaks)
