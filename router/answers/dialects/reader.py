"""The parser of a whole output: thoughts first, then words and calls of tools."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from router.answers.dialects import bare_calls, harmony, marked_calls, pythonic_calls, tagged_calls
from router.answers.dialects.offered import OfferedTool
from router.answers.dialects.part_tape import FlowParser, PartTape, joined
from router.answers.dialects.reasoning import MARKS, thought_parser
from router.answers.dialects.tape import Flow, Mismatch
from router.contracts.answer_parts import Parser, Part, Words


# The parser of each dialect of tool calls.
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


GPT_OSS = "gpt_oss"
_DEEPSEEK_MARKS = (
    marked_calls.DEEPSEEK, marked_calls.DEEPSEEK_END, marked_calls.DEEPSEEK_CALL, marked_calls.DEEPSEEK_CALL_END,
    marked_calls.DEEPSEEK_SEPARATOR,
)  # fmt: skip
_HARMONY_MARKS = (
    harmony.CHANNEL, harmony.START, harmony.MESSAGE, harmony.CONSTRAIN, harmony.END, harmony.RETURN, harmony.CALL
)  # fmt: skip
TOOL_MARKS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "hermes": (marked_calls.HERMES, marked_calls.HERMES_END),
        "llama3_json": (bare_calls.PYTHON_TAG,),
        "pythonic": (pythonic_calls.PYTHON_START, pythonic_calls.PYTHON_END),
        "mistral": (marked_calls.MISTRAL, marked_calls.MISTRAL_ID, marked_calls.MISTRAL_ARGUMENTS),
        "deepseek_v3": _DEEPSEEK_MARKS,
        "deepseek_v31": _DEEPSEEK_MARKS,
        "glm45": tagged_calls.GLM.marks,
        "qwen3_coder": tagged_calls.CODER.marks,
        GPT_OSS: _HARMONY_MARKS,
        "generic": (),
    }
)
REASONING_MARKS: Mapping[str, tuple[str, ...]] = MappingProxyType({**MARKS, GPT_OSS: _HARMONY_MARKS})


class _Reader:
    """Reads thoughts; the words of the first parser are the output that the second reads."""

    def __init__(self, thoughts: Parser, calls: Parser) -> None:
        self._thoughts, self._calls = thoughts, calls

    def feed(self, text: str) -> Sequence[Part]:
        return self._read(self._thoughts.feed(text))

    def finish(self, cut: bool = False) -> Sequence[Part]:
        return joined([*self._read(self._thoughts.finish(cut)), *self._calls.finish(cut)])

    def _read(self, parts: Sequence[Part]) -> Sequence[Part]:
        return [read for part in parts for read in (self._calls.feed(part.text) if isinstance(part, Words) else [part])]


def reader(
    reasoning: str | None,
    tools: str | None,
    offered: Sequence[OfferedTool] = (),
    thought_open: bool = False,
    calls_first: bool = False,
) -> Parser:
    """Return the parser of one output. `thought_open`: the prompt ends inside a thought.

    `calls_first`: calls stand at the beginning of the answer alone, and all else is words.

    None stands for no dialect: thoughts, or calls, are then not told from words. Channels of gpt-oss hold both, so one
    parser reads both.
    """
    if GPT_OSS in (reasoning, tools):
        return harmony.harmony_parser(offered, tools == GPT_OSS)
    calls = words_parser() if tools is None else tool_parser(tools, offered, calls_first)
    if reasoning is None:
        return calls
    return _Reader(thought_parser(reasoning, thought_open), calls)


def words_parser() -> Parser:
    """Return the parser for which all output is words."""
    return FlowParser(PartTape(), _all_words)


def kept_tokens(reasoning: str | None, tools: str | None) -> frozenset[str]:
    """Return the special tokens that must stay in the text, for a parser to read it."""
    marks = () if reasoning is None else REASONING_MARKS[reasoning]
    return frozenset((*marks, *(() if tools is None else TOOL_MARKS[tools])))


def thought_marks(reasoning: str) -> tuple[str, str]:
    """Return the texts before and after a thought."""
    if reasoning != GPT_OSS:
        return MARKS[reasoning]
    return f"{harmony.CHANNEL}analysis{harmony.MESSAGE}", harmony.END


def thought_end(reasoning: str, must_call: bool = False) -> str:
    """Return the text that ends a thought by force. The answer follows; where tools are required, a call."""
    if reasoning != GPT_OSS:
        return f"\n{MARKS[reasoning][1]}\n\n"
    head = f"{harmony.END}{harmony.START}assistant{harmony.CHANNEL}"
    return f"{head}commentary to=functions." if must_call else f"{head}final{harmony.MESSAGE}"


def _all_words(tape: PartTape) -> Flow[None]:
    yield from tape.copy_until((), tape.words)
