"""Value types that clients and services share: finish and miss reasons, usage, log-probabilities, pool identity.

This module imports the standard library and `quire.api.errors` only, so that the pure cores may use it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, fields
from enum import StrEnum

from quire.api.errors import Mismatch


class FinishReason(StrEnum):
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
    UNRESUMABLE = "unresumable"
    UNFETCHED = "unfetched"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probability of one token and of the most likely ones at its place, (token id, logprob), best first.

    A token of a prompt has its `rank` too: 1 where it is the most likely one. 0 for a token of an output.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """The tokens that one sequence cost. Of those that it drafted, the accepted ones are output. A draft model
    guessed those of `model_drafted_tokens`. Of the cached tokens, `host_cached_tokens` were in host memory and copied
    from there, `disk_cached_tokens` came from disk and `peer_cached_tokens` from another worker while it waited."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    drafted_tokens: int = 0
    accepted_draft_tokens: int = 0
    model_drafted_tokens: int = 0
    accepted_model_draft_tokens: int = 0
    host_cached_tokens: int = 0
    disk_cached_tokens: int = 0
    peer_cached_tokens: int = 0


class KvGroupKind(StrEnum):
    """How long the K/V of a group's layers is read."""

    FULL = "full"
    WINDOW = "window"
    CHUNK = "chunk"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers whose K/V is read equally long, by their numbers in the model.

    With FULL a token reads all before it and `span` is 0; with WINDOW the last `span` ones, itself included; with CHUNK
    those of its own chunk of `span`. Layers of a STATE group keep a state in place of K and V: a block of theirs is a
    checkpoint, the states behind all tokens up to its end, and `span` is 0. A block is `pages` pages of the pool.
    """

    kind: KvGroupKind
    span: int
    pages: int
    layers: tuple[int, ...]

    def __str__(self) -> str:
        span = f" of {self.span}" if self.span else ""
        return f"{self.kind.value}{span} in {self.pages} pages: {','.join(map(str, self.layers))}"


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """Shape of one token's K/V.

    `num_layers` counts the layers that keep K/V of their own. `window` is the widest attention window if every layer
    has one, else 0. With `values_in_keys` V is the first `head_dim_v` numbers of K and is kept nowhere else. Where
    layers differ, `shapes` says how (gpuworker/memory/layout.py), and the other fields are those of the first one.
    `groups` is empty where all layers keep K/V equally long. Else a block is a part of one group, the pool consists of
    pages, and the first group is FULL.
    """

    num_layers: int
    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    dtype: str
    window: int = 0
    # Not in `repr`, of which `namespace` is made.
    values_in_keys: bool = field(default=False, repr=False)
    shapes: str = field(default="", repr=False)
    groups: tuple[KvGroup, ...] = field(default=(), repr=False)


ANY_ARITHMETIC = "any"
NO_POOLING = "none"


@dataclass(frozen=True, slots=True)
class PoolIdentity:
    """The parts that must be equal before two services may exchange blocks, hashes or tokens."""

    model_fingerprint: str
    tokenizer_fingerprint: str
    block_size: int
    kv_geometry: KvGeometry
    hash_version: str = "1"
    arithmetic: str = ANY_ARITHMETIC
    """The arithmetic that fixes the bits of logits, where workers promise equal bits; else ANY_ARITHMETIC."""
    pooling: str = NO_POOLING
    """How prompts become vectors, as `common.checkpoint.pooling.Pooling` writes it; NO_POOLING where they continue."""

    @property
    def embeds(self) -> bool:
        """Whether workers make vectors of prompts; they generate nothing then."""
        return self.pooling not in ("", NO_POOLING)

    def differences(self, theirs: PoolIdentity) -> tuple[Mismatch, ...]:
        """Return every part in which the two differ, with the flag that changes it."""
        found = []
        for name, flag in _IDENTITY_FLAGS.items():
            ours, other = getattr(self, name), getattr(theirs, name)
            if ours != other:
                found.append(Mismatch(name, str(ours), str(other), flag))
        mine, others = self.kv_geometry, theirs.kv_geometry
        alike = (mine.values_in_keys, mine.shapes) == (others.values_in_keys, others.shapes)
        shape = "--model" if alike else "--model, or the Quire version"  # older ones keep other things of a model
        flags = {"dtype": "--dtype or --kv-cache-dtype"}
        if alike:  # checkpoints of states are a group, which workers without a prefix cache have not
            flags["groups"] = "--model or --no-prefix-caching"
        for part in fields(KvGeometry):
            ours, other = getattr(mine, part.name), getattr(others, part.name)
            if ours != other:
                flag = flags.get(part.name, shape)
                found.append(Mismatch(f"kv_geometry.{part.name}", _in_words(ours), _in_words(other), flag))
        return tuple(found)

    @property
    def namespace(self) -> str:
        """Key prefix of the index in Redis; two identities that differ in any part have different ones."""
        parts = f"{self.tokenizer_fingerprint} {self.kv_geometry} {self.hash_version} {self.arithmetic}"
        if self.embeds:
            parts = f"{parts} {self.pooling}"
        if self.kv_geometry.values_in_keys:
            parts = f"{parts} values_in_keys"
        if self.kv_geometry.shapes:
            parts = f"{parts} {self.kv_geometry.shapes}"
        if self.kv_geometry.groups:
            parts = " ".join([parts, *map(str, self.kv_geometry.groups)])
        rest = hashlib.sha256(parts.encode())
        return f"{{quire:{self.model_fingerprint[:16]}:{rest.hexdigest()[:16]}:{self.block_size}}}"


def _in_words(part: object) -> str:
    """Return a part of a geometry for a reader; the numbers of layers would take lines."""
    return "; ".join(map(str, part)) if isinstance(part, tuple) else str(part)


_IDENTITY_FLAGS = {
    "model_fingerprint": "--model",
    "tokenizer_fingerprint": "--model or --tokenizer",
    "block_size": "--block-size",
    "hash_version": "the Quire version",
    "arithmetic": "--deterministic, --dtype, --quantization or --simulate, or run both on equal processors",
    "pooling": "--pooling",
}
