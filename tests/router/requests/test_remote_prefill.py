"""A prompt is computed at one worker, and its request is served by another one, whatever happens to the first."""

from __future__ import annotations

import asyncio

import pytest

from common.contracts.adapters import AdapterRef
from common.contracts.errors import Overloaded, QuireError, QuotaViolation, Unauthenticated, Unavailable
from common.contracts.types import FinishReason
from quire.gpuworker.v1 import gpuworker_pb2 as pb
from router.contracts.events import Admitted
from tests.support.router.fake_worker import FakeWorker, prompt_of
from tests.support.router.frontend_harness import (
    CLOCK,
    FixedIndex,
    Harness,
    ends_of,
    frontend_over,
    in_background,
    request,
    tokens_of,
    until_nothing_left,
)

TOKENS = [100, 101, 102]


def workers(automatic: bool = True) -> tuple[FakeWorker, FakeWorker]:
    """Return a worker for prompts, and one that decodes and answers at once."""
    computes = FakeWorker("p", disaggregation=pb.DISAGGREGATION_PREFILL, fetches_blocks=True, automatic=automatic)
    return computes, FakeWorker("d", disaggregation=pb.DISAGGREGATION_DECODE, fetches_blocks=True, automatic=True)


def placed(harness: Harness) -> list[tuple[str, tuple[str, ...], dict[str, float]]]:
    """Return the worker of each routing decision, its reasons, and its figures."""
    return [(each.chosen, each.reasons, dict(each.figures)) for each in harness.decisions.find(kind="routing")]


