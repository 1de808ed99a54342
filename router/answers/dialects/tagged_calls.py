"""Calls whose arguments stand in tags, a key and a value each, of GLM-4.5 and of Qwen3-Coder.

The value of a string parameter stands as it is; any other value is JSON. The tool's schema tells which. A call as one
JSON object is read too: the constraint of a schema that has no list of parameters writes it so.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from router.answers.dialects.json_text import copy_value, quoted, within_quotes
from router.answers.dialects.marked_calls import HERMES, HERMES_END, hermes, name_before
from router.answers.dialects.offered import KINDS, Schema, is_kind, is_plain_text, kind_of, kinds
from router.answers.dialects.part_tape import PartTape
from router.answers.dialects.tape import MOST_HELD, Flow, Mismatch


@dataclass(frozen=True, slots=True)
class Tags:
    """How a call is written.

    `name`, the tool's name, `name_end`; for each parameter `key`, its name, `key_end`, `value`, the value, `value_end`;
    then `end`. Blanks may stand where a template breaks the line.
    """

    name: str
    name_end: str
    key: str
    key_end: str
    value: str
    value_end: str
    end: str

    @property
    def marks(self) -> tuple[str, ...]:
        """What may be a token of its own in a vocabulary."""
        between = (self.key, self.key_end, self.value, self.value_end)
        return (HERMES, HERMES_END, *(mark for mark in between if mark[0] == "<" and mark[-1] == ">"))


GLM = Tags("", "\n", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "")
# The line breaks around a value belong to the tags.
CODER = Tags("<function=", ">", "<parameter=", ">", "\n", "\n</parameter>", "</function>")
_OPENING = {"{": "object", "[": "array", '"': "string"}


def glm(tape: PartTape, opener: str) -> Flow[None]:
    """Read one call of GLM after its opener."""
    yield from _tagged(tape, opener, GLM)


def coder(tape: PartTape, opener: str) -> Flow[None]:
    """Read one call of Qwen3-Coder after its opener."""
    yield from _tagged(tape, opener, CODER)


def _tagged(tape: PartTape, opener: str, tags: Tags) -> Flow[None]:
    yield from tape.spaces()
    if (yield from tape.peek()) == "{":
        yield from hermes(tape, opener)
        return
    yield from tape.expect(tags.name)
    name = yield from name_before(tape, "\n<{>")
    yield from tape.take(tags.name_end)
    yield from tape.spaces()
    if not name:
        raise Mismatch
    yield from _arguments(tape, name, tags)


def _arguments(tape: PartTape, name: str, tags: Tags) -> Flow[None]:
    before = "{"
    while (yield from tape.take(tags.key)):
        key = yield from name_before(tape, "<>")
        yield from tape.expect(tags.key_end)
        if tags.value != "\n":
            yield from tape.spaces()
        yield from tape.expect(tags.value)
        if before == "{":
            tape.begin(name)
        tape.release()
        tape.arguments(f"{before}{quoted(key)}: ")
        yield from _value(tape, _schema(tape, name, key), tags.value_end)
        before = ", "
        tape.hold()
        yield from tape.spaces()
    yield from _end(tape, name, tags, before != "{")


def _end(tape: PartTape, name: str, tags: Tags, begun: bool) -> Flow[None]:
    """Read the end of a call. Where the output breaks off, parameters may be missing: the object stays open."""
    ended = yield from tape.take(tags.end or HERMES_END)
    if not begun:
        if not ended:
            raise Mismatch
        tape.begin(name)
        tape.arguments("{")
    if ended or (yield from tape.peek()):
        tape.arguments("}")
    tape.hold()
    yield from tape.spaces()
    yield from tape.take(HERMES_END)


def _schema(tape: PartTape, name: str, key: str) -> Schema | None:
    tool = tape.offered.get(name)
    return None if tool is None else tool.parameter(key)


def _value(tape: PartTape, schema: Schema | None, end: str) -> Flow[None]:
    """Read a value and its closing tag, and write it as JSON."""
    if schema is not None and is_plain_text(schema):
        yield from _text(tape, (), end)
        return
    allowed = frozenset() if schema is None else kinds(schema) or KINDS
    if _OPENING.get((yield from tape.peek())) in allowed:
        yield from copy_value(tape, tape.arguments)
        tape.hold()
        yield from tape.spaces()
        yield from tape.expect(end.strip())
    else:
        yield from _judged(tape, allowed, end)


def _text(tape: PartTape, begun: Sequence[str], end: str) -> Flow[None]:
    """Read the rest of a string that stands without quotes; write it as a JSON string."""
    tape.arguments('"' + "".join(map(within_quotes, begun)))
    if (yield from tape.copy_until((end,), lambda text: tape.arguments(within_quotes(text)))):
        tape.arguments('"')


def _judged(tape: PartTape, allowed: frozenset[str], end: str) -> Flow[None]:
    """Read a value that may be JSON or text; the type decides. One too long to be held is text."""
    pieces: list[str] = []
    length = 0
    while length < MOST_HELD:
        if (yield from tape.take(end)):
            tape.arguments(_as_json("".join(pieces), allowed))
            return
        if not (yield from tape.peek()):
            return
        pieces.append((yield from tape.read()))
        length += 1
    yield from _text(tape, pieces, end)


def _as_json(text: str, allowed: frozenset[str]) -> str:
    """Return a value as JSON: itself where it is JSON of an allowed type, else the string that it spells."""
    if "boolean" in allowed and text in ("True", "False"):
        return text.lower()
    try:
        value: Any = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return quoted(text)
    return text.strip() if is_kind(value, allowed) and (kind_of(value) != "string" or allowed) else quoted(text)


def _no_number(name: str) -> float:
    raise ValueError(name)
