"""Common parts of whole and streamed answers of the OpenAI-compatible API: their form, pieces and token counts."""

from __future__ import annotations

import codecs
import secrets
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.contracts.errors import Cancelled, DeadlineExceeded, EngineFailure, QuireError
from common.contracts.types import FinishReason, TokenLogprobs
from router.answers.dialects import harmony
from router.answers.dialects.part_tape import joined
from router.answers.dialects.stop_words import StopWords
from router.answers.reading import Reading
from router.api.openai.logprobs import ChoiceLogprobs
from router.api.openai.prompt_logprobs import NO_LOGPROBS, PromptEncoder, WantedLogprobs
from router.contracts.answer_parts import CallBegun, Parser, Part, Thought, Words
from router.contracts.events import Admitted, Finished, GenerateEvent, PromptLogprobs, Tokens
from router.contracts.ports import TextCodec


# Counts the tokens of an answer's thought.
class TokenTexts:
    """Divides the text of several tokens among them, where the tokenizer spells tokens as bytes.

    A thought has then as many tokens however the output was cut. Marks count for nothing, nor do end tokens: a thought
    that the model opened is as long as one that the prompt opened, and one that it closed as one that it broke off.
    """

    def __init__(self, codec: TextCodec, kept: Collection[str]) -> None:
        self._codec = codec
        self._hidden = {token for text, token in codec.hidden_tokens.items() if text not in kept}
        added = codec.added_tokens
        self._marks = frozenset(token for text, token, special in added if special or text in kept)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def divided(self, token_ids: Sequence[int], text: str) -> Iterator[tuple[int, str]]:
        """Yield how many tokens count, and their text: one by one, or all at once where texts are not known."""
        sizes = [len(self._utf8.decode(self._spelt(token))) for token in token_ids]
        if sum(sizes) != len(text):
            yield sum(token not in self._marks for token in token_ids), text
            return
        place = 0
        for token, size in zip(token_ids, sizes, strict=True):
            yield int(token not in self._marks), text[place : place + size]
            place += size

    def _spelt(self, token: int) -> bytes:
        return b"" if token in self._hidden else self._codec.token_bytes(token) or b""


@dataclass(slots=True)
class ThoughtTokens:
    """Counts tokens of thoughts: exactly where tokens come one by one, else by the characters of the parts."""

    count: int = 0
    _pending: int = 0
    _thinking: bool = False
    _began: bool = False

    @property
    def may_grow(self) -> bool:
        """Whether a thought goes on, or may still begin."""
        return self._thinking or not self._began

    def take(self, tokens: int, parts: Sequence[Part]) -> None:
        """Count tokens whose text, with what was held back before, completed these parts."""
        self._pending += tokens
        lengths = [len(part.name if isinstance(part, CallBegun) else part.text) for part in parts]
        if not any(lengths):
            if not tokens and self._thinking:  # behind a mark nothing of the thought is left to come
                self.count, self._pending = self.count + self._pending, 0
            return
        thought = sum(length for length, part in zip(lengths, parts, strict=True) if isinstance(part, Thought))
        self.count += round(self._pending * thought / sum(lengths))
        self._pending, self._thinking, self._began = 0, isinstance(parts[-1], Thought), True

    def end(self) -> int:
        """Return the count, with tokens at the end of a thought that was cut off."""
        return self.count + (self._pending if self._thinking else 0)


Json = dict[str, Any]
_FAILURES: dict[FinishReason, type[QuireError]] = {
    FinishReason.CANCELLED: Cancelled,
    FinishReason.DEADLINE: DeadlineExceeded,
    FinishReason.ERROR: EngineFailure,
}


