"""What `--quantization auto` may take: by the loss that was measured, and by how the weights of a model round."""

from __future__ import annotations

import pytest

from gpuworker.models.llama.linears import MEASURED, MOST_LOST, Loss, by_error, by_type

TABLE = {"int8": Loss(1.002, 0.01), "w8a8": Loss(1.011, 0.01), "int4": Loss(0.999, 0.1)}


def test_a_quantisation_that_loses_more_than_one_percent_is_never_taken() -> None:
    assert [by_type(name, TABLE).accepted for name in ("int8", "w8a8", "int4")] == [True, False, True]
    assert by_type("w8a8", TABLE).why == "w8a8: 1.0110 of bf16's perplexity on SmolLM2-135M, more than 1.01"
    assert not by_error("w8a8", 0.0, TABLE).accepted


def test_what_was_not_measured_is_not_taken() -> None:
    assert by_type("int2", TABLE).why == "int2: its loss is not measured"
    assert not by_error("int2", 0.0, TABLE).accepted


@pytest.mark.parametrize(("error", "accepted"), [(0.0, True), (0.01, True), (0.0223, True), (0.0224, False)])
def test_the_loss_grows_with_the_square_of_the_error(error: float, accepted: bool) -> None:
    assert by_error("int8", error, TABLE).accepted is accepted


def test_the_reason_has_the_numbers() -> None:
    words = by_error("int8", 0.03, TABLE).why
    assert words == (
        "int8: weights round with an error of 3.00%, those of SmolLM2-135M with 1.00%; 1.0180 of bf16's"
        " perplexity expected"
    )


def test_the_recorded_table() -> None:
    assert all(loss.ratio > 0.99 and 0 < loss.error < 1 for loss in MEASURED.values())
    assert {name for name in MEASURED if by_type(name).accepted} == {"int8"}
    assert MOST_LOST == 1.01
