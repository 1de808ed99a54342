"""Grammars that enforce calls of tools, and other constraints that begin after a thought.

What a constrained output holds when it ends, the parser of the dialect reads as calls whose arguments match the schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from common.contracts.json_schema import enforceable
from common.contracts.types import Constraint, ConstraintKind
from router.answers.dialects import harmony
from router.answers.dialects.call_grammar import Calls, any_arguments, arguments_rule, calls, plain
from router.answers.dialects.lark import TOO_DEEP, Lark, literal, one_of
from router.answers.dialects.offered import OfferedTool
from router.answers.dialects.reader import GPT_OSS
from router.answers.dialects.reasoning import MARKS

# What a parser passes as white space before a call.
_BLANKS = r"\s\x1c-\x1f"
_BLANK = f"[{_BLANKS}]"
NO_TOKENS: Mapping[str, int] = MappingProxyType({})


class ToolChoice(StrEnum):
    """Whether the model may call tools, or must. For a named tool: REQUIRED, with that tool alone."""

    AUTO = "auto"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class ThoughtPrefix:
    """A thought before the answer, in a dialect. `is_open`: the prompt ends inside the thought."""

    reasoning: str
    is_open: bool


def tool_grammar(
    dialect: str,
    tools: Sequence[OfferedTool],
    choice: ToolChoice,
    parallel: bool,
    thought: ThoughtPrefix | None = None,
    special: Mapping[str, int] = NO_TOKENS,
    form: Constraint | None = None,
) -> str:
    """Return the grammar of an answer, in Lark.

    REQUIRED: one or more calls, exactly one unless `parallel`, all with arguments that match their schemas. AUTO: text
    with calls, where those of strict tools match; with a `form`, a JSON schema, calls alone or a document of that form.
    `special` are the tokenizer's `whole_tokens`. Raises ValueError for tools that a dialect cannot write.
    """
    if not tools:
        raise ValueError("no tool is offered; expected at least one")
    must = choice is ToolChoice.REQUIRED
    enforced = [_enforced(tool) if must or tool.strict else any_arguments(tool) for tool in tools]
    lark = Lark(special)
    if dialect == GPT_OSS:
        return lark.source(_harmony(lark, enforced, must, thought, form))
    made = calls(lark, dialect, enforced, parallel)
    before = _thought(lark, thought)
    if must:
        answer = _required(lark, made)
    elif form is not None:
        answer = one_of([_beside_json(lark, made), lark.define("answer", _nested(form))])
    else:
        answer = _text_and_calls(lark, made, thought)
    return lark.source(f"{before} {answer}".strip())


def after_thought(constraint: Constraint, thought: ThoughtPrefix, special: Mapping[str, int] = NO_TOKENS) -> Constraint:
    """Return the constraint of an output whose answer, after an optional thought, has to match `constraint`."""
    lark = Lark(special)
    answer = lark.define("answer", _nested(constraint))
    if thought.reasoning == GPT_OSS:
        start = f"{_analysis(lark)}? {_head(lark, 'final')} {answer}"
    else:
        start = f"{_thought(lark, thought)} {answer}"
    return Constraint(ConstraintKind.GRAMMAR, lark.source(start))


def _enforced(tool: OfferedTool) -> OfferedTool:
    """Return a tool whose arguments are enforced: those of a tool that is not strict as far as they can be."""
    if tool.strict:
        return tool
    try:
        return replace(tool, parameters=enforceable(tool.parameters, lenient=True))
    except RecursionError as error:
        raise ValueError(TOO_DEEP) from error


# ---------------------------------------------------------------- calls and text


def _required(lark: Lark, made: Calls) -> str:
    if made.bare:
        return made.block
    marker = lark.mark(made.marker)
    between = f"{literal(made.between)} " if made.between else ""
    more = f" ({between}{marker} {made.block})*" if made.repeats else ""
    return f"{marker} {made.block}{more}"


def _beside_json(lark: Lark, made: Calls) -> str:
    """Return calls that may stand in the place of a JSON document.

    A call that is an object is told from the document by its members. Its first literal would hide all other documents
    that begin alike, so it is written as JSON.
    """
    if not made.objects:
        return _required(lark, made)
    call = one_of([lark.json(each) for each in made.objects])
    return f'{call} ("; " {call})*' if made.more_objects else call


def _text_and_calls(lark: Lark, made: Calls, thought: ThoughtPrefix | None) -> str:
    """Return text in which each marker begins a call."""
    start = _start_of_text(lark, made, thought)
    others = [mark for mark in made.closed if mark != made.marker]
    block = " ".join(part for part in (_quoted(made.fence[0]), made.block, _quoted(made.fence[1])) if part)
    several = f" ({lark.until(made.marker, others)} {block})*" if made.repeats else ""
    tail = f" {lark.text(made.closed)}" if made.text_follows else ""
    options = [f"{lark.until(made.marker, others, start)} {block}{several}{tail}", lark.text(made.closed, start)]
    return one_of([made.block, *options] if made.bare else options)


def _quoted(text: str) -> str:
    return literal(text) if text else ""


def _start_of_text(lark: Lark, made: Calls, thought: ThoughtPrefix | None) -> str:
    """Return how the text begins that is neither a call nor a thought; "" for any way."""
    limits = []
    if made.bare:
        limits.append(lark.define("NO_CALL", rf"/{_BLANK}*([^{_BLANKS}{_escaped(made.bare)}](?s:.*))?/"))
    if thought is not None and not thought.is_open:
        blanks = lark.define("BLANKS", f"/{_BLANK}*/")
        limits.append(f"~({blanks} {literal(MARKS[thought.reasoning][0])} {lark.any})")
    return " & ".join(limits)


def _escaped(characters: str) -> str:
    return "".join(f"\\{character}" for character in characters)


# ---------------------------------------------------------------- thoughts


def _thought(lark: Lark, thought: ThoughtPrefix | None) -> str:
    if thought is None:
        return ""
    if thought.reasoning == GPT_OSS:
        raise ValueError("thoughts of gpt_oss stand in channels; expected its own dialect of tool calls, gpt_oss")
    opener, closer = MARKS[thought.reasoning]
    rest = f'{lark.until(closer)} ("\\n" | "\\n\\n")?'
    return rest if thought.is_open else f"({lark.mark(opener)} {rest})?"


def _nested(constraint: Constraint) -> str:
    """Return a constraint as the body of a rule."""
    match constraint.kind:
        case ConstraintKind.JSON_SCHEMA:
            schema = _parsed(constraint.text)
            if not isinstance(schema, dict | bool):
                raise ValueError('the JSON schema must be a JSON object; expected a schema such as {"type": "object"}')
            return Lark.json_body({} if schema is True else {"not": {}} if schema is False else schema)
        case ConstraintKind.REGEX:
            pattern = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", constraint.text, flags=re.DOTALL)
            return "/" + pattern.replace("\n", r"\n") + "/" if pattern else '""'
        case ConstraintKind.GRAMMAR:
            return f"%lark {{\n{constraint.text}\n}}"


def _parsed(schema: str) -> Any:
    try:
        return json.loads(schema)
    except RecursionError as error:
        raise ValueError(TOO_DEEP) from error


# ---------------------------------------------------------------- channels of gpt-oss


def _harmony(
    lark: Lark, tools: Sequence[OfferedTool], must: bool, thought: ThoughtPrefix | None, form: Constraint | None
) -> str:
    """Return messages that end with a call, or, unless calls are required, with text in the final channel.

    A call ends an output of this family, so that there is never a second one.
    """
    before = f"{_analysis(lark)}? " if thought is not None else ""
    call = lark.define("call", one_of([_harmony_call(lark, tool) for tool in tools]))
    if must:
        return f"{before}{call}"
    if form is not None:  # a preamble would be words before the document
        return f"{before}({call} | {_head(lark, 'final')} {lark.define('answer', _nested(form))})"
    preamble = lark.define("preamble", _closed_message(lark, "commentary"))
    return f"{before}{preamble}? ({call} | {_head(lark, 'final')} {lark.text(harmony.ENDS)})"


def _harmony_call(lark: Lark, tool: OfferedTool) -> str:
    head = f"{lark.mark(harmony.CHANNEL)} {literal(f'commentary to=functions.{plain(tool)} ')}"
    kind = f'{lark.mark(harmony.CONSTRAIN)} "json" {lark.mark(harmony.MESSAGE)}'
    return f"{head} {kind} {arguments_rule(lark, tool)}"


def _analysis(lark: Lark) -> str:
    return lark.define("analysis", _closed_message(lark, "analysis"))


def _closed_message(lark: Lark, channel: str) -> str:
    """Return a message with its end, and the beginning of the next."""
    body = lark.until(harmony.END, [mark for mark in harmony.ENDS if mark != harmony.END])
    return f'{_head(lark, channel)} {body} {lark.mark(harmony.START)} "assistant"'


def _head(lark: Lark, channel: str) -> str:
    return f"{lark.mark(harmony.CHANNEL)} {literal(channel)} {lark.mark(harmony.MESSAGE)}"
