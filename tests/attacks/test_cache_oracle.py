"""The cache discloses to no tenant whether another one sent a prompt."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from bench.oracle import auc
from quire.inference.v1 import inference_pb2 as pb
from tests.support.tenants import TenantSuite, random_prompts, tenant_suite

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROBES, TOKENS = 20, 320


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tenants(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TenantSuite]:
    """A victim and an attacker; the operator opened a domain for public prompts."""
    names = {"victim": "", "attacker": ""}
    async with tenant_suite(tmp_path_factory.mktemp("tenants"), names, end="[shared.public]\n") as running:
        yield running


async def probes(tenants: TenantSuite, tenant: str, prompts: list[list[int]]) -> list[pb.Admitted]:
    return [await tenants.probe(tenant, prompt) for prompt in prompts]


def figures(found: list[pb.Admitted]) -> set[tuple[int, int, int]]:
    """Return everything about the cache that an answer has."""
    return {(each.cached_tokens, each.miss_reason, each.diverged_at) for each in found}


async def test_another_tenants_prompts_look_like_prompts_that_nobody_sent(tenants: TenantSuite) -> None:
    sent, unsent = random_prompts(PROBES, TOKENS, seed=1), random_prompts(PROBES, TOKENS, seed=2)
    await probes(tenants, "victim", sent)
    theirs = await probes(tenants, "attacker", sent)
    nobodys = await probes(tenants, "attacker", unsent)
    assert auc([each.cached_tokens for each in theirs], [each.cached_tokens for each in nobodys]) == 0.5
    assert figures(theirs) == figures(nobodys)


async def test_a_search_block_by_block_finds_no_prefix_of_another_tenant(tenants: TenantSuite) -> None:
    lengths = (16, 64, 160, 304)
    secrets = random_prompts(len(lengths), TOKENS, seed=3)
    await probes(tenants, "victim", secrets)
    ends = random_prompts(len(lengths), TOKENS, seed=7)
    guesses = [secret[:n] + end[n:] for secret, end, n in zip(secrets, ends, lengths, strict=True)]
    assert {(each.cached_tokens, each.diverged_at) for each in await probes(tenants, "attacker", guesses)} == {(0, 0)}


async def test_within_a_tenant_the_cache_works_as_before(tenants: TenantSuite) -> None:
    sent, unsent = random_prompts(PROBES, TOKENS, seed=4), random_prompts(PROBES, TOKENS, seed=5)
    await probes(tenants, "victim", sent)
    again, new = await probes(tenants, "victim", sent), await probes(tenants, "victim", unsent)
    assert auc([each.cached_tokens for each in again], [each.cached_tokens for each in new]) == 1.0
    assert {each.cached_tokens for each in again} == {TOKENS - 16}


async def test_a_shared_domain_is_shared_by_those_who_name_it_alone(tenants: TenantSuite) -> None:
    (public,) = random_prompts(1, TOKENS, seed=6)
    assert (await tenants.probe("victim", public, "public")).cached_tokens == 0
    assert (await tenants.probe("attacker", public, "public")).cached_tokens == TOKENS - 16
    assert (await tenants.probe("attacker", public)).cached_tokens == 0
