"""Validates a request field by field: reports all mistakes at once, and fills in every default.

Ranges are those of protos/quire/types/v1/types.proto. A scalar that is unset takes the checkpoint's generation_config,
then Quire's default; zero is a value.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from common.errors import CONTEXT_LENGTH_EXCEEDED, FieldViolation, InvalidRequest, Unsupported
from common.telemetry import span_context_of
from common.types import Constraint, ConstraintKind, SamplingParams
from quire.inference.v1 import inference_pb2
from quire.types.v1 import types_pb2
from router.core.events import ValidatedRequest
from router.ports import CallContext, ConstraintCheck, TextCodec
from router.text.checkpoint import Checkpoint

MAX_STOPS = 16
MAX_SEQUENCES = 64
MAX_LOGPROBS = 20
MAX_PRIORITY = 100
# Wrong entries of a list that are reported one by one.
_MOST_NAMED = 5
# Violations that are reported at most.
_MOST_VIOLATIONS = 100
# JSON readers keep integers of up to this many bits exact.
_SEED_BITS = 53
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass(frozen=True, slots=True)
class Range:
    """The values that a field may have, `low` to `high`; `open_low` leaves out `low` itself."""

    low: float
    high: float
    open_low: bool = False
    hint: str = ""

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high and not (self.open_low and value == self.low) and math.isfinite(value)

    def __str__(self) -> str:
        if self.high == math.inf:
            words = f"more than {self.low:g}" if self.open_low else f"{self.low:g} or more"
        else:
            words = (
                f"more than {self.low:g}, at most {self.high:g}" if self.open_low else f"{self.low:g} to {self.high:g}"
            )
        return words + (f" ({self.hint})" if self.hint else "")


_RANGES = {
    "temperature": Range(0, math.inf, hint="0 is greedy"),
    "top_p": Range(0, 1, open_low=True, hint="1 keeps all tokens"),
    "top_k": Range(0, math.inf, hint="0 keeps all tokens"),
    "min_p": Range(0, 1),
    "max_tokens": Range(1, math.inf),
    "min_tokens": Range(0, math.inf),
    "repetition_penalty": Range(0, math.inf, open_low=True, hint="1 is none"),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "logprobs": Range(0, MAX_LOGPROBS),
    "n": Range(1, MAX_SEQUENCES),
}
_FLAGS = ("ignore_eos", "include_stop")


@dataclass(slots=True)
class _Report:
    violations: list[FieldViolation] = field(default_factory=list)

    def add(self, path: str, what: str, reason: str = "") -> None:
        if len(self.violations) < _MOST_VIOLATIONS:
            self.violations.append(FieldViolation(path, what, reason))

    def check(self, path: str, value: float, allowed: Range) -> None:
        if value not in allowed:
            shown = f"{value:.7g}" if isinstance(value, float) else value
            self.add(path, f"is {shown}; expected {allowed}")

    def check_ids(self, path: str, ids: Iterable[int], vocab_size: int) -> None:
        wrong = [(place, token_id) for place, token_id in enumerate(ids) if not 0 <= token_id < vocab_size]
        for place, token_id in wrong[:_MOST_NAMED]:
            self.add(f"{path}[{place}]", f"is {token_id}; expected a token id, 0 to {vocab_size - 1}")
        if len(wrong) > _MOST_NAMED:
            self.add(path, f"has {len(wrong) - _MOST_NAMED} more ids out of the vocabulary")


class Validator:
    """The RequestValidator of one model.

    `context` returns how many tokens prompt and output may have together now, which depends on the connected workers;
    by default it is the checkpoint's. `constraints` is None where the checkpoint has no tokenizer to enforce them with.
    """

    def __init__(
        self,
        codec: TextCodec,
        checkpoint: Checkpoint,
        has_tokenizer: bool = True,
        draw_seed: Callable[[], int] = lambda: secrets.randbits(_SEED_BITS),
        context: Callable[[], int] | None = None,
        constraints: ConstraintCheck | None = None,
    ) -> None:
        self._codec = codec
        self._checkpoint = checkpoint
        self._has_tokenizer = has_tokenizer
        self._draw_seed = draw_seed
        self._constraints = constraints
        self._context = context or (lambda: checkpoint.max_model_len)

    async def validate(self, request: inference_pb2.GenerateRequest, call: CallContext) -> ValidatedRequest:
        if request.WhichOneof("input") == "resume":
            what = "resume is not offered yet; send the prompt and the tokens that you have as prompt.token_ids"
            raise Unsupported(what)
        report = _Report()
        self._check_envelope(report, request)
        self._check_sampling(report, request.sampling)
        prompt = await self._prompt(report, request)
        sampling = self._sampling(report, request.sampling, len(prompt))
        sampling = await self._constrained(report, request, sampling)
        if report.violations:
            raise InvalidRequest(*report.violations)
        return ValidatedRequest(
            prompt=tuple(prompt),
            sampling=sampling,
            arrived=call.arrived,
            request_id=request.request_id or None,
            deadline=call.deadline,
            priority=request.priority,
            no_cache=request.cache.no_cache,
            tenant=call.tenant,
            # Domains are length-prefixed and tagged in the hash root, so the tenant's own name is a safe one.
            cache_domain=call.tenant,
            salt=request.cache.salt,
            traceparent=valid_traceparent(request.traceparent) or valid_traceparent(call.traceparent),
        )

    def check_token_ids(self, token_ids: Sequence[int]) -> None:
        report = _Report()
        report.check_ids("token_ids", token_ids, self._checkpoint.vocab_size)
        if report.violations:
            raise InvalidRequest(*report.violations)

    def _check_envelope(self, report: _Report, request: inference_pb2.GenerateRequest) -> None:
        if request.request_id and not _REQUEST_ID.fullmatch(request.request_id):
            report.add("request_id", "is not 1 to 128 printable ASCII characters without spaces")
        report.check("priority", request.priority, Range(-MAX_PRIORITY, MAX_PRIORITY))

    def _check_sampling(self, report: _Report, given: types_pb2.SamplingParams) -> None:
        for name, allowed in _RANGES.items():
            if given.HasField(name):  # type: ignore[arg-type]
                report.check(f"sampling.{name}", getattr(given, name), allowed)
        self._check_stops(report, given.stop)
        vocab_size = self._checkpoint.vocab_size
        report.check_ids("sampling.stop_token_ids", given.stop_token_ids, vocab_size)
        for token_id, bias in sorted(given.logit_bias.items()):
            path = f"sampling.logit_bias[{token_id}]"
            report.check(path, bias, Range(-100, 100))
            if not 0 <= token_id < vocab_size:
                report.add(path, f"is for a token out of the vocabulary; expected a token id, 0 to {vocab_size - 1}")

    def _check_stops(self, report: _Report, stops: Sequence[str]) -> None:
        if len(stops) > MAX_STOPS:
            report.add("sampling.stop", f"has {len(stops)} strings; expected at most {MAX_STOPS}")
        for place in (place for place, stop in enumerate(stops) if not stop):
            report.add(f"sampling.stop[{place}]", "is empty; expected at least one character")
        if stops and not self._has_tokenizer:
            report.add("sampling.stop", "needs a tokenizer, and this checkpoint has none; use stop_token_ids")

    async def _prompt(self, report: _Report, request: inference_pb2.GenerateRequest) -> Sequence[int]:
        """Return the prompt's tokens; an empty list and a violation if they are wrong."""
        if request.WhichOneof("input") is None:
            report.add("input", "is missing; expected a prompt")
            return ()
        try:
            prompt = await self._codec.encode(request.prompt)
        except InvalidRequest as error:
            report.violations += error.violations
            return ()
        report.check_ids("prompt.token_ids.ids", prompt, self._checkpoint.vocab_size)
        context = self._context()
        if len(prompt) >= context:
            what = f"has {len(prompt)} tokens; the context is {context}, one of it for output"
            what = f"{what}; shorten the prompt by {len(prompt) - context + 1} tokens or more"
            report.add("prompt", what, CONTEXT_LENGTH_EXCEEDED)
        return prompt

    def _sampling(self, report: _Report, given: types_pb2.SamplingParams, prompt_tokens: int) -> SamplingParams:
        """Return the given values, then the checkpoint's defaults, then Quire's."""
        values: dict[str, float] = dict(self._checkpoint.sampling_defaults)
        for name in (*_RANGES, *_FLAGS, "seed"):
            if given.HasField(name):  # type: ignore[arg-type]
                values[name] = getattr(given, name)
        self._fit(report, values, prompt_tokens)
        values.setdefault("seed", self._draw_seed())
        return SamplingParams(
            stop=tuple(given.stop),
            stop_token_ids=tuple(given.stop_token_ids),
            logit_bias=tuple(sorted(given.logit_bias.items())),
            **values,  # type: ignore[arg-type]
        )

    async def _constrained(
        self, report: _Report, request: inference_pb2.GenerateRequest, sampling: SamplingParams
    ) -> SamplingParams:
        """Add the constraint. Its document ends where it is complete: ignore_eos and min_tokens must not prolong it."""
        kind = request.WhichOneof("constraint")
        if kind is None:
            return sampling
        if self._constraints is None:
            what = "this checkpoint has no tokenizer.json to follow it with"
            raise Unsupported(f"{kind}: {what}; add one, or ask for the form in the prompt")
        constraint = Constraint(ConstraintKind(kind), getattr(request, kind))
        try:
            await self._constraints.check(constraint)
        except InvalidRequest as error:
            report.violations += error.violations
        return replace(sampling, constraint=constraint, ignore_eos=False, min_tokens=0)

    def _fit(self, report: _Report, values: dict[str, float], prompt_tokens: int) -> None:
        """Fill in max_tokens, and refuse one that the context cannot hold after the prompt."""
        context = self._context()
        left = context - prompt_tokens
        if "max_tokens" not in values:
            values["max_tokens"] = max(1, min(left, self._checkpoint.max_new_tokens or left))
        elif values["max_tokens"] > left > 0:
            what = f"is {values['max_tokens']}; the context of {context} leaves {left} after {prompt_tokens}"
            what = f"{what} tokens of prompt; lower it to {left} or shorten the prompt"
            report.add("sampling.max_tokens", what, CONTEXT_LENGTH_EXCEEDED)
        if values.get("min_tokens", 0) > values["max_tokens"] >= 1:
            what = f"is {values['min_tokens']}; expected at most max_tokens, which is {values['max_tokens']}"
            report.add("sampling.min_tokens", what)


def valid_traceparent(header: str) -> str:
    """Return a W3C traceparent, or "" when it is malformed: the request then starts a trace of its own."""
    return header.strip() if span_context_of(header).is_valid else ""
