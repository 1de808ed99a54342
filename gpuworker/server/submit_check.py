"""Checks a submit before the engine sees it: a number that could fail a step is refused, for that submit alone.

The worker computes the chain of block hashes again from the tokens and the cache domain. So no router, faulty or
hostile, can put tokens under the hashes of other tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from common.contracts.adapters import NAME_WORDS, is_adapter_name, is_fingerprint, root_keys
from common.contracts.errors import FieldViolation, InvalidRequest
from common.contracts.hashing import (
    DIGEST_BYTES,
    KEY_BYTES,
    MAX_DOMAIN_BYTES,
    MIN_PARTIAL_BLOCK,
    all_partial_hashes,
    block_hash_of,
    packed_digests,
    root_digest,
)
from common.contracts.limits import (
    MAX_CONSTRAINT_BYTES,
    MAX_CONTINUATION_BYTES,
    MAX_LOGPROBS,
    MAX_PRIORITY,
    MAX_SUBMIT_IDS,
    MAX_THOUGHT_MARK_CHARS,
    MAX_TRACEPARENT_CHARS,
    MAX_TRACESTATE_CHARS,
)
from common.contracts.types import BlockHash, PoolIdentity
from common.wire.packing import unpack_u32
from quire.gpuworker.v1 import gpuworker_pb2 as pb
from quire.types.v1 import types_pb2 as types

_NAME: Final = re.compile(rf"[\x21-\x7e]{{0,{MAX_TRACEPARENT_CHARS}}}")
# A caller without a key is a tenant, "peer" and its address.
_TENANT: Final = re.compile(rf"[\x20-\x7e]{{0,{MAX_TRACEPARENT_CHARS}}}")
_ROOTS_KEPT: Final = 1024


@dataclass(frozen=True, slots=True)
class _Range:
    """The values that a number may have: `low` to `high`, `low` itself only if it is not `open`."""

    low: float
    high: float = math.inf
    open: bool = False

    def __contains__(self, value: float) -> bool:
        return math.isfinite(value) and self.low <= value <= self.high and not (self.open and value == self.low)

    def __str__(self) -> str:
        low = f"more than {self.low:g}" if self.open else f"at least {self.low:g}"
        return low if self.high == math.inf else f"{low}, at most {self.high:g}"


RANGES: Final = {
    "temperature": _Range(0),
    "top_p": _Range(0, 1, open=True),
    "top_k": _Range(0),
    "min_p": _Range(0, 1),
    "max_tokens": _Range(0),
    "min_tokens": _Range(0),
    "repetition_penalty": _Range(0, open=True),
    "presence_penalty": _Range(-2, 2),
    "frequency_penalty": _Range(-2, 2),
    "logprobs": _Range(0, MAX_LOGPROBS),
    "prompt_logprobs": _Range(0, MAX_LOGPROBS),
}
"""The ranges of protos/quire/types/v1/types.proto. An unset scalar takes a default that is in its range."""
_BIAS: Final = _Range(-100, 100)


@dataclass(frozen=True, slots=True)
class SubmitLimits:
    """What bounds a submit: tokens of a sequence, token ids below `vocab_size`, and what the block hashes root in."""

    max_model_len: int
    vocab_size: int
    identity: PoolIdentity

    def check(self, message: pb.Submit) -> None:
        """Raise InvalidRequest with everything that is wrong besides tokens and hashes."""
        wrong = [*_envelope(message), *_sampling(message.sampling), *self._ids(message), *self._lengths(message)]
        wrong += self._kind(message)
        if wrong:
            raise InvalidRequest(*wrong)

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """Raise InvalidRequest for an id outside of the vocabulary; unsigned ids, so a negative one is large."""
        if max(tokens) >= self.vocab_size:
            what = f"token id {max(tokens)}; expected 0 to {self.vocab_size - 1}"
            raise InvalidRequest(FieldViolation("prompt_token_ids", what))

    def prediction(self, message: pb.Submit) -> tuple[int, ...]:
        """Return the client's prediction up to the first id outside of the vocabulary, which no step could compute."""
        tokens = unpack_u32(message.prediction_token_ids)
        known = next((at for at, token in enumerate(tokens) if token >= self.vocab_size), len(tokens))
        return tuple(tokens[:known])

    def partial_hashes(self, message: pb.Submit, block_hashes: Sequence[BlockHash]) -> tuple[BlockHash, ...]:
        """Return the partial hashes of the prompt's blocks; none where blocks are too small, or nothing is cached.

        None too where layers have windows: parts of blocks are not copied then.
        """
        shape = self.identity.kv_geometry
        if message.no_cache or self.identity.block_size < MIN_PARTIAL_BLOCK or shape.window or shape.groups:
            return ()
        root = _root(self.identity, message.cache_domain, message.adapter_fingerprint)
        return all_partial_hashes(root, block_hashes, message.prompt_token_ids, self.identity.block_size)

    def chain(self, message: pb.Submit) -> tuple[tuple[BlockHash, ...], bytes]:
        """Return the hashes of the prompt's full blocks, and the digest that the next block's hash continues.

        Raises InvalidRequest when those of the submit are others. A submit that is not to be cached has none.
        """
        root = _root(self.identity, message.cache_domain, message.adapter_fingerprint)
        if message.no_cache:
            return (), root
        digests = packed_digests(root, message.prompt_token_ids, self.identity.block_size)
        hashes, last = tuple(map(block_hash_of, digests)), digests[-1] if digests else root
        if message.block_hashes != b"".join(hashes) or message.parent_digest != last:
            raise InvalidRequest(*_differences(message, hashes, last))
        return hashes, last

    def _kind(self, message: pb.Submit) -> Iterable[FieldViolation]:
        if message.embeds != self.identity.embeds:
            yield FieldViolation("embeds", f"is {message.embeds}, and the pooling here is {self.identity.pooling}")

    def _lengths(self, message: pb.Submit) -> Iterable[FieldViolation]:
        tokens, before = len(message.prompt_token_ids) // 4, message.output_tokens_before
        most = self.max_model_len - (0 if message.embeds else 1)
        if not 0 < tokens <= most or before >= tokens:
            what = f"{tokens} tokens, {before} of them output; expected 1 to {most}, and a prompt"
            yield FieldViolation("prompt_token_ids", what)
        sampling = message.sampling
        if before and sampling.max_tokens <= before:
            what = f"{sampling.max_tokens}, of which {before} were sampled before; expected more than that"
            yield FieldViolation("sampling.max_tokens", what)
        if message.prompt_logprobs_before >= max(1, tokens - before):
            what = f"{message.prompt_logprobs_before}; expected less than the prompt's {tokens - before} tokens"
            yield FieldViolation("prompt_logprobs_before", what)
        if sampling.min_tokens > sampling.max_tokens:
            what = f"is {sampling.min_tokens}; expected at most max_tokens, which is {sampling.max_tokens}"
            yield FieldViolation("sampling.min_tokens", what)

    def _ids(self, message: pb.Submit) -> Iterable[FieldViolation]:
        sampling = message.sampling
        lists = {
            "eos_token_ids": message.eos_token_ids,
            "sampling.stop_token_ids": sampling.stop_token_ids,
            "sampling.logit_bias": sampling.logit_bias,
            "sampling.logprob_token_ids": sampling.logprob_token_ids,
            "thought_end_token_ids": message.thought_end_token_ids,
        }
        long = {name: len(ids) for name, ids in lists.items() if len(ids) > MAX_SUBMIT_IDS}
        for name, count in long.items():
            yield FieldViolation(name, f"has {count} ids; expected at most {MAX_SUBMIT_IDS}")
        if any(not word or len(word) % 4 for word in message.bad_words):
            yield FieldViolation("bad_words", "has a word that is not a list of int32 ids; expected at least one id")
        elif (count := sum(map(len, message.bad_words)) // 4) > MAX_SUBMIT_IDS:
            yield FieldViolation("bad_words", f"has {count} ids; expected at most {MAX_SUBMIT_IDS}")
        if len(set(sampling.logprob_token_ids)) < len(sampling.logprob_token_ids):
            yield FieldViolation("sampling.logprob_token_ids", "has an id twice; expected each once")
        for name in [each for each in lists if each != "eos_token_ids"]:
            if name not in long and (unknown := [i for i in lists[name] if not 0 <= i < self.vocab_size]):
                what = f"has {len(unknown)} ids such as {unknown[0]}; expected 0 to {self.vocab_size - 1}"
                yield FieldViolation(name, what)
        if not 0 <= (closing := sampling.closing_token_id) < self.vocab_size:
            yield FieldViolation("sampling.closing_token_id", f"is {closing}; expected 0 to {self.vocab_size - 1}")


def _envelope(message: pb.Submit) -> Iterable[FieldViolation]:
    if abs(message.priority) > MAX_PRIORITY:
        what = f"is {message.priority}; expected -{MAX_PRIORITY} to {MAX_PRIORITY}"
        yield FieldViolation("priority", what)
    if math.isnan(message.timeout_seconds):
        yield FieldViolation("timeout_seconds", "is not a number; expected seconds")
    if not _TENANT.fullmatch(message.tenant):
        yield FieldViolation("tenant", f"expected printable ASCII, {MAX_TRACEPARENT_CHARS} characters at most")
    for name in ("request_id", "traceparent"):
        if not _NAME.fullmatch(getattr(message, name)):
            yield FieldViolation(name, f"expected printable ASCII without spaces, {MAX_TRACEPARENT_CHARS} at most")
    if message.HasField("thought_budget"):
        yield from _thought(message)
    yield from _sizes(message)
    yield from _adapter(message)


def _adapter(message: pb.Submit) -> Iterable[FieldViolation]:
    """A name without a content, or a content without a name, would root the hashes of another adapter, or the base."""
    if bool(message.adapter) != bool(message.adapter_fingerprint):
        yield FieldViolation("adapter", "needs its name and its fingerprint; expected both or neither")
    elif message.adapter and not is_adapter_name(message.adapter):
        yield FieldViolation("adapter", f"cannot be a name; expected {NAME_WORDS}")
    elif message.adapter and not is_fingerprint(message.adapter_fingerprint):
        yield FieldViolation("adapter_fingerprint", "expected a SHA-256 in hexadecimal digits")


def _sizes(message: pb.Submit) -> Iterable[FieldViolation]:
    for name, most in (("tracestate", MAX_TRACESTATE_CHARS), ("cache_domain", MAX_DOMAIN_BYTES)):
        if (length := len(getattr(message, name))) > most:
            yield FieldViolation(name, f"has a length of {length}; expected at most {most}")
    if (size := message.continuation.ByteSize()) > MAX_CONTINUATION_BYTES:
        yield FieldViolation("continuation", f"has {size} bytes; expected at most {MAX_CONTINUATION_BYTES}")
    kind = message.WhichOneof("constraint")
    if kind is not None and (size := len(getattr(message, kind).encode())) > MAX_CONSTRAINT_BYTES:
        yield FieldViolation(kind, f"has {size} bytes; expected at most {MAX_CONSTRAINT_BYTES}")


def _thought(message: pb.Submit) -> Iterable[FieldViolation]:
    budget = message.thought_budget
    for name in ("opener", "closer"):
        if not 0 < len(getattr(budget, name)) <= MAX_THOUGHT_MARK_CHARS:
            yield FieldViolation(f"thought_budget.{name}", f"expected 1 to {MAX_THOUGHT_MARK_CHARS} characters")
    if not message.thought_end_token_ids:
        yield FieldViolation("thought_end_token_ids", "is empty; expected the tokens that end a thought")


def _sampling(sampling: types.SamplingParams) -> Iterable[FieldViolation]:
    for name, allowed in RANGES.items():
        value = getattr(sampling, name)
        if sampling.HasField(name) and value not in allowed:  # type: ignore[arg-type]
            yield FieldViolation(f"sampling.{name}", f"is {value}; expected {allowed}")
    if (wrong := next((value for value in sampling.logit_bias.values() if value not in _BIAS), None)) is not None:
        yield FieldViolation("sampling.logit_bias", f"has the value {wrong}; expected {_BIAS}")


def _differences(message: pb.Submit, hashes: Sequence[BlockHash], last: bytes) -> Iterable[FieldViolation]:
    """Return which block is the first whose hash is not that of its tokens, or that only the digest differs."""
    given = message.block_hashes
    if len(given) != KEY_BYTES * len(hashes):
        what = f"{len(given)} bytes; expected {KEY_BYTES * len(hashes)}, one hash of {KEY_BYTES} for each full block"
        yield FieldViolation("block_hashes", what)
        return
    pairs = ((given[at * KEY_BYTES :][:KEY_BYTES], each) for at, each in enumerate(hashes))
    first = next((at for at, (theirs, ours) in enumerate(pairs) if theirs != ours), None)
    if first is not None:
        what = f"block {first} has not the hash of its tokens in this cache domain"
        yield FieldViolation("block_hashes", f"{what}; router and worker must agree on model, tokenizer and domain")
    else:
        what = (
            f"is not the digest of the last of {len(hashes)} full blocks, or of the root; expected {DIGEST_BYTES} bytes"
        )
        yield FieldViolation("parent_digest", what)


@lru_cache(_ROOTS_KEPT)
def _root(identity: PoolIdentity, cache_domain: bytes, adapter: str) -> bytes:
    fingerprints = identity.model_fingerprint, identity.tokenizer_fingerprint
    return root_digest(*fingerprints, identity.block_size, cache_domain, root_keys(adapter))
