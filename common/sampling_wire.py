"""How tokens are drawn, with every default filled in, to and from its proto."""

from __future__ import annotations

from common.types import SamplingParams
from quire.types.v1 import types_pb2


def sampling_to_proto(sampling: SamplingParams) -> types_pb2.SamplingParams:
    """Return the proto of sampling parameters, every field set."""
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
    )


def sampling_from_proto(message: types_pb2.SamplingParams) -> SamplingParams:
    """Return the sampling parameters in a proto that `sampling_to_proto` made; a field that is not set counts as 0."""
    return SamplingParams(
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        repetition_penalty=message.repetition_penalty,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        seed=message.seed,
        ignore_eos=message.ignore_eos,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        n=message.n,
        include_stop=message.include_stop,
    )
