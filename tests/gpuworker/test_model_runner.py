"""The runner over real (tiny) models: greedy output against Hugging Face generate, draws, failures."""

from __future__ import annotations

import random

import pytest

from tests.checkpoints import SERVED, VOCAB_SIZE, checkpoint, hf_greedy
from tests.gpuworker.runner_driver import Driver, hosted, runner_on


def prompts(*lengths: int) -> list[list[int]]:
    draw = random.Random(sum(lengths))
    return [[draw.randrange(6, VOCAB_SIZE) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("block_size", [4, 16, 64, 256])
@pytest.mark.parametrize("kind", SERVED)
def test_greedy_output_of_a_mixed_batch_equals_generate(kind: str, block_size: int) -> None:
    runner = runner_on(hosted(checkpoint(kind)), block_size)
    driver = Driver(runner, block_size)
    cases = [
        (prompt, 24 - n, chunk)
        for n, (prompt, chunk) in enumerate(zip(prompts(3, 41, 70, 17), (99, 7, 13, 1), strict=True))
    ]
    streams = [driver.add(*case) for case in cases]
    driver.run()
    runner.close()
    assert [stream.output for stream in streams] == [hf_greedy(checkpoint(kind), p, count) for p, count, _ in cases]
