"""Requests that embed, through admission, routing and workers; the worker is a fake that speaks its protocol."""

from __future__ import annotations

import pytest

from common.contracts.errors import Unsupported
from common.contracts.types import FinishReason, PoolIdentity
from router.contracts.events import Admitted, Finished
from tests.support.router.fake_worker import IDENTITY, FakeWorker
from tests.support.router.frontend_harness import ends_of, frontend_over, in_background, request, until_nothing_left

EMBEDS = PoolIdentity(
    IDENTITY.model_fingerprint,
    IDENTITY.tokenizer_fingerprint,
    IDENTITY.block_size,
    IDENTITY.kv_geometry,
    pooling="mean, normalised",
)
VECTOR = b"\x00\x00\x80\x3f" * 2


def worker(number: int = 0) -> FakeWorker:
    return FakeWorker(f"worker-{number}", identity=EMBEDS)


async def test_a_request_that_embeds_ends_with_its_vector_and_holds_its_prompt_alone() -> None:
    one = worker()
    wanted = request(prompt=33, max_tokens=1, embeds=True)
    async with frontend_over(one) as harness, in_background(harness, wanted) as running:
        await one.until(lambda: len(one.submits) == 1)
        (submit,) = one.submits
        assert (submit.embeds, len(submit.prompt_token_ids)) == (True, 4 * 33)
        assert harness.admission.tokens_in_flight == 33
        one.step(admitted={submit.handle: 16}, finished={submit.handle: FinishReason.STOP}, embedding=VECTOR)
        admitted, *_, finished = await running
        assert isinstance(admitted, Admitted)
        assert isinstance(finished, Finished)
        assert (finished.embedding, finished.usage.output_tokens, finished.usage.cached_tokens) == (VECTOR, 0, 16)
        await until_nothing_left(harness)


async def test_a_lost_worker_costs_no_vector_and_no_second_one_comes() -> None:
    first, second = worker(0), worker(1)
    wanted = request(prompt=33, max_tokens=1, embeds=True)
    async with frontend_over(first, second) as harness, in_background(harness, wanted) as running:
        await harness.until(lambda: bool(first.submits or second.submits))
        dies, stays = (first, second) if first.submits else (second, first)
        dies.step(admitted={dies.submits[0].handle: 0})
        await dies.kill()
        await stays.until(lambda: len(stays.submits) == 1)
        (again,) = stays.submits
        assert (again.embeds, again.output_tokens_before) == (True, 0)
        stays.step(admitted={again.handle: 0}, finished={again.handle: FinishReason.STOP}, embedding=VECTOR)
        ends = ends_of(await running)
        assert [end.embedding for end in ends.values()] == [VECTOR]
        assert harness.registry.get_sample_value("quire:migrations_total") == 1
        await until_nothing_left(harness)


@pytest.mark.parametrize(("embeds", "identity"), [(True, IDENTITY), (False, EMBEDS)])
async def test_a_pool_of_the_other_kind_refuses_before_any_worker_sees_it(embeds: bool, identity: PoolIdentity) -> None:
    one = FakeWorker(identity=identity)
    async with frontend_over(one) as harness:
        with pytest.raises(Unsupported, match="quire serve MODEL --pooling"):
            await harness.events(request(embeds=embeds))
        await until_nothing_left(harness)
        assert one.submits == []
