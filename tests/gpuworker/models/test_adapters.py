"""Adapters in a batch: each row's tokens are PEFT's, and rows of the base keep every bit."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gpuworker.checkpoints.lora import read_adapter
from gpuworker.models.adapters import NativeAdapter, StepAdapters
from gpuworker.native.library import best
from gpuworker.runner.model_runner import ModelRunner
from tests.support.adapters import VARIANTS, adapter, tokens_of
from tests.support.checkpoints import VOCAB_SIZE, checkpoint
from tests.support.gpuworker.runner_harness import Driver, queued_on, runner_on, transformers_model

MAX_RANK = 16
KIND = "llama"


def prompts(*lengths: int) -> list[list[int]]:
    draw = random.Random(sum(lengths))
    return [[draw.randrange(6, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def thread_runner(kind: str) -> ModelRunner:
    return runner_on(transformers_model(checkpoint(kind)))


def queue_runner(kind: str) -> ModelRunner:
    return queued_on(checkpoint(kind))


@pytest.fixture(params=["thread", "queue"])
def new_runner(request: pytest.FixtureRequest) -> Callable[[str], ModelRunner]:
    """What makes a runner on transformers' path, or on the native one."""
    if request.param == "queue" and best() is None:
        pytest.skip("the native library was not built")
    return queue_runner if request.param == "queue" else thread_runner


def prepare(runner: ModelRunner, kind: str, *variants: int) -> dict[int | None, Any]:
    """Return the adapters of a runner's model, and None for the base."""
    model: Any = runner._model
    model.allow_adapters(MAX_RANK)
    found = {each: read_adapter(adapter(kind, each), model.adapter_targets, MAX_RANK) for each in variants}
    return {None: None} | {each: model.prepare_adapter(read) for each, read in found.items()}


def test_eight_adapters_in_one_batch_give_the_tokens_of_peft(new_runner: Callable[[str], ModelRunner]) -> None:
    runner = new_runner(KIND)
    driver, adapters = Driver(runner), prepare(runner, KIND, *range(len(VARIANTS)))
    given = prompts(3, 41, 17, 30, 9, 22, 5, 12)
    streams = [driver.add(prompt, 12, 7 + place, adapter=adapters[place]) for place, prompt in enumerate(given)]
    driver.run()
    runner.close()
    assert [stream.output for stream in streams] == [
        tokens_of(KIND, place, prompt, 12) for place, prompt in enumerate(given)
    ]


def test_rows_of_one_adapter_beside_others_and_the_base(new_runner: Callable[[str], ModelRunner]) -> None:
    """Five rows of one adapter fill a block of rows and begin another; chunks of prompts are in the same steps."""
    runner = new_runner(KIND)
    driver, adapters = Driver(runner), prepare(runner, KIND, 0, 6)
    of_rows = (0, None, 0, 6, 0, 0, None, 0)
    given = prompts(11, 12, 13, 14, 15, 16, 17, 18)
    pairs = list(zip(given, of_rows, strict=True))
    streams = [driver.add(prompt, 10, 5, adapter=adapters[which]) for prompt, which in pairs]
    driver.run()
    runner.close()
    assert [stream.output for stream in streams] == [tokens_of(KIND, which, prompt, 10) for prompt, which in pairs]


@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_other_families_take_adapters(kind: str) -> None:
    """Queries and keys of qwen3 are normed behind their linears; gemma2 runs on transformers' code."""
    runner = thread_runner(kind) if kind != "qwen3" or best() is None else queue_runner(kind)
    driver, adapters = Driver(runner), prepare(runner, kind, 0)
    given = prompts(9, 14)
    streams = [driver.add(prompt, 8, adapter=each) for prompt, each in zip(given, (adapters[0], None), strict=True)]
    driver.run()
    runner.close()
    expected = [tokens_of(kind, which, prompt, 8) for prompt, which in zip(given, (0, None), strict=True)]
    assert [stream.output for stream in streams] == expected


def test_no_bit_of_the_base_depends_on_adapters_beside_it() -> None:
    if best() is None:
        pytest.skip("the native library was not built")
    given = prompts(9, 20, 13)

    def logits(allowed: bool) -> torch.Tensor:
        runner = queue_runner(KIND)
        driver = Driver(runner)
        adapters = prepare(runner, KIND, 0, 6) if allowed else {}
        streams = [driver.add(prompt, 6) for prompt in given[:1]]
        streams += [
            driver.add(prompt, 6, adapter=adapters.get(which)) for prompt, which in zip(given[1:], (0, 6), strict=True)
        ]
        kept = []
        while (future := driver.step()) is not None:
            driver.take(future.result(timeout=60))
            kept.append(runner._model._logits[0].clone())  # type: ignore[attr-defined]
        runner.close()
        return torch.stack(kept[1:])

    assert torch.equal(logits(allowed=False), logits(allowed=True))


def test_an_adapters_memory_is_free_once_its_last_sequence_has_left() -> None:
    if best() is None:
        pytest.skip("the native library was not built")
    runner = queue_runner(KIND)
    driver = Driver(runner)
    adapters = prepare(runner, KIND, 0)
    held: weakref.ref[NativeAdapter] = weakref.ref(adapters[0])
    stream = driver.add(prompts(9)[0], 6, adapter=adapters.pop(0))
    driver.run()
    assert held() is not None
    runner.remove(stream.sequence)
    gc.collect()
    assert held() is None
    runner.close()


def test_a_step_names_each_adapter_once() -> None:
    one, other = object(), object()
    step = StepAdapters.of_rows([one, None, other, one], [2, 1, 1, 3])  # type: ignore[list-item, arg-type]
    assert step is not None
    assert step.adapters == (one, other)
    assert step.of_token.tolist() == [0, 0, -1, 1, 0, 0, 0]
    assert StepAdapters.of_rows([None, None], [2, 1]) is None  # type: ignore[arg-type]
