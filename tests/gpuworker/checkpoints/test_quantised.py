"""Quantised weights one at a time: each format's parts are read back as the floats and the integers that they mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from common.contracts.errors import Unsupported
from gpuworker.checkpoints.quantised import QuantisedLinear
from gpuworker.checkpoints.weights import Checkpoint
from tests.support.gpuworker import packers
from tests.support.gpuworker.packers import Parts, Weight, quantise

OUTPUTS, INPUTS, GROUP = 32, 64, 16
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "weight_block_size": [16, 16]}


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "symmetric": True} | weights}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


def random(outputs: int = OUTPUTS, inputs: int = INPUTS) -> torch.Tensor:
    return torch.randn((outputs, inputs), generator=torch.Generator().manual_seed(0))


def written(folder: Path, parts: Parts, quantisation: dict[str, Any], **more: torch.Tensor) -> Checkpoint:
    save_file({f"layer.{name}": part for name, part in parts.items()} | more, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": quantisation}))
    return Checkpoint(folder)


def check(checkpoint: Checkpoint, weight: Weight) -> QuantisedLinear:
    """Expect the weight's floats to the last bit, and integers that mean the same; return these."""
    assert list(checkpoint) == ["layer.weight"]
    assert torch.equal(checkpoint.tensor("layer.weight", torch.float32), weight.plain())
    integers = checkpoint.integers("layer.weight")
    assert integers is not None
    half = 2 ** (weight.bits - 1)
    assert (integers.name, integers.bits) == ("layer", weight.bits)
    assert torch.equal(integers.values.long(), torch.from_numpy(weight.numbers) - half)
    assert torch.equal(integers.scales, weight.scales.float())
    zeros = torch.from_numpy(weight.zeros) - half
    assert torch.equal(zeros if integers.zeros is None else integers.zeros.long(), zeros)
    assert (integers.zeros is None) == bool((zeros == 0).all())
    return integers


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_gptq(tmp_path: Path, bits: int, symmetric: bool) -> None:
    weight = quantise(random(), bits, GROUP, symmetric)
    integers = check(written(tmp_path, packers.gptq(weight), GPTQ | {"bits": bits}), weight)
    assert (integers.group_size, integers.group_of) == (GROUP, None)


def test_gptq_of_the_second_version_stores_zero_points_as_they_are(tmp_path: Path) -> None:
    weight = quantise(random(), 4, GROUP, symmetric=False)
    parts = packers.gptq(weight, first_version=False)
    check(written(tmp_path, parts, GPTQ | {"checkpoint_format": "gptq_v2"}), weight)


def test_a_zero_point_may_be_one_past_the_largest_number(tmp_path: Path) -> None:
    weight = quantise(random(), 4, GROUP, symmetric=True)
    weight.zeros[0, 0] = 16  # stored as 15
    check(written(tmp_path, packers.gptq(weight), GPTQ), weight)


def test_gptq_with_inputs_reordered_names_the_group_of_each(tmp_path: Path) -> None:
    weight = quantise(random(), 4, GROUP, symmetric=False, shuffle=True)
    integers = check(written(tmp_path, packers.gptq(weight), GPTQ | {"desc_act": True}), weight)
    assert integers.group_of is not None
    assert integers.group_of.tolist() == weight.group_of.tolist()


def test_gptq_without_groups(tmp_path: Path) -> None:
    weight = quantise(random(), 4, INPUTS, symmetric=True)
    integers = check(written(tmp_path, packers.gptq(weight), GPTQ | {"group_size": -1}), weight)
    assert integers.group_size == INPUTS


def test_layers_of_gptq_may_have_other_bits_than_the_configuration_says(tmp_path: Path) -> None:
    weight = quantise(random(), 8, 32, symmetric=False)
    quantisation = GPTQ | {"dynamic": {"layer": {"bits": 8, "group_size": 32}}}
    assert check(written(tmp_path, packers.gptq(weight), quantisation), weight).group_size == 32


