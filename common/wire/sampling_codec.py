"""Sampling parameters, with every default filled in, to and from their proto."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from common.contracts.types import SamplingParams, ThoughtBudget
from quire.types.v1 import types_pb2

_SAME = ("max_tokens", "opener", "closer", "is_open", "anywhere")


# Codec of the budget of a thought.
def thought_to_proto(budget: ThoughtBudget | None) -> types_pb2.ThoughtBudget | None:
    """Return the budget without its end, whose tokens travel beside it."""
    if budget is None:
        return None
    return types_pb2.ThoughtBudget(**{name: getattr(budget, name) for name in _SAME})


def thought_from_proto(message: types_pb2.ThoughtBudget, end_token_ids: Sequence[int]) -> ThoughtBudget:
    return ThoughtBudget(end_token_ids=tuple(end_token_ids), **{name: getattr(message, name) for name in _SAME})


_REPEATED = {"stop", "stop_token_ids", "logit_bias", "logprob_token_ids"}
_ELSEWHERE = {"constraint", "thought", "bad_words"}  # fields of the message around it
_SCALARS: tuple[Any, ...] = tuple(
    each.name for each in fields(SamplingParams) if each.name not in _REPEATED | _ELSEWHERE
)


def sampling_to_proto(sampling: SamplingParams) -> types_pb2.SamplingParams:
    """Return the proto with every field set."""
    return types_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop=sampling.stop,
        stop_token_ids=sampling.stop_token_ids,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias),
        seed=sampling.seed,
        ignore_eos=sampling.ignore_eos,
        logprobs=sampling.logprobs,
        n=sampling.n,
        include_stop=sampling.include_stop,
        prompt_logprobs=sampling.prompt_logprobs,
        closing_token_id=sampling.closing_token_id,
        logprob_token_ids=sampling.logprob_token_ids,
    )


def sampling_from_proto(message: types_pb2.SamplingParams) -> SamplingParams:
    """Return the sampling parameters; a scalar that is not set takes the default of `SamplingParams`."""
    scalars: dict[str, Any] = {name: getattr(message, name) for name in _SCALARS if message.HasField(name)}
    return SamplingParams(
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        logit_bias=tuple(sorted(message.logit_bias.items())),
        logprob_token_ids=tuple(message.logprob_token_ids),
        **scalars,
    )
