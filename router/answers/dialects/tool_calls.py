"""The parser of each dialect of tool calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from router.answers.dialects import bare_calls, marked_calls, pythonic_calls, tagged_calls
from router.answers.dialects.offered import OfferedTool
from router.answers.dialects.part_tape import FlowParser, PartTape
from router.answers.dialects.tape import Flow, Mismatch
from router.contracts.answer_parts import Parser


@dataclass(frozen=True, slots=True)
class Form:
    """Where calls stand: after an opener anywhere (`after`), and, of some dialects, at the start (`first`)."""

    openers: tuple[str, ...]
    after: Callable[[PartTape, str], Flow[None]]
    first: Callable[[PartTape], Flow[None]] | None = None


_DEEPSEEK = Form((marked_calls.DEEPSEEK, marked_calls.DEEPSEEK_CALL), marked_calls.deepseek)
FORMS: Mapping[str, Form] = MappingProxyType(
    {
        "hermes": Form((marked_calls.HERMES,), marked_calls.hermes),
        "llama3_json": Form((bare_calls.PYTHON_TAG,), bare_calls.after_python_tag, bare_calls.bare_objects),
        "pythonic": Form(
            (pythonic_calls.PYTHON_START,), pythonic_calls.after_python_start, pythonic_calls.bare_list
        ),
        "mistral": Form((marked_calls.MISTRAL,), marked_calls.mistral),
        "deepseek_v3": _DEEPSEEK,
        "deepseek_v31": _DEEPSEEK,
        "glm45": Form((marked_calls.HERMES,), tagged_calls.glm),
        "qwen3_coder": Form((marked_calls.HERMES,), tagged_calls.coder),
        "generic": Form((marked_calls.FENCE,), bare_calls.fenced_calls, bare_calls.bare_calls),
    }
)  # fmt: skip


def tool_parser(dialect: str, offered: Sequence[OfferedTool] = (), calls_first: bool = False) -> Parser:
    """Return the parser of an answer, which reads words and calls; `calls_first`: calls at the beginning alone."""
    form = FORMS[dialect]
    return FlowParser(PartTape(offered), lambda tape: (_calls_first if calls_first else _answer)(tape, form))


def _answer(tape: PartTape, form: Form) -> Flow[None]:
    if form.first is not None:
        yield from tape.attempt(form.first(tape))
    while opener := (yield from tape.copy_until(form.openers, tape.words)):
        yield from tape.attempt(form.after(tape, opener), len(opener))


def _calls_first(tape: PartTape, form: Form) -> Flow[None]:
    if form.first is not None:
        yield from tape.attempt(form.first(tape))
    read = -1
    while read < tape.calls:
        read = tape.calls
        yield from tape.attempt(_opened(tape, form))
    yield from tape.copy_until((), tape.words)


def _opened(tape: PartTape, form: Form) -> Flow[None]:
    """Read what follows an opener that comes next; Mismatch where none does."""
    yield from tape.spaces()
    for opener in form.openers:
        if (yield from tape.take(opener)):
            yield from form.after(tape, opener)
            return
    raise Mismatch
