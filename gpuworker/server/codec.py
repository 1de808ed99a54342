"""Translates the router's messages into the engine's types, and the worker's own state into messages."""

from __future__ import annotations

from dataclasses import dataclass, replace

from common.errors import FieldViolation, InvalidRequest
from common.types import Constraint, ConstraintKind, SamplingParams, SequenceId
from common.wire.packing import unpack_hashes, unpack_u32
from common.wire.sampling_codec import sampling_from_proto
from gpuworker.core.sequence import NewSequence
from gpuworker.core.splitmix64 import GOLDEN, WORD, splitmix64
from gpuworker.core.stopping import StopRule
from gpuworker.engine.ports import EngineLoad, EngineRequest
from quire.gpuworker.v1 import gpuworker_pb2 as pb

LINK_BYTES = 32


def fold_seed(seed: int, index: int) -> int:
    """Return the seed of sequence `index` of a request: the request's own for 0, else splitmix64 of both.

    A sampled token depends on (seed, position) only, so the sequences of one request need different seeds.
    """
    return splitmix64(seed + index * GOLDEN) if index else seed & WORD


def sampling_params(message: pb.Submit) -> SamplingParams:
    """Return the sampling of one sequence; the router has filled in every default."""
    sampling = sampling_from_proto(message.sampling)
    return replace(sampling, seed=fold_seed(sampling.seed, message.index), constraint=constraint_of(message))


def constraint_of(message: pb.Submit) -> Constraint | None:
    """Return the constraint on a sequence's output, if any."""
    kind = message.WhichOneof("constraint")
    return None if kind is None else Constraint(ConstraintKind(kind), getattr(message, kind))


@dataclass(frozen=True, slots=True)
class SubmitLimits:
    """Limits of a submit: tokens of a sequence, token ids below `vocab_size`, slots in a block."""

    max_model_len: int
    vocab_size: int
    block_size: int

    def check(self, new: NewSequence) -> None:
        """Raise InvalidRequest for values that would fail the engine or a step, and so every sequence of the worker."""
        if max(new.tokens) >= self.vocab_size:
            what = f"token id {max(new.tokens)}; expected 0 to {self.vocab_size - 1}"
            raise InvalidRequest(FieldViolation("prompt_token_ids", what))
        blocks = len(new.tokens) // self.block_size
        if not new.no_cache and len(new.block_hashes) != blocks:
            what = f"{len(new.block_hashes)} hashes for {len(new.tokens)} tokens; expected {blocks}, one per full block"
            raise InvalidRequest(FieldViolation("block_hashes", what))


def engine_request(
    message: pb.Submit, sequence: SequenceId, fork_of: SequenceId | None, max_model_len: int, traceparent: str
) -> EngineRequest:
    """Return the engine's form of a submit.

    Raises InvalidRequest when its parts contradict each other, ProtocolViolation when packed fields are malformed.
    """
    tokens = unpack_u32(message.prompt_token_ids)
    before = message.output_tokens_before
    if not 0 < len(tokens) < max_model_len or before >= len(tokens):
        what = f"{len(tokens)} tokens, {before} of them output; expected 1 to {max_model_len - 1}, and a prompt"
        raise InvalidRequest(FieldViolation("prompt_token_ids", what))
    if message.sampling.max_tokens <= before:
        what = f"{message.sampling.max_tokens}, of which {before} were sampled before; expected more than that"
        raise InvalidRequest(FieldViolation("sampling.max_tokens", what))
    if not message.no_cache and len(message.parent_digest) != LINK_BYTES:
        what = f"{len(message.parent_digest)} bytes; expected {LINK_BYTES}"
        raise InvalidRequest(FieldViolation("parent_digest", what))
    sampling = sampling_params(message)
    prompt_tokens = len(tokens) - before
    stop = StopRule(
        max_tokens=sampling.max_tokens - before,
        min_tokens=max(0, sampling.min_tokens - before),
        eos_ids=frozenset(message.eos_token_ids),
        stop_token_ids=frozenset(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos and sampling.constraint is None,  # a constraint lets a text end in its own time
    )
    new = NewSequence(
        sequence=sequence,
        request_id=message.request_id,
        tokens=tuple(tokens),
        block_hashes=() if message.no_cache else unpack_hashes(message.block_hashes),
        parent_digest=message.parent_digest,
        max_len=min(max_model_len, prompt_tokens + sampling.max_tokens),
        stop=stop,
        priority=message.priority,
        fork_of=fork_of,
        no_cache=message.no_cache,
        traceparent=traceparent,
    )
    return EngineRequest(new, sampling, prompt_tokens, traced=bool(traceparent))


def load_message(load: EngineLoad, draining: bool) -> pb.Load:
    return pb.Load(
        running=load.running,
        waiting=load.waiting,
        num_blocks=load.num_blocks,
        unheld_blocks=load.unheld_blocks,
        pending_prefill_tokens=load.pending_prefill_tokens,
        decode_step_seconds=load.decode_step_seconds,
        prefill_seconds_per_token=load.prefill_seconds_per_token,
        step_age_seconds=load.step_age_seconds,
        step_predicted_seconds=load.step_predicted_seconds,
        steps=load.steps,
        manager_attached=load.manager_attached,
        draining=draining,
    )
