"""What a dry run says, and that what then happens is the same; that it leaves nothing behind."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.contracts.errors import Unsupported
from common.contracts.types import DecisionKind
from router.placement.admission import AdmissionLimits
from router.requests.explainer import Explainer, Foreseen
from router.tenants.tenancy import Caller, Tenant, TenantLimits
from tests.support.router.fake_worker import IDENTITY, FakeWorker
from tests.support.router.frontend_harness import (
    CLOCK,
    FixedIndex,
    Harness,
    frontend_over,
    in_background,
    request,
    until_nothing_left,
)


def explainer_of(harness: Harness) -> Explainer:
    return Explainer(harness.dispatcher, harness.admission, harness.frontend, CLOCK)


async def test_hits_costs_and_worker_are_those_of_the_decision_that_follows() -> None:
    index = FixedIndex({"worker-0": 2})
    async with frontend_over(FakeWorker(automatic=True), index=index) as harness:
        (model,) = harness.pool.models()
        index.answer = {model.worker_id: 2}
        found = await explainer_of(harness).explain(request(prompt=11))
        assert (found.outcome, found.reason, found.tied) == (Foreseen.PLACED, "", (model.worker_id,))
        assert (found.choice.hit_blocks, found.block_size, found.shareable_tokens) == (2, 4, 8)
        assert found.foresight.index_answered
        await harness.events(request(prompt=11))
        (routed,) = harness.decisions.find(kind=DecisionKind.ROUTING)
        (foreseen,), (real,) = found.choice.decision.candidates, routed.candidates
        assert (foreseen.name, foreseen.figures) == (real.name, real.figures)
        assert (found.choice.decision.chosen, found.choice.decision.worker) == (routed.chosen, routed.worker)


async def test_a_dry_run_leaves_nothing_behind() -> None:
    async with frontend_over(FakeWorker(automatic=True), index=FixedIndex({})) as harness:
        (model,) = harness.pool.models()
        before = (model.sequences, model.pending_prefill_tokens, model.unheld_blocks)
        for _ in range(3):
            found = await explainer_of(harness).explain(request(prompt=11))
            # Nor does the router expect the prompt's blocks at the worker from now on.
            assert found.choice.hit_blocks == 0
        assert (model.sequences, model.pending_prefill_tokens, model.unheld_blocks) == before
        await until_nothing_left(harness)
        assert len(harness.decisions) == 0
        await harness.events(request(prompt=11))
        # No id of a decision was used up: the admission has the first one.
        assert harness.decisions.find(kind=DecisionKind.ADMISSION)[0].decision_id == "id-1"


async def test_a_request_behind_others_waits() -> None:
    async with frontend_over(FakeWorker(max_num_seqs=1)) as harness:
        explain = explainer_of(harness).explain
        async with in_background(harness, request(n=2)):
            await harness.until(lambda: harness.admission.running == 1)
            full = await explain(request())
            assert full.outcome is Foreseen.QUEUED
            assert full.reason.startswith("no worker has a free slot: ")
            assert full.foresight.before == 0
            async with in_background(harness, request()):
                await harness.until(lambda: harness.admission.queued == 1)
                assert (await explain(request())).foresight.before == 1
                assert (await explain(request(priority=1))).foresight.before == 0


async def test_limits_refuse_with_their_words() -> None:
    limits = AdmissionLimits(max_tokens_in_flight=12)
    async with frontend_over(FakeWorker(), limits=limits) as harness:
        found = await explainer_of(harness).explain(request(prompt=10))
        words = "router.tokens_in_flight: 0 tokens in flight and 13 more requested; at most 12"
        assert (found.outcome, found.reason) == (Foreseen.REFUSED, words)
        tenant = Tenant("red", limits=TenantLimits(sequences=1))
        found = await explainer_of(harness).explain(request(prompt=2, n=2, caller=Caller(tenant)))
        assert (found.outcome, found.reason.partition(":")[0]) == (Foreseen.REFUSED, "tenant red.sequences")
        harness.frontend.draining = True
        assert "draining" in (await explainer_of(harness).explain(request(prompt=2))).reason


async def test_what_fits_no_worker_and_what_comes_too_late_is_said() -> None:
    async with frontend_over(FakeWorker()) as harness:
        explain = explainer_of(harness).explain
        large = await explain(request(prompt=10, max_tokens=100_000))
        assert (large.outcome, large.choice.worker) == (Foreseen.TOO_LARGE, None)
        (model,) = harness.pool.models()
        model.heartbeat(replace(model.load, prefill_seconds_per_token=1.0, steps=9), CLOCK.monotonic())
        late = await explain(request(), seconds=1e-9)
        assert late.outcome is Foreseen.TOO_LATE
        assert "the first token is predicted in" in late.reason
        assert (await explain(request(), seconds=1e9)).outcome is Foreseen.PLACED


async def test_without_a_worker_there_is_no_place() -> None:
    async with frontend_over() as harness:
        found = await explainer_of(harness).explain(request())
        assert (found.outcome, found.reason, found.shareable_tokens) == (Foreseen.NO_WORKER, "no worker is known", 0)


async def test_a_request_that_takes_no_hits_has_no_shareable_tokens() -> None:
    async with frontend_over(FakeWorker(), index=FixedIndex({})) as harness:
        explain = explainer_of(harness).explain
        assert (await explain(request(prompt=11, no_cache=True))).shareable_tokens == 0
        assert (await explain(request(prompt=11, prompt_logprobs=1))).shareable_tokens == 0
        assert (await explain(request(prompt=3))).shareable_tokens == 0


async def test_a_pool_that_embeds_explains_no_generation() -> None:
    async with frontend_over(FakeWorker(identity=replace(IDENTITY, pooling="last")), pooling="last") as harness:
        with pytest.raises(Unsupported):
            await explainer_of(harness).explain(request())
