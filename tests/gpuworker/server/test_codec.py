"""From a router's submit to the engine's request: nothing is dropped, and what contradicts itself is refused."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from common.contracts.adapters import AdapterShare
from common.contracts.errors import InvalidRequest, ProtocolViolation
from common.contracts.hashing import block_digests, block_hash_of, little_endian_int32, partial_hashes, root_digest
from common.contracts.lease import LAST_BLOCK, RetainedBlocks
from common.contracts.limits import MAX_OWN_ADAPTER_NAMES, MAX_TENANT_CHARS
from common.contracts.types import (
    Constraint,
    ConstraintKind,
    KvGeometry,
    KvGroup,
    KvGroupKind,
    PoolIdentity,
    SamplingParams,
    SequenceId,
)
from common.wire.retention_codec import MOST_RANGES
from common.wire.sampling_codec import sampling_to_proto
from gpuworker.engine.ports import EngineLoad, EngineRequest
from gpuworker.scheduling.drafting import Speculation
from gpuworker.scheduling.sequence import Sequence
from gpuworker.server.codec import engine_request, fold_seed, load_message, sampling_params, share_of
from gpuworker.server.submit_check import SubmitLimits
from quire.gpuworker.v1 import gpuworker_pb2 as pb
from quire.types.v1 import types_pb2 as types

SEQUENCE = SequenceId(3)
PROMPT = list(range(10))
ROOT = root_digest("model", "tokenizer", 4)
LINKS = block_digests(ROOT, PROMPT, 4)
MAX_MODEL_LEN = 64
LIMITS = SubmitLimits(MAX_MODEL_LEN, 100, PoolIdentity("model", "tokenizer", 4, KvGeometry(1, 1, 1, 1, "float32")))


def submit(**changes: object) -> pb.Submit:
    """Return a submit of ten tokens in blocks of 4, eight more to be sampled; with the given changes."""
    parts: dict[str, object] = {
        "handle": 1,
        "request_id": "r1",
        "prompt_token_ids": little_endian_int32(PROMPT),
        "block_hashes": b"".join(map(block_hash_of, LINKS)),
        "parent_digest": LINKS[-1],
        "sampling": types.SamplingParams(temperature=0.5, max_tokens=8, seed=1),
    }
    return pb.Submit(**(parts | changes))  # type: ignore[arg-type]


def convert(message: pb.Submit, fork_of: int | None = None, traceparent: str = "") -> EngineRequest:
    LIMITS.check(message)
    return engine_request(message, SEQUENCE, None if fork_of is None else SequenceId(fork_of), LIMITS, traceparent)


CONTENT = "0123456789abcdef" * 4


def test_the_content_of_an_adapter_roots_the_chain() -> None:
    named = {"adapter": "sql", "adapter_fingerprint": CONTENT}
    root = root_digest("model", "tokenizer", 4, b"", [("adapter", CONTENT)])
    links = block_digests(root, PROMPT, 4)
    chain = {"block_hashes": b"".join(map(block_hash_of, links)), "parent_digest": links[-1]}
    assert convert(submit(**named, **chain)).new.parent_digest == links[-1] != LINKS[-1]
    with pytest.raises(InvalidRequest, match="block 0 has not the hash of its tokens"):
        convert(submit(**named))
    with pytest.raises(InvalidRequest, match="block 0 has not the hash of its tokens"):
        convert(submit(**chain))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"adapter": "sql"}, "needs its name and its fingerprint"),
        ({"adapter_fingerprint": CONTENT}, "needs its name and its fingerprint"),
        ({"adapter": "../sql", "adapter_fingerprint": CONTENT}, "cannot be a name"),
        ({"adapter": "sql", "adapter_fingerprint": CONTENT[1:]}, "expected a SHA-256"),
        ({"adapter": "sql", "adapter_fingerprint": CONTENT.upper()}, "expected a SHA-256"),
    ],
)
def test_an_adapter_has_a_name_and_a_content(fields: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        convert(submit(**fields))


def test_a_submit_becomes_a_sequence_with_its_chain() -> None:
    request = convert(submit(priority=-5, eos_token_ids=[2, 5], tracestate="a=1"), fork_of=1, traceparent="t")
    new = request.new
    assert (new.sequence, new.request_id, new.tokens) == (SEQUENCE, "r1", tuple(PROMPT))
    assert new.block_hashes == tuple(map(block_hash_of, LINKS))
    assert new.parent_digest == LINKS[-1]
    assert (new.max_len, new.priority, new.fork_of, new.traceparent) == (18, -5, 1, "t")
    assert (new.tracestate, convert(submit(tracestate="a=1")).new.tracestate) == ("a=1", "")
    assert (new.stop.max_tokens, new.stop.eos_ids) == (8, frozenset({2, 5}))
    assert (request.prompt_tokens, request.traced) == (10, True)


@pytest.mark.parametrize(
    ("block_size", "window", "groups", "no_cache", "count"),
    [
        (64, 0, (), False, 3 + 2),
        (32, 0, (), False, 0),
        (64, 128, (), False, 0),
        (64, 0, (KvGroup(KvGroupKind.FULL, 0, 1, (0,)), KvGroup(KvGroupKind.WINDOW, 128, 1, (1,))), False, 0),
        (64, 0, (), True, 0),
    ],
)
def test_prompts_in_blocks_of_64_slots_get_partial_hashes(
    block_size: int, window: int, groups: tuple[KvGroup, ...], no_cache: bool, count: int
) -> None:
    """There are a full block and two quarters; the first block's hashes chain to the root of the cache domain."""
    prompt, root = [5] * 100, root_digest("model", "tokenizer", block_size, b"domain")
    links = block_digests(root, prompt, block_size)
    hashes, packed = tuple(map(block_hash_of, links)), little_endian_int32(prompt)
    message = submit(
        prompt_token_ids=packed,
        block_hashes=b"".join(hashes),
        parent_digest=links[-1],
        cache_domain=b"domain",
        no_cache=no_cache,
    )
    geometry = KvGeometry(1, 1, 1, 1, "float32", window, groups=groups)
    limits = SubmitLimits(256, 100, PoolIdentity("model", "tokenizer", block_size, geometry))
    new = engine_request(message, SEQUENCE, None, limits, "").new
    assert len(new.partial_hashes) == count
    assert engine_request(message, SEQUENCE, SequenceId(1), limits, "").new.partial_hashes == ()
    if count:
        assert new.partial_hashes[:3] == partial_hashes(block_hash_of(root), packed, block_size)
        assert new.partial_hashes[3:] == partial_hashes(hashes[0], packed[4 * block_size :], block_size)
        assert Sequence(new, 0, hashed=True, partly=True).reserve().partial_hashes == new.partial_hashes
        assert Sequence(new, 0, hashed=True).reserve().partial_hashes == ()


