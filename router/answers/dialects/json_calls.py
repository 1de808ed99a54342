"""Calls that are written as a JSON object with the tool's name and its arguments, in any order of keys."""

from __future__ import annotations

from dataclasses import dataclass, field

from router.answers.dialects.json_text import copy_value, short_string, string_body
from router.answers.dialects.part_tape import PartTape
from router.answers.dialects.tape import Flow, Mismatch, Sink

_ARGUMENTS = ("arguments", "parameters")


@dataclass(slots=True)
class _Call:
    """What is known of a call. A bare one has no marker before it: its name must be offered and have arguments."""

    bare: bool
    name: str = ""
    begun: bool = False
    waiting: list[str] = field(default_factory=list)

    def begin(self, tape: PartTape) -> None:
        if not self.name or (self.bare and not tape.offers(self.name)):
            raise Mismatch
        self.begun = True
        tape.begin(self.name)
        for piece in self.waiting:
            tape.arguments(piece)


def call_object(tape: PartTape, bare: bool = False) -> Flow[None]:
    """Read one call; what follows its arguments is held. Mismatch before the call begins if it is none."""
    call = _Call(bare)
    yield from _members(tape, call, True)
    if call.begun:
        return
    if bare:
        raise Mismatch
    call.begin(tape)
    tape.arguments("{}")
    tape.hold()


def call_list(tape: PartTape, bare: bool = False) -> Flow[None]:
    """Read a JSON array of calls."""
    yield from tape.expect("[")
    while True:
        yield from tape.spaces()
        yield from call_object(tape, bare)
        yield from tape.spaces()
        if not (yield from tape.take(",")):
            yield from tape.expect("]")
            return


def call_run(tape: PartTape, bare: bool = False) -> Flow[None]:
    """Read calls that stand one after another, with blanks, a comma or a semicolon between them."""
    while True:
        yield from call_object(tape, bare)
        tape.hold()
        yield from tape.spaces()
        parted = (yield from tape.take(";")) or (yield from tape.take(","))
        yield from tape.spaces()
        if (yield from tape.peek()) != "{":
            break
    if parted:
        raise Mismatch


def object_arguments(tape: PartTape, name: str) -> Flow[None]:
    """Read the object with the arguments of a call whose name stood before it; what follows is held."""
    if not name or (yield from tape.peek()) != "{":
        raise Mismatch
    tape.begin(name)
    yield from copy_value(tape, tape.arguments)
    tape.hold()


def _members(tape: PartTape, call: _Call, outermost: bool) -> Flow[None]:
    yield from tape.expect("{")
    yield from tape.spaces()
    if (yield from tape.take("}")):
        return
    while True:
        key = yield from short_string(tape)
        yield from tape.spaces()
        yield from tape.expect(":")
        yield from tape.spaces()
        yield from _member(tape, call, key, outermost)
        yield from tape.spaces()
        if not (yield from tape.take(",")):
            yield from tape.expect("}")
            return
        yield from tape.spaces()


def _member(tape: PartTape, call: _Call, key: str, outermost: bool) -> Flow[None]:
    if key == "name" and not call.name:
        call.name = yield from short_string(tape)
        if call.waiting:
            call.begin(tape)
            tape.hold()
    elif key in _ARGUMENTS and not call.begun and not call.waiting:
        yield from _arguments(tape, call)
    elif key == "function" and outermost and (yield from tape.peek()) == "{":
        yield from _members(tape, call, False)
    else:
        yield from copy_value(tape, _nowhere)


def _arguments(tape: PartTape, call: _Call) -> Flow[None]:
    """Read the arguments: an object, an object that is written in a string, or null."""
    first = yield from tape.peek()
    in_string = yield from tape.take('"')
    if in_string:
        first = yield from tape.peek()
    if first != "{":
        yield from tape.expect('"' if in_string else "null")
        _write(tape, call, "{}")
        return
    sink: Sink = call.waiting.append
    if call.name:
        call.begin(tape)
        sink = tape.arguments
    yield from string_body(tape, '"', sink) if in_string else copy_value(tape, sink)
    if call.begun:
        tape.hold()


def _write(tape: PartTape, call: _Call, text: str) -> None:
    call.waiting.append(text)
    if call.name:
        call.begin(tape)
        tape.hold()


def _nowhere(text: str) -> None:
    """Drop text."""
