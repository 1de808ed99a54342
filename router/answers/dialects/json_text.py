"""Reads JSON from a tape: values as they are written, and the characters that strings stand for."""

from __future__ import annotations

import json
import re

from router.answers.dialects.tape import Flow, Mismatch, Sink, Tape

_BETWEEN_BRACKETS = re.compile(r'[^"{}\[\]]*')
_IN_STRING = re.compile(r'[^"\\]*')
_IN_SINGLE_QUOTES = re.compile(r"[^'\\]*")
_AFTER_SCALAR = frozenset('",:{}[]()')
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\\": "\\", "/": "/", '"': '"', "'": "'"}
_HEX = frozenset("0123456789abcdefABCDEF")
_MOST_NAME = 256
# Digits of a number have no bound in JSON.
_MOST_SCALAR = 1 << 14
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def copy_value(tape: Tape, sink: Sink) -> Flow[None]:
    """Pass one JSON value as it is written. A broken value is passed too, up to the bracket that closes it."""
    first = yield from tape.peek()
    if first in ("{", "["):
        yield from _copy_brackets(tape, sink)
    elif first == '"':
        sink((yield from tape.read()))
        yield from _copy_string(tape, sink)
    else:
        yield from copy_scalar(tape, sink)


def copy_scalar(tape: Tape, sink: Sink) -> Flow[None]:
    """Pass a number, true, false or null; Mismatch if nothing of that kind comes."""
    scalar = ""
    while (character := (yield from tape.peek())) and not (character.isspace() or character in _AFTER_SCALAR):
        if len(scalar) == _MOST_SCALAR:
            raise Mismatch
        scalar += yield from tape.read()
    if not scalar:
        raise Mismatch
    sink(scalar)


def _copy_brackets(tape: Tape, sink: Sink) -> Flow[None]:
    depth = 0
    while character := (yield from tape.peek()):
        if character == '"':
            sink((yield from tape.read()))
            yield from _copy_string(tape, sink)
        elif character in "{}[]":
            sink((yield from tape.read()))
            depth += 1 if character in "{[" else -1
            if not depth:
                return
        else:
            yield from tape.copy(_BETWEEN_BRACKETS, sink)


def _copy_string(tape: Tape, sink: Sink) -> Flow[None]:
    """Pass the rest of a string, whose first quote is passed."""
    while character := (yield from tape.peek()):
        if character == '"':
            sink((yield from tape.read()))
            return
        if character == "\\":
            sink((yield from tape.read()))
            if (yield from tape.peek()):
                sink((yield from tape.read()))
        else:
            yield from tape.copy(_IN_STRING, sink)


def short_string(tape: Tape) -> Flow[str]:
    """Read a JSON string that is a name; Mismatch if none comes or it is too long."""
    yield from tape.expect('"')
    pieces: list[str] = []
    yield from string_body(tape, '"', pieces.append)
    name = "".join(pieces)
    if len(name) > _MOST_NAME:
        raise Mismatch
    return name


def string_body(tape: Tape, quotes: str, sink: Sink) -> Flow[None]:
    """Pass what a string stands for, and its closing quotes; the opening ones are passed. Mismatch if it is broken."""
    plain = _IN_STRING if quotes[0] == '"' else _IN_SINGLE_QUOTES
    high = ""
    while not (yield from tape.take(quotes)):
        if (yield from tape.take("\\")):
            high = yield from _escape(tape, high, sink)
            continue
        high = _lone(high, sink)
        if (yield from tape.peek()) == quotes[0]:
            sink((yield from tape.read()))
        elif not (yield from tape.peek()):
            raise Mismatch
        yield from tape.copy(plain, sink)
    _lone(high, sink)


def _escape(tape: Tape, high: str, sink: Sink) -> Flow[str]:
    """Pass an escape whose backslash is passed. `high` is a first half of a surrogate pair that waits; return such."""
    kind = yield from tape.read()
    code = 0
    if kind in "ux":
        code = yield from _code(tape, 4 if kind == "u" else 2)
    if high and kind == "u" and 0xDC00 <= code < 0xE000:
        sink((high + chr(code)).encode("utf-16", "surrogatepass").decode("utf-16"))
        return ""
    _lone(high, sink)
    if kind not in "ux":
        sink(_ESCAPES.get(kind, "\\" + kind))
        return ""
    if 0xD800 <= code < 0xDC00:
        return chr(code)
    sink(_REPLACEMENT if 0xDC00 <= code < 0xE000 else chr(code))
    return ""


def _code(tape: Tape, digits: int) -> Flow[int]:
    code = 0
    for _ in range(digits):
        if (digit := (yield from tape.read())) not in _HEX:
            raise Mismatch
        code = 16 * code + int(digit, 16)
    return code


def _lone(high: str, sink: Sink) -> str:
    """Pass U+FFFD for half a surrogate pair, which is not a character."""
    if high:
        sink(_REPLACEMENT)
    return ""


def quoted(text: str) -> str:
    """Return text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def within_quotes(text: str) -> str:
    """Return text as it stands between the quotes of a JSON string."""
    return quoted(text)[1:-1]