def test_retained_tokens_become_blocks_in_the_reservation() -> None:
    """Blocks have four tokens: two are full before token 9, and token 10 stands in the third one."""
    retention = [
        pb.RetainedTokens(start=0, end=9, priority=80, seconds=60.0),
        pb.RetainedTokens(start=10, priority=50, seconds=5.0),
        pb.RetainedTokens(start=5, end=5, priority=80, seconds=60.0),
        pb.RetainedTokens(priority=101, seconds=60.0),
        pb.RetainedTokens(priority=80, seconds=float("inf")),
    ]
    new = convert(submit(retention=retention)).new
    assert new.retention == (RetainedBlocks(0, 2, 80, 60.0), RetainedBlocks(2, LAST_BLOCK, 50, 5.0))
    assert Sequence(new, 0, hashed=True).reserve().retention == new.retention
    many = [pb.RetainedTokens(priority=80, seconds=1.0)] * 1000
    assert len(convert(submit(retention=many)).new.retention) == MOST_RANGES


def test_a_scalar_that_the_router_left_unset_is_off_and_not_zero() -> None:
    sampling = sampling_params(pb.Submit(sampling=types.SamplingParams(temperature=0.0, max_tokens=8)))
    assert sampling == SamplingParams(temperature=0.0, max_tokens=8)
    assert (sampling.top_p, sampling.repetition_penalty) == (1.0, 1.0)


