"""Codec of the messages between router and worker."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Final

from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from common.contracts.adapters import NAME_WORDS, AdapterRef, is_adapter_name, is_fingerprint
from common.contracts.errors import ProtocolViolation, QuireError
from common.contracts.hashing import little_endian_int32
from common.contracts.lease import RetainedTokens
from common.contracts.limits import MAX_ADAPTERS
from common.contracts.transfers import Fetched
from common.contracts.types import (
    BlockHash,
    FinishReason,
    MissReason,
    PoolIdentity,
    SamplingParams,
    TokenLogprobs,
)
from common.untrusted.ids import ID_WORDS, is_id
from common.wire.enum_codec import finish_from_proto, miss_from_proto
from common.wire.identity_codec import identity_from_proto
from common.wire.output_codec import logprobs_from_proto, usage_from_proto
from common.wire.packing import pack_hashes, unpack_u32
from common.wire.retention_codec import tokens_to_proto
from common.wire.sampling_codec import sampling_to_proto, thought_to_proto
from quire.api.status import error_from_status
from quire.gpuworker.v1 import gpuworker_pb2 as pb
from quire.types.v1 import types_pb2
from router.placement.adapters import WorkerAdapter, WorkerAdapters
from router.placement.worker_model import Capacity, Disaggregation, Load
from router.workers.orphan_codec import continuation_to_proto
from router.workers.resuming import Continuation
from router.workers.worker_events import (
    Preempted,
    PromptScored,
    Refused,
    SequenceAdmitted,
    SequenceDelayed,
    SequenceEvent,
    SequenceFinished,
    SequenceStarted,
    TokensSampled,
    WorkerTime,
)

_DISAGGREGATION: Final = {
    pb.DISAGGREGATION_PREFILL: Disaggregation.PREFILL,
    pb.DISAGGREGATION_DECODE: Disaggregation.DECODE,
}


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """Facts that a worker reports in its hello; `incarnation` is 16 random bytes for each process."""

    worker_id: str
    incarnation: bytes
    identity: PoolIdentity
    capacity: Capacity
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    kv_events: types_pb2.KvEventSource | None = None
    """Where it publishes KV events; None: it does not."""


@dataclass(frozen=True, slots=True)
class Submission:
    """One sequence for a worker. The last `output_before` of `tokens` are output of an earlier run of the sequence.

    `block_hashes` are those of the full blocks of `tokens`. `parent_digest` is the 32-byte digest of the last full
    block, or the root digest when no block is full; both root in `cache_domain`.
    """

    request_id: str
    index: int
    tokens: tuple[int, ...]
    block_hashes: tuple[BlockHash, ...]
    parent_digest: bytes
    sampling: SamplingParams
    priority: int = 0
    timeout: float | None = None
    traceparent: str = ""
    tracestate: str = ""
    output_before: int = 0
    no_cache: bool = False
    eos_token_ids: tuple[int, ...] = ()
    cache_domain: bytes = b""
    tenant: str = ""
    weight: float = 1.0
    embeds: bool = False
    # Log-probabilities of the prompt that the client has, or that another sequence of the request gets.
    prompt_logprobs_before: int = 0
    # `tokens` as they travel, packed once for all sequences of a request; empty: they are packed for each message.
    packed_tokens: bytes = b""
    # What the client expects as output, from the beginning of all runs.
    prediction: tuple[int, ...] = ()
    retention: tuple[RetainedTokens, ...] = ()
    # What another router needs to go on with the sequence; None where none may.
    continuation: Continuation | None = None
    adapter: AdapterRef | None = None


def submit_to_proto(submission: Submission, handle: int, fork_of: int | None = None) -> pb.Submit:
    """Return the message for one sequence; `fork_of` is the handle of a sibling that was sent before."""
    constraint, thought = submission.sampling.constraint, submission.sampling.thought
    constrained = {constraint.kind.value: constraint.text} if constraint is not None else {}
    return pb.Submit(
        handle=handle,
        request_id=submission.request_id,
        index=submission.index,
        prompt_token_ids=submission.packed_tokens or little_endian_int32(submission.tokens),
        block_hashes=pack_hashes(submission.block_hashes),
        parent_digest=submission.parent_digest,
        # Without stop strings: routers match these themselves, and `continuation` has them for the next one.
        sampling=sampling_to_proto(replace(submission.sampling, stop=())),
        priority=submission.priority,
        timeout_seconds=submission.timeout,
        traceparent=submission.traceparent,
        tracestate=submission.tracestate,
        output_tokens_before=submission.output_before,
        no_cache=submission.no_cache,
        fork_of=fork_of,
        eos_token_ids=submission.eos_token_ids,
        cache_domain=submission.cache_domain,
        tenant=submission.tenant,
        weight=submission.weight,
        prompt_logprobs_before=submission.prompt_logprobs_before,
        bad_words=map(little_endian_int32, submission.sampling.bad_words),
        thought_budget=thought_to_proto(thought),
        thought_end_token_ids=() if thought is None else thought.end_token_ids,
        embeds=submission.embeds,
        prediction_token_ids=little_endian_int32(submission.prediction),
        continuation=continuation_to_proto(submission.continuation),
        retention=tokens_to_proto(submission.retention),
        adapter=submission.adapter.name if submission.adapter is not None else "",
        adapter_fingerprint=submission.adapter.fingerprint if submission.adapter is not None else "",
        **constrained,
    )


def facts_from_proto(info: pb.WorkerInfo) -> WorkerFacts:
    """Return what a worker reports of itself. Raises ProtocolViolation when its id could not stand in a log line."""
    if not is_id(info.worker_id):
        raise ProtocolViolation(f"a worker's id has another form than {ID_WORDS}")
    identity = identity_from_proto(info.identity)
    capacity = Capacity(
        info.num_blocks,
        max(1, identity.block_size),
        max(1, info.max_num_seqs),
        info.max_model_len,
        identity.kv_geometry.window,
        info.prefix_caching,
        identity.kv_geometry.groups,
        _DISAGGREGATION.get(info.disaggregation, Disaggregation.NONE),
        info.fetches_blocks,
    )
    return WorkerFacts(
        info.worker_id,
        info.incarnation,
        identity,
        capacity,
        info.vocab_size,
        tuple(info.eos_token_ids),
        info.kv_events if info.HasField("kv_events") else None,
    )


def adapters_from_proto(told: pb.Adapters) -> WorkerAdapters:
    """Return what a worker says of its adapters. Raises ProtocolViolation for too many, and for what can name none."""
    if len(told.adapters) > MAX_ADAPTERS:
        raise ProtocolViolation(f"a worker names {len(told.adapters)} adapters; expected at most {MAX_ADAPTERS}")
    found = {}
    for each in told.adapters:
        if not is_adapter_name(each.name) or not is_fingerprint(each.fingerprint):
            raise ProtocolViolation(f"a worker names an adapter with another form than {NAME_WORDS}, and a SHA-256")
        found[each.name] = WorkerAdapter(each.fingerprint, each.rank, each.num_bytes, each.in_memory)
    return WorkerAdapters(found, _finite(told.load_seconds), told.max_in_memory)


def load_from_proto(load: pb.Load) -> Load:
    return Load(
        running=load.running,
        waiting=load.waiting,
        unheld_blocks=load.unheld_blocks,
        pending_prefill_tokens=load.pending_prefill_tokens,
        prefill_tokens_in_flight=load.prefill_tokens_in_flight,
        decode_step_seconds=load.decode_step_seconds,
        prefill_seconds_per_token=load.prefill_seconds_per_token,
        step_age_seconds=load.step_age_seconds,
        step_predicted_seconds=load.step_predicted_seconds,
        steps=load.steps,
        sampled_tokens=load.sampled_tokens,
        computed_tokens=load.computed_tokens,
        manager_attached=load.manager_attached,
        draining=load.draining,
        migrating=load.draining and load.migrating,
        fetch_seconds_per_block=_finite(load.fetch_seconds_per_block),
        fetch_setup_seconds=_finite(load.fetch_setup_seconds),
    )


def refusal_from_proto(refused: pb.Refused) -> Refused:
    """Raise ProtocolViolation when the status in it is none."""
    return Refused(error_of_status(refused.status))


def error_of_status(raw: bytes) -> QuireError:
    """Return the error that a worker refuses something with. Raises ProtocolViolation for bytes that hold none."""
    try:
        status = status_pb2.Status.FromString(raw)
    except DecodeError:
        raise ProtocolViolation(f"{len(raw)} bytes of a refusal are not a google.rpc.Status") from None
    return error_from_status(status)


def events_of(outputs: pb.StepOutputs) -> Iterator[tuple[int, SequenceEvent]]:
    """Yield (handle, event) of one message, in the right order for each sequence.

    Raises ProtocolViolation when its parallel arrays do not fit together.
    """
    times = _Times(outputs.turns)
    for held in outputs.delayed:
        yield held.handle, _delayed(held, times)
    for granted in outputs.admitted:
        yield granted.handle, _admitted(granted, times)
    for handle in unpack_u32(outputs.preempted):
        yield handle, Preempted(times.of(len(outputs.turns)))
    for begun in outputs.started:
        yield begun.handle, _started(begun, times)
    if outputs.prompt_logprobs:
        for handle, entries in _by_owner(outputs.prompt_logprobs, outputs.prompt_logprob_handles).items():
            yield handle, PromptScored(tuple(entries))
    yield from _sampled(outputs, times)
    for ended in outputs.finished:
        yield ended.handle, _finished(ended, times)


class _Times:
    """The times of a message's turns."""

    def __init__(self, turns: Sequence[pb.EngineTurn]) -> None:
        self._times = [_time_of(turn) for turn in turns]
        self._first_rows = [turn.first_row for turn in turns]

    def of(self, turn: int) -> WorkerTime | None:
        """Return when a turn was over, by its place from 1 on; None where that is not said."""
        return self._times[turn - 1] if 0 < turn <= len(self._times) else None

    def of_row(self, row: int) -> WorkerTime | None:
        """Return when the turn of a row of tokens was over."""
        return self.of(bisect_right(self._first_rows, row))