def test_gptq_may_be_described_in_a_file_of_its_own(tmp_path: Path) -> None:
    weight = quantise(random(), 4, GROUP, symmetric=True)
    save_file({f"layer.{name}": part for name, part in packers.gptq(weight).items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": GROUP}))
    check(Checkpoint(tmp_path), weight)


@pytest.mark.parametrize("symmetric", [True, False])
def test_awq(tmp_path: Path, symmetric: bool) -> None:
    weight = quantise(random(), 4, GROUP, symmetric)
    assert check(written(tmp_path, packers.awq(weight), AWQ), weight).group_size == GROUP


def bfloat_scales(weight: Weight) -> Weight:
    return Weight(weight.bits, weight.numbers, weight.zeros, weight.scales.bfloat16(), weight.group_of)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_pack_quantized(tmp_path: Path, bits: int, symmetric: bool) -> None:
    weight = bfloat_scales(quantise(random(), bits, GROUP, symmetric))
    parts = packers.pack_quantized(weight, symmetric)
    check(written(tmp_path, parts, compressed("pack-quantized", num_bits=bits)), weight)


def test_pack_quantized_with_inputs_reordered(tmp_path: Path) -> None:
    weight = bfloat_scales(quantise(random(), 4, GROUP, symmetric=True, shuffle=True))
    parts = packers.pack_quantized(weight)
    assert check(written(tmp_path, parts, compressed("pack-quantized", num_bits=4)), weight).group_of is not None


def test_the_rest_of_a_packed_row_is_left_out(tmp_path: Path) -> None:
    weight = bfloat_scales(quantise(random(OUTPUTS, 60), 4, 20, symmetric=True))
    check(written(tmp_path, packers.pack_quantized(weight), compressed("pack-quantized", num_bits=4)), weight)


@pytest.mark.parametrize("form", ["int-quantized", "naive-quantized"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_int_quantized(tmp_path: Path, form: str, symmetric: bool) -> None:
    weight = bfloat_scales(quantise(random(), 8, INPUTS, symmetric))
    check(written(tmp_path, packers.int_quantized(weight, symmetric), compressed(form)), weight)


def test_one_scale_may_hold_for_the_whole_weight(tmp_path: Path) -> None:
    weight = bfloat_scales(quantise(random(), 8, INPUTS, symmetric=True))
    weight.scales[:] = 0.125
    parts = packers.int_quantized(weight) | {"weight_scale": torch.tensor(0.125)}
    check(written(tmp_path, parts, compressed("int-quantized")), weight)


@pytest.mark.parametrize("form", ["float-quantized", "naive-quantized"])
@pytest.mark.parametrize("shape", [(), (1,), (OUTPUTS,), (OUTPUTS, 1)])
def test_float_quantized(tmp_path: Path, form: str, shape: tuple[int, ...]) -> None:
    stored, scales = random().to(torch.float8_e4m3fn), torch.rand(shape, generator=torch.Generator().manual_seed(1))
    checkpoint = written(tmp_path, {"weight": stored, "weight_scale": scales}, compressed(form, type="float"))
    meant = stored.float() * (scales.view(-1, 1) if scales.numel() > 1 else scales)
    assert torch.equal(checkpoint.tensor("layer.weight", torch.float32), meant)
    assert checkpoint.integers("layer.weight") is None


def blocked(scale: str, quantisation: dict[str, Any], folder: Path) -> None:
    """Blocks of 16 x 16 of a weight of 24 x 40: the last row and the last column of blocks are cut."""
    stored = random(24, 40).to(torch.float8_e4m3fn)
    scales = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    checkpoint = written(folder, {"weight": stored, scale: scales}, quantisation)
    meant = stored.float()
    for (n, k), _ in ((index, 0) for index in torch.cartesian_prod(torch.arange(24), torch.arange(40))):
        meant[n, k] *= scales[n // 16, k // 16]
    assert torch.equal(checkpoint.tensor("layer.weight", torch.float32), meant)


def test_float_quantized_in_blocks(tmp_path: Path) -> None:
    blocked("weight_scale", compressed("float-quantized", type="float", block_structure=[16, 16]), tmp_path)


def test_fp8_in_blocks(tmp_path: Path) -> None:
    blocked("weight_scale_inv", FP8, tmp_path)


def test_mxfp4_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (3, 8, 2, 16), dtype=torch.uint8, generator=draw)
    scales = torch.randint(120, 134, (3, 8, 2), dtype=torch.uint8, generator=draw)
    parts = {"experts_blocks": blocks, "experts_scales": scales}
    checkpoint = written(tmp_path, parts, {"quant_method": "mxfp4"})
    assert list(checkpoint) == ["layer.experts"]
    ours = checkpoint.tensor("layer.experts", torch.bfloat16)
    assert torch.equal(ours, convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16))


def test_dequantised_weights_are_rounded_once(tmp_path: Path) -> None:
    weight = quantise(random(), 4, GROUP, symmetric=False)
    checkpoint = written(tmp_path, packers.gptq(weight), GPTQ)
    assert torch.equal(checkpoint.tensor("layer.weight", torch.bfloat16), weight.plain().bfloat16())


def test_large_weights_are_dequantised_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuworker.checkpoints.quantised._AT_ONCE", 5 * INPUTS)
    check(written(tmp_path, packers.gptq(quantised := quantise(random(), 4, GROUP, False)), GPTQ), quantised)


def test_what_is_not_quantised_is_as_stored(tmp_path: Path) -> None:
    norm = torch.arange(5.0).bfloat16()
    weight = quantise(random(), 4, GROUP, symmetric=True)
    checkpoint = written(tmp_path, packers.gptq(weight), GPTQ, **{"norm.weight": norm})
    assert torch.equal(checkpoint.tensor("norm.weight", torch.float32), norm)
    assert checkpoint.integers("norm.weight") is None
    assert ("layer.weight" in checkpoint, "norm.weight" in checkpoint, "layer.qzeros" in checkpoint) == (1, 1, 0)


def test_scales_of_activations_and_of_the_cache_are_no_weights(tmp_path: Path) -> None:
    weight = bfloat_scales(quantise(random(), 8, INPUTS, symmetric=True))
    extra = {name: torch.ones(1) for name in ("layer.input_scale", "attn.k_scale", "attn.v_scale")}
    check(written(tmp_path, packers.int_quantized(weight), compressed("int-quantized"), **extra), weight)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "method": ({"quant_method": "bitsandbytes"}, r"quantization_config.quant_method is 'bitsandbytes'; expected one"),
    "gptq bits": (GPTQ | {"bits": 3}, r"quantization_config.bits is 3; expected one of \(2, 4, 8\)"),
    "gptq layout": (GPTQ | {"checkpoint_format": "marlin"}, "quantization_config.checkpoint_format is 'marlin'"),
    "gptq words": (GPTQ | {"pack_dtype": "int16"}, "quantization_config.pack_dtype is 'int16'"),
    "awq layout": (AWQ | {"version": "gemv"}, "quantization_config.version is 'gemv'; expected gemm"),
    "awq bits": (AWQ | {"bits": 3}, "quantization_config.bits is 3; expected 4"),
    "compressed format": (compressed("marlin-24"), "quantization_config.format is 'marlin-24'"),
    "compressed bits": (
        compressed("pack-quantized", num_bits=3),
        "quantization_config.config_groups.group_0.weights is 'int3'",
    ),
    "compressed fp4": (
        compressed("pack-quantized", type="float", num_bits=4),
        "quantization_config.config_groups.group_0.weights is 'float4'",
    ),
    "compressed sparsity": (
        compressed("pack-quantized") | {"sparsity_config": {"format": "sparse-24-bitmask"}},
        "quantization_config.sparsity_config.format is 'sparse-24-bitmask'",
    ),
    "compressed transforms": (
        compressed("pack-quantized") | {"transform_config": {"config_groups": {"R1": {}}}},
        "quantization_config.transform_config is 'not empty'",
    ),
    "fp8 blocks": (FP8 | {"weight_block_size": [128]}, r"quantization_config.weight_block_size is \[128\]"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_read_is_refused_by_its_field(tmp_path: Path, what: str) -> None:
    quantisation, words = REFUSED[what]
    with pytest.raises(Unsupported, match=words):
        written(tmp_path, {"qweight": torch.zeros(1)}, quantisation)


def test_groups_of_gptq_may_be_cut_short_where_each_input_names_its_own(tmp_path: Path) -> None:
    weight = quantise(random(OUTPUTS, 56), 4, 24, symmetric=False)  # 24, 24 and 8
    check(written(tmp_path, packers.gptq(weight), GPTQ | {"group_size": 24}), weight)


def test_groups_that_do_not_divide_the_inputs_are_refused(tmp_path: Path) -> None:
    weight = bfloat_scales(quantise(random(OUTPUTS, 56), 4, 24, symmetric=True))
    checkpoint = written(tmp_path, packers.pack_quantized(weight), compressed("pack-quantized", num_bits=4))
    with pytest.raises(Unsupported, match="layer: groups is 3; 56 inputs cannot be shared out evenly"):
        checkpoint.tensor("layer.weight", torch.float32)


def test_scales_that_fit_no_block_are_refused(tmp_path: Path) -> None:
    parts = {"weight": random().to(torch.float8_e4m3fn), "weight_scale_inv": torch.ones(3, 3)}
    with pytest.raises(Unsupported, match=r"layer: scales of the weight is \(3, 3\); expected one number, 32, or one"):
        written(tmp_path, parts, FP8).tensor("layer.weight", torch.float32)