def test_sampling_is_as_the_router_says_but_for_the_seed_of_a_further_sequence() -> None:
    sampling = SamplingParams(temperature=0.5, max_tokens=8, logit_bias=((3, -2.0), (9, 1.0)), seed=7, logprobs=0, n=2)
    message = pb.Submit(sampling=sampling_to_proto(sampling))
    assert sampling_params(message) == sampling
    message.index = 1
    assert sampling_params(message) == replace(sampling, seed=fold_seed(7, 1))


@pytest.mark.parametrize("kind", list(ConstraintKind))
def test_a_constraint_is_part_of_how_tokens_are_drawn(kind: ConstraintKind) -> None:
    message = submit(**{kind.value: "{}"})
    assert convert(message).sampling.constraint == Constraint(kind, "{}")


def test_an_end_that_a_constraint_allows_counts_even_if_ends_are_to_be_ignored() -> None:
    sampling = types.SamplingParams(temperature=0.5, max_tokens=8, ignore_eos=True)
    free, bound = (convert(submit(sampling=sampling, eos_token_ids=[2], **more)) for more in ({}, {"regex": "ab?"}))
    assert (free.new.stop.stopping, bound.new.stop.stopping) == (frozenset(), frozenset({2}))


def test_no_end_of_the_router_is_sampled_before_min_tokens() -> None:
    """The router knows ends that the worker does not, as those of a chat template."""
    sampling = types.SamplingParams(temperature=0.5, max_tokens=8, min_tokens=3, stop_token_ids=[9])
    assert convert(submit(sampling=sampling, eos_token_ids=[5, 2])).sampling.stop_token_ids == (2, 5, 9)
    sampling.ignore_eos = True
    assert convert(submit(sampling=sampling, eos_token_ids=[5, 2])).sampling.stop_token_ids == (9,)
    sampling.ignore_eos, sampling.min_tokens = False, 0
    assert convert(submit(sampling=sampling, eos_token_ids=[5, 2])).sampling.stop_token_ids == (9,)


def test_a_closing_token_stands_for_all_ends_of_the_router() -> None:
    sampling = types.SamplingParams(temperature=0.5, max_tokens=8, closing_token_id=4)
    found = convert(submit(sampling=sampling, eos_token_ids=[5, 2], regex="a")).sampling
    assert (found.closing_token_id, found.stop_token_ids) == (4, (2, 5))


def test_sequences_of_one_request_draw_from_seeds_of_their_own() -> None:
    """The values are splitmix64's first outputs for seed 0, as published with it."""
    assert [fold_seed(0, index) for index in range(4)] == [
        0,
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]
    assert fold_seed(-1, 0) == 2**64 - 1


def test_output_of_an_earlier_run_counts_against_the_limits() -> None:
    sampling = types.SamplingParams(max_tokens=8, min_tokens=5)
    request = convert(submit(output_tokens_before=3, sampling=sampling))
    assert request.prompt_tokens == 7
    assert (request.new.stop.max_tokens, request.new.stop.min_tokens) == (5, 2)
    assert request.new.max_len == 15, "prompt and output together are what they were"


def test_the_longest_context_bounds_the_sequence() -> None:
    assert convert(submit(sampling=types.SamplingParams(max_tokens=1000))).new.max_len == MAX_MODEL_LEN


EMBEDS = replace(LIMITS, identity=replace(LIMITS.identity, pooling="last"))


