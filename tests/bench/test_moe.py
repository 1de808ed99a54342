"""The benchmark of experts and states: it runs both paths on one tiny model, and its ratios are those of its times."""

from __future__ import annotations

import pytest

from tests.support.bench_process import run_benchmark


@pytest.mark.parametrize(
    "family",
    [
        *("qwen3_moe", "lfm2", "gemma4"),
        *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("mixtral", "qwen3_5", "lfm2_moe")),
    ],
)
def test_both_paths_are_timed_for_each_kind_of_step(family: str) -> None:
    figures, _ = run_benchmark(
        "moe", "--tiny", "--family", family, "--repeats", "3", "--threads", "1", "--prefill", "64"
    )
    steps = ("b1", "b8", "b32", "prefill64")
    assert set(figures) == {f"{name}_{step}" for name in ("native_ms", "transformers_ms", "ratio") for step in steps}
    for step in steps:
        expected = figures[f"transformers_ms_{step}"] / figures[f"native_ms_{step}"]
        assert figures[f"ratio_{step}"] == pytest.approx(expected, rel=1e-2)