async def test_a_prompt_is_computed_at_the_one_and_served_by_the_other() -> None:
    p, d = workers()
    async with frontend_over(p, d, index=FixedIndex({}), remote_prefill="always") as harness:
        events = await harness.events(request(prompt=11, request_id="mine", priority=3, logprobs=2))
        assert tokens_of(events) == TOKENS
        (first,), (second,) = p.submits, d.submits
        assert prompt_of(first) == list(range(1, 9))
        assert (first.request_id, first.sampling.max_tokens, first.priority) == ("mine.prompt", 0, 3)
        assert (len(first.block_hashes) // 16, first.HasField("continuation"), first.no_cache) == (2, False, False)
        assert first.block_hashes == second.block_hashes[: 2 * 16]
        assert not first.sampling.HasField("logprobs")
        assert (prompt_of(second), second.request_id) == (list(range(1, 12)), "mine")
        assert first.cache_domain == second.cache_domain
        assert sum(isinstance(event, Admitted) for event in events) == 1
        assert ends_of(events)[0].usage.prompt_tokens == 11
        ((chosen, reasons, figures),) = placed(harness)
        assert chosen == "d"
        assert reasons[0].startswith("prefill: p computed 8 tokens of its prompt in ")
        assert {"prefill_here_s", "prefill_there_s", "prefill_s"} < set(figures)
        assert not p.cancels
        await until_nothing_left(harness)


async def test_the_end_says_in_which_phase_the_prompt_was_computed() -> None:
    p, d = workers()
    async with frontend_over(p, d, index=FixedIndex({}), remote_prefill="always") as harness:
        await harness.events(request(prompt=11))
        (outcome,) = harness.decisions.find(kind="outcome")
        assert {"prompt_worker: p"} < set(outcome.reasons)
        figures = dict(outcome.figures)
        assert figures["computed_elsewhere"] == 8
        assert figures["before.prefill_elsewhere"] > 0.0


@pytest.mark.parametrize(
    "fields", [{"prompt_logprobs": 0}, {"no_cache": True}, {"prompt": 4}], ids=["scored", "not cached", "short"]
)
async def test_what_cannot_be_fetched_is_not_computed_elsewhere(fields: dict[str, int]) -> None:
    p, d = workers()
    async with frontend_over(p, d, index=FixedIndex({}), remote_prefill="always") as harness:
        await harness.events(request(**{"prompt": 11, **fields}))
        assert (len(p.submits), len(d.submits)) == (0, 1)


async def test_one_prompt_is_computed_for_all_sequences_of_a_request() -> None:
    p, d = workers()
    async with frontend_over(p, d, index=FixedIndex({}), remote_prefill="always") as harness:
        events = await harness.events(request(prompt=11, n=3))
        assert [tokens_of(events, index) for index in range(3)] == [TOKENS] * 3
        assert (len(p.submits), len(d.submits)) == (1, 3)
        assert [each.HasField("fork_of") for each in d.submits] == [False, True, True]


async def test_an_idle_pair_computes_a_short_prompt_where_it_is_sampled() -> None:
    p, d = workers()
    async with frontend_over(p, d, index=FixedIndex({})) as harness:
        assert tokens_of(await harness.events(request(prompt=11))) == TOKENS
        assert not p.submits
        ((chosen, reasons, figures),) = placed(harness)
        assert (chosen, reasons) == ("d", ())
        assert figures["prefill_here_s"] < figures["prefill_there_s"]


async def test_off_means_never() -> None:
    p, d = workers()
    async with frontend_over(p, d, index=FixedIndex({}), remote_prefill="off") as harness:
        await harness.events(request(prompt=11))
        assert not p.submits


async def test_a_worker_for_prompts_serves_whole_requests_where_no_other_is() -> None:
    p, _ = workers()
    async with frontend_over(p, index=FixedIndex({}), remote_prefill="always") as harness:
        assert tokens_of(await harness.events(request(prompt=11))) == TOKENS
        assert [each.sampling.max_tokens for each in p.submits] == [3]


@pytest.mark.parametrize("end", ["killed", "refused", "cancelled", "failed"])
async def test_whatever_ends_the_prompt_the_request_is_served(end: str) -> None:
    p, d = workers(automatic=False)
    async with frontend_over(p, d, index=FixedIndex({}), remote_prefill="always") as harness:
        async with in_background(harness, request(prompt=11)) as task:
            await p.until(lambda: bool(p.submits))
            assert not d.submits
            match end:
                case "killed":
                    await p.kill()
                case "refused":
                    p.refuse(p.submits[0].handle, Unavailable("it drains"))
                case _:
                    reason = FinishReason.CANCELLED if end == "cancelled" else FinishReason.ERROR
                    p.step(finished={p.submits[0].handle: reason})
            assert tokens_of(await task) == TOKENS
        ((_, reasons, _),) = placed(harness)
        assert reasons[0].startswith("prefill: p did not compute 8 tokens of its prompt, in ")
        (outcome,) = harness.decisions.find(kind="outcome")
        assert any(each.startswith("prompt_end: ") for each in outcome.reasons)
        assert not harness.decisions.find(kind="migration")
        await until_nothing_left(harness)


async def test_a_prompt_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.placement.remote_prefill.LEAST_PATIENCE_S", 0.05)
    p, d = workers(automatic=False)
    async with frontend_over(p, d, index=FixedIndex({}), remote_prefill="always") as harness:
        assert tokens_of(await harness.events(request(prompt=11))) == TOKENS
        await p.until(lambda: bool(p.cancels))
        assert p.cancels[0].handle == p.submits[0].handle
        ((_, reasons, _),) = placed(harness)
        assert "it took longer than 0." in reasons[0]
        await until_nothing_left(harness)


async def test_a_client_that_leaves_ends_the_prompt() -> None:
    p, d = workers(automatic=False)
    async with frontend_over(p, d, index=FixedIndex({}), remote_prefill="always") as harness:
        async with in_background(harness, request(prompt=11)) as task:
            await p.until(lambda: bool(p.submits))
            task.cancel()
            await asyncio.wait({task})
        await p.until(lambda: bool(p.cancels))
        assert not d.submits
        await until_nothing_left(harness)


async def test_a_revoked_key_ends_the_prompt() -> None:
    p, d = workers(automatic=False)
    async with frontend_over(p, d, index=FixedIndex({}), remote_prefill="always") as harness:
        async with in_background(harness, request(prompt=11)) as task:
            await p.until(lambda: bool(p.submits))
            harness.frontend.end_revoked(lambda caller: False)
            with pytest.raises(Unauthenticated):
                await task
        await p.until(lambda: bool(p.cancels))
        assert not d.submits
        await until_nothing_left(harness)


async def test_a_deadline_holds_for_the_prompt_too() -> None:
    p, d = workers(automatic=False)
    wanted = request(prompt=11, deadline=CLOCK.monotonic() + 60.0)
    pool = frontend_over(p, d, index=FixedIndex({}), remote_prefill="always")
    async with pool as harness, in_background(harness, wanted) as task:
        await p.until(lambda: bool(p.submits))
        assert 0.0 < p.submits[0].timeout_seconds <= 60.0
        p.step(finished={p.submits[0].handle: FinishReason.LENGTH})
        assert tokens_of(await task) == TOKENS


async def test_a_request_that_loses_its_worker_moves_without_another_prefill() -> None:
    p, d = workers()
    d.automatic = False
    async with frontend_over(p, d, index=FixedIndex({}), remote_prefill="always") as harness:
        async with in_background(harness, request(prompt=11)) as task:
            await d.until(lambda: bool(d.submits))
            d.automatic = True
            await d.restart()
            assert tokens_of(await task) == TOKENS
        assert sum(not each.sampling.max_tokens for each in p.submits) == 1


async def test_a_prompt_counts_once_against_the_limits() -> None:
    p, d = workers(automatic=False)
    async with frontend_over(p, d, index=FixedIndex({}), remote_prefill="always") as harness:
        wanted = request(prompt=11)
        async with in_background(harness, wanted) as task:
            await p.until(lambda: bool(p.submits))
            assert harness.admission.tokens_in_flight == wanted.tokens
            p.step(finished={p.submits[0].handle: FinishReason.LENGTH})
            await task
        assert harness.registry.get_sample_value("quire:prompt_tokens_total") == 11.0
        await until_nothing_left(harness)


# ------------------------------------------------------------ adapters

B = AdapterRef("b", 64 * "b")


@pytest.mark.parametrize("in_memory", [True, False])
async def test_a_prompt_of_an_adapter_is_computed_where_the_adapter_is_loaded_for_it(in_memory: bool) -> None:
    p, d = workers()
    async with frontend_over(p, d, index=FixedIndex({}), remote_prefill="always") as harness:
        p.tell_of_adapters(b=in_memory)
        d.tell_of_adapters(b=True)
        await harness.until(lambda: all(each.adapters.by_name for each in harness.pool.models()))
        async with in_background(harness, request(prompt=11, adapter=B)) as answer:
            if not in_memory:
                await p.until(lambda: bool(p.loads))
                assert not p.submits
                assert p.loads[0].share.tenant == ""
                p.answer_load()
            assert tokens_of(await answer) == TOKENS
        (first,), (second,) = p.submits, d.submits
        assert (first.adapter, first.adapter_fingerprint) == ("b", 64 * "b")
        assert first.block_hashes == second.block_hashes[: 2 * 16]
        assert placed(harness)[0][1][0].startswith("prefill: p computed 8 tokens of its prompt in ")
        await until_nothing_left(harness)


@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        (Overloaded(QuotaViolation("worker.loras", "all are in use"), 1.0), "adapter b found no room: all are in use"),
        (Unavailable("it has another content"), "it has another content"),
    ],
)
async def test_a_worker_that_has_no_room_for_the_adapter_computes_no_prompt(refusal: QuireError, words: str) -> None:
    p, d = workers()
    async with frontend_over(p, d, index=FixedIndex({}), remote_prefill="always") as harness:
        p.tell_of_adapters(b=False)
        d.tell_of_adapters(b=True)
        await harness.until(lambda: all(each.adapters.by_name for each in harness.pool.models()))
        async with in_background(harness, request(prompt=11, adapter=B)) as answer:
            await p.until(lambda: bool(p.loads))
            p.answer_load(refusal)
            assert tokens_of(await answer) == TOKENS
        assert not p.submits
        assert words in placed(harness)[0][1][0]
        await until_nothing_left(harness)
