"""Attributes of a request's span by OpenTelemetry's conventions for generative AI.

The text of prompts, outputs and stop strings is in no attribute, though the conventions have names for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from common.contracts import gen_ai_names as names
from common.contracts.types import ConstraintKind, FinishReason
from router.contracts.events import Finished, ValidatedRequest

Value = str | int | float | Sequence[str]
_ABNORMAL: Final = (FinishReason.CANCELLED, FinishReason.DEADLINE)


def span_name(request: ValidatedRequest, model: str) -> str:
    """Return the name of the span that stands for the inference; `model` is that of a request that names none."""
    return f"{operation_of(request)} {request.model or model}".rstrip()


def operation_of(request: ValidatedRequest) -> str:
    """Return what the conventions call the operation, one of OPERATIONS."""
    return names.EMBEDDINGS if request.embeds else names.CHAT if request.chat else names.COMPLETION


def request_attributes(request: ValidatedRequest, model: str) -> dict[str, Value]:
    """Return what was asked for; `model` is what the request gets if it names none."""
    whole: dict[str, Value] = {
        names.OPERATION_NAME: operation_of(request),
        names.PROVIDER_NAME: names.PROVIDER,
        names.REQUEST_MODEL: request.model or model,
    }
    return whole if request.embeds else whole | _sampling(request)


def _sampling(request: ValidatedRequest) -> dict[str, Value]:
    """Return the parameters with which tokens are sampled, defaults filled in; a top_k of 0 is none."""
    sampling, constraint = request.sampling, request.sampling.constraint
    some: dict[str, Value] = {}
    if sampling.n != 1:
        some[names.REQUEST_CHOICE_COUNT] = sampling.n
    if sampling.top_k:
        some[names.REQUEST_TOP_K] = sampling.top_k
    if not request.whole:
        some[names.REQUEST_STREAM] = True
    if constraint is not None:
        some[names.OUTPUT_TYPE] = names.JSON if constraint.kind is ConstraintKind.JSON_SCHEMA else names.TEXT
    return some | {
        names.REQUEST_MAX_TOKENS: sampling.max_tokens,
        names.REQUEST_TEMPERATURE: sampling.temperature,
        names.REQUEST_TOP_P: sampling.top_p,
        names.REQUEST_FREQUENCY_PENALTY: sampling.frequency_penalty,
        names.REQUEST_PRESENCE_PENALTY: sampling.presence_penalty,
        names.REQUEST_SEED: sampling.seed,
    }


def response_attributes(
    ends: Mapping[int, Finished], model: str, response_id: str, sequences: int = 1
) -> dict[str, Value]:
    """Return what came, of so many sequences; `ends` are those that ended, by their index. Nothing before the first.

    The prompt counts once: its sequences share it. Of tokens from the cache nothing is said where there are none.
    """
    if not ends:
        return {}
    ordered = [ends[index] for index in sorted(ends)]
    cached = ordered[0].usage.cached_tokens
    hits: dict[str, Value] = {names.USAGE_CACHED_TOKENS: cached} if cached else {}
    return hits | {
        names.RESPONSE_ID: response_id,
        names.RESPONSE_MODEL: model,
        names.RESPONSE_FINISH_REASONS: [_finish_reason(ends.get(index)) for index in range(sequences)],
        names.USAGE_INPUT_TOKENS: ordered[0].usage.prompt_tokens,
        names.USAGE_OUTPUT_TOKENS: sum(each.usage.output_tokens for each in ordered),
    }


def _finish_reason(end: Finished | None) -> str:
    return names.ERROR if end is None or end.reason in _ABNORMAL else end.reason.value
