"""Events of a request to the bodies that OpenAI-compatible clients expect, whole or in chunks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.errors import Cancelled, DeadlineExceeded, EngineFailure, Unsupported
from common.types import FinishReason, TokenLogprobs
from router.core.events import AdmittedEvent, FinishedEvent, GenerateEvent, TokensEvent
from router.ports import TextCodec

Json = dict[str, Any]
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclass(slots=True)
class Choice:
    """One sequence of the answer, as it grows."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class Bill:
    """What the answer cost, in tokens."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def body(self) -> Json:
        """Return it as OpenAI does."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.output_tokens,
            "total_tokens": self.prompt_tokens + self.output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True, slots=True)
class Form:
    """What an answer looks like: of which kind, and with what in it. `created` is in Unix seconds."""

    chat: bool
    model: str
    created: int
    codec: TextCodec
    sequences: int = 1
    return_token_ids: bool = False
    include_usage: bool = False

    @property
    def id_prefix(self) -> str:
        """What the id of an answer begins with."""
        return "chatcmpl-" if self.chat else "cmpl-"


class Answer:
    """Collects the events of one or several prompts and makes bodies of them."""

    def __init__(self, form: Form, prompts: int) -> None:
        self._form = form
        self.id = ""
        self.trace_id = ""
        self.bill = Bill()
        self.choices = [Choice(index) for index in range(prompts * form.sequences)]

    def take(self, prompt: int, event: GenerateEvent) -> Choice | None:
        """Take the next event; return what it adds to a choice. Raises the error with which a sequence ended."""
        match event:
            case AdmittedEvent():
                self.id = self.id or self._form.id_prefix + event.request_id
                self.trace_id = self.trace_id or event.trace_id
                self.bill.prompt_tokens += event.prompt_tokens
                self.bill.cached_tokens += event.cached_tokens
                return None
            case TokensEvent():
                return self._tokens(prompt * self._form.sequences + event.index, event)
            case FinishedEvent():
                return self._finished(prompt * self._form.sequences + event.index, event)

    def whole(self) -> Json:
        """Return the body of an answer that is not streamed."""
        return self._body(map(self._whole_choice, self.choices), chunk=False) | {"usage": self.bill.body()}

    def openings(self) -> list[Json]:
        """Return the chunks that open a stream: in a chat each choice says its role."""
        if not self._form.chat:
            return []
        delta = {"role": "assistant", "content": ""}
        return [self._chunk([self._choice(choice, {"delta": delta})]) for choice in self.choices]

    def chunk(self, added: Choice) -> Json:
        """Return the chunk of what an event added."""
        piece = {"delta": {"content": added.text} if added.text else {}} if self._form.chat else {"text": added.text}
        return self._chunk([self._choice(added, piece)])

    def closing(self) -> list[Json]:
        """Return the chunk that says what the stream cost, if that was asked for."""
        return [self._body([], chunk=True) | {"usage": self.bill.body()}] if self._form.include_usage else []

    def _tokens(self, index: int, event: TokensEvent) -> Choice | None:
        choice = self.choices[index]
        added = Choice(index, event.text, list(event.token_ids), list(event.logprobs))
        choice.text += added.text
        choice.token_ids += added.token_ids
        choice.logprobs += added.logprobs
        visible = added.text or added.logprobs or (self._form.return_token_ids and added.token_ids)
        return added if visible else None

    def _finished(self, index: int, event: FinishedEvent) -> Choice:
        if event.reason not in (FinishReason.STOP, FinishReason.LENGTH):
            raise _FAILURES[event.reason](event.message or f"the request ended early: {event.reason}")
        stop_reason = event.stop_token_id if event.stop_string is None else event.stop_string
        choice = self.choices[index]
        choice.finish_reason, choice.stop_reason = event.reason, stop_reason
        self.bill.output_tokens += event.usage.output_tokens
        return Choice(index, finish_reason=event.reason, stop_reason=stop_reason)

    def _whole_choice(self, choice: Choice) -> Json:
        if self._form.chat:
            return self._choice(choice, {"message": {"role": "assistant", "content": choice.text}})
        return self._choice(choice, {"text": choice.text})

    def _choice(self, choice: Choice, text: Json) -> Json:
        body = {
            "index": choice.index,
            **text,
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        return body | {"token_ids": choice.token_ids} if self._form.return_token_ids else body

    def _chunk(self, choices: Sequence[Json]) -> Json:
        body = self._body(choices, chunk=True)
        return body | {"usage": None} if self._form.include_usage else body

    def _body(self, choices: Iterable[Json], chunk: bool) -> Json:
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self._form.chat else "text_completion"
        return {
            "id": self.id,
            "object": kind,
            "created": self._form.created,
            "model": self._form.model,
            "choices": list(choices),
        }

    def _logprobs(self, tokens: Sequence[TokenLogprobs]) -> Json | None:
        if not tokens:
            return None
        return {"content": [self._chat_token(token) for token in tokens]} if self._form.chat else self._legacy(tokens)

    def _chat_token(self, token: TokenLogprobs) -> Json:
        top = [self._chat_entry(*pair) for pair in token.top]
        return self._chat_entry(token.token_id, token.logprob) | {"top_logprobs": top}

    def _chat_entry(self, token_id: int, logprob: float) -> Json:
        text = self._name(token_id)
        # A token that is a part of a character has no text of its own.
        return {"token": text, "logprob": logprob, "bytes": None if _REPLACEMENT in text else list(text.encode())}

    def _legacy(self, tokens: Sequence[TokenLogprobs]) -> Json:
        names = [self._name(token.token_id) for token in tokens]
        return {
            "tokens": names,
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [{self._name(token_id): logprob for token_id, logprob in each.top} for each in tokens],
            "text_offset": list(itertools.accumulate(map(len, names[:-1]), initial=0)),
        }

    def _name(self, token_id: int) -> str:
        try:
            return self._form.codec.decode([token_id], skip_special_tokens=False)
        except Unsupported:
            return f"token_id:{token_id}"


_FAILURES = {
    FinishReason.CANCELLED: Cancelled,
    FinishReason.DEADLINE: DeadlineExceeded,
    FinishReason.ERROR: EngineFailure,
}
