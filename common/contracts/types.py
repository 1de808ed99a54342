"""Names that the pure cores share: ids, sampling, finish and miss reasons, pool identity and the decision record."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

from quire.api.types import (
    ANY_ARITHMETIC,
    NO_POOLING,
    FinishReason,
    KvGeometry,
    KvGroup,
    KvGroupKind,
    MissReason,
    PoolIdentity,
    TokenLogprobs,
    Usage,
)

__all__ = [
    "ANY_ARITHMETIC",
    "NO_POOLING",
    "TENANT_CANDIDATE",
    "TRIMMED",
    "BlockHash",
    "BlockId",
    "Candidate",
    "Constraint",
    "ConstraintKind",
    "Decision",
    "DecisionKind",
    "FinishReason",
    "FrameId",
    "KvGeometry",
    "KvGroup",
    "KvGroupKind",
    "MissReason",
    "PoolIdentity",
    "SamplingParams",
    "SequenceId",
    "SequencePhase",
    "ShortfallReason",
    "ThoughtBudget",
    "TokenLogprobs",
    "Usage",
]

BlockId = NewType("BlockId", int)
FrameId = BlockId
"""The number of a frame of the host tier; frames have columns as blocks have."""
"""Index of a block in one worker's pool."""

SequenceId = NewType("SequenceId", int)
"""Below 2^64, rising, never reused within one incarnation of a worker."""

BlockHash = NewType("BlockHash", bytes)
"""16 bytes: the hash of a full block's content and of everything before it (`common.contracts.hashing`)."""

TRIMMED = BlockId(-1)
"""Replaces a block in a block table once the block has left every layer's attention window."""


class SequencePhase(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    DRAINING_FINISH = "draining_finish"
    DRAINING_PREEMPT = "draining_preempt"


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
class ThoughtBudget:
    """Ends a thought by force: once thoughts have `max_tokens` tokens, the tokens `end_token_ids` come.

    A thought stands between `opener` and `closer`, at the beginning of the output alone, or `anywhere`. `is_open`: the
    prompt ends within it.
    """

    max_tokens: int
    opener: str
    closer: str
    end_token_ids: tuple[int, ...]
    is_open: bool = False
    anywhere: bool = False


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are sampled; every default is filled in. Ranges are in `protos/quire/types/v1/types.proto`.

    `constraint`, `thought` and `bad_words` travel beside the others: in requests and in submits they have fields of
    their own. `temperature` 0 is greedy, `top_k` 0 keeps all tokens. `logprobs` None returns none, 0 the sampled
    token's only, or beside it those of `logprob_token_ids` where there are any; `prompt_logprobs` is the same for the
    prompt's tokens. `bad_words` are runs of token ids that may not be sampled. Where a constraint forbids the end of a
    text and allows `closing_token_id`, that token stands for it.
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
    thought: ThoughtBudget | None = None
    prompt_logprobs: int | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    closing_token_id: int | None = None
    logprob_token_ids: tuple[int, ...] = ()

    @property
    def top_count(self) -> int:
        """Tokens beside the sampled one that have a log-probability at each position."""
        return len(self.logprob_token_ids) or self.logprobs or 0


class DecisionKind(StrEnum):
    ADMISSION = "admission"
    ROUTING = "routing"
    GRANT = "grant"
    EVICTION = "eviction"
    PREEMPTION = "preemption"
    MIGRATION = "migration"
    REJECTION = "rejection"
    RESET = "reset"
    PIN = "pin"
    QUEUED = "queued"
    SHORTFALL = "shortfall"
    OUTCOME = "outcome"
    PREFETCH = "prefetch"


class ShortfallReason(StrEnum):
    """Why a sequence was not admitted at once: the first reason of its short-fall."""

    BLOCKS = "too few blocks"
    PLACES = "no place in the batch"
    BEHIND = "behind another sequence"
    CHECKPOINT = "for a checkpoint of another sequence"
    FETCH = "for blocks that are fetched"


# Before the name of a candidate of a short-fall that is a tenant; the others are requests.
TENANT_CANDIDATE = "tenant "


@dataclass(frozen=True, slots=True)
class Candidate:
    """One option of a decision: its cost and the terms that add up to it, in one unit, or why it was excluded.

    In a routing decision the unit is predicted seconds. `figures` are the inputs of the terms.
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
    # The tenant of the request where a key showed it; empty otherwise.
    tenant: str = ""
    # The worker whose blocks or slots it is about, or that was chosen; empty where there is none.
    worker: str = ""
    # The name of the request's session; empty for none, and in records that do not begin or end a request.
    session: str = ""
