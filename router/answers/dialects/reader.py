"""The parser of a whole output: thoughts first, then words and calls of tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from router.answers.dialects import bare_calls, harmony, marked_calls, pythonic_calls, tagged_calls
from router.answers.dialects.offered import OfferedTool
from router.answers.dialects.part_tape import FlowParser, PartTape, joined
from router.answers.dialects.reasoning import MARKS, thought_parser
from router.answers.dialects.tape import Flow
from router.answers.dialects.tool_calls import tool_parser
from router.contracts.answer_parts import Parser, Part, Words

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
