"""The benchmark of the host tier: each load moves what it should, and its figures have their fixed names."""

from __future__ import annotations

import pytest

from tests.support.bench_process import run_benchmark

pytestmark = pytest.mark.rest


@pytest.mark.parametrize(
    ("load", "figure"), [("talks", "ttft_ratio_host"), ("swap", "swap_ratio"), ("no_reuse", "cost_without_reuse")]
)
def test_a_load_moves_what_it_should(load: str, figure: str) -> None:
    figures, _ = run_benchmark("tiers", "--pairs", "1", "--scale", "0.2", "--only", load)
    assert figures[figure] > 0
    assert figures[f"stores_{load}"] > 0
    assert (figures[f"loads_{load}"] > 0) == (load != "no_reuse")
    if load == "swap":
        assert 0 <= figures["swap_redone"] < 1 <= figures["swap_redone_plain"]


@pytest.mark.parametrize(
    ("load", "figure"), [("saving", "throughput_ratio_disk"), ("unused_disk", "disk_cost_when_unused")]
)
def test_a_disk_saves_what_it_should(load: str, figure: str) -> None:
    """The benchmark checks that blocks were saved, and that none was where none fills up."""
    figures, _ = run_benchmark("tiers", "--pairs", "1", "--scale", "0.2", "--only", load)
    assert figures[figure] > 0
    assert ("saved_saving" in figures) == (load == "saving")
