"""One response from its body to its end: what was asked, how its answer is read, and what is kept of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from common.contracts.errors import CONTEXT_LENGTH_EXCEEDED, InvalidRequest, Overloaded, QuireError
from common.contracts.types import FinishReason
from router.api.openai.answer import Answer, Piece
from router.api.openai.logprobs import ChoiceLogprobs
from router.api.openai.request import Order
from router.api.openai.responses.events import ResponseBuilder
from router.api.openai.responses.items import Item
from router.api.openai.responses.records import Record
from router.api.openai.responses.request import format_body, tool_bodies
from router.api.openai.responses.tool_kinds import ToolKinds
from router.api.openai.responses.types import Json, ResponsesRequest
from router.api.openai.responses.usage import usage_body
from router.api.shared.answer_size import AnswerPlace
from router.contracts.answer_parts import CallBegun, Part, Words
from router.contracts.events import ValidatedRequest

_SYSTEM = ("system", "developer")


@dataclass(slots=True)
class Asked:
    """A validated response that is to be made, or is being made. `given` are the items of its own input."""

    tenant: str
    name: str
    store: bool
    # The conversation that gets its items.
    conversation: str | None
    earlier: list[Item]
    given: list[Item]
    order: Order
    request: ValidatedRequest
    answer: Answer
    builder: ResponseBuilder
    kinds: ToolKinds
    # The room that a whole answer takes, or the log-probabilities of a streamed one.
    place: AnswerPlace
    _ran_out: bool = False
    _logprobs: ChoiceLogprobs = field(init=False)

    def __post_init__(self) -> None:
        self._logprobs = ChoiceLogprobs(self.answer.form.codec, chat=True)

    def take(self, piece: Piece) -> str:
        """Take an addition to the answer; return the lines of its events."""
        self._ran_out |= piece.finish_reason == FinishReason.LENGTH
        entries = self._logprobs.columns(piece.logprobs)["content"] if piece.logprobs else ""
        self.place.grow(len(entries))
        return self.builder.add(parts_of(piece), entries)

    def finish(self) -> str:
        return self.builder.finish(usage_body(self.answer.bill), self._ran_out)

    def fail(self, error: QuireError) -> str:
        code = "server_error"
        if isinstance(error, Overloaded):
            code = "rate_limit_exceeded"
        elif isinstance(error, InvalidRequest):
            code = "invalid_prompt"
        return self.builder.fail(code, str(error))

    def record(self) -> Record:
        return Record(self.builder.body(), [*self.earlier, *self.given])

    @property
    def own_items(self) -> list[Item]:
        """The items that a conversation gets: what was asked and what is answered."""
        return [*self.given, *self.builder.body()["output"]]


def parts_of(piece: Piece) -> Sequence[Part]:
    return piece.parts or ([Words(piece.text)] if piece.text else ())


def size_of(piece: Piece) -> int:
    """Return the bytes of an addition, about."""
    return sum(len(part.name if isinstance(part, CallBegun) else part.text) for part in parts_of(piece))


def first_body(body: ResponsesRequest, name: str, model: str, created: int, request: ValidatedRequest) -> Json:
    """Return the fields of a response that are known before its answer; `created` is in Unix seconds."""
    sampling, options = request.sampling, body.reasoning
    return {
        "id": name,
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "background": bool(body.background),
        "completed_at": None,
        "conversation": {"id": body.conversation_id} if body.conversation_id else None,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": options.effort if options else None, "summary": None},
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": sampling.temperature,
        "text": {"format": format_body(body)},
        "tool_choice": body.tool_choice or "auto",
        "tools": tool_bodies(body),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
    }


def is_too_long(error: InvalidRequest) -> bool:
    return any(each.reason == CONTEXT_LENGTH_EXCEEDED for each in error.violations)


def without_oldest(items: Sequence[Item]) -> list[Item] | None:
    """Return the conversation without about the older half of it; None where nothing is left to leave out.

    Leading system messages stay, and the rest begins with a user's message, so that no call loses its output.
    """
    first = next((place for place, each in enumerate(items) if each.get("role") not in _SYSTEM), len(items))
    turns = [place for place, each in enumerate(items) if place > first and each.get("role") == "user"]
    if not turns:
        return None
    middle = (first + len(items)) // 2
    cut = next((place for place in turns if place >= middle), turns[-1])
    return [*items[:first], *items[cut:]]
