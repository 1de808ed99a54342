"""The GPU benchmarks run, small and interpreted: their results are right, and their timings mean nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from bench import gpu_attention, gpu_engine, gpu_states, gpu_tuning
from bench.gpu import attention_checks as gpu_attention_checks
from bench.gpu import cases as gpu_cases
from bench.gpu import measure as gpu_measure
from bench.gpu.cases import Heads, Rows
from bench.gpu.engine_harness import Stream, decode_rate
from bench.gpu.models import TINY, config_of
from gpuworker.kernels import triton_states
from gpuworker.models.llama.gpu_model import LlamaGpuModel
from gpuworker.models.llama.gpu_weights import random_weights
from gpuworker.models.llama.spec import llama_spec
from gpuworker.runner.cuda_graphs import RepeatingRecorder

CPU = torch.device("cpu")
SMALL = Heads(4, 2, 16, torch.float32)


def run_once(work: Callable[[], object]) -> float:
    work()
    return 1e-3


@pytest.fixture(autouse=True)
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gpu_attention, gpu_attention_checks):
        monkeypatch.setattr(module, "LLAMA_8B", SMALL)
    monkeypatch.setattr(gpu_attention, "graph_seconds", run_once)
    monkeypatch.setattr(gpu_attention, "rotation", lambda size, device: 2)
    monkeypatch.setattr(gpu_attention_checks, "CudaRecorder", RepeatingRecorder)
    monkeypatch.setattr(gpu_attention_checks, "_MIXED", Rows((30, 1, 40, 35, 9), (1, 1, 1, 20, 9)))
    monkeypatch.setattr(gpu_attention_checks, "_SHARED", Rows((55, 33, 37), (1,) * 3, shared=32))
    monkeypatch.setattr(gpu_attention_checks, "_RAGGED", Rows((70, 1, 33), (1,) * 3))


def test_every_check_passes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    # The interpreter computes bfloat16 wrongly.
    monkeypatch.setattr(gpu_attention_checks, "_TOLERANCE", {torch.float32: 1e-5, torch.float16: 5e-3})
    made = gpu_cases.make_case

    def make_case(heads: Heads, rows: Rows, kv_dtype: str, device: torch.device, layers: int = 1) -> gpu_cases.Case:
        small = replace(SMALL, num_heads=heads.num_heads, num_kv_heads=heads.num_kv_heads)
        dtype = torch.float32 if heads.dtype == torch.bfloat16 else heads.dtype
        return made(replace(small, dtype=dtype), rows, kv_dtype.replace("bfloat16", "float32"), device, layers)

    monkeypatch.setattr(gpu_attention_checks, "make_case", make_case)
    gpu_attention_checks.check_attention(CPU)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 15
    assert all(line.endswith("ok") for line in lines)


def test_a_kernel_that_is_wrong_ends_the_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    for error in (0.3, float("nan")):
        with pytest.raises(SystemExit) as ended:
            gpu_measure.checked("attention", error, 0.2)
        assert ended.value.code == gpu_measure.FAILED_CHECK
        assert "WRONG" in capsys.readouterr().out


def test_attention_is_timed_in_every_kind_of_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_attention, "_LARGE", ((2, 32),))
    monkeypatch.setattr(gpu_attention, "_SMALL", ((1, 20),))
    monkeypatch.setattr(gpu_attention, "_PREFILLS", (24,))
    figures = [
        *gpu_attention._decodes(CPU, 1e9),
        *gpu_attention._narrow(CPU, (2, 32)),
        *gpu_attention._varlen(CPU, ((2, 256),)),
        *gpu_attention._prefills(CPU),
        *gpu_attention._cascade(CPU, ((2, 32, 16, 3.0),)),
    ]
    found = {figure.name: figure.value for figure in figures}
    kv_bytes = 2 * 32 * 2 * 2 * 16 * 2  # rows, slots, K and V, heads, head size, bytes
    assert found["decode_2x32_over_copy"] == found["decode_large_over_copy"] == pytest.approx(kv_bytes / 1e-3 * 2 / 1e9)
    assert found["fp8_over_bf16"] == found["cascade_2x32"] == found["prefill_24_over_flash"] == 1.0
    assert found["prefill_24_tflop_s"] == pytest.approx(2 * 24 * 24 * 4 * 16 / 1e-3 / 1e12)
    assert {value for name, value in found.items() if "over_varlen" in name} == {None}  # it needs a GPU


def test_tunings_are_checked_and_ranked(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((5e-6, 9e-6, 3e-6, 5e-6, 2e-6))

    def next_time(work: Callable[[], object]) -> float:
        work()
        return next(times)

    monkeypatch.setattr(gpu_tuning, "graph_seconds", next_time)
    monkeypatch.setattr(gpu_tuning, "rotation", lambda size, device: 1)
    monkeypatch.setattr(gpu_tuning, "_small", lambda case: case)
    monkeypatch.setattr(gpu_tuning, "_SINGLES", ((16, 4, 2, 1), (32, 4, 2, 2)))
    monkeypatch.setattr(gpu_tuning, "_MANIES", ((32, 16, 4, 1),))
    monkeypatch.setattr(gpu_tuning, "_PREFILL", 24)
    monkeypatch.setattr(gpu_tuning, "LLAMA_8B", SMALL)
    found = list(gpu_tuning.ranked("decode", gpu_tuning.decodes(2, 40, "float32", CPU), 2))
    assert [(figure.name, round(figure.value or 0)) for figure in found] == [
        ("decode_today_us", 5),
        ("decode_1_us", 3),
        ("decode_2_us", 9),
    ]
    assert found[1].note == "tile 32, 4 warps, 2 stages, 2 programs a multiprocessor"
    assert [round(figure.value or 0) for figure in gpu_tuning.ranked("prefill", gpu_tuning.prefills(CPU), 1)] == [5, 2]


SMALL_STEPS: dict[str, gpu_states.Step] = {
    "delta": gpu_states.DeltaRule(1, 2, 8, 4),
    "delta by channel": gpu_states.DeltaRule(2, 2, 8, 4, by_channel=True),
    "space": gpu_states.StateSpace(2, 4, 4, 8),
    "convolution": gpu_states.Convolution(6, 3),
}


@pytest.mark.parametrize("name", SMALL_STEPS)
def test_steps_of_states_are_checked_and_timed(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = SMALL_STEPS[name]
    gpu_states.check(name, step, CPU)
    assert [line.endswith("ok") for line in capsys.readouterr().out.splitlines()] == [True, True]
    times = iter((4e-3, 8e-3))

    def next_time(work: Callable[[], object]) -> float:
        work()
        return next(times)

    monkeypatch.setattr(gpu_states, "graph_seconds", next_time)
    monkeypatch.setattr(gpu_states, "rotation", lambda size, device: 2)
    bandwidth, time = gpu_states.measured(name, step, 2, 1e9, CPU)
    each = {"delta": 2 * 8 * 4 * 4, "delta by channel": 2 * 8 * 4 * 4, "space": 4 * 4 * 8 * 4, "convolution": 6 * 3 * 2}
    assert bandwidth.value == pytest.approx(2 * 2 * each[name] / 2e-3 / 1e9)
    assert (time.value, time.verdict) == (0.5, "met")


def test_a_step_of_states_that_is_wrong_ends_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    step = triton_states.step_state_space
    monkeypatch.setattr(gpu_states, "step_state_space", lambda **given: step(**given | {"softplus": False}))
    with pytest.raises(SystemExit):
        gpu_states.check("space", SMALL_STEPS["space"], CPU)


def test_the_rate_counts_tokens_while_all_decode() -> None:
    one, other = Stream([1] * 4, [1.0, 2.0, 3.0, 4.0]), Stream([1] * 4, [1.5, 2.5, 3.5, 4.5])
    assert decode_rate([one, other], 2) == 3 / 1.5  # at 3.0, 3.5 and 4.0; from 2.5 until 4.0


def test_a_step_reads_weights_and_contexts_once() -> None:
    config = config_of((TINY[0], TINY[1] | {"num_hidden_layers": 1, "tie_word_embeddings": False}))
    spec = llama_spec(config)
    assert spec is not None
    weights = random_weights(spec, torch.bfloat16, CPU)
    model = LlamaGpuModel(config, weights, "bfloat16", 8)
    load = gpu_engine.Load(4, 100, 20, 0)
    assert load.prompt == 90
    embedding = spec.vocab_size * spec.hidden_size * 2
    assert gpu_engine.step_bytes(model, load) == weights.num_bytes - embedding + 4 * 100 * 2 * 4 * 64 * 2


def test_the_engine_is_checked_against_generate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = TINY[1] | {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    monkeypatch.setattr(gpu_engine, "TINY", (TINY[0], shape | {"intermediate_size": 48, "vocab_size": 96}))
    monkeypatch.setattr("gpuworker.runner.cuda_graphs.CudaRecorder", RepeatingRecorder)
    monkeypatch.setattr(gpu_engine, "_DRAWS", {"top_k": gpu_engine._DRAWS["top_k"]})
    gpu_engine.check(CPU, rows=2, prompt=20, output=3)
    assert capsys.readouterr().out.count("ok\n") == 2