@dataclass(frozen=True, slots=True)
class Form:
    """The kind of an answer and the client's choices about it. `created` is in Unix seconds.

    `echo` has the text of each prompt, or of the message that a chat goes on with, if choices begin with that.
    """

    chat: bool
    model: str
    fingerprint: str
    created: int
    codec: TextCodec
    streamed: bool = False
    sequences: int = 1
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    include_usage: bool = False
    event_ids: bool = False
    continuous_usage: bool = False
    echo: tuple[str, ...] = ()
    # Log-probabilities of prompts, and the first token of each prompt, which has none.
    of_prompts: WantedLogprobs = NO_LOGPROBS
    first_tokens: tuple[int, ...] = ()
    # With return_token_ids: the tokens of each prompt, as JSON.
    prompt_token_ids: tuple[str, ...] = ()
    # Tokens that end an answer without being named as its stop_reason.
    eos_token_ids: tuple[int, ...] = ()
    # How outputs are read; None where their text is the content.
    reading: Reading | None = None
    # A choice that names its tool ends with "stop", as OpenAI's does. Calls of `functions` have an older form.
    named_tool: bool = False
    older_calls: bool = False
    include_reasoning: bool = True

    @property
    def id_prefix(self) -> str:
        return "chatcmpl-" if self.chat else "cmpl-"

    def prompt_ids(self, index: int) -> str:
        """Return a member with the tokens of a prompt, for the first of its choices; "" where it is not wanted."""
        prompt, place = divmod(index, self.sequences)
        return f',"prompt_token_ids":{self.prompt_token_ids[prompt]}' if self.prompt_token_ids and not place else ""

    def choices(self, prompts: int) -> list[Piece]:
        """Return the first piece of every choice, in order."""
        echo = self.echo or ("",) * prompts
        count = self.sequences
        read = self.reading is not None
        return [
            Piece(prompt * count + each, text, [Words(text)] if read and text else ())
            for prompt, text in enumerate(echo)
            for each in range(count)
        ]


@dataclass(slots=True)
class Piece:
    """A choice, or the addition of an event to it: text, or the parts that were read in it."""

    index: int
    text: str = ""
    parts: Sequence[Part] = ()
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    # Of the prompt, in the first of its choices.
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class Bill:
    """The tokens of an answer. `streamed` counts output as it comes, `output_tokens` that of finished choices.

    `reasoning_tokens` is None where thoughts are not read.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    streamed: int = 0
    reasoning_tokens: int | None = None
    drafted_tokens: int = 0
    accepted_draft_tokens: int = 0

    def body(self) -> Json:
        return self._body(self.output_tokens)

    def so_far(self) -> Json:
        return self._body(self.streamed)

    def _body(self, output: int) -> Json:
        details = self._details(output)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": output,
            "total_tokens": self.prompt_tokens + output,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            **({"completion_tokens_details": details} if details else {}),
        }

    def _details(self, output: int) -> Json:
        thought, drafted, accepted = self.reasoning_tokens, self.drafted_tokens, self.accepted_draft_tokens
        found: Json = {} if thought is None else {"reasoning_tokens": min(thought, output)}
        if drafted:
            found |= {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
        return found


@dataclass(slots=True)
class Answer:
    """Turns the events of one or several prompts into pieces, and counts their tokens."""

    form: Form
    prompts: int
    id: str = ""
    trace_id: str = ""
    bill: Bill = field(default_factory=Bill)
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    notes: tuple[str, ...] = ()
    _readers: dict[int, OutputReader] = field(default_factory=dict)
    _hits: dict[int, int] = field(default_factory=dict)

    def take(self, prompt: int, event: GenerateEvent) -> Piece | None:
        """Take the next event; return its addition to a choice. Raises the error with which a sequence ended."""
        match event:
            case Tokens():
                self.bill.streamed += len(event.token_ids)
                piece = Piece(
                    self._choice(prompt, event.index), event.text, token_ids=event.token_ids, logprobs=event.logprobs
                )
                return piece if self.form.reading is None else self._reader(piece.index).read(piece)
            case Finished():
                return self._finished(prompt, event)
            case PromptLogprobs():
                return Piece(self._choice(prompt, 0), prompt_logprobs=event.logprobs)
            case Admitted():
                self.id = self.id or self.form.id_prefix + event.request_id
                self.trace_id = self.trace_id or event.trace_id
                self.bill.prompt_tokens += event.prompt_tokens
                self._bill_hits(prompt, event.cached_tokens)
                return None

    def new_logprobs(self) -> list[ChoiceLogprobs]:
        """Return the encoder of log-probabilities for each choice."""
        form = self.form
        offsets = [len(choice.text) for choice in form.choices(self.prompts)]
        return [ChoiceLogprobs(form.codec, form.chat, form.tokens_as_ids, offset) for offset in offsets]

    def new_prompt_logprobs(self) -> list[PromptEncoder]:
        """Return the encoder of log-probabilities for each prompt."""
        form = self.form
        return [PromptEncoder(form.codec, form.of_prompts, form.tokens_as_ids) for _ in range(self.prompts)]

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

    def _bill_hits(self, prompt: int, cached_tokens: int) -> None:
        """Bill a prompt's cached tokens, at first as its grant said them, in the end as they were."""
        self.bill.cached_tokens += cached_tokens - self._hits.get(prompt, 0)
        self._hits[prompt] = cached_tokens

    def _finished(self, prompt: int, event: Finished) -> Piece:
        if (failure := failure_of(event)) is not None:
            raise failure
        if not event.index:
            self._bill_hits(prompt, event.usage.cached_tokens)
        self.bill.output_tokens += event.usage.output_tokens
        self.bill.drafted_tokens += event.usage.drafted_tokens
        self.bill.accepted_draft_tokens += event.usage.accepted_draft_tokens
        named = None if event.stop_token_id in self.form.eos_token_ids else event.stop_token_id
        stop_reason = named if event.stop_string is None else event.stop_string
        piece = Piece(self._choice(prompt, event.index), finish_reason=event.reason, stop_reason=stop_reason)
        return (
            piece
            if self.form.reading is None
            else self._reader(piece.index).end(piece, event.stop_string, self.include_stop)
        )

    def _reader(self, index: int) -> OutputReader:
        if index not in self._readers:
            self._readers[index] = OutputReader(self.form, self.bill, self.stop)
        return self._readers[index]


