"""Common parts of whole and streamed answers of the OpenAI-compatible API: their form, pieces and token counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from common.errors import Cancelled, DeadlineExceeded, EngineFailure
from common.types import FinishReason, TokenLogprobs
from router.core.events import Admitted, Finished, GenerateEvent, Tokens
from router.openai.logprobs import ChoiceLogprobs
from router.ports import TextCodec

Json = dict[str, Any]
_FAILURES = {
    FinishReason.CANCELLED: Cancelled,
    FinishReason.DEADLINE: DeadlineExceeded,
    FinishReason.ERROR: EngineFailure,
}


@dataclass(frozen=True, slots=True)
class Form:
    """The kind of an answer and the client's choices about it. `created` is in Unix seconds.

    `echo` has the text of each prompt if choices begin with their prompts.
    """

    chat: bool
    model: str
    fingerprint: str
    created: int
    codec: TextCodec
    streamed: bool = False
    sequences: int = 1
    return_token_ids: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    echo: tuple[str, ...] = ()

    @property
    def id_prefix(self) -> str:
        return "chatcmpl-" if self.chat else "cmpl-"

    def choices(self, prompts: int) -> list[Piece]:
        """Return the first piece of every choice, in order."""
        echo = self.echo or ("",) * prompts
        count = self.sequences
        return [Piece(prompt * count + each, text) for prompt, text in enumerate(echo) for each in range(count)]


@dataclass(slots=True)
class Piece:
    """A choice, or the addition of an event to it."""

    index: int
    text: str = ""
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class Bill:
    """The tokens of an answer. `streamed` counts output as it comes, `output_tokens` that of finished choices."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    streamed: int = 0

    def body(self) -> Json:
        return self._body(self.output_tokens)

    def so_far(self) -> Json:
        return self._body(self.streamed)

    def _body(self, output: int) -> Json:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": output,
            "total_tokens": self.prompt_tokens + output,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(slots=True)
class Answer:
    """Turns the events of one or several prompts into pieces, and counts their tokens."""

    form: Form
    prompts: int
    id: str = ""
    trace_id: str = ""
    bill: Bill = field(default_factory=Bill)

    def take(self, prompt: int, event: GenerateEvent) -> Piece | None:
        """Take the next event; return its addition to a choice. Raises the error with which a sequence ended."""
        match event:
            case Tokens():
                self.bill.streamed += len(event.token_ids)
                return Piece(self._choice(prompt, event.index), event.text, event.token_ids, event.logprobs)
            case Finished():
                return self._finished(prompt, event)
            case Admitted():
                self.id = self.id or self.form.id_prefix + event.request_id
                self.trace_id = self.trace_id or event.trace_id
                self.bill.prompt_tokens += event.prompt_tokens
                self.bill.cached_tokens += event.cached_tokens
                return None

    def new_logprobs(self) -> list[ChoiceLogprobs]:
        """Return the encoder of log-probabilities for each choice."""
        count = self.prompts * self.form.sequences
        return [ChoiceLogprobs(self.form.codec, self.form.chat) for _ in range(count)]

    def head(self, kind: str) -> Json:
        """Return the fields with which every body begins."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.form.created,
            "model": self.form.model,
            "system_fingerprint": self.form.fingerprint,
        }

    def _choice(self, prompt: int, index: int) -> int:
        return prompt * self.form.sequences + index

    def _finished(self, prompt: int, event: Finished) -> Piece:
        if event.reason not in (FinishReason.STOP, FinishReason.LENGTH):
            raise _FAILURES[event.reason](event.message or f"the request ended early: {event.reason}")
        self.bill.output_tokens += event.usage.output_tokens
        stop_reason = event.stop_token_id if event.stop_string is None else event.stop_string
        return Piece(self._choice(prompt, event.index), finish_reason=event.reason, stop_reason=stop_reason)
