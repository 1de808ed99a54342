"""Whole quantised checkpoints, served: they compute what the same weights compute when they are stored in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from common.contracts.errors import InvalidConfig, Unsupported
from gpuworker.attention.backends import make_backend
from gpuworker.models.hf.loader import ModelSource, load_model
from gpuworker.models.self_test import self_test
from tests.gpuworker.checkpoints.test_quantised import AWQ, GPTQ, compressed
from tests.support.checkpoints import checkpoint, config_of, hf_greedy
from tests.support.gpuworker import packers
from tests.support.gpuworker.packers import Parts, quantise
from tests.support.gpuworker.runner_harness import Driver, runner_on

CPU = torch.device("cpu")
GROUP = 16
Pack = Any


def packed_by(make: Any, bits: int = 4, group_size: int = GROUP, **options: bool) -> Pack:
    """Return what packs the linear layers of the blocks, and leaves embedding, head and routers alone."""

    def pack(layer: str, weight: torch.Tensor) -> tuple[Parts, torch.Tensor] | None:
        if not layer.endswith("_proj"):
            return None
        found = quantise(weight, bits, group_size or weight.shape[1], symmetric=not options.get("asymmetric", False))
        return make(found), found.plain()

    return pack


def float8(layer: str, weight: torch.Tensor) -> tuple[Parts, torch.Tensor] | None:
    if not layer.endswith("_proj"):
        return None
    scale = (weight.abs().amax(dim=1, keepdim=True) / 448).bfloat16()
    stored = (weight / scale.float()).to(torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale": scale}, stored.float() * scale.float()


def in_bfloat_scales(make: Any) -> Any:
    def wrapped(weight: packers.Weight) -> Parts:
        weight.scales.copy_(weight.scales.bfloat16().half())
        return make(weight)  # type: ignore[no-any-return]

    return wrapped


FORMATS: dict[str, tuple[Pack, dict[str, Any]]] = {
    "gptq": (packed_by(packers.gptq, asymmetric=True), GPTQ),
    "awq": (packed_by(packers.awq, asymmetric=True), AWQ),
    "pack-quantized": (
        packed_by(in_bfloat_scales(packers.pack_quantized)),
        compressed("pack-quantized", num_bits=4, strategy="group", group_size=GROUP),
    ),
    "int-quantized": (
        packed_by(in_bfloat_scales(packers.int_quantized), 8, 0),
        compressed("int-quantized", strategy="channel"),
    ),
    "float-quantized": (float8, compressed("float-quantized", type="float", strategy="channel")),
}


def logits(folder: Path, dtype: str = "float32") -> torch.Tensor:
    model = load_model(ModelSource(str(folder), dtype=dtype), CPU)
    return model.reference_logits(torch.arange(12)[None])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", FORMATS)
def test_a_quantised_checkpoint_runs_as_the_weights_that_it_means(tmp_path: Path, form: str, dtype: str) -> None:
    pack, quantisation = FORMATS[form]
    plain = packers.rewrite(checkpoint("llama"), tmp_path / "packed", pack, quantisation)
    assert torch.equal(logits(tmp_path / "packed", dtype), logits(plain, dtype))


def test_it_passes_the_self_test_and_says_what_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pack, quantisation = FORMATS["gptq"]
    packers.rewrite(checkpoint("llama"), tmp_path / "packed", pack, quantisation)
    with caplog.at_level("INFO"):
        model = load_model(ModelSource(str(tmp_path / "packed"), dtype="float32"), CPU)
    assert self_test(model, lambda cache: make_backend("auto", cache)).num_layers == 3
    assert "21 of 30 weights of the checkpoint are in gptq; the transformers path runs them dequantised" in caplog.text


@pytest.mark.parametrize("form", ["float-quantized", "int-quantized"])
def test_latents_are_absorbed_with_the_weights_that_a_quantised_layer_means(tmp_path: Path, form: str) -> None:
    pack, quantisation = FORMATS[form]
    plain = packers.rewrite(
        checkpoint("deepseek_v3"),
        tmp_path / "packed",
        lambda layer, weight: pack(layer, weight) if layer.endswith("kv_b_proj") else None,
        quantisation,
    )
    runner = runner_on(load_model(ModelSource(str(tmp_path / "packed"), dtype="float32"), CPU))
    driver, prompt = Driver(runner), list(range(9, 40))
    stream = driver.add(prompt, 12, chunk=13)
    driver.run()
    runner.close()
    assert stream.output == hf_greedy(plain, prompt, 12)
    model = load_model(ModelSource(str(tmp_path / "packed"), dtype="float32"), CPU)
    assert (len(model.absorbed.layers), model.absorbed.reason) == (3, "")


def test_quantised_experts_are_merged_as_transformers_wants_them(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        name: getattr(config_of("llama"), name)
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    }
    options |= {"head_dim": 16, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
    config = Qwen3MoeConfig(**options, architectures=["Qwen3MoeForCausalLM"])
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "made")
    pack, quantisation = FORMATS["gptq"]
    plain = packers.rewrite(tmp_path / "made", tmp_path / "packed", pack, quantisation)
    stored = load_file(tmp_path / "packed" / "model.safetensors")
    assert "model.layers.0.mlp.experts.3.down_proj.qweight" in stored
    assert torch.equal(logits(tmp_path / "packed"), logits(plain))


def test_weights_may_lie_in_several_files(tmp_path: Path) -> None:
    pack, quantisation = FORMATS["gptq"]
    plain = packers.rewrite(checkpoint("llama"), tmp_path / "packed", pack, quantisation)
    whole = tmp_path / "packed" / "model.safetensors"
    tensors, where = load_file(whole), {}
    for index, name in enumerate(tensors):
        where[name] = f"model-{index % 3}.safetensors"  # even the parts of one layer
    for file in set(where.values()):
        save_file({name: tensors[name] for name in where if where[name] == file}, whole.with_name(file))
    whole.unlink()
    whole.with_name("model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert torch.equal(logits(tmp_path / "packed"), logits(plain))
    whole.with_name("model-1.safetensors").unlink()
    with pytest.raises(InvalidConfig, match=r"names model-1\.safetensors, which are not there"):
        logits(tmp_path / "packed")


def test_a_weight_that_is_missing_is_named_and_not_made_up(tmp_path: Path) -> None:
    def lost(layer: str, weight: torch.Tensor) -> tuple[Parts, torch.Tensor] | None:
        return ({"other": weight}, weight) if layer.endswith("layers.1.mlp.up_proj") else None

    packers.rewrite(checkpoint("llama"), tmp_path / "packed", lost, GPTQ)
    with pytest.raises(InvalidConfig, match=r"1 weights are missing .* such as model\.layers\.1\.mlp\.up_proj\.weight"):
        logits(tmp_path / "packed")


def test_a_method_that_is_unknown_is_refused(tmp_path: Path) -> None:
    pack, _ = FORMATS["gptq"]
    packers.rewrite(checkpoint("llama"), tmp_path / "packed", pack, {"quant_method": "aqlm"})
    with pytest.raises(Unsupported, match=r"quantization_config.quant_method is 'aqlm'"):
        logits(tmp_path / "packed")