class OutputReader:
    """Reads the output of one choice."""

    def __init__(self, form: Form, bill: Bill, stop: Sequence[str] = ()) -> None:
        assert form.reading is not None
        parser = form.reading.new_parser()
        self._form, self._bill = form, bill
        self._stops = StopWords(parser, stop) if stop else None
        self._parser: Parser = self._stops or parser
        self._thought, self._calls = ThoughtTokens(), 0
        self._kept = form.reading.kept
        self._texts: TokenTexts | None = None

    def read(self, piece: Piece) -> Piece:
        """Replace the text of a piece by its parts."""
        before, read = self._thought.count, list[Part]()
        for tokens, text in self._divided(piece):
            found = self._parser.feed(text)
            self._thought.take(tokens, found)
            read += found
        parts = joined(read)
        self._add_thought(self._thought.count - before)
        piece.parts, piece.text = self._wanted(parts), ""
        return piece

    def end(self, piece: Piece, stop: str | None = None, include_stop: bool = False) -> Piece:
        """Add what was held back to the last piece, and say so where the output ended with calls."""
        before = self._thought.count
        if stop is not None and self._stops is not None:
            parts = self._stops.stopped(stop, include_stop)
        else:
            parts = self._parser.finish(cut=piece.finish_reason is FinishReason.LENGTH)
        self._thought.take(0, parts)
        self._add_thought(self._thought.end() - before)
        piece.parts = self._wanted(parts)
        ended = piece.finish_reason == FinishReason.STOP and stop is None
        if self._calls and ended and not self._form.named_tool:
            piece.finish_reason = "function_call" if self._form.older_calls else "tool_calls"
        return piece

    def _divided(self, piece: Piece) -> Iterable[tuple[int, str]]:
        """Return the piece token by token while it may belong to a thought, whose tokens are counted."""
        if not (self._thought.may_grow or harmony.CHANNEL in self._kept):
            return ((len(piece.token_ids), piece.text),)
        self._texts = self._texts or TokenTexts(self._form.codec, self._kept)
        return self._texts.divided(piece.token_ids, piece.text)

    def _add_thought(self, tokens: int) -> None:
        self._bill.reasoning_tokens = (self._bill.reasoning_tokens or 0) + tokens

    def _wanted(self, parts: Sequence[Part]) -> Sequence[Part]:
        self._calls += sum(isinstance(part, CallBegun) for part in parts)
        if self._form.include_reasoning:
            return parts
        return [part for part in parts if not isinstance(part, Thought)]


def failure_of(event: Finished) -> QuireError | None:
    """Return the error with which a sequence ended; None where it ended as it should."""
    if event.reason in (FinishReason.STOP, FinishReason.LENGTH):
        return None
    return _FAILURES[event.reason](event.message or f"the request ended early: {event.reason}")


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"