def test_a_prompt_that_embeds_may_fill_the_context_and_ends_at_its_limit() -> None:
    ids = little_endian_int32([7] * MAX_MODEL_LEN)
    message = submit(embeds=True, no_cache=True, prompt_token_ids=ids, block_hashes=b"", parent_digest=b"")
    EMBEDS.check(message)
    new = engine_request(message, SEQUENCE, None, EMBEDS, "").new
    assert new.stop.limit(MAX_MODEL_LEN, new.max_len) == MAX_MODEL_LEN + 1
    longer = submit(embeds=True, prompt_token_ids=little_endian_int32([7] * (MAX_MODEL_LEN + 1)))
    with pytest.raises(InvalidRequest, match=f"expected 1 to {MAX_MODEL_LEN}"):
        EMBEDS.check(longer)


@pytest.mark.parametrize(("limits", "embeds"), [(LIMITS, True), (EMBEDS, False)])
def test_a_worker_serves_one_kind_alone(limits: SubmitLimits, embeds: bool) -> None:
    with pytest.raises(InvalidRequest, match=f"embeds: is {embeds}, and the pooling here is"):
        limits.check(submit(embeds=embeds))


def test_a_request_that_is_not_to_be_cached_has_no_chain() -> None:
    new = convert(submit(no_cache=True)).new
    assert (new.block_hashes, new.no_cache) == ((), True)


def test_a_scored_prompt_says_what_the_router_has_already() -> None:
    sampling = types.SamplingParams(max_tokens=8, prompt_logprobs=2)
    new = convert(submit(sampling=sampling, prompt_logprobs_before=4, output_tokens_before=3)).new
    assert (new.score_from, new.score_until) == (4, 6)
    plain = convert(submit()).new
    assert (plain.score_from, plain.score_until) == (0, 0)


@pytest.mark.parametrize("scored", [None, 0], ids=["computed", "scored"])
def test_nothing_need_be_sampled_of_a_prompt(scored: int | None) -> None:
    request = convert(submit(sampling=types.SamplingParams(max_tokens=0, prompt_logprobs=scored)))
    assert (request.new.stop.max_tokens, request.new.max_len) == (0, 10)
    with pytest.raises(InvalidRequest, match="expected more than that"):
        convert(submit(sampling=types.SamplingParams(max_tokens=3), output_tokens_before=3))


def test_bad_words_are_runs_of_ids() -> None:
    message = submit(bad_words=[little_endian_int32([4, 5]), little_endian_int32([6])])
    assert convert(message).sampling.bad_words == ((4, 5), (6,))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"prompt_logprobs_before": 10}, "prompt_logprobs_before: 10; expected less than the prompt's 10 tokens"),
        ({"tracestate": "a=" + 511 * "b"}, "tracestate: has a length of 513; expected at most 512"),
        (
            {"sampling": types.SamplingParams(logprob_token_ids=[4, 4])},
            "sampling.logprob_token_ids: has an id twice; expected each once",
        ),
        (
            {"sampling": types.SamplingParams(logprob_token_ids=[100])},
            "sampling.logprob_token_ids: has 1 ids such as 100; expected 0 to 99",
        ),
        ({"bad_words": [b""]}, "bad_words: has a word that is not a list of int32 ids"),
        ({"bad_words": [b"abc"]}, "bad_words: has a word that is not a list of int32 ids"),
        ({"sampling": types.SamplingParams(max_tokens=1, closing_token_id=-1)}, "sampling.closing_token_id: is -1"),
        ({"bad_words": [bytes(4 * 16_385)]}, "bad_words: has 16385 ids; expected at most 16384"),
        ({"sampling": types.SamplingParams(max_tokens=1, prompt_logprobs=21)}, "sampling.prompt_logprobs: is 21"),
    ],
)
def test_what_cannot_be_scored_or_forbidden_is_refused(changes: dict[str, object], what: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(what)):
        convert(submit(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_token_ids": b""},
        {"prompt_token_ids": little_endian_int32([1] * MAX_MODEL_LEN)},
        {"output_tokens_before": len(PROMPT)},
    ],
    ids=["no prompt", "no room to draw", "nothing but output"],
)
def test_a_prompt_that_cannot_be_run_is_refused_with_the_numbers(changes: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match="expected 1 to 63"):
        convert(submit(**changes))


