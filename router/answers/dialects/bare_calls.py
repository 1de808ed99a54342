"""Families whose answer is the call itself, without a marker: Llama's JSON, and the form for templates without one."""

from __future__ import annotations

from router.answers.dialects.json_calls import call_list, call_run
from router.answers.dialects.marked_calls import FENCE_END
from router.answers.dialects.part_tape import PartTape
from router.answers.dialects.tape import Flow

PYTHON_TAG = "<|python_tag|>"


def bare_objects(tape: PartTape) -> Flow[None]:
    """Read calls as objects with which the answer begins."""
    yield from tape.spaces()
    yield from call_run(tape, bare=True)


def after_python_tag(tape: PartTape, opener: str) -> Flow[None]:
    """Read calls as objects after Llama's marker."""
    yield from tape.spaces()
    yield from call_run(tape)


def bare_calls(tape: PartTape) -> Flow[None]:
    """Read objects or an array of calls with which the answer begins."""
    yield from tape.spaces()
    if (yield from tape.peek()) == "[":
        yield from call_list(tape, bare=True)
    else:
        yield from call_run(tape, bare=True)


def fenced_calls(tape: PartTape, opener: str) -> Flow[None]:
    """Read calls in a fence of JSON, whose beginning is passed."""
    yield from bare_calls(tape)
    yield from tape.spaces()
    yield from tape.take(FENCE_END)
