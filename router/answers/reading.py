"""How the answers of a chat are read: thoughts, words and calls of tools, and what the request must ask for that.

An API passes a chat, its tools and its constraint. It gets the constraint to send, the special tokens that the text
must keep, and a parser for each sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from common.contracts.errors import FieldViolation, InvalidRequest, Unsupported
from common.contracts.types import Constraint, ConstraintKind
from quire.inference.v1 import inference_pb2 as pb
from quire.types.v1 import types_pb2
from router.answers.constraints.closing import close, closed_text
from router.answers.dialects.detect import detect_reasoning, detect_tools, opens_thought
from router.answers.dialects.grammar import ThoughtPrefix, ToolChoice, after_thought, tool_grammar
from router.answers.dialects.lark import whole_tokens
from router.answers.dialects.names import reasoning_dialect, tool_dialect
from router.answers.dialects.offered import OfferedTool
from router.answers.dialects.reader import GPT_OSS, kept_tokens, reader, thought_end, thought_marks
from router.answers.requested_tools import UNSEEN_TOOLS
from router.contracts.answer_parts import Parser
from router.contracts.ports import ChatRenderer

# Names of `--tool-call-parser` and `--reasoning-parser` beside those of the dialects.
AUTO: Final = "auto"
NONE: Final = "none"
_NO_DIALECT: Final = "generic"


@dataclass(frozen=True, slots=True)
class Dialects:
    """How the served model writes calls and thoughts; None where that is not read.

    `whole_tokens` are those that a grammar must name by their ids. `sees_tools`: the prompt names the tools.
    """

    tools: str | None = _NO_DIALECT
    reasoning: str | None = None
    whole_tokens: Mapping[str, int] = field(default_factory=dict)
    sees_tools: bool = True

    @classmethod
    def of(
        cls,
        tools: str,
        reasoning: str,
        template: str | None,
        tool_template: str | None,
        added_tokens: Iterable[tuple[str, int, bool]] = (),
        sees_tools: bool = True,
    ) -> Dialects:
        """Return the dialects of two options; `auto` finds them in the chat template, and in that for tools."""
        found = detect_tools(tool_template or "") or _NO_DIALECT
        calls = None if tools == NONE else found if tools == AUTO else tool_dialect(tools)
        found_thoughts = detect_reasoning(template or "") or detect_reasoning(tool_template or "")
        thoughts = None if reasoning == NONE else found_thoughts if reasoning == AUTO else reasoning_dialect(reasoning)
        return cls(calls, thoughts, whole_tokens(added_tokens), sees_tools)


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request that may be called, and whether one must be. A `named` one is the only one."""

    tools: tuple[OfferedTool, ...] = ()
    choice: ToolChoice = ToolChoice.AUTO
    named: bool = False
    parallel: bool = True

    @property
    def is_constrained(self) -> bool:
        """Whether free text does not do: a call must come, must match its schema, or must be the only one."""
        required = self.choice is ToolChoice.REQUIRED
        return bool(self.tools) and (required or not self.parallel or any(tool.strict for tool in self.tools))


@dataclass(frozen=True, slots=True)
class AskedConstraint:
    """A constraint, and the field of the body that sets it.

    `closing_token`: what stands for an end of the text that the constraint forbids, a mark that ends a thought.
    """

    field: str
    constraint: Constraint
    closing_token: int | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """How each sequence of a request is read, the special tokens that its text must keep, and what limits it."""

    new_parser: Callable[[], Parser]
    kept: frozenset[str]
    asked: AskedConstraint | None
    budget: types_pb2.ThoughtBudget | None = None
    note: str = ""
    """What the client should know of its tools; "" where they reach the model."""


