"""The benchmark of speculation on the demo model: both kinds of decoding run, and their tokens are equal."""

from __future__ import annotations

import pytest

from bench.speculative import Copied, figures_of
from gpuworker.native.library import best
from tests.support.bench_process import run_benchmark

SHORT = ("--output", "40")


@pytest.mark.skipif(best() is None, reason="the native library was not built")
def test_copies_have_the_tokens_of_plain_decoding() -> None:
    figures, _ = run_benchmark("speculative", "--copy", "demo", "--only", "copy", "--rounds", "1", *SHORT)
    assert figures["tokens_differing"] == 0
    assert figures["speedup_copy"] > 0
    assert figures["plain_copy"] > 0
    assert figures["accepted_share"] > 0


@pytest.mark.skipif(best() is None, reason="the native library was not built")
def test_streams_with_a_draft_model_have_the_tokens_of_plain_decoding() -> None:
    """The decision whether it pays is made by times; so some drafts are not to be expected here."""
    figures, _ = run_benchmark("speculative", "--only", "draft", "--rounds", "1", "--target", "small", *SHORT)
    assert figures["tokens_differing"] == 0
    assert figures["speedup_draft"] > 0
    assert figures["slowdown_wrong_draft"] > 0
    assert 0 <= figures["draft_accepted_share"] <= 1


def test_copies_of_a_model_with_states_have_the_tokens_of_plain_decoding() -> None:
    figures, _ = run_benchmark("speculative", "--only", "states", "--rounds", "1", "--target", "small", *SHORT)
    assert figures["tokens_differing"] == 0
    assert figures["speedup_states"] > 0
    assert 0 <= figures["states_accepted_share"] <= 1


def test_a_ratio_is_that_of_all_prompts_of_a_round() -> None:
    """The median over the rounds; of a prompt alone, the median of its ratios."""
    quick = [Copied(11, (2.0, 1.0), (4.0, 3.0)), Copied(11, (4.0, 1.0), (5.0, 2.0))]
    slow = [Copied(11, (3.0, 3.0), (4.0, 4.0)), Copied(11, (6.0, 6.0), (7.0, 7.0))]
    figures = figures_of([quick, slow, quick])
    assert figures["speedup_copy"] == 3.0
    assert (figures["speedup_least"], figures["speedup_most"]) == (2.0, 4.0)
    assert figures["speedup_answer"] == 1.8
    assert figures["plain_copy"] == 60 / 21
