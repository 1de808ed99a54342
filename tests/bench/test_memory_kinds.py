"""The benchmark of kinds of memory: bytes are those of the formula, rates are there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.lib.kv_groups import Pair, least_hit
from bench.lib.one_kind import one_kind_figures
from common.contracts.types import KvGeometry, KvGroup, KvGroupKind
from gpuworker.memory.byte_plan import BytePlan
from tests.support.bench_process import run_benchmark


@pytest.fixture(scope="module")
def figures() -> dict[str, float]:
    """The figures of a run without rates, of models of each kind."""
    named = ("deepseek_v3", "minicpm3", "gpt_oss_20b", "gemma3_27b", "minimax_m2", "lfm2_2_6b")
    return run_benchmark("memory_kinds", "--only", *named, "--rounds", "0")[0]


def test_a_token_takes_its_latent_alone(figures: dict[str, float]) -> None:
    found = {name: value for name, value in figures.items() if name.endswith(("deepseek_v3", "minicpm3"))}
    assert found == {
        "latent_bytes_deepseek_v3": 1.0,
        "kib_a_token_deepseek_v3": (512 + 64) * 61 * 2 / 1024,
        "every_head_deepseek_v3": pytest.approx(128 * (128 + 64 + 128) / (512 + 64), abs=1e-6),
        "latent_bytes_minicpm3": 1.0,
        "kib_a_token_minicpm3": (256 + 32) * 62 * 2 / 1024,
        "every_head_minicpm3": pytest.approx(40 * (64 + 32 + 64) / (256 + 32), abs=1e-6),
    }


def test_windows_leave_room_and_hits_are_the_best_possible(figures: dict[str, float]) -> None:
    shares = {name: value for name, value in figures.items() if name.startswith("capacity_share")}
    assert len(shares) == 9
    assert min(shares.values()) > 0.95
    assert figures["capacity_share_gpt_oss_20b_1k"] == pytest.approx((64 + 8) / (64 + 10), abs=1e-4)
    assert figures["capacity_over_one_group_gemma3_27b_64k"] == pytest.approx(
        4096 * 62 / (4096 * 10 + 66 * 52), abs=1e-4
    )
    assert figures["capacity_over_one_group_minimax_m2_64k"] == pytest.approx(1, abs=1e-4)
    hits = {name: value for name, value in figures.items() if name.startswith("hits") and "lfm2" not in name}
    assert hits
    assert {*hits.values()} == {1.0}


def test_hybrids_go_on_from_checkpoints(figures: dict[str, float]) -> None:
    for shared in (240, 2000):
        requests = [figures[f"hits_lfm2_2_6b_system_{shared}_request_{number}"] for number in (1, 2, 3)]
        assert requests == [0, 0, 1], "the second one leaves a checkpoint where it parts from the first"
        assert figures[f"hits_lfm2_2_6b_system_{shared}_marked"] == 1
    assert (figures["resume_share_lfm2_2_6b_chat"], figures["burst_prefix_lfm2_2_6b"]) == (1, 1)
    assert figures["least_hit_lfm2_2_6b"] == 16


FULL, WINDOW = KvGroup(KvGroupKind.FULL, 0, 2, (0,)), KvGroup(KvGroupKind.WINDOW, 40, 3, (1,))
STATES = KvGroup(KvGroupKind.STATE, 0, 5, (2,))


@pytest.mark.parametrize(
    ("groups", "fewest"),
    [((), 2), ((FULL, WINDOW), 10), ((FULL, STATES), 11), ((FULL, WINDOW, STATES), 20)],
    ids=["one", "window", "states", "mixed"],
)
def test_the_least_prefix_that_hits_is_the_one_that_a_worker_names_at_its_start(
    groups: tuple[KvGroup, ...], fewest: int
) -> None:
    """A ledger and an agent try each prefix, in pools from two blocks of each group to some pages more."""
    geometry = replace(KvGeometry(2, 2, 8, 8, "float32"), groups=groups)
    least = 2 * (sum(group.pages for group in groups if group.kind is not KvGroupKind.STATE) or 1)
    for pages in range(least, least + 14):
        plan = BytePlan(
            *("cpu", 0, 0, 0, 0, 0, 64, pages, 16, "float32", 64, 64, 8),
            state_bytes=int(STATES in groups),
            groups=groups,
        )
        assert plan.shortest_hit == least_hit(geometry, pages) == (16 if pages >= fewest else 0), pages


@pytest.mark.parametrize("length", [16, 17])
def test_a_prompt_that_comes_again_hits_where_it_has_a_token_more_than_a_block(length: int) -> None:
    pair = Pair.without_want(replace(KvGeometry(2, 2, 8, 8, "float32"), groups=(FULL, STATES)), 1024)
    assert [pair.serve(list(range(2, 2 + length)), [1]) for _ in range(2)] == [0, 16 * (length > 16)]


def test_a_tree_costs_what_it_costs_and_an_older_one_must_do_the_same_work(tmp_path: Path) -> None:
    """Against itself the ratio is 1, as far as one round on a busy machine can say."""
    root = Path(__file__).parents[2]
    figures = {name: value for name, value, _ in one_kind_figures(root, rounds=1)}
    assert all(0.5 < figures[f"one_kind_cost_{name}"] < 2 for name in ("report", "grant", "token"))
    assert all(figures[f"us_a_{name}"] > 0 for name in ("report", "grant", "token"))
    other = tmp_path / "bench" / "manager_load"
    other.mkdir(parents=True)
    for name in ("bench/__init__.py", "bench/manager_load/__init__.py"):
        (tmp_path / name).touch()
    theirs = (root / "bench" / "manager_load" / "reporter.py").read_text()
    (other / "reporter.py").write_text(theirs.replace("_PROMPT: Final = 520", "_PROMPT: Final = 500"))
    for package in ("common", "gpuworker", "kvmanager", "protos", "bench/lib"):
        (tmp_path / package).symlink_to(root / package)
    with pytest.raises(RuntimeError, match="reports, grants and tokens are"):
        list(one_kind_figures(tmp_path, rounds=1))


def test_the_engine_runs_both_ways() -> None:
    figures, _ = run_benchmark("memory_kinds", "--only", "youtu", "--rounds", "1", "--prompt", "48", "--output", "5")
    assert figures["prefill_over_every_head"] > 0
    assert figures["decode_over_every_head"] > 0
    assert figures["hosted_hybrid_1"] > 0
    assert figures["hosted_hybrid_8"] > 0
    assert min(figures["native_hybrid_1"], figures["native_hybrid_8"]) > 0
