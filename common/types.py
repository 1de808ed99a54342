"""Names that the pure cores share: ids, sampling, finish and miss reasons, pool identity and the decision record."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import NewType

from common.errors import Mismatch

BlockId = NewType("BlockId", int)
"""Index of a block in one worker's pool."""

SequenceId = NewType("SequenceId", int)
"""u32, rising, never reused within one incarnation of a worker."""

BlockHash = NewType("BlockHash", bytes)
"""16 bytes: the hash of a full block's content and of everything before it (`common.hashing`)."""

TRIMMED = BlockId(-1)
"""Stands in a block table where a block has left every layer's attention window."""


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"


class MissReason(StrEnum):
    """Why the prefix cache served no more blocks than it did."""

    FULL_HIT = "full_hit"
    BELOW_BLOCK = "below_block"
    DIVERGED_AT = "diverged_at"
    EVICTED = "evicted"
    NEVER_SEEN = "never_seen"
    CAPPED = "capped"
    WINDOWED = "windowed"
    DISABLED = "disabled"


class SequencePhase(StrEnum):
    """Where a sequence is in its life at the worker."""

    WAITING = "waiting"
    RUNNING = "running"
    DRAINING_FINISH = "draining_finish"
    DRAINING_PREEMPT = "draining_preempt"


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """Shape of one token's K/V. `window` is the widest attention window if every layer has one, else 0."""

    num_layers: int
    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    dtype: str
    window: int = 0


ANY_ARITHMETIC = "any"


@dataclass(frozen=True, slots=True)
class PoolIdentity:
    """What must be equal before two services may exchange blocks, hashes or tokens."""

    model_fingerprint: str
    tokenizer_fingerprint: str
    block_size: int
    kv_geometry: KvGeometry
    hash_version: str = "1"
    arithmetic: str = ANY_ARITHMETIC
    """What decides the bits of a token's logits, where workers promise equal bits; else ANY_ARITHMETIC."""

    def differences(self, theirs: PoolIdentity) -> tuple[Mismatch, ...]:
        """Return every part in which the two differ, with the flag that changes it."""
        found = []
        for name, flag in _IDENTITY_FLAGS.items():
            ours, other = getattr(self, name), getattr(theirs, name)
            if ours != other:
                found.append(Mismatch(name, str(ours), str(other), flag))
        for part in fields(KvGeometry):
            ours, other = getattr(self.kv_geometry, part.name), getattr(theirs.kv_geometry, part.name)
            if ours != other:
                flag = "--dtype or --kv-cache-dtype" if part.name == "dtype" else "--model"
                found.append(Mismatch(f"kv_geometry.{part.name}", str(ours), str(other), flag))
        return tuple(found)

    @property
    def namespace(self) -> str:
        """Key prefix of the index in Redis; two identities that differ in any part have different ones."""
        parts = f"{self.tokenizer_fingerprint} {self.kv_geometry} {self.hash_version} {self.arithmetic}"
        rest = hashlib.sha256(parts.encode())
        return f"{{quire:{self.model_fingerprint[:16]}:{rest.hexdigest()[:16]}:{self.block_size}}}"


_IDENTITY_FLAGS = {
    "model_fingerprint": "--model",
    "tokenizer_fingerprint": "--model",
    "block_size": "--block-size",
    "hash_version": "the Quire version",
    "arithmetic": "--deterministic, --dtype, --quantization or --simulate, or run both on equal processors",
}


class ConstraintKind(StrEnum):
    """The language in which a constraint is written; the names are those of the wire's fields."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the whole output must match: a JSON schema, a regular expression, or a grammar in Lark's notation."""

    kind: ConstraintKind
    text: str


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn, with every default filled in. See `protos/quire/types/v1/types.proto` for ranges.

    `constraint` travels beside the others, not with them: in requests and in submits it has a field of its own.
    `temperature` 0 is greedy, `top_k` 0 keeps all tokens, `logprobs` None returns none, 0 only that of the drawn token.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1
    include_stop: bool = False
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probability of one output token and of the most likely ones, (token id, logprob), best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """What one sequence cost, in tokens."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0


class DecisionKind(StrEnum):
    """What a decision record is about."""

    ADMISSION = "admission"
    ROUTING = "routing"
    GRANT = "grant"
    EVICTION = "eviction"
    PREEMPTION = "preemption"
    MIGRATION = "migration"
    REJECTION = "rejection"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One option of a decision: its cost and the terms that add up to it, in one unit, or why it was out.

    In a routing decision the unit is predicted seconds. `figures` are what the terms were worked out from.
    """

    name: str
    cost: float | None = None
    terms: tuple[tuple[str, float], ...] = ()
    rejected: str = ""
    figures: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """One recorded decision: the one source of the span event, the log line, the decision RPC and the golden trace."""

    decision_id: str
    kind: DecisionKind
    time_ns: int
    chosen: str
    request_id: str = ""
    candidates: tuple[Candidate, ...] = ()
    reasons: tuple[str, ...] = ()
    signal_ages: tuple[tuple[str, float], ...] = ()
    victim: str = ""
    beneficiary: str = ""
    figures: tuple[tuple[str, float], ...] = field(default=())
    traceparent: str = ""
