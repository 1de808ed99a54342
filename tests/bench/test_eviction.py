"""The eviction benchmark: its workloads, its limit, and the fixed names of its figures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from bench import eviction
from bench.cache_replay.clairvoyant import uses_of
from bench.cache_replay.replay import pool_of, replay
from bench.cache_replay.traces import requests_of
from bench.cache_replay.workloads import WORKLOADS, CacheRequest, agents_and_scans, working_set
from cli.replay.trace import Arrival, Trace
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
    assert uses_of(requests) == {A: [0, 1, 2], B: [1, 2]}


def arrival(at: float, prompt_tokens: int, output_tokens: int, *blocks: int) -> Arrival:
    return Arrival(at, prompt_tokens, output_tokens, blocks)


def test_blocks_of_a_trace_are_divided() -> None:
    """Of 20 tokens in blocks of 8, those of 4 have five full ones; two prompts share what they shared before."""
    trace = Trace((arrival(0.0, 20, 4, 7, 9, 11), arrival(1.0, 17, 4, 7, 8, 12)), block_size=8)
    one, other = requests_of(trace, 4)
    assert (len(one.prompt), len(other.prompt), one.output, one.lasts) == (5, 4, (), 0.0)
    assert one.prompt[:2] == other.prompt[:2]
    assert not set(one.prompt[2:]) & set(other.prompt[2:])
    with pytest.raises(ValueError, match="blocks of 5 tokens; expected a divisor of the trace's 8"):
        requests_of(trace, 5)
    with pytest.raises(ValueError, match="the trace names no contents"):
        requests_of(Trace((arrival(0.0, 20, 4),), block_size=1), 1)


def test_a_request_that_lasts_has_blocks_of_its_own() -> None:
    """Of 21 tokens in blocks of 4, five are full; the rest and 4 tokens of output take two more."""
    trace = Trace((arrival(3.0, 21, 4, 1, 2, 3, 4, 5, 6),) * 2, block_size=4)
    one, other = requests_of(trace, 4, token_seconds=0.5)
    assert (one.at, one.lasts, len(one.prompt), len(one.output)) == (3.0, 2.0, 5, 2)
    assert (one.prompt == other.prompt, set(one.output) & set(other.output)) == (True, set())


def test_blocks_of_requests_that_run_are_not_evicted() -> None:
    """The first request holds two of four blocks until the third has come, so the second one's are evicted for it."""
    first, second, third = ((BlockHash(bytes([n]) * 16), BlockHash(bytes([n + 100]) * 16)) for n in (1, 2, 3))
    requests = [CacheRequest(first, (), 0.0, lasts=9.0), CacheRequest(second, (), 1.0, lasts=1.0)]
    requests += [CacheRequest(third, (), 5.0, lasts=1.0), CacheRequest(first, (), 8.0), CacheRequest(second, (), 8.5)]
    state = pool_of(4)
    found = replay(state, requests)
    assert (found.asked, found.found) == (8, 2)


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


def test_the_figures_of_sessions_have_their_fixed_names(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["bench.eviction", "--json", "--sessions", "--requests", "60"])
    eviction.main()
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]
    both = ("learned", "fitted", "disturbed")
    kinds = {"slow_tools": (*both, "asked"), "agents_and_chats": both}
    assert set(figures) == {
        f"{name}_{words}_{which}" for name, each in kinds.items() for words in each for which in ("mean", "least")
    }


def test_a_trace_has_a_figure_for_each_pool_and_two_of_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [
        {"timestamp": 100 * n, "input_length": 1024, "output_length": 8, "hash_ids": [0, 1 + n % 3]} for n in range(12)
    ]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    words = ["--trace", str(tmp_path / "trace.jsonl"), "--pools", "2", "8", "--block-sizes", "512", "256"]
    monkeypatch.setattr("sys.argv", ["bench.eviction", "--json", *words])
    eviction.main()
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]
    assert {name: figures[f"{name}_8_256"] for name in ("lru", "utility", "limit")} == dict.fromkeys(
        ("lru", "utility", "limit"), 1.0
    )
    assert figures["limit_2_512"] >= figures["lru_2_512"] >= 0.5
    assert {"worst_loss_vs_lru", "mean_share_of_gain"} <= set(figures)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--trace", "nowhere"], "nowhere cannot be read"),
        (["--pools", "0"], "a pool of 0 blocks of 512 tokens; the largest request has 1"),
        (["--block-sizes", "500"], "blocks of 500 tokens; expected a divisor of the trace's 512"),
    ],
)
def test_a_trace_that_cannot_be_used_is_refused_in_a_line(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trace.jsonl").write_text('{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}')
    monkeypatch.setattr("sys.argv", ["bench.eviction", "--trace", str(tmp_path / "trace.jsonl"), *words])
    with pytest.raises(SystemExit, match="2"):
        eviction.main()
    assert said in capsys.readouterr().err


def test_retention_keeps_the_blocks_of_agents_among_scans() -> None:
    """The hit rates are exact for the seed: what agents say of themselves helps them with every policy."""
    figures = eviction.retention(agents_and_scans(1, 500))
    for policy in eviction.POLICIES:
        assert figures[f"agents_hits_{policy}_retained"] > figures[f"agents_hits_{policy}_plain"]
