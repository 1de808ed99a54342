"""Options of the worker that are right one by one and wrong together."""

from __future__ import annotations

import pytest

from gpuworker.config import GpuWorkerSettings


def problems(**options: object) -> list[str]:
    settings = GpuWorkerSettings.model_validate({"model": "m", **options})
    return [f"{each.field} {each.description}" for each in settings.problems()]


def test_a_step_has_room_for_a_token_of_each_sequence() -> None:
    (said,) = problems(max_num_seqs=65, max_num_batched_tokens=64)
    assert said == (
        "--max-num-batched-tokens is 64, and a step has up to 65 sequences with a token each; expected at least 65, "
        "or a lower --max-num-seqs"
    )
    assert problems(max_num_seqs=64, max_num_batched_tokens=64) == []


@pytest.mark.parametrize(("given", "budget", "sequences"), [(None, 48, 48), (None, 2048, 64), (7, 48, 7)])
def test_by_default_a_step_has_no_more_sequences_than_tokens(given: int | None, budget: int, sequences: int) -> None:
    settings = GpuWorkerSettings(model="m", max_num_seqs=given, max_num_batched_tokens=budget)
    assert settings.num_seqs(64) == sequences
