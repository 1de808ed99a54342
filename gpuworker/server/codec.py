"""Translates the router's messages into the engine's types, and the worker's own state into messages."""

from __future__ import annotations

from dataclasses import replace

from common.contracts.adapters import OWN_NAME_WORDS, AdapterShare, is_adapter_name, is_own_name
from common.contracts.errors import FieldViolation, InvalidRequest
from common.contracts.limits import MAX_OWN_ADAPTER_NAMES, MAX_TENANT_CHARS
from common.contracts.types import Constraint, ConstraintKind, SamplingParams, SequenceId, ThoughtBudget
from common.wire.lease_codec import valid_weight
from common.wire.packing import unpack_u32
from common.wire.retention_codec import tokens_from_proto
from common.wire.sampling_codec import sampling_from_proto, thought_from_proto
from gpuworker.engine.ports import EngineLoad, EngineRequest
from gpuworker.scheduling.drafting import speculation_of
from gpuworker.scheduling.kv_events import CacheLabel
from gpuworker.scheduling.sequence import NewSequence
from gpuworker.scheduling.splitmix64 import GOLDEN, WORD, splitmix64
from gpuworker.scheduling.stopping import StopRule
from gpuworker.server.submit_check import SubmitLimits
from quire.gpuworker.v1 import gpuworker_pb2 as pb


def fold_seed(seed: int, index: int) -> int:
    """Return the seed of sequence `index` of a request: the request's own for 0, else splitmix64 of both.

    A sampled token depends on (seed, position) only, so the sequences of one request need different seeds.
    """
    return splitmix64(seed + index * GOLDEN) if index else seed & WORD


def sampling_params(message: pb.Submit) -> SamplingParams:
    """Return the sampling of one sequence; the router has filled in every default."""
    sampling = sampling_from_proto(message.sampling)
    words = tuple([tuple(unpack_u32(word)) for word in message.bad_words])
    seed, thought = fold_seed(sampling.seed, message.index), thought_of(message)
    return replace(sampling, seed=seed, constraint=constraint_of(message), thought=thought, bad_words=words)


def constraint_of(message: pb.Submit) -> Constraint | None:
    """Return the constraint on a sequence's output, if any."""
    kind = message.WhichOneof("constraint")
    return None if kind is None else Constraint(ConstraintKind(kind), getattr(message, kind))


def thought_of(message: pb.Submit) -> ThoughtBudget | None:
    """Return the budget of a sequence's thoughts, if any."""
    if not message.HasField("thought_budget"):
        return None
    return thought_from_proto(message.thought_budget, message.thought_end_token_ids)