def _time_of(turn: pb.EngineTurn) -> WorkerTime | None:
    at, lost = turn.at_seconds, turn.lost_seconds
    return WorkerTime(at, lost) if at > 0.0 and isfinite(at) and isfinite(lost) else None


def _sampled(outputs: pb.StepOutputs, times: _Times) -> Iterator[tuple[int, TokensSampled]]:
    handles, counts, tokens = (unpack_u32(packed) for packed in (outputs.handles, outputs.counts, outputs.token_ids))
    if len(handles) != len(counts) or sum(counts) != len(tokens):
        raise ProtocolViolation(f"{len(handles)} handles, {len(counts)} counts and {len(tokens)} tokens do not fit")
    logprobs = _by_owner(outputs.logprobs, outputs.logprob_handles) if outputs.logprobs else {}
    start, single = 0, times.of(1) if len(outputs.turns) == 1 else None
    for row, (handle, count) in enumerate(zip(handles, counts, strict=True)):
        sampled = TokensSampled(tuple(tokens[start : start + count]), (), single or times.of_row(row))
        if handle in logprobs:
            entries = logprobs[handle]
            sampled = replace(sampled, logprobs=tuple(entries[:count]))
            del entries[:count]
        start += count
        yield handle, sampled


def _by_owner(entries: Sequence[types_pb2.TokenLogprobs], handles: bytes) -> dict[int, list[TokenLogprobs]]:
    """Return the entries of each handle; `handles` names the owner of each entry."""
    owners = unpack_u32(handles)
    if len(owners) != len(entries):
        raise ProtocolViolation(f"{len(entries)} log-probabilities have {len(owners)} owners")
    found: dict[int, list[TokenLogprobs]] = {}
    for owner, entry in zip(owners, entries, strict=True):
        found.setdefault(owner, []).append(logprobs_from_proto(entry))
    return found


