"""Validates a request field by field: reports all mistakes at once, and fills in every default.

The ranges (`violations.py`) are those of protos/quire/types/v1/types.proto. A scalar that is unset takes the
checkpoint's generation_config, then Quire's default; zero is a value.
"""

from __future__ import annotations

import math
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from common.contracts.adapters import AdapterRef
from common.contracts.errors import FieldViolation, InvalidRequest, QuireError, Unsupported
from common.contracts.lease import DEFAULT_RETENTION_PRIORITY, MAX_RETENTION_PRIORITY, RetainedTokens
from common.contracts.limits import (
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_CONSTRAINT_BYTES,
    MAX_KEPT_TOKEN_CHARS,
    MAX_KEPT_TOKENS,
    MAX_LOGIT_BIASES,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_PREDICTION_CHARS,
    MAX_PRIORITY,
    MAX_REQUEST_ID_CHARS,
    MAX_RETENTION_MESSAGE_RANGES,
    MAX_RETENTION_RANGES,
    MAX_SALT_CHARS,
    MAX_SESSION_ID_CHARS,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_THOUGHT_END_CHARS,
    MAX_THOUGHT_MARK_CHARS,
    MAX_TRACEPARENT_CHARS,
)
from common.contracts.types import Constraint, ConstraintKind, SamplingParams, ThoughtBudget
from common.telemetry import span_context_of
from common.wire.sampling_codec import thought_from_proto
from quire.inference.v1 import inference_pb2
from quire.inference.v1 import inference_pb2 as pb
from quire.types.v1 import types_pb2
from router.answers.constraints.closing import closed_text
from router.answers.requested_tools import quoted
from router.answers.text.checkpoint import Checkpoint
from router.contracts.events import ValidatedRequest
from router.contracts.ports import (
    AdapterSource,
    CallContext,
    ConstraintCheck,
    NoAdapters,
    RequestValidator,
    TextCodec,
)
from router.contracts.refusals import beyond_context
from router.contracts.session_ids import session_name
from router.requests.request_ids import AUTOMATIC_PREFIX
from router.requests.violations import RANGES, Range, Report
from router.tenants.tenancy import Caller, Tenant

Encode = Callable[[pb.Prompt], Awaitable[Sequence[int]]]

_PRIORITIES: Final = Range(
    0, MAX_RETENTION_PRIORITY, hint=f"{DEFAULT_RETENTION_PRIORITY} is that of blocks without retention"
)
_SECONDS: Final = Range(0, math.inf, open_low=True, hint="seconds")
# Without a duration, blocks stay for as long as the KV manager lets any; a month is more than that.
_LONGEST: Final = 30 * 86_400.0
_FIELD: Final = "cache_retention"


# Reads which parts of a prompt a request retains in the cache: checks the numbers, and finds the ends of messages.
def wrong_retention(request: pb.GenerateRequest) -> list[FieldViolation]:
    """Return what is wrong with the retention of a request."""
    given = request.cache_retention
    found = [*_wrong_terms(given, "priority", "duration", _FIELD)]
    found += _wrong_terms(given, "decode_priority", "decode_duration", _FIELD)
    if len(given.ranges) > MAX_RETENTION_RANGES:
        what = f"has {len(given.ranges)} ranges; expected at most {MAX_RETENTION_RANGES}"
        return [*found, FieldViolation(f"{_FIELD}.ranges", what)]
    of_messages = sum(each.HasField("messages") for each in given.ranges)
    if of_messages > MAX_RETENTION_MESSAGE_RANGES:
        what = f"has {of_messages} ranges with messages; expected at most {MAX_RETENTION_MESSAGE_RANGES}"
        return [*found, FieldViolation(f"{_FIELD}.ranges", what)]
    chat = request.prompt.chat if request.prompt.HasField("chat") else None
    for place, each in enumerate(given.ranges):
        found += _wrong_range(each, f"{_FIELD}.ranges[{place}]", chat)
    return found