class AnswerReader:
    """Plans how answers of one model are read."""

    def __init__(self, dialects: Dialects, renderer: ChatRenderer, open_schemas: bool = False) -> None:
        self._dialects, self._renderer, self._open_schemas = dialects, renderer, open_schemas

    def reads(self, use: ToolUse) -> bool:
        """Return whether answers are read; otherwise their text is what the user reads."""
        return bool(use.tools) or self._dialects.reasoning is not None

    async def reading(
        self, chat: pb.Chat, use: ToolUse, asked: AskedConstraint | None, budget: int | None = None
    ) -> Reading:
        """Return how the answers to a chat are read, whose thoughts may have `budget` tokens.

        Raises InvalidRequest for a chat that cannot be rendered and for contradictions, Unsupported where calls are not
        read.
        """
        dialects = self._dialects
        if use.tools and dialects.tools is None:
            raise Unsupported("tools: not offered, as this router runs with --tool-call-parser none; leave them out")
        if use.tools and asked is not None and asked.constraint.kind is not ConstraintKind.JSON_SCHEMA:
            what = "cannot be combined with tools, which allow only a JSON schema; leave out one of them"
            raise InvalidRequest(FieldViolation(asked.field, what))
        thought = None
        if dialects.reasoning is not None:
            prompt = await self._renderer.rendered(chat)
            thought = ThoughtPrefix(dialects.reasoning, opens_thought(dialects.reasoning, prompt))
        return self._planned(use, asked, thought, budget)

    def _planned(
        self, use: ToolUse, asked: AskedConstraint | None, thought: ThoughtPrefix | None, budget: int | None
    ) -> Reading:
        dialects = self._dialects
        tools = dialects.tools if use.tools else None
        is_open = thought is not None and thought.is_open
        return Reading(
            partial(reader, dialects.reasoning, tools, use.tools, is_open, calls_first=asked is not None),
            kept_tokens(dialects.reasoning, tools),
            self._constraint(use, asked, thought),
            None if budget is None or thought is None else _budget(budget, thought, use),
            UNSEEN_TOOLS if use.tools and not dialects.sees_tools else "",
        )

    def _constraint(
        self, use: ToolUse, asked: AskedConstraint | None, thought: ThoughtPrefix | None
    ) -> AskedConstraint | None:
        if use.is_constrained or (use.tools and asked is not None):
            return self._of_calls(use, asked, thought)
        if asked is None or thought is None:
            return asked
        try:
            constraint = after_thought(self._closed_schema(asked.constraint), thought, self._dialects.whole_tokens)
        except ValueError as error:
            raise _not_enforced(asked.field, error) from None
        return AskedConstraint(asked.field, constraint, self._closing_token(thought))

    def _of_calls(self, use: ToolUse, asked: AskedConstraint | None, thought: ThoughtPrefix | None) -> AskedConstraint:
        """Return the constraint of an answer that consists of calls, or, where the choice allows it, has a form."""
        assert self._dialects.tools is not None
        field = "tools" if asked is None or use.is_constrained else asked.field
        form = None if asked is None else self._closed_schema(asked.constraint)
        try:
            tools = [self._closed(tool) for tool in use.tools]
            text = tool_grammar(
                self._dialects.tools, tools, use.choice, use.parallel, thought, self._dialects.whole_tokens, form
            )
        except ValueError as error:
            raise _not_enforced(field, error) from None
        return AskedConstraint(field, Constraint(ConstraintKind.GRAMMAR, text), self._closing_token(thought))

    def _closing_token(self, thought: ThoughtPrefix | None) -> int | None:
        """Return the mark that ends a thought, where it is one token."""
        return None if thought is None else self._dialects.whole_tokens.get(thought_marks(thought.reasoning)[1])

    def _closed_schema(self, constraint: Constraint) -> Constraint:
        """Close a schema here: the grammar around it hides it from the validator, which closes schemas."""
        if constraint.kind is not ConstraintKind.JSON_SCHEMA or self._open_schemas:
            return constraint
        return replace(constraint, text=closed_text(constraint.text))

    def _closed(self, tool: OfferedTool) -> OfferedTool:
        if self._open_schemas and not tool.strict:
            return tool
        parameters = deepcopy(dict(tool.parameters))
        close(parameters)
        return replace(tool, parameters=parameters)


def _not_enforced(field: str, error: ValueError) -> InvalidRequest:
    return InvalidRequest(FieldViolation(field, f"cannot be enforced: {error}"))


def _budget(tokens: int, thought: ThoughtPrefix, use: ToolUse) -> types_pb2.ThoughtBudget:
    opener, closer = thought_marks(thought.reasoning)
    return types_pb2.ThoughtBudget(
        max_tokens=tokens,
        opener=opener,
        closer=closer,
        end=thought_end(thought.reasoning, use.choice is ToolChoice.REQUIRED),
        is_open=thought.is_open,
        anywhere=thought.reasoning == GPT_OSS,
    )
