"""The ratios of the GGUF benchmark: rounds are compared one by one."""

from __future__ import annotations

import pytest

from bench.gguf import ratios

_PERPLEXITIES = {"perplexity_kept_bfloat16": 22.0, "perplexity_widened_bfloat16": 20.0}


def test_ratios_are_those_of_the_rounds_with_their_range() -> None:
    rates = {
        "b1_kept_bfloat16": [100.0, 50.0, 90.0],
        "b1_widened_bfloat16": [50.0, 50.0, 30.0],
        "b1_peer": [80.0, 100.0, 90.0],
        "b16_kept_bfloat16": [400.0],
        "b16_widened_bfloat16": [500.0],
    }
    found = ratios(rates, _PERPLEXITIES, ["bfloat16"])
    assert found == pytest.approx(
        {
            "kept_over_widened_bfloat16_b1": 2.0,
            "kept_over_widened_bfloat16_b1_least": 1.0,
            "kept_over_widened_bfloat16_b1_greatest": 3.0,
            "ratio_gguf_b1": 1.0,
            "ratio_gguf_b1_least": 0.5,
            "ratio_gguf_b1_greatest": 1.25,
            "kept_over_widened_bfloat16_b16": 0.8,
            "kept_over_widened_bfloat16_b16_least": 0.8,
            "kept_over_widened_bfloat16_b16_greatest": 0.8,
            "perplexity_ratio_bfloat16": 1.1,
        }
    )