def _wrong_range(given: pb.RetentionRange, path: str, chat: pb.Chat | None) -> Iterator[FieldViolation]:
    if given.priority not in _PRIORITIES:
        yield FieldViolation(f"{path}.priority", f"is {given.priority}; expected {_PRIORITIES}")
    if given.HasField("duration") and given.duration not in _SECONDS:
        yield FieldViolation(f"{path}.duration", f"is {given.duration:g}; expected {_SECONDS}")
    if given.HasField("messages"):
        yield from _wrong_messages(given, path, chat)
        return
    if given.start < 0:
        yield FieldViolation(f"{path}.start", f"is {given.start}; expected 0 or more")
    elif given.HasField("end") and given.end <= given.start:
        what = f"is {given.end}; expected more than start, which is {given.start}, or nothing for all that follows"
        yield FieldViolation(f"{path}.end", what)


def _wrong_messages(given: pb.RetentionRange, path: str, chat: pb.Chat | None) -> Iterator[FieldViolation]:
    if given.start or given.HasField("end"):
        yield FieldViolation(f"{path}.messages", "cannot be combined with start or end; leave one of them out")
    elif chat is None:
        yield FieldViolation(f"{path}.messages", "belongs to a chat, and the prompt is none; give start and end")
    elif not 0 <= given.messages <= len(chat.messages):
        what = f"is {given.messages}; expected 0 to {len(chat.messages)}, the messages of the chat"
        yield FieldViolation(f"{path}.messages", what)


def _wrong_terms(given: pb.CacheRetention, priority: str, duration: str, path: str) -> Iterator[FieldViolation]:
    if given.HasField(priority) and (value := getattr(given, priority)) not in _PRIORITIES:  # type: ignore[arg-type]
        yield FieldViolation(f"{path}.{priority}", f"is {value}; expected {_PRIORITIES}")
    if not given.HasField(duration):  # type: ignore[arg-type]
        return
    if (seconds := getattr(given, duration)) not in _SECONDS:
        yield FieldViolation(f"{path}.{duration}", f"is {seconds:g}; expected {_SECONDS}")
    if not given.HasField(priority):  # type: ignore[arg-type]
        yield FieldViolation(f"{path}.{duration}", f"needs {priority}, which is not set; set it or leave both out")


async def retained_tokens(
    request: pb.GenerateRequest, prompt: Sequence[int], highest: int, encode: Encode
) -> tuple[RetainedTokens, ...]:
    """Return what a request retains, of a prompt with these tokens. `highest` is the tenant's highest priority.

    `wrong_retention` has found nothing wrong.
    """
    given, terms, whole = request.cache_retention, list[RetainedTokens](), len(prompt)
    if given.HasField("priority"):
        terms.append(RetainedTokens(0, None, given.priority, _seconds(given, "duration")))
    if given.HasField("decode_priority"):
        terms.append(RetainedTokens(whole, None, given.decode_priority, _seconds(given, "decode_duration")))
    # The longest beginning of a chat first: it may make the others superfluous.
    of_messages = [each for each in given.ranges if each.HasField("messages")]
    for each in sorted(of_messages, key=lambda each: -each.messages):
        seconds = _seconds(each, "duration")
        if not any(_covers(known, each.priority, seconds) for known in terms):
            end = await _end_of_messages(request.prompt.chat, each.messages, prompt, encode)
            terms.append(RetainedTokens(0, end, each.priority, seconds))
    for each in given.ranges:
        if not each.HasField("messages"):
            end = min(each.end, whole) if each.HasField("end") else whole
            terms.append(RetainedTokens(each.start, end, each.priority, _seconds(each, "duration")))
    lowered = (_lowered(each, highest) for each in terms if each.end is None or each.start < each.end)
    return tuple([each for each in lowered if each.priority != DEFAULT_RETENTION_PRIORITY])


