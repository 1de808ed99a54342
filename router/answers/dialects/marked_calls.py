"""Families that mark a call with tokens and write its arguments as JSON: Hermes and Qwen, Mistral, DeepSeek."""

from __future__ import annotations

from router.answers.dialects.json_calls import call_list, call_object, object_arguments
from router.answers.dialects.part_tape import PartTape
from router.answers.dialects.tape import Flow, Mismatch

HERMES, HERMES_END = "<tool_call>", "</tool_call>"
MISTRAL, MISTRAL_ID, MISTRAL_ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
DEEPSEEK, DEEPSEEK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DEEPSEEK_CALL, DEEPSEEK_CALL_END, DEEPSEEK_SEPARATOR = (
    "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
)  # fmt: skip
FENCE, FENCE_END = "```json", "```"
_MOST_NAME = 256


def hermes(tape: PartTape, opener: str) -> Flow[None]:
    """Read `<tool_call>{"name": ..., "arguments": ...}</tool_call>` after its opener."""
    yield from tape.spaces()
    yield from call_object(tape)
    yield from tape.spaces()
    yield from tape.take(HERMES_END)


def mistral(tape: PartTape, opener: str) -> Flow[None]:
    """Read `[TOOL_CALLS][{...}]` or `[TOOL_CALLS]name[ARGS]{...}` after its opener."""
    yield from tape.spaces()
    if (yield from tape.peek()) == "[":
        yield from call_list(tape)
        return
    name = yield from name_before(tape, "[{")
    if (yield from tape.take(MISTRAL_ID)):
        yield from name_before(tape, "[{")
    yield from tape.take(MISTRAL_ARGUMENTS)
    yield from tape.spaces()
    yield from object_arguments(tape, name)


def deepseek(tape: PartTape, opener: str) -> Flow[None]:
    """Read the calls of DeepSeek V3, R1 and V3.1 after the first marker."""
    if opener == DEEPSEEK:
        yield from tape.spaces()
        yield from tape.expect(DEEPSEEK_CALL)
    while True:
        yield from _deepseek_call(tape)
        if (yield from tape.take(DEEPSEEK_END)) or not (yield from tape.take(DEEPSEEK_CALL)):
            return


def _deepseek_call(tape: PartTape) -> Flow[None]:
    """Read `function<sep>name`, a line break and fenced arguments (V3), or `name<sep>arguments` (V3.1)."""
    name = yield from name_before(tape, "<")
    yield from tape.expect(DEEPSEEK_SEPARATOR)
    yield from tape.spaces()
    if (yield from tape.peek()) != "{":
        name = yield from name_before(tape, "\n")
        yield from tape.spaces()
        yield from tape.expect(FENCE)
        yield from tape.spaces()
    yield from object_arguments(tape, name)
    yield from tape.spaces()
    yield from tape.take(FENCE_END)
    yield from tape.spaces()
    yield from tape.take(DEEPSEEK_CALL_END)
    yield from tape.spaces()


def name_before(tape: PartTape, ends: str) -> Flow[str]:
    """Read the name before one of these characters, without blanks around it; Mismatch if it is too long."""
    name = ""
    while (character := (yield from tape.peek())) and character not in ends:
        if len(name) == _MOST_NAME:
            raise Mismatch
        name += yield from tape.read()
    return name.strip()
