"""Calls as a Python list, `[f(a=1), g(b="x")]`, of Llama 3.2 and 4. Their arguments become JSON as they come."""

from __future__ import annotations

import re

from router.answers.dialects.json_text import copy_scalar, quoted, string_body, within_quotes
from router.answers.dialects.part_tape import PartTape
from router.answers.dialects.tape import Flow, Mismatch, Sink, Tape

PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"
_MOST_NAME = 256
_MOST_NESTED = 64
_CONSTANTS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_BRACKETS = {"[": "]", "(": ")", "{": "}"}


def bare_list(tape: PartTape) -> Flow[None]:
    """Read a list of calls with which the answer begins."""
    yield from tape.spaces()
    yield from after_python_start(tape, "")


def after_python_start(tape: PartTape, opener: str) -> Flow[None]:
    """Read a list of calls."""
    yield from tape.spaces()
    yield from tape.expect("[")
    while True:
        yield from tape.spaces()
        yield from _call(tape)
        yield from tape.spaces()
        if not (yield from tape.take(",")):
            yield from tape.expect("]")
            yield from tape.take(PYTHON_END)
            return


def _call(tape: PartTape) -> Flow[None]:
    name = yield from _identifier(tape)
    yield from tape.expect("(")
    if not tape.offers(name):
        raise Mismatch
    yield from tape.spaces()
    if (yield from tape.take(")")):
        tape.begin(name)
        tape.arguments("{}")
    elif (yield from tape.take("**")):
        yield from _unpacked(tape, name)
    else:
        yield from _keywords(tape, name)
    tape.hold()


def _unpacked(tape: PartTape, name: str) -> Flow[None]:
    """Read `f(**{...})`, which has room for keys that are not names in Python."""
    if (yield from tape.peek()) != "{":
        raise Mismatch
    tape.begin(name)
    yield from _value(tape, tape.arguments)
    tape.hold()
    yield from tape.spaces()
    yield from tape.expect(")")


def _keywords(tape: PartTape, name: str) -> Flow[None]:
    before = "{"
    while True:
        key = yield from _identifier(tape)
        yield from tape.spaces()
        yield from tape.expect("=")
        if before == "{":
            tape.begin(name)
        tape.release()
        tape.arguments(f"{before}{quoted(key)}: ")
        yield from tape.spaces()
        yield from _value(tape, tape.arguments)
        tape.hold()
        before = ", "
        yield from tape.spaces()
        more = yield from tape.take(",")
        yield from tape.spaces()
        if not more or (yield from tape.peek()) == ")":
            yield from tape.expect(")")
            tape.arguments("}")
            return


def _identifier(tape: Tape) -> Flow[str]:
    """Read a name, which may have dots and hyphens as the names of tools do."""
    name = ""
    while (character := (yield from tape.peek())) and (character.isalnum() or character in "_.-"):
        if len(name) == _MOST_NAME:
            raise Mismatch
        name += yield from tape.read()
    if not name:
        raise Mismatch
    return name


def _value(tape: Tape, sink: Sink, depth: int = 0) -> Flow[None]:
    """Read a literal of Python or JSON, and pass it as JSON."""
    first = yield from tape.peek()
    if depth == _MOST_NESTED:
        raise Mismatch
    if first in ('"', "'"):
        yield from _string(tape, sink)
    elif first in _BRACKETS:
        yield from _collection(tape, sink, _BRACKETS[(yield from tape.read())], depth)
    else:
        yield from _scalar(tape, sink)


def _scalar(tape: Tape, sink: Sink) -> Flow[None]:
    pieces: list[str] = []
    if (yield from tape.peek()).isalpha():
        word = yield from _identifier(tape)
        if word not in _CONSTANTS:
            raise Mismatch
        pieces.append(_CONSTANTS[word])
    else:
        yield from copy_scalar(tape, pieces.append)
        if not _NUMBER.fullmatch(pieces[0]):
            raise Mismatch
    sink("".join(pieces))


def _string(tape: Tape, sink: Sink) -> Flow[None]:
    quote = yield from tape.read()
    sink('"')
    if (yield from tape.take(quote * 2)):
        yield from string_body(tape, quote * 3, lambda text: sink(within_quotes(text)))
    elif not (yield from tape.take(quote)):
        yield from string_body(tape, quote, lambda text: sink(within_quotes(text)))
    sink('"')


def _collection(tape: Tape, sink: Sink, end: str, depth: int) -> Flow[None]:
    """Read what follows the opening bracket of a list, a tuple or a dict."""
    is_dict, first = end == "}", True
    sink("{" if is_dict else "[")
    yield from tape.spaces()
    while not (yield from tape.take(end)):
        if not first:
            sink(", ")
        first = False
        if is_dict:
            yield from _key(tape, sink)
        yield from _value(tape, sink, depth + 1)
        yield from tape.spaces()
        if not (yield from tape.take(",")):
            yield from tape.expect(end)
            break
        yield from tape.spaces()
    sink("}" if is_dict else "]")


def _key(tape: Tape, sink: Sink) -> Flow[None]:
    if (yield from tape.peek()) not in ('"', "'"):
        raise Mismatch
    yield from _string(tape, sink)
    yield from tape.spaces()
    yield from tape.expect(":")
    sink(": ")
    yield from tape.spaces()