def _covers(known: RetainedTokens, priority: int, seconds: float) -> bool:
    """Return whether the whole request, or a longer beginning of it, stays with that priority for that time."""
    begins = known.start == 0 and known.end != 0
    return begins and known.priority >= priority > DEFAULT_RETENTION_PRIORITY and known.seconds >= seconds


def _lowered(each: RetainedTokens, highest: int) -> RetainedTokens:
    """Lower a priority to the tenant's highest, but never below that of blocks without retention: what a request wants
    to keep would leave before all others.
    """
    priority = min(each.priority, max(highest, DEFAULT_RETENTION_PRIORITY))
    return RetainedTokens(each.start, each.end, priority, each.seconds)


def _seconds(given: pb.CacheRetention | pb.RetentionRange, name: str) -> float:
    return min(getattr(given, name), _LONGEST) if given.HasField(name) else _LONGEST  # type: ignore[arg-type]


async def first_message(chat: pb.Chat, prompt: Sequence[int], encode: Encode) -> tuple[RetainedTokens, ...]:
    """Return the range of the first message of a chat. It stays no longer than other tokens: its end alone is said."""
    end = await _end_of_messages(chat, 1, prompt, encode)
    return (RetainedTokens(0, end, DEFAULT_RETENTION_PRIORITY, _LONGEST),) if end else ()


async def _end_of_messages(chat: pb.Chat, count: int, prompt: Sequence[int], encode: Encode) -> int:
    """Return how many tokens of a prompt belong to the tools and the first messages of its chat.

    They are those that the same beginning has with another end. A template that cannot render that retains nothing:
    the request is right, and retention changes no answer.
    """
    if count == len(chat.messages):
        return len(prompt)
    beginning = pb.Chat()
    beginning.CopyFrom(chat)
    del beginning.messages[count:]
    if not count:
        first = chat.messages[0]
        beginning.messages.append(pb.ChatMessage(role=first.role, content="1" if first.content[:1] == "0" else "0"))
    beginning.continue_final_message, beginning.add_generation_prompt = False, False
    try:
        tokens = await encode(pb.Prompt(chat=beginning))
    except QuireError:
        return 0
    alike = (at for at, pair in enumerate(zip(tokens, prompt, strict=False)) if pair[0] != pair[1])
    return next(alike, min(len(tokens), len(prompt)))


_MOST = {"opener": MAX_THOUGHT_MARK_CHARS, "closer": MAX_THOUGHT_MARK_CHARS, "end": MAX_THOUGHT_END_CHARS}


# Checks the budget of a request's thoughts.
def wrong_thought(given: types_pb2.ThoughtBudget) -> list[FieldViolation]:
    """Return what is wrong with a budget."""
    found = [
        FieldViolation(f"thought_budget.{name}", f"has {len(getattr(given, name))} characters; expected 1 to {most}")
        for name, most in _MOST.items()
        if not 0 < len(getattr(given, name)) <= most
    ]
    if not found and given.closer not in given.end:
        what = f"lacks the closing mark {quoted(given.closer)}; expected it, or the thought would not end"
        found.append(FieldViolation("thought_budget.end", what))
    return found


