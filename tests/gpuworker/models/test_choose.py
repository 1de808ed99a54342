"""Which path a model takes, and why: the choice at start, its test, and what it says of itself."""

from __future__ import annotations

import functools
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from common.contracts.errors import InvalidConfig
from common.contracts.types import KvGeometry
from gpuworker.attention.backends import make_backend
from gpuworker.memory.kv_cache import KvCache
from gpuworker.models import choose
from gpuworker.models.choose import LlamaModel, open_native
from gpuworker.models.hf.loader import ModelSource, load_model, read_config
from gpuworker.models.llama import pack as llama_pack
from gpuworker.models.llama import reference as llama_reference
from gpuworker.models.llama.cpu_model import LlamaCpuModel
from gpuworker.models.llama.spec import LlamaSpec
from gpuworker.models.self_test import self_test
from gpuworker.native import library as native
from gpuworker.runner.model_runner import ModelRunner, RunnerLimits
from gpuworker.runner.thread_executor import thread_executor
from tests.support.checkpoints import checkpoint, config_of, hf_greedy
from tests.support.gpuworker.llama_cases import make_case
from tests.support.gpuworker.runner_harness import SLOTS, Driver

pytestmark = pytest.mark.skipif(native.best() is None, reason="the native library was not built")
CPU = torch.device("cpu")
FAMILY = ("llama", "qwen3", "mistral", "mixtral", "qwen3_moe", "olmoe")
Opened = tuple[LlamaModel, KvGeometry]


def backend(cache: KvCache) -> Any:
    return make_backend("auto", cache)


def opened(kind: str, **options: Any) -> Opened:
    found = open_native(ModelSource(str(checkpoint(kind)), **options), CPU, "native", backend)
    assert found is not None
    return found


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", FAMILY)
def test_the_family_takes_the_native_path_with_the_same_geometry(kind: str, dtype: str, kv_cache_dtype: str) -> None:
    source = ModelSource(str(checkpoint(kind)), dtype=dtype, kv_cache_dtype=kv_cache_dtype)
    found = open_native(source, CPU, "auto", backend)
    assert found is not None
    assert found[1] == self_test(load_model(source, CPU), backend)


