"""The usage and the log-probabilities of a sequence's output, to and from the protos."""

from __future__ import annotations

from typing import Final

from common.contracts.errors import ProtocolViolation
from common.contracts.types import TokenLogprobs, Usage
from quire.types.v1 import types_pb2

_MOST: Final = 2**32 - 1


def usage_to_proto(usage: Usage) -> types_pb2.Usage:
    """Return the proto; what preemptions sum up stays at the greatest number that it holds."""
    return types_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        output_tokens=usage.output_tokens,
        recomputed_tokens=min(usage.recomputed_tokens, _MOST),
        preemptions=min(usage.preemptions, _MOST),
        drafted_tokens=min(usage.drafted_tokens, _MOST),
        accepted_draft_tokens=min(usage.accepted_draft_tokens, _MOST),
        model_drafted_tokens=min(usage.model_drafted_tokens, _MOST),
        accepted_model_draft_tokens=min(usage.accepted_model_draft_tokens, _MOST),
        host_cached_tokens=usage.host_cached_tokens,
        disk_cached_tokens=usage.disk_cached_tokens,
        peer_cached_tokens=usage.peer_cached_tokens,
    )


def usage_from_proto(message: types_pb2.Usage) -> Usage:
    return Usage(
        prompt_tokens=message.prompt_tokens,
        cached_tokens=message.cached_tokens,
        output_tokens=message.output_tokens,
        recomputed_tokens=message.recomputed_tokens,
        preemptions=message.preemptions,
        drafted_tokens=message.drafted_tokens,
        accepted_draft_tokens=message.accepted_draft_tokens,
        model_drafted_tokens=message.model_drafted_tokens,
        accepted_model_draft_tokens=message.accepted_model_draft_tokens,
        host_cached_tokens=message.host_cached_tokens,
        disk_cached_tokens=message.disk_cached_tokens,
        peer_cached_tokens=message.peer_cached_tokens,
    )


def logprobs_to_proto(entry: TokenLogprobs) -> types_pb2.TokenLogprobs:
    return types_pb2.TokenLogprobs(
        token_id=entry.token_id,
        logprob=entry.logprob,
        top_token_ids=[token_id for token_id, _ in entry.top],
        top_logprobs=[logprob for _, logprob in entry.top],
        rank=entry.rank,
    )


def logprobs_from_proto(message: types_pb2.TokenLogprobs) -> TokenLogprobs:
    """Raises ProtocolViolation when the likeliest ids and their values differ in number."""
    if len(message.top_token_ids) != len(message.top_logprobs):
        raise ProtocolViolation(f"{len(message.top_token_ids)} tokens have {len(message.top_logprobs)} probabilities")
    top = tuple(zip(message.top_token_ids, message.top_logprobs, strict=True))
    return TokenLogprobs(message.token_id, message.logprob, top, message.rank)