# Stop texts that are special tokens: texts leave these out, so that no search in a text finds them.
def shown_and_hidden(stops: Sequence[str], hidden: Mapping[str, int]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the stop texts to look for in a text, and the ids of those that are tokens which it leaves out."""
    texts = tuple([stop for stop in stops if stop not in hidden])
    return texts, tuple([hidden[stop] for stop in stops if stop in hidden])


def hidden_part(stop: str, hidden: Collection[str]) -> str:
    """Return a token that a text leaves out within a longer stop text, which therefore never comes; "" for none."""
    return "" if stop in hidden else next((token for token in hidden if token and token in stop), "")


# JSON readers keep integers of up to this many bits exact.
_SEED_BITS = 53
_REQUEST_ID = re.compile(rf"[\x21-\x7e]{{1,{MAX_REQUEST_ID_CHARS}}}")
# Of a request for log-probabilities of its prompt, which may want nothing else.
_PROMPT_RANGES = {**RANGES, "max_tokens": Range(0, math.inf)}
_TRUNCATION = Range(1, math.inf, hint="-1 keeps what the context leaves")
_FLAGS = ("ignore_eos", "include_stop")


def _ranges(given: types_pb2.SamplingParams) -> Mapping[str, Range]:
    return _PROMPT_RANGES if given.HasField("prompt_logprobs") else RANGES


def random_seed() -> int:
    return secrets.randbits(_SEED_BITS)


class Validator:
    """The RequestValidator of one model.

    `context` returns how many tokens prompt and output may have together now, which depends on the connected workers;
    by default it is the checkpoint's. `constraints` is None where the checkpoint has no tokenizer to enforce them with.
    Without `open_schemas`, objects of JSON schemas have the properties alone that they name (`closing.py`).
    """

    def __init__(
        self,
        codec: TextCodec,
        checkpoint: Checkpoint,
        has_tokenizer: bool = True,
        draw_seed: Callable[[], int] = random_seed,
        context: Callable[[], int] | None = None,
        constraints: ConstraintCheck | None = None,
        open_schemas: bool = False,
    ) -> None:
        self._codec = codec
        self._checkpoint = checkpoint
        self._has_tokenizer = has_tokenizer
        self._draw_seed = draw_seed
        self._constraints, self._open_schemas = constraints, open_schemas
        self._context = context or (lambda: checkpoint.max_model_len)
        self.adapters: AdapterSource = NoAdapters()
        """What requests may name as their model, beside the base."""
        self.keeps_states: Callable[[], bool] = lambda: False
        """Whether prompts go on from checkpoints of states alone. Then one is wanted behind the first message of a
        chat, because other chats begin with it."""

    async def validate(
        self, request: inference_pb2.GenerateRequest, call: CallContext, embeds: bool = False
    ) -> ValidatedRequest:
        report = Report()
        model = request.model or call.model
        adapter = self._adapter(request.model, model, call.caller.tenant)
        self._check_envelope(report, request)
        session_id = request.session_id or call.session_id
        report.fits("session_id", len(session_id), MAX_SESSION_ID_CHARS, "characters")
        hidden = self._hidden(request) if request.sampling.stop else {}
        self._check_sampling(report, request.sampling, hidden)
        prompt = await self._prompt(report, request, 0 if embeds else 1)
        # A prompt that is cut to what max_tokens leaves means that number.
        lowers = call.lowers_max_tokens and request.truncate_prompt_tokens != -1
        scalars = self._scalars(report, request.sampling, len(prompt), lowers)
        asked, served = request.sampling.max_tokens, scalars["max_tokens"]
        lowered = f"max_tokens {asked} is lowered to {served}, which the context leaves" if asked > served else ""
        began = time.monotonic()
        constraint = await self._constraint(report, request, call.caller.tenant.name)
        constraint_seconds = time.monotonic() - began if constraint is not None else 0.0
        bad_words = await self._bad_words(report, request)
        thought = await self._thought(report, request)
        prediction = await self._prediction(report, request)
        report.holds(wrong_retention(request))
        if report.violations:
            raise InvalidRequest(*report.violations)
        retention = await self._retention(request, prompt, call.caller.tenant.max_retention_priority)
        called = valid_traceparent(call.traceparent)
        traceparent = valid_traceparent(request.traceparent) or called
        return ValidatedRequest(
            prompt=tuple(prompt),
            sampling=replace(_sampling(request.sampling, scalars, constraint, bad_words, hidden), thought=thought),
            arrived=call.arrived,
            request_id=request.request_id or call.request_id or None,
            deadline=call.deadline,
            priority=min(request.priority, call.caller.tenant.max_priority),
            no_cache=request.cache.no_cache,
            caller=call.caller,
            cache_domain=call.caller.tenant.domain(request.cache.shared_domain),
            salt=request.cache.salt,
            traceparent=traceparent,
            tracestate=call.tracestate if traceparent == called else "",
            trace_id=call.trace_id,
            correlation_id=call.correlation_id,
            session=session_name(call.caller.owner, session_id),
            model=model,
            adapter=adapter,
            notes=(*call.notes, lowered) if lowered else call.notes,
            chat=request.prompt.HasField("chat"),
            kept_special_tokens=tuple(request.kept_special_tokens),
            skip_special_tokens=not request.HasField("skip_special_tokens") or request.skip_special_tokens,
            embeds=embeds,
            prediction=prediction,
            retention=retention,
            constraint_seconds=constraint_seconds,
        )

    def _adapter(self, named: str, model: str, tenant: Tenant) -> AdapterRef | None:
        """Return the adapter of a request; None for the base.

        `named` is what the request itself calls its model: other APIs have checked what they call it. Raises
        ModelNotFound, and PermissionDenied for an adapter that the tenant may not use.
        """
        if named:
            self.adapters.check_model(named)
        found = self.adapters.find_adapter(model) if model else None
        if found is not None:
            tenant.check_adapter(found.name)
        return found

    def check_token_ids(self, token_ids: Sequence[int]) -> None:
        report = Report()
        if report.fits("token_ids", len(token_ids), self._checkpoint.max_model_len, "ids"):
            report.check_ids("token_ids", token_ids, self._checkpoint.vocab_size)
        if report.violations:
            raise InvalidRequest(*report.violations)

    def _check_envelope(self, report: Report, request: inference_pb2.GenerateRequest) -> None:
        if request.request_id and not _REQUEST_ID.fullmatch(request.request_id):
            what = f"is not 1 to {MAX_REQUEST_ID_CHARS} printable ASCII characters without spaces"
            report.add("request_id", what)
        if request.request_id.startswith(AUTOMATIC_PREFIX):
            what = f"begins with {AUTOMATIC_PREFIX}, as the router's own ids do; choose another, or leave it out"
            report.add("request_id", what)
        report.check("priority", request.priority, Range(-MAX_PRIORITY, MAX_PRIORITY))
        report.fits("cache.salt", len(request.cache.salt), MAX_SALT_CHARS, "characters")
        kept = request.kept_special_tokens
        if report.fits("kept_special_tokens", len(kept), MAX_KEPT_TOKENS, "tokens"):
            for place, token in enumerate(kept):
                report.fits(f"kept_special_tokens[{place}]", len(token), MAX_KEPT_TOKEN_CHARS, "characters")

    def _hidden(self, request: inference_pb2.GenerateRequest) -> Mapping[str, int]:
        """Return the tokens that the output's text leaves out, and their ids."""
        if request.HasField("skip_special_tokens") and not request.skip_special_tokens:
            return {}
        kept = {*request.kept_special_tokens}
        return {text: token for text, token in self._codec.hidden_tokens.items() if text not in kept}

    def _check_sampling(self, report: Report, given: types_pb2.SamplingParams, hidden: Mapping[str, int]) -> None:
        for name, allowed in _ranges(given).items():
            if given.HasField(name):  # type: ignore[arg-type]
                report.check(f"sampling.{name}", getattr(given, name), allowed)
        self._check_stops(report, given.stop, hidden)
        if report.fits("sampling.stop_token_ids", len(given.stop_token_ids), MAX_STOP_TOKEN_IDS, "ids"):
            report.check_ids("sampling.stop_token_ids", given.stop_token_ids, self._checkpoint.vocab_size)
        listed = given.logprob_token_ids
        if report.fits("sampling.logprob_token_ids", len(listed), MAX_LOGPROB_TOKEN_IDS, "ids"):
            report.check_ids("sampling.logprob_token_ids", listed, self._checkpoint.vocab_size)
        if listed and not given.HasField("logprobs"):
            report.add("sampling.logprob_token_ids", "needs logprobs, which is not set; set it")
        if not 0 <= (closing := given.closing_token_id) < self._checkpoint.vocab_size:
            what = f"is {closing}; expected a token id, 0 to {self._checkpoint.vocab_size - 1}"
            report.add("sampling.closing_token_id", what)
        if report.fits("sampling.logit_bias", len(given.logit_bias), MAX_LOGIT_BIASES, "entries"):
            self._check_biases(report, given.logit_bias)

    def _check_biases(self, report: Report, biases: Mapping[int, float]) -> None:
        vocab_size = self._checkpoint.vocab_size
        for token_id, bias in sorted(biases.items()):
            path = f"sampling.logit_bias[{token_id}]"
            report.check(path, bias, Range(-100, 100))
            if not 0 <= token_id < vocab_size:
                report.add(path, f"is for a token out of the vocabulary; expected a token id, 0 to {vocab_size - 1}")

    def _check_stops(self, report: Report, stops: Sequence[str], hidden: Mapping[str, int]) -> None:
        if report.fits("sampling.stop", len(stops), MAX_STOP_STRINGS, "strings"):
            for place, stop in enumerate(stops):
                path = f"sampling.stop[{place}]"
                if not stop:
                    report.add(path, "is empty; expected at least one character")
                fits = report.fits(path, len(stop), MAX_STOP_STRING_CHARS, "characters")
                if fits and (token := hidden_part(stop, hidden)):
                    what = f"has {token} within it, a special token that no text shows"
                    report.add(path, f"{what}; give that token alone, or set skip_special_tokens to false")
        if stops and not self._has_tokenizer:
            report.add("sampling.stop", "needs a tokenizer, and this checkpoint has none; use stop_token_ids")

    async def _prompt(self, report: Report, request: inference_pb2.GenerateRequest, output: int) -> Sequence[int]:
        """Return the prompt's tokens, which leave `output` of them; an empty list and a violation if they are wrong."""
        if request.WhichOneof("input") != "prompt":
            report.add("input", "is missing; expected a prompt")
            return ()
        kept, ids = self._kept(report, request, output), len(request.prompt.token_ids.ids)
        if not self._fits_context(report, ids if kept is None else min(kept, ids), output):
            return ()
        special = not request.HasField("add_special_tokens") or request.add_special_tokens
        try:
            prompt = await self._codec.encode(request.prompt, special)
        except InvalidRequest as error:
            report.violations += error.violations
            return ()
        report.check_ids("prompt.token_ids.ids", prompt, self._checkpoint.vocab_size)
        if kept is not None:
            from_right = request.truncation_side == inference_pb2.TRUNCATION_SIDE_RIGHT
            prompt = prompt[:kept] if from_right else prompt[-kept:]
        if not request.prompt.HasField("token_ids"):
            self._fits_context(report, len(prompt), output)
        return prompt

    def _kept(self, report: Report, request: inference_pb2.GenerateRequest, output: int) -> int | None:
        """Return how many of a prompt's tokens are wanted; None for all."""
        if not request.HasField("truncate_prompt_tokens"):
            return None
        if (asked := request.truncate_prompt_tokens) == -1:
            return max(1, self._context() - output * max(1, request.sampling.max_tokens))
        report.check("truncate_prompt_tokens", asked, _TRUNCATION)
        return max(1, asked)

    def _fits_context(self, report: Report, tokens: int, output: int) -> bool:
        """Return whether a prompt of so many tokens leaves `output` of them, 0 or 1; else add a violation."""
        context = self._context()
        if (excess := tokens + output - context) > 0:
            what = f"the prompt has {tokens} tokens{', and the output needs one' if output else ''}"
            what = f"{what}; shorten the prompt by {excess} tokens or more"
            report.add_violation(beyond_context("prompt", context, what))
        return excess <= 0

    def _scalars(
        self, report: Report, given: types_pb2.SamplingParams, prompt_tokens: int, lowers: bool
    ) -> dict[str, float]:
        """Return the given values, then the checkpoint's defaults; Quire's are those of `SamplingParams`."""
        values: dict[str, float] = dict(self._checkpoint.sampling_defaults)
        for name in (*RANGES, *_FLAGS, "seed", "closing_token_id"):
            if given.HasField(name):  # type: ignore[arg-type]
                values[name] = getattr(given, name)
        self._fit(report, values, prompt_tokens, lowers)
        values.setdefault("seed", self._draw_seed())
        return values

    async def _constraint(self, report: Report, request: inference_pb2.GenerateRequest, peer: str) -> Constraint | None:
        kind = request.WhichOneof("constraint")
        if kind is None:
            return None
        if self._constraints is None:
            what = "this checkpoint has no tokenizer.json to follow it with"
            raise Unsupported(f"{kind}: {what}; add one, or ask for the form in the prompt")
        constraint = Constraint(ConstraintKind(kind), getattr(request, kind))
        try:
            if report.fits(kind, len(constraint.text), MAX_CONSTRAINT_BYTES, "characters"):
                constraint = self._closed(constraint)
                await self._constraints.check_constraint(constraint, peer)
        except InvalidRequest as error:
            report.violations += error.violations
        return constraint

    async def _bad_words(self, report: Report, request: inference_pb2.GenerateRequest) -> tuple[tuple[int, ...], ...]:
        """Return the tokens of each bad word at the start of a text, and after a space where they are others."""
        words = request.sampling.bad_words
        if not words or not self._fit_words(report, words, request.WhichOneof("constraint")):
            return ()
        spellings = dict.fromkeys(spelling for word in words for spelling in (word.lstrip(" "), f" {word.lstrip(' ')}"))
        encoded = [await self._codec.encode(inference_pb2.Prompt(text=each), False) for each in spellings]
        return tuple(dict.fromkeys(map(tuple, encoded)))

    def _fit_words(self, report: Report, words: Sequence[str], constraint: str | None) -> bool:
        """Return whether bad words can be followed; else add violations."""
        before = len(report.violations)
        if constraint is not None:
            what = f"cannot be combined with {constraint}, as both could forbid every token; leave one out"
            report.add("sampling.bad_words", what)
        if not self._has_tokenizer:
            report.add("sampling.bad_words", "needs a tokenizer, and this checkpoint has none; use logit_bias")
        if report.fits("sampling.bad_words", len(words), MAX_BAD_WORDS, "words"):
            for place, word in enumerate(words):
                path = f"sampling.bad_words[{place}]"
                if not word.strip(" "):
                    report.add(path, "is empty; expected at least one character other than a space")
                report.fits(path, len(word), MAX_BAD_WORD_CHARS, "characters")
        return len(report.violations) == before

    async def _thought(self, report: Report, request: inference_pb2.GenerateRequest) -> ThoughtBudget | None:
        """Return the budget of thoughts with the tokens that end one."""
        if not request.HasField("thought_budget"):
            return None
        if not self._has_tokenizer:
            raise Unsupported("thought_budget: this checkpoint has no tokenizer.json to follow thoughts with; add one")
        given = request.thought_budget
        if not report.holds(wrong_thought(given)):
            return None
        end = await self._codec.encode(inference_pb2.Prompt(text=given.end), False)
        return thought_from_proto(given, end)

    async def _prediction(self, report: Report, request: inference_pb2.GenerateRequest) -> tuple[int, ...]:
        """Return the tokens of the expected output. They change no token, so those that do not fit are left out."""
        text = request.prediction
        if not report.fits("prediction", len(text), MAX_PREDICTION_CHARS, "characters") or not text:
            return ()
        if not self._has_tokenizer:
            return ()
        tokens = await self._codec.encode(inference_pb2.Prompt(text=text), False)
        return tuple(tokens[: self._context()])

    async def _retention(
        self, request: inference_pb2.GenerateRequest, prompt: Sequence[int], highest: int
    ) -> tuple[RetainedTokens, ...]:
        begins = self.keeps_states() and request.prompt.HasField("chat") and len(request.prompt.chat.messages) > 1
        if request.cache.no_cache or not (begins or request.HasField("cache_retention")):
            return ()
        special = not request.HasField("add_special_tokens") or request.add_special_tokens

        async def encode(each: inference_pb2.Prompt) -> Sequence[int]:
            return await self._codec.encode(each, special)

        retained = await retained_tokens(request, prompt, highest, encode)
        return (*retained, *(await first_message(request.prompt.chat, prompt, encode) if begins else ()))

    def _closed(self, constraint: Constraint) -> Constraint:
        if self._open_schemas or constraint.kind is not ConstraintKind.JSON_SCHEMA:
            return constraint
        return replace(constraint, text=closed_text(constraint.text))

    def _fit(self, report: Report, values: dict[str, float], prompt_tokens: int, lowers: bool) -> None:
        """Fill in max_tokens. One that the context cannot hold after the prompt is refused, or lowered."""
        context = self._context()
        left = context - prompt_tokens
        if "max_tokens" not in values:
            values["max_tokens"] = max(1, min(left, self._checkpoint.max_new_tokens or left))
        elif values["max_tokens"] > left > 0 and lowers:
            values["max_tokens"] = left
        elif values["max_tokens"] > left > 0:
            what = f"max_tokens asks for {values['max_tokens']}"
            if prompt_tokens:  # 0: its violation is in the report
                what = f"the prompt has {prompt_tokens} tokens, and {what} more"
            what = f"{what}; lower max_tokens to {left} or shorten the prompt"
            report.add_violation(beyond_context("sampling.max_tokens", context, what))
        if values.get("min_tokens", 0) > values["max_tokens"] >= (0 if "prompt_logprobs" in values else 1):
            what = f"is {values['min_tokens']}; expected at most max_tokens, which is {values['max_tokens']}"
            report.add("sampling.min_tokens", what)


class WatchedValidator:
    """The RequestValidator over another one; `refused` gets each wrong request that has an id."""

    def __init__(self, validator: RequestValidator, refused: Callable[[str, Caller, InvalidRequest], None]) -> None:
        self._validator, self._refused = validator, refused

    async def validate(
        self, request: inference_pb2.GenerateRequest, call: CallContext, embeds: bool = False
    ) -> ValidatedRequest:
        try:
            return await self._validator.validate(request, call, embeds)
        except InvalidRequest as error:
            request_id = request.request_id or call.request_id
            if _REQUEST_ID.fullmatch(request_id):
                self._refused(request_id, call.caller, error)
            raise

    def check_token_ids(self, token_ids: Sequence[int]) -> None:
        self._validator.check_token_ids(token_ids)


def _sampling(
    given: types_pb2.SamplingParams,
    scalars: Mapping[str, float],
    constraint: Constraint | None,
    bad_words: tuple[tuple[int, ...], ...],
    hidden: Mapping[str, int],
) -> SamplingParams:
    """Return the sampling of a request whose lists are within their limits.

    A constraint's document ends where it is complete: ignore_eos and min_tokens must not prolong it.
    """
    stop, stop_tokens = shown_and_hidden(given.stop, hidden)
    sampling = SamplingParams(
        stop=stop,
        stop_token_ids=(*given.stop_token_ids, *stop_tokens),
        logit_bias=tuple(sorted(given.logit_bias.items())),
        logprob_token_ids=tuple(dict.fromkeys(given.logprob_token_ids)),
        bad_words=bad_words,
        **scalars,  # type: ignore[arg-type]
    )
    if constraint is None:
        return sampling
    return replace(sampling, constraint=constraint, ignore_eos=False, min_tokens=0)


def valid_traceparent(header: str) -> str:
    """Return a W3C traceparent, or "" when it is malformed: the request then starts a trace of its own."""
    short = len(header) <= MAX_TRACEPARENT_CHARS
    return header.strip() if short and span_context_of(header).is_valid else ""
