"""Adapters in a batch: each row's tokens are PEFT's, and rows of the base keep every bit."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from common.contracts.errors import EngineFailure
from common.contracts.types import BlockId, SequenceId
from gpuworker.attention.backends import make_backend
from gpuworker.attention.step_inputs import attention_arrays, attention_metadata, pack_rows, to_device
from gpuworker.checkpoints.lora import read_adapter
from gpuworker.memory.kv_cache import KvCache
from gpuworker.models.adapters import StepAdapters
from gpuworker.models.choose import open_native
from gpuworker.models.hf.loader import ModelSource
from gpuworker.models.llama.adapters import NativeAdapter
from gpuworker.models.llama.cpu_model import LlamaCpuModel
from gpuworker.native.library import best
from gpuworker.runner.model_runner import ModelRunner
from gpuworker.scheduling.batch_plan import ScheduledRow, StepPlan
from tests.support.adapters import VARIANTS, adapter, tokens_of
from tests.support.checkpoints import VOCAB_SIZE, checkpoint
from tests.support.gpuworker.runner_harness import (
    CPU,
    GREEDY,
    Driver,
    queued_on,
    runner_on,
    transformers_model,
)

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


@pytest.mark.rest
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


def first_logits(quantization: str, dtype: str, which: int | None) -> torch.Tensor:
    """Return the logits behind a prompt, of a native model whose linears are held so."""
    opened = open_native(
        ModelSource(str(checkpoint(KIND)), dtype=dtype, quantization=quantization),
        CPU,
        "native",
        lambda cache: make_backend("auto", cache),
    )
    assert opened is not None
    model, geometry = opened
    assert isinstance(model, LlamaCpuModel)
    model.allow_adapters(MAX_RANK)
    read = None if which is None else read_adapter(adapter(KIND, which), model.adapter_targets, MAX_RANK)
    rows = [None if read is None else model.prepare_adapter(read)]
    cache = KvCache(geometry, 8, 16, CPU)
    tokens = torch.tensor(prompts(20)[0])
    attention = make_backend("auto", cache)
    positions = torch.arange(len(tokens))
    start, length = np.zeros(1, dtype=np.int32), np.array([len(tokens)], dtype=np.int32)
    packed = pack_rows(start, length, np.array([[0, 1]], dtype=np.int32), 16)
    attention.begin(attention_metadata(packed, to_device(attention_arrays(packed), CPU)))
    model.adapters = StepAdapters.of_rows(rows, length)
    return model.forward(tokens, positions, positions[-1:], attention)[0].clone()


@pytest.mark.rest
@pytest.mark.parametrize(("quantization", "dtype"), [("none", "bfloat16"), ("int8", "float32"), ("w8a8", "float32")])
def test_an_adapter_of_a_rounded_base_adds_about_what_it_adds_in_float32(quantization: str, dtype: str) -> None:
    if best() is None:
        pytest.skip("the native library was not built")
    exact = first_logits("none", "float32", 6) - first_logits("none", "float32", None)
    rounded = first_logits(quantization, dtype, 6) - first_logits(quantization, dtype, None)
    assert float((rounded - exact).norm() / exact.norm()) < 0.35
    assert float((rounded - exact).norm() / exact.norm()) > 0.0


def test_drafts_of_an_adapters_sequence_are_verified_by_it() -> None:
    if best() is None:
        pytest.skip("the native library was not built")
    runner, (prompt,) = queue_runner(KIND), prompts(9)
    adapters = prepare(runner, KIND, 6)
    expected = tokens_of(KIND, 6, prompt, 6)
    sequence, blocks = SequenceId(1), (BlockId(3), BlockId(1))
    runner.add_sequence(sequence, prompt, GREEDY, len(prompt), adapters[6])
    rows = [ScheduledRow(sequence, 0, 9, blocks, samples=True)]
    rows.append(ScheduledRow(sequence, 9, 1, blocks, samples=True, drafts=(expected[1], expected[2], 5)))
    found: list[int] = []
    for number, row in enumerate(rows):
        plan = StepPlan(number, (row,), drafts=len(row.drafts))
        found += runner.submit_step(plan).result(timeout=60).sampled[sequence]
    runner.close()
    assert found == expected[: len(found)]
    assert len(found) >= 4


def test_a_linear_that_a_step_passes_over_fails_the_step_and_is_no_silent_base() -> None:
    runner = thread_runner(KIND)
    driver, adapters = Driver(runner), prepare(runner, KIND, 0)
    attention = runner._model.module.model.layers[0].self_attn  # type: ignore[attr-defined]
    hooked, attention.o_proj = attention.o_proj, torch.nn.Identity()
    driver.add(prompts(9)[0], 2, adapter=adapters[0])
    step = driver.step()
    assert step is not None
    with pytest.raises(EngineFailure, match=r"the step did not call model\.layers\.0\.self_attn\.o_proj"):
        step.result(timeout=60)
    attention.o_proj = hooked
    runner.close()
