"""The benchmark of the host tier: each load moves what it should, and its figures have their fixed names."""

from __future__ import annotations

import pytest

from bench.lib.workers import Resume, ResumeWatch, Run
from bench.tiers import Pair, resume_figures
from common.contracts.lease import Admit
from common.contracts.types import BlockId, FinishReason, SequenceId, Usage
from gpuworker.engine.ports import EngineOutputs
from gpuworker.scheduling.outcomes import SequenceFinished
from tests.support.bench_process import run_benchmark


def test_what_a_preemption_costs_is_told_apart_from_the_queue() -> None:
    """The pair in which one engine preempted nobody does not count."""
    swapped = Run(resumes=[Resume(0.0, 3.0, 4.0), Resume(10.0, 10.0, 11.0)])
    computed = Run(resumes=[Resume(0.0, 4.0, 8.0)])
    pairs = [Pair(swapped, computed, 0, 0, 0, 0), Pair(swapped, Run(), 0, 0, 0, 0)]
    assert resume_figures(pairs) == {
        "swap_resumes": 4,
        **dict.fromkeys(("swap_resume_ratio", "swap_resume_ratio_lower", "swap_resume_ratio_upper"), 1.0 / 4.0),
        **dict.fromkeys(("swap_pause_ratio", "swap_pause_ratio_lower", "swap_pause_ratio_upper"), 2.5 / 8.0),
        "swap_resume_seconds": 1.0,
        "swap_queued": 3.0 / 5.0,
        "swap_resume_seconds_plain": 4.0,
        "swap_queued_plain": 0.5,
    }
    assert resume_figures(pairs[1:]) == {"swap_resumes": 2}


def test_a_resume_ends_with_the_first_token_behind_the_admission() -> None:
    """A token of a step that ran before the preemption comes later than it, and ends nothing."""
    watch, one, other = ResumeWatch(), SequenceId(1), SequenceId(2)
    admitted = tuple(Admit(each, (BlockId(0),), 0) for each in (one, other))
    token, end = (one, (7,)), SequenceFinished(other, FinishReason.CANCELLED, Usage())
    assert watch.take(EngineOutputs(1, admitted=admitted, tokens=(token,)), 1.0) == []
    assert watch.take(EngineOutputs(2, tokens=(token,), preempted=(one, other)), 2.0) == []
    assert watch.take(EngineOutputs(3, tokens=(token,)), 3.0) == [], "it waits in the queue"
    assert watch.take(EngineOutputs(4, admitted=admitted), 4.0) == []
    assert watch.take(EngineOutputs(5, finished=(end,)), 5.0) == []
    assert watch.take(EngineOutputs(6, tokens=(token, (other, (7,)))), 6.5) == [Resume(2.0, 4.0, 6.5)]
    assert watch.take(EngineOutputs(7, tokens=(token,)), 8.0) == []


@pytest.mark.rest
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
        assert figures["swap_resumes"] > 0
        assert 0 < figures["swap_resume_ratio_lower"] <= figures["swap_resume_ratio"]


@pytest.mark.rest
@pytest.mark.parametrize(
    ("load", "figure"), [("saving", "throughput_ratio_disk"), ("unused_disk", "disk_cost_when_unused")]
)
def test_a_disk_saves_what_it_should(load: str, figure: str) -> None:
    """The benchmark checks that blocks were saved, and that none was where none fills up."""
    figures, _ = run_benchmark("tiers", "--pairs", "1", "--scale", "0.2", "--only", load)
    assert figures[figure] > 0
    assert ("saved_saving" in figures) == (load == "saving")