def _admitted(message: pb.SequenceAdmitted, times: _Times) -> SequenceAdmitted:
    miss = miss_from_proto(message.miss_reason, unknown=MissReason.NEVER_SEEN)
    return SequenceAdmitted(
        message.cached_tokens,
        miss,
        message.diverged_at,
        message.decision_id,
        max(0.0, message.reserve_seconds),
        message.recounted,
        max(0.0, message.lost_seconds),
        max(0.0, message.unread_seconds),
        _fetched(message.fetched) if message.HasField("fetched") else None,
        times.of(message.turn),
    )


def _fetched(message: pb.Fetched) -> Fetched:
    source = message.source if is_id(message.source) else ""
    return Fetched(min(message.blocks, message.asked), message.asked, _finite(message.seconds), source)


def _started(message: pb.SequenceStarted, times: _Times) -> SequenceStarted:
    ahead_of = message.ahead_of if is_id(message.ahead_of) else ""
    wait = max(0.0, message.wait_seconds)
    loads = message.loaded_blocks, _finite(message.load_seconds), _finite(message.spared_seconds)
    return SequenceStarted(wait, message.ahead_tokens, ahead_of, times.of(message.turn), *loads)


def _finite(seconds: float) -> float:
    """Return seconds that are added up and told; 0 for what is no duration."""
    return seconds if 0.0 <= seconds < math.inf else 0.0


def _delayed(message: pb.SequenceDelayed, times: _Times) -> SequenceDelayed:
    compiled, stalled, away = message.compile_seconds, message.stalled_seconds, message.manager_away_seconds
    return SequenceDelayed(max(0.0, compiled), max(0.0, stalled), max(0.0, away), times.of(message.turn))


def _finished(message: pb.SequenceFinished, times: _Times) -> SequenceFinished:
    reason = finish_from_proto(message.reason, unknown=FinishReason.ERROR)
    stop = message.stop_token_id if message.HasField("stop_token_id") else None
    usage = usage_from_proto(message.usage)
    field, when = message.wrong_field, times.of(message.turn)
    return SequenceFinished(reason, usage, stop, message.message, field, message.embedding, when)