def test_bytes_that_hold_no_whole_tokens_are_refused() -> None:
    with pytest.raises(ProtocolViolation, match="no whole number"):
        convert(submit(prompt_token_ids=b"\0" * 5))


def test_bytes_that_hold_no_whole_hashes_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="17 bytes; expected 32"):
        convert(submit(block_hashes=b"\0" * 17))


def test_a_load_is_reported_whole() -> None:
    load = EngineLoad(
        1, 2, 3, 4, 5, 0.5, 0.25, 2.0, 4.0, 6, 7, 8, 9, True, fetch_seconds_per_block=0.75, fetch_setup_seconds=0.125
    )
    assert load_message(load, draining=True) == pb.Load(
        running=1,
        waiting=2,
        num_blocks=3,
        unheld_blocks=4,
        pending_prefill_tokens=5,
        decode_step_seconds=0.5,
        prefill_seconds_per_token=0.25,
        step_age_seconds=2.0,
        step_predicted_seconds=4.0,
        steps=6,
        sampled_tokens=7,
        computed_tokens=8,
        prefill_tokens_in_flight=9,
        manager_attached=True,
        draining=True,
        fetch_seconds_per_block=0.75,
        fetch_setup_seconds=0.125,
    )


def test_a_prediction_is_what_the_sequence_drafts_from() -> None:
    message = submit(prediction_token_ids=little_endian_int32([5, 6, 7]), output_tokens_before=4)
    assert convert(message).new.speculation == Speculation((5, 6, 7), 4)
    assert convert(submit()).new.speculation == Speculation()


def test_a_prediction_ends_where_the_vocabulary_does() -> None:
    message = submit(prediction_token_ids=little_endian_int32([5, 100, 7]))
    assert convert(message).new.speculation == Speculation((5,))


def test_a_prediction_that_is_no_list_of_ids_is_refused() -> None:
    with pytest.raises(ProtocolViolation):
        convert(submit(prediction_token_ids=b"abc"))


def test_a_constrained_sequence_drafts_and_one_with_a_budget_of_thoughts_does_not() -> None:
    prediction = little_endian_int32([5])
    assert convert(submit(regex="a", prediction_token_ids=prediction)).new.speculation == Speculation((5,))
    budget = types.ThoughtBudget(max_tokens=4, opener="<a>", closer="</a>", end="</a>")
    thinking = submit(thought_budget=budget, thought_end_token_ids=[9], prediction_token_ids=prediction)
    assert convert(thinking).new.speculation is None


def test_a_share_arrives() -> None:
    share = pb.AdapterShare(tenant="acme", names=["acme-*", "sql"], max_bytes=9)
    assert share_of(pb.LoadAdapter(share=share)) == AdapterShare("acme", ("acme-*", "sql"), 9)
    assert share_of(pb.LoadAdapter(folder="acme")) == AdapterShare()


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.LoadAdapter(share=pb.AdapterShare(tenant="t" * (MAX_TENANT_CHARS + 1))), "share"),
        (pb.LoadAdapter(share=pb.AdapterShare(names=["a"] * (MAX_OWN_ADAPTER_NAMES + 1))), "share"),
        (pb.LoadAdapter(share=pb.AdapterShare(names=["*"])), "share.names"),
        (pb.LoadAdapter(share=pb.AdapterShare(names=["a*b"])), "share.names"),
        (pb.LoadAdapter(folder="../acme"), "folder"),
        (pb.LoadAdapter(folder="acme/.."), "folder"),
    ],
)
def test_a_share_is_bounded_and_a_folder_is_one_name(message: pb.LoadAdapter, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        share_of(message)
    assert [each.field for each in refused.value.violations] == [field]
