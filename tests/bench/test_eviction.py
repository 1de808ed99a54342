"""The eviction benchmark: its workloads, its limit, and the fixed names of its figures."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from bench import eviction
from bench.cache_replay.clairvoyant import next_uses
from bench.cache_replay.workloads import WORKLOADS, CacheRequest, agents_and_scans, working_set
from common.contracts.types import BlockHash
from kvmanager.contracts.ledger_config import DEFAULTS

A, B, C = (BlockHash(bytes([number]) * 16) for number in (1, 2, 3))


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_the_same_for_a_seed(name: str) -> None:
    make = WORKLOADS[name]
    assert make(3, 60) == make(3, 60) != make(4, 60)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_block_has_one_block_before_it(name: str) -> None:
    """Hashes stand for whole prefixes: two requests that share a block share everything before it."""
    before: dict[BlockHash, BlockHash | None] = {}
    for request in WORKLOADS[name](1, 200):
        content = (*request.prompt, *request.output)
        assert len(set(content)) == len(content)
        for parent, block in zip((None, *content), content, strict=False):
            assert before.setdefault(block, parent) == parent


def test_the_working_set_is_what_is_live_at_once() -> None:
    """Of three blocks, one is live during all requests, another one for the last two, the third never again."""
    requests = [CacheRequest((A,), (C,)), CacheRequest((A, B), ()), CacheRequest((A, B), ())]
    assert working_set(requests) == 2
    assert next_uses(requests) == [{A: 1}, {A: 2, B: 2}, {}]


@pytest.fixture(scope="module")
def cells() -> Mapping[str, list[eviction.Cell]]:
    """Each workload, small, on its three pools. The policies were not tuned on this seed."""
    return {name: eviction.measure(name, make(1, 300)) for name, make in WORKLOADS.items()}


@pytest.mark.parametrize("name", WORKLOADS)
def test_no_policy_finds_more_than_the_limit(name: str, cells: Mapping[str, list[eviction.Cell]]) -> None:
    for cell in cells[name]:
        found = {policy: run.found for policy, run in cell.policies.items()}
        assert max(found.values()) <= cell.limit.found, (cell.part, found)
        assert cell.share("lru") == 0.0


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_default_policy_loses_no_hundredth_of_the_hits_of_lru(
    name: str, cells: Mapping[str, list[eviction.Cell]]
) -> None:
    """The pools of a workload count together: with so few requests, the smallest one alone has too few hits."""
    found = {policy: sum(cell.policies[policy].found for cell in cells[name]) for policy in (DEFAULTS.eviction, "lru")}
    assert found[DEFAULTS.eviction] >= 0.99 * found["lru"] > 0, found


def test_the_default_policy_finds_more_than_lru_on_four_workloads_of_five(
    cells: Mapping[str, list[eviction.Cell]],
) -> None:
    figures = eviction.figures_of([cell for name in WORKLOADS for cell in cells[name]], DEFAULTS.eviction)
    assert len(WORKLOADS) == 5
    assert figures["workloads_beating_lru"] >= 4, figures


def test_the_figures_have_their_fixed_names(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["bench.eviction", "--json", "--requests", "80"])
    eviction.main()
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["bench"] == "eviction"
    assert {"share_of_belady_gain", "workloads_beating_lru", "least_hits_over_lru", "share_chat"} <= set(
        said["figures"]
    )
    assert {f"{who}_hits_utility_{how}" for who in ("agents", "all") for how in ("plain", "retained")} <= set(
        said["figures"]
    )
    assert {f"ns_per_block_{policy}" for policy in eviction.POLICIES} <= set(said["figures"])


def test_retention_keeps_the_blocks_of_agents_among_scans() -> None:
    """The hit rates are exact for the seed: what agents say of themselves helps them with every policy."""
    figures = eviction.retention(agents_and_scans(1, 500))
    for policy in eviction.POLICIES:
        assert figures[f"agents_hits_{policy}_retained"] > figures[f"agents_hits_{policy}_plain"]