@pytest.mark.parametrize("kind", FAMILY)
def test_greedy_output_of_a_mixed_batch_equals_generate(kind: str) -> None:
    model, geometry = opened(kind, dtype="float32")
    cache = KvCache(geometry, SLOTS // 16, 16, CPU)
    runner = ModelRunner(model, cache, backend(cache), RunnerLimits(8, 256, threads=1), thread_executor())
    driver = Driver(runner)
    prompts = [[6 + (31 * n + 7 * i) % 250 for i in range(length)] for n, length in enumerate((3, 41, 70, 17))]
    streams = [driver.add(prompt, 24, chunk) for prompt, chunk in zip(prompts, (99, 7, 13, 1), strict=True)]
    driver.run()
    runner.close()
    assert [stream.output for stream in streams] == [hf_greedy(checkpoint(kind), prompt, 24) for prompt in prompts]


@functools.cache
def half_precision(kind: str) -> Path:
    """Return a checkpoint whose weights are stored in float16, and named so by its configuration."""
    directory = checkpoint(kind).with_name(f"{kind}-float16")
    AutoModelForCausalLM.from_pretrained(checkpoint(kind), dtype=torch.float16).save_pretrained(directory)
    assert read_config(directory).dtype == torch.float16
    return directory


@pytest.mark.parametrize("kind", FAMILY)
def test_float16_stays_in_16_bits_and_has_the_tokens_of_float32(kind: str) -> None:
    directory = half_precision(kind)
    found = open_native(ModelSource(str(directory)), CPU, "auto", backend)
    assert found is not None
    model, geometry = found
    assert (model.dtype, geometry.dtype) == (torch.float32, "float32")
    assert isinstance(model, LlamaCpuModel)
    assert model.packed.kinds_in_words == "linears in F16"
    widened = opened(kind, dtype="float32")[0]
    assert model.weight_bytes < 0.7 * widened.weight_bytes  # norms, embeddings, biases
    cache = KvCache(geometry, SLOTS // 16, 16, CPU)
    runner = ModelRunner(model, cache, backend(cache), RunnerLimits(8, 256, threads=1), thread_executor())
    driver = Driver(runner)
    prompts = [[6 + (29 * n + 5 * i) % 250 for i in range(length)] for n, length in enumerate((5, 40, 23))]
    streams = [driver.add(prompt, 24, 11) for prompt in prompts]
    driver.run()
    runner.close()
    # `hf_greedy` is transformers on the same file, in float32.
    assert [stream.output for stream in streams] == [hf_greedy(directory, prompt, 24) for prompt in prompts]


def test_a_narrow_cache_can_be_asked_for_beside_float16_weights(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=choose.__name__):
        found = open_native(ModelSource(str(half_precision("llama")), kv_cache_dtype="float16"), CPU, "native", backend)
    assert found is not None
    assert (found[0].dtype, found[1].dtype) == (torch.float32, "float16")
    assert "llama: float16 is computed in float32, K and V are kept in float16" in caplog.text
    assert "llama: linears in F16" in caplog.text


def test_the_log_names_the_entries_that_nothing_reads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "capped"
    shutil.copytree(checkpoint("llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"final_logit_softcapping": 30.0}))
    assert open_native(ModelSource(str(folder)), CPU, "native", backend) is not None
    (line,) = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert line.startswith(f"{folder}/config.json has entries that nothing reads")
    assert line.endswith(": final_logit_softcapping")


def test_random_weights_of_a_float16_model_stay_in_16_bits_too(caplog: pytest.LogCaptureFixture) -> None:
    source = ModelSource(str(half_precision("llama")), load_format="dummy")
    with caplog.at_level(logging.INFO, logger=choose.__name__):
        assert open_native(source, CPU, "native", backend) is not None
    assert "llama: linears in F16" in caplog.text


@pytest.mark.parametrize(("quantization", "words"), [("int8", "linears in I8_F32"), ("w8a8", "linears in W8A8")])
def test_float16_can_be_quantised_at_start(quantization: str, words: str, caplog: pytest.LogCaptureFixture) -> None:
    source = ModelSource(str(half_precision("llama")), quantization=quantization)
    with caplog.at_level(logging.INFO, logger=choose.__name__):
        assert open_native(source, CPU, "native", backend) is not None
    assert f"llama: {words}" in caplog.text


def test_dummy_weights_are_those_that_the_transformers_path_draws() -> None:
    source = ModelSource(str(checkpoint("llama")), "float32", "dummy", seed=3)
    found = open_native(source, CPU, "native", backend)
    assert found is not None
    outputs = []
    for model in (found[0], load_model(source, CPU)):
        cache = KvCache(found[1], SLOTS // 4, 4, CPU)
        runner = ModelRunner(model, cache, backend(cache), RunnerLimits(1, 32, threads=1), thread_executor())
        driver = Driver(runner, block_size=4)
        stream = driver.add(list(range(6, 15)), 12)
        driver.run()
        runner.close()
        outputs.append(stream.output)
    assert outputs[0] == outputs[1]


# ---------------------------------------------------------------- who does not take it


def reason_for(caplog: pytest.LogCaptureFixture, source: ModelSource) -> str:
    """Return the log line of a model that "auto" runs on transformers. "native" fails for the same reason."""
    with caplog.at_level(logging.INFO, logger=choose.__name__):
        assert open_native(source, CPU, "auto", backend) is None
    line = caplog.records[-1].getMessage()
    with pytest.raises(InvalidConfig, match=r"--model-impl: native, but the model cannot take that path") as refused:
        open_native(source, CPU, "native", backend)
    assert str(refused.value).endswith(line.partition("runs on transformers: ")[2])
    return line


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("gemma2", {}, "gemma2 runs on transformers: gemma2 is not of the Llama family"),
        ("llama", {"kv_cache_dtype": "fp8"}, "llama runs on transformers: native attention has no cache of fp8"),
    ],
)
def test_a_model_that_cannot_take_it_runs_on_transformers(
    kind: str, options: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert reason in reason_for(caplog, ModelSource(str(checkpoint(kind)), **options))


def test_without_the_library_every_model_runs_on_transformers(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "best", lambda: None)
    assert "the native library is not there" in reason_for(caplog, ModelSource(str(checkpoint("llama"))))


def test_the_transformers_path_can_be_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=choose.__name__):
        assert open_native(ModelSource(str(checkpoint("llama"))), CPU, "transformers", backend) is None
    assert "llama runs on transformers: that was asked for" in caplog.text


Tensors = dict[str, torch.Tensor]


def without_norm(tensors: Tensors) -> None:
    del tensors["model.norm.weight"]


def with_short_norm(tensors: Tensors) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:5].clone()


@pytest.mark.parametrize(
    ("change", "reason"),
    [(without_norm, "'model.norm.weight'"), (with_short_norm, r"model.norm.weight is (5,)")],
)
def test_a_checkpoint_of_other_tensors_is_left_to_the_transformers_path(
    change: Callable[[Tensors], None], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(checkpoint("llama"), tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    assert reason in reason_for(caplog, ModelSource(str(tmp_path)))


# ---------------------------------------------------------------- the start-up test


def wrong_eps(packed: llama_pack.PackedModel) -> None:
    packed.struct.norm_eps = 0.5


def wrong_window(packed: llama_pack.PackedModel) -> None:
    packed.layers[1].window = 3


def wrong_router(packed: llama_pack.PackedModel) -> None:
    first, last = packed.layers[0].experts[0].router, packed.layers[2].experts[0].router
    first.memory, last.memory = last.memory, first.memory


def wrong_experts(packed: llama_pack.PackedModel) -> None:
    each = packed.layers[0].experts[0].each
    each[0].down.memory, each[1].down.memory = each[1].down.memory, each[0].down.memory


def wrong_weights(packed: llama_pack.PackedModel) -> None:
    packed.layers[0].experts[0].normalised = 1


def wrong_order(packed: llama_pack.PackedModel) -> None:
    first, second = packed.layers[0].down.memory, packed.layers[1].down.memory
    packed.layers[0].down.memory, packed.layers[1].down.memory = second, first


@pytest.mark.parametrize("mistake", [wrong_eps, wrong_window, wrong_order])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_forward_that_computes_something_else_is_not_used(
    mistake: Callable[[llama_pack.PackedModel], None],
    dtype: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    make_mistake(mistake, monkeypatch)
    found = reason_for(caplog, ModelSource(str(checkpoint("llama")), dtype=dtype))
    assert "its logits differ from its own eager attention" in found


def make_mistake(mistake: Callable[[llama_pack.PackedModel], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every model that is packed from here on a wrong one."""
    right = llama_pack.pack_model

    def pack(*args: Any) -> llama_pack.PackedModel:
        packed = right(*args)
        mistake(packed)
        return packed

    monkeypatch.setattr("gpuworker.models.choose.pack_model", pack)


@pytest.mark.parametrize("mistake", [wrong_router, wrong_experts, wrong_weights])
def test_experts_that_compute_something_else_are_not_used(
    mistake: Callable[[llama_pack.PackedModel], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    make_mistake(mistake, monkeypatch)
    found = reason_for(caplog, ModelSource(str(checkpoint("qwen3_moe")), dtype="float32"))
    assert "its logits differ from its own eager attention" in found


def test_a_window_that_is_wrong_beyond_the_self_test_is_found_on_a_tiny_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A window of 100 positions does not show in 16 tokens; the tiny model's window does."""
    config = config_of("mistral")
    config.sliding_window = 100
    config.save_pretrained(tmp_path)
    source = ModelSource(str(tmp_path), "float32", "dummy")
    assert open_native(source, CPU, "native", backend) is not None
    right = llama_pack.pack_model

    def without_windows(*args: Any) -> llama_pack.PackedModel:
        packed = right(*args)
        for layer in packed.layers:
            layer.window = 0
        return packed

    monkeypatch.setattr("gpuworker.models.choose.pack_model", without_windows)
    assert "mistral cannot be served beyond sliding_window 100: tested tiny" in reason_for(caplog, source)


def windows(*each: int | None) -> LlamaSpec:
    spec = make_case("llama").spec
    changes = {"num_layers": len(each), "windows": each}
    return LlamaSpec(**({name: getattr(spec, name) for name in LlamaSpec.__slots__} | changes))


@pytest.mark.parametrize(
    ("spec", "layers"),
    [
        (windows(None), (0,)),
        (windows(None, None, None), (0, 1)),
        (windows(*[None] * 28, 8, 8), (0, 1, 28)),
        (windows(8, 8, None, 4), (0, 1, 2, 3)),
    ],
)
def test_the_test_runs_a_layer_of_each_window(spec: LlamaSpec, layers: tuple[int, ...]) -> None:
    assert llama_reference.tested_layers(spec) == layers


def test_the_model_says_what_decides_its_bits() -> None:
    model, _ = opened("llama", dtype="bfloat16")
    level = native.levels_here()[-1]
    assert model.arithmetic == f"native {level}, bfloat16, linears in BF16"


def test_a_model_whose_kinds_of_layers_differ_is_tested_on_each(tmp_path: Path) -> None:
    case = make_case("qwen2, a window above")
    case.transformers_model.module.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["layer_types"] == ["full_attention", "sliding_attention", "sliding_attention"]
    found = open_native(ModelSource(str(tmp_path)), CPU, "native", backend)
    assert found is not None
    assert found[1].window == 0