def engine_request(
    message: pb.Submit,
    sequence: SequenceId,
    fork_of: SequenceId | None,
    limits: SubmitLimits,
    traceparent: str,
    adapter: object | None = None,
) -> EngineRequest:
    """Return the engine's form of a submit.

    `limits.check` was called before; `adapter` is what the model made of the adapter that the submit names. Raises
    InvalidRequest for tokens outside of the vocabulary and for block hashes of other tokens, ProtocolViolation when
    packed fields are malformed.
    """
    tokens = unpack_u32(message.prompt_token_ids)
    limits.check_tokens(tokens)
    block_hashes, parent_digest = limits.chain(message)
    sampling, before = _within(sampling_params(message), limits.max_model_len), message.output_tokens_before
    prompt_tokens = len(tokens) - before
    stop = StopRule(
        max_tokens=sampling.max_tokens - before,
        min_tokens=max(0, sampling.min_tokens - before),
        eos_ids=frozenset(message.eos_token_ids),
        stop_token_ids=frozenset(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos and sampling.constraint is None,  # a constraint lets a text end in its own time
    )
    size = limits.identity.block_size
    new = NewSequence(
        sequence=sequence,
        request_id=message.request_id,
        tokens=tuple(tokens),
        block_hashes=block_hashes,
        parent_digest=parent_digest,
        partial_hashes=limits.partial_hashes(message, block_hashes) if fork_of is None else (),
        max_len=_max_len(message, prompt_tokens, sampling, limits),
        stop=stop,
        priority=message.priority,
        fork_of=fork_of,
        no_cache=message.no_cache,
        traceparent=traceparent,
        tracestate=message.tracestate if traceparent else "",
        tenant=message.tenant,
        weight=valid_weight(message.weight),
        score_from=message.prompt_logprobs_before,
        score_until=0 if sampling.prompt_logprobs is None else prompt_tokens - 1,
        retention=tuple(each.blocks(size) for each in tokens_from_proto(message.retention))
        if message.retention
        else (),
        label=CacheLabel(message.cache_domain, message.adapter, message.adapter_fingerprint),
        speculation=None if message.embeds else speculation_of(sampling, limits.prediction(message), before),
    )
    return EngineRequest(new, _forbidding(sampling, stop), prompt_tokens, bool(traceparent), adapter)


def _forbidding(sampling: SamplingParams, stop: StopRule) -> SamplingParams:
    """Return parameters with all ends of the router, where ends may be forbidden: it knows those of the template."""
    if (not sampling.min_tokens and sampling.closing_token_id is None) or stop.ignore_eos:
        return sampling
    return replace(sampling, stop_token_ids=tuple(sorted({*sampling.stop_token_ids, *stop.eos_ids})))


def _max_len(message: pb.Submit, prompt_tokens: int, sampling: SamplingParams, limits: SubmitLimits) -> int:
    """Return the length at which a sequence ends; one that embeds ends where the first token would be sampled."""
    return prompt_tokens + 1 if message.embeds else min(limits.max_model_len, prompt_tokens + sampling.max_tokens)


def _within(sampling: SamplingParams, max_model_len: int) -> SamplingParams:
    """Lower counts that no sequence reaches, so that their sums with positions stay far from the end of an int32."""
    most, least = min(sampling.max_tokens, max_model_len), min(sampling.min_tokens, max_model_len)
    return replace(sampling, max_tokens=most, min_tokens=least)


def load_message(load: EngineLoad, draining: bool, migrating: bool = False) -> pb.Load:
    return pb.Load(
        running=load.running,
        waiting=load.waiting,
        num_blocks=load.num_blocks,
        unheld_blocks=load.unheld_blocks,
        pending_prefill_tokens=load.pending_prefill_tokens,
        prefill_tokens_in_flight=load.prefill_tokens_in_flight,
        decode_step_seconds=load.decode_step_seconds,
        prefill_seconds_per_token=load.prefill_seconds_per_token,
        step_age_seconds=load.step_age_seconds,
        step_predicted_seconds=load.step_predicted_seconds,
        steps=load.steps,
        sampled_tokens=load.tokens_sampled,
        computed_tokens=load.tokens_scheduled,
        manager_attached=load.manager_attached,
        draining=draining,
        migrating=migrating,
        drafted_tokens=load.drafted_tokens,
        accepted_draft_tokens=load.accepted_tokens,
        fetch_seconds_per_block=load.fetch_seconds_per_block,
        fetch_setup_seconds=load.fetch_setup_seconds,
    )


def share_of(message: pb.LoadAdapter) -> AdapterShare:
    """Return for whom a load is. Raises InvalidRequest for names or a folder that cannot be."""
    share = message.share
    names = tuple(share.names[: MAX_OWN_ADAPTER_NAMES + 1])
    if len(names) > MAX_OWN_ADAPTER_NAMES or len(share.tenant) > MAX_TENANT_CHARS:
        what = f"expected a tenant of at most {MAX_TENANT_CHARS} characters, and {MAX_OWN_ADAPTER_NAMES} names"
        raise InvalidRequest(FieldViolation("share", what))
    if not all(is_own_name(name) for name in names):
        raise InvalidRequest(FieldViolation("share.names", f"expected {OWN_NAME_WORDS}"))
    if message.folder and not is_adapter_name(message.folder):
        raise InvalidRequest(FieldViolation("folder", "expected the name of one folder"))
    return AdapterShare(share.tenant, names, share.max_bytes)
