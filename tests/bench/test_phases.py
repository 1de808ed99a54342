"""Parts of the phases benchmark that are exact: decode steps, workloads, and that its pieces run through."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from bench import phases
from bench.lib import block_sizes, paged_attention, stalls
from bench.lib.model_costs import ModelCosts
from bench.lib.rates import fastest_in_turns, matmul_rate, read_rate
from bench.lib.workers import Run
from bench.phases import Peaks, fractions
from cli.benchmark.closed_loop import Record


def test_fractions_are_of_the_best_rates_seen() -> None:
    costs = ModelCosts(4, 6, 2, 2, 1, 3, 10, weight_bytes=2, kv_bytes=2)
    found = fractions(costs, Peaks(torch.float32, 1, flops=2e9, read=1e9), prefill=4.0, decodes={8: 0.5})
    assert (found["peak_gflop_s"], found["read_gb_s"], found["prefill_tok_s"]) == (2.0, 1.0, 8 * 1024 / 4)
    assert found["prefill_flop_fraction"] == pytest.approx(8 * costs.flops(0, 1024) / 4 / 2e9)
    assert found["decode8_step_ms"] == 500
    assert found["decode8_read_fraction"] == pytest.approx(costs.decode_bytes(8, 536) / 0.5 / 1e9)
    assert found["decode8_flop_fraction"] == pytest.approx(costs.decode_flops(8, 536) / 0.5 / 2e9)


def test_a_disturbed_measurement_does_not_lower_a_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "matmul_rate", partial(matmul_rate, order=64))
    monkeypatch.setattr(phases, "read_rate", partial(read_rate, size=1 << 16))
    peaks = Peaks(torch.float32, 1, flops=1e30, read=1.0)
    peaks.take()
    assert peaks.flops == 1e30
    assert peaks.read > 1.0


@pytest.mark.parametrize(
    ("kind", "count", "prompts", "outputs"),
    [("short", 64, (16, 64), (16, 64)), ("general", 64, (32, 1024), (16, 256)), ("long", 8, (1024, 1792), (64, 128))],
)
def test_kinds_of_requests_keep_their_bounds(
    kind: str, count: int, prompts: tuple[int, int], outputs: tuple[int, int]
) -> None:
    made = block_sizes.requests(kind, 0, 1.0).initial
    assert len(made) == count
    assert all(prompts[0] <= len(each.prompt) <= prompts[1] for each in made)
    assert all(outputs[0] <= each.max_new_tokens <= outputs[1] for each in made)
    assert len(block_sizes.requests(kind, 0, 0.001).initial) == 1


def test_each_work_is_timed_apart_and_its_first_run_is_not() -> None:
    ran: list[str] = []
    found = fastest_in_turns(lambda: ran.append("a"), lambda: ran.append("b"), repeats=2)
    assert ran == ["a", "b"] * 3
    assert all(0 < seconds < 1 for seconds in found)


def test_rates_are_measured() -> None:
    assert matmul_rate(torch.float32, 1, order=64) > 0
    assert read_rate(1, size=1 << 16) > 0


def test_paged_and_contiguous_attention_run_on_the_same_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_attention, "DECODE", paged_attention.Shape(rows=2, queries=1, context=40))
    monkeypatch.setattr(paged_attention, "PREFILL", paged_attention.Shape(rows=1, queries=40, context=40))
    found = paged_attention.measure("float32", 16, threads=1)
    assert found.keys() == paged_attention.NOTES.keys()
    assert all(ratio > 0 for ratio in found.values())


def test_gaps_that_overlap_the_long_prompt_count_and_no_others() -> None:
    workload = stalls.arrival(2040, 0)
    *decodes, first = workload.initial
    following = workload.follow_up(first, [7] * first.max_new_tokens)
    assert following is not None
    assert len(following.prompt) == 2040
    times = [1.0, 2.0, 5.0, 9.0, 9.5]
    records = {each.rid: Record(each, 0.0, times, [7] * 5) for each in decodes}
    records |= {"first": Record(first, 0.0, [1.0], [7]), "long": Record(following, 4.0, [8.0], [7])}
    assert sorted(stalls.gaps_of(Run(records=records))) == [3.0] * len(decodes) + [4.0] * len(decodes)
