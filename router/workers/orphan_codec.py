"""Codec of what travels with a sequence for other routers, and of what workers say of orphans."""

from __future__ import annotations

from dataclasses import replace

from common.contracts.types import Constraint, ConstraintKind, SamplingParams
from common.wire.output_codec import usage_from_proto, usage_to_proto
from common.wire.packing import unpack_u32
from common.wire.sampling_codec import sampling_from_proto, thought_from_proto
from quire.gpuworker.v1 import gpuworker_pb2 as pb
from router.workers.resuming import Continuation, Orphan


def continuation_to_proto(given: Continuation | None) -> pb.Continuation | None:
    if given is None:
        return None
    return pb.Continuation(
        stop=given.stop,
        kept_special_tokens=given.kept_special_tokens,
        skip_special_tokens=given.skip_special_tokens,
        salt=given.salt,
        submitted_seconds=given.submitted_seconds,
        admitted_seconds=given.admitted_seconds,
        first_token_seconds=given.first_token_seconds,
        usage_before=None if given.usage_before is None else usage_to_proto(given.usage_before),
    )


def continuation_from_proto(message: pb.Continuation) -> Continuation:
    return Continuation(
        stop=tuple(message.stop),
        kept_special_tokens=tuple(message.kept_special_tokens),
        skip_special_tokens=message.skip_special_tokens,
        salt=message.salt,
        submitted_seconds=message.submitted_seconds,
        admitted_seconds=message.admitted_seconds if message.HasField("admitted_seconds") else None,
        first_token_seconds=message.first_token_seconds if message.HasField("first_token_seconds") else None,
        usage_before=usage_from_proto(message.usage_before) if message.HasField("usage_before") else None,
    )


def sampling_of(submit: pb.Submit) -> SamplingParams:
    """Return the sampling of the request that a submit is of."""
    kind = submit.WhichOneof("constraint")
    thought = None
    if submit.HasField("thought_budget"):
        thought = thought_from_proto(submit.thought_budget, submit.thought_end_token_ids)
    return replace(
        sampling_from_proto(submit.sampling),
        stop=tuple(submit.continuation.stop),
        constraint=None if kind is None else Constraint(ConstraintKind(kind), getattr(submit, kind)),
        thought=thought,
        bad_words=tuple([tuple(unpack_u32(word)) for word in submit.bad_words]),
    )


def orphan_from_proto(message: pb.Orphan, first: pb.Submit) -> Orphan:
    """Return one orphan; `first` is the submit of the first one in the same answer, which has the shared prompt."""
    submit = message.submit
    tokens = unpack_u32(submit.prompt_token_ids or first.prompt_token_ids)
    prompt = len(tokens) - submit.output_tokens_before
    return Orphan(
        sequence=message.sequence,
        index=submit.index,
        prompt_tokens=prompt,
        earlier=tuple(tokens[prompt:]),
        output_tokens=message.output_tokens,
        continuation=continuation_from_proto(submit.continuation),
        logprobs_dropped=message.logprobs_dropped,
        prompt_logprobs_dropped=message.prompt_logprobs_dropped,
        submitted_seconds=message.submitted_seconds,
        orphaned_seconds=message.orphaned_seconds,
        admitted_seconds=message.admitted_seconds if message.HasField("admitted_seconds") else None,
        first_token_seconds=message.first_token_seconds if message.HasField("first_token_seconds") else None,
        last_token_seconds=message.last_token_seconds if message.HasField("last_token_seconds") else None,
        ended=message.ended,
        prompt_logprobs_before=submit.prompt_logprobs_before,
    )
