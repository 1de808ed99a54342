"""Adapters are read as PEFT means them; whatever would compute something else is refused by its name."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from common.contracts.limits import MAX_ADAPTER_CONFIG_BYTES
from gpuworker.checkpoints.lora import AdapterRefused, LoraAdapter, read_adapter

TARGETS = {"model.layers.0.self_attn.q_proj": (6, 4), "model.layers.0.mlp.down_proj": (4, 8)}
Q, DOWN = (f"base_model.model.{name}" for name in TARGETS)
CONFIG: Mapping[str, Any] = {
    "peft_type": "LORA",
    "r": 2,
    "lora_alpha": 6,
    "bias": "none",
    "target_modules": ["q_proj"],
    "base_model_name_or_path": "some/base",
}


def tensors(rank: int = 2) -> dict[str, torch.Tensor]:
    a = torch.arange(4.0 * rank).view(rank, 4)
    return {f"{Q}.lora_A.weight": a, f"{Q}.lora_B.weight": torch.ones(6, rank)}


def written(folder: Path, weights: Mapping[str, torch.Tensor] | None = None, **changed: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **changed}))
    save_file(dict(tensors() if weights is None else weights), folder / "adapter_model.safetensors")
    return folder


def read(folder: Path, max_rank: int = 8) -> LoraAdapter:
    return read_adapter(folder, TARGETS, max_rank)


def refusal(folder: Path, max_rank: int = 8) -> str:
    with pytest.raises(AdapterRefused) as refused:
        read(folder, max_rank)
    return str(refused.value)


@pytest.mark.parametrize(("rslora", "scale"), [(False, 3.0), (True, 6 / math.sqrt(2))])
def test_the_scale_is_in_b(tmp_path: Path, rslora: bool, scale: float) -> None:
    adapter = read(written(tmp_path, use_rslora=rslora))
    (part,) = adapter.parts.values()
    assert adapter.rank == 2
    assert adapter.base == "some/base"
    assert torch.equal(part.a, torch.arange(8.0).view(2, 4))
    assert torch.equal(part.b, torch.full((6, 2), scale))
    assert adapter.num_bytes == 4 * (8 + 12)


def test_halves_become_floats(tmp_path: Path) -> None:
    halves = {name: each.to(torch.bfloat16) for name, each in tensors().items()}
    (part,) = read(written(tmp_path, halves)).parts.values()
    assert part.a.dtype == part.b.dtype == torch.float32


def test_the_fingerprint_is_of_weights_and_scale_alone(tmp_path: Path) -> None:
    same = read(written(tmp_path / "a")).fingerprint
    assert read(written(tmp_path / "b", base_model_name_or_path="else", lora_dropout=0.5)).fingerprint == same
    other = {name: each + 1 for name, each in tensors().items()}
    changed = {
        read(written(tmp_path / "c", other)).fingerprint,
        read(written(tmp_path / "d", lora_alpha=7)).fingerprint,
        read(written(tmp_path / "e", use_rslora=True)).fingerprint,
    }
    assert len(changed | {same}) == 4


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; expected LORA"),
        ({"bias": "all"}, "bias is 'all'; expected none"),
        ({"use_dora": True}, "use_dora is True, which is not served: DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is ['lm_head'], which is not served"),
        ({"trainable_token_indices": [1]}, "rows of the embedding are trained"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern is an object, which is not served"),
        ({"alpha_pattern": {"q_proj": 4}}, "alpha_pattern is an object, which is not served"),
        ({"lora_bias": True}, "lora_bias is True, which is not served"),
        ({"fan_in_fan_out": True}, "weights of the base are transposed"),
        ({"layer_replication": [[0, 1]]}, "layers of the base are repeated"),
        ({"use_of_tomorrow": 1}, "use_of_tomorrow is 1, which is not served"),
        ({"init_lora_weights": "pissa_niter_4"}, "whose training changed the base too"),
        ({"r": 9}, "r is 9; expected at most 8: raise --max-lora-rank"),
        ({"r": 1 << 200}, "r is a number of more than 38 digits; expected at most 8"),
        ({"r": 0}, "r is 0; expected a whole number from 1 on"),
        ({"r": True}, "r is True; expected a whole number from 1 on"),
        ({"r": None}, "r is None; expected a whole number from 1 on"),
        ({"lora_alpha": "8"}, "lora_alpha is '8'; expected a finite number"),
        ({"lora_alpha": math.inf}, "lora_alpha is inf; expected a finite number"),
        ({"lora_alpha": 10**400}, "lora_alpha is a number of more than 38 digits; expected a finite number"),
        ({"use_rslora": "yes"}, "use_rslora is 'yes'; expected true or false"),
        ({"target_modules": ["embed_tokens"]}, "embeddings and the last linear cannot be adapted"),
        ({"target_modules": ["lm_head"]}, "embeddings and the last linear cannot be adapted"),
        ({"target_modules": ["w3"]}, "target_modules has 'w3'; this base can be adapted in down_proj, q_proj"),
        ({"target_modules": [7]}, "target_modules has 7; expected names of modules"),
    ],
)
def test_what_a_configuration_may_not_ask_for(tmp_path: Path, changed: dict[str, Any], words: str) -> None:
    assert words in refusal(written(tmp_path, **changed))


def without(name: str) -> dict[str, torch.Tensor]:
    return {key: each for key, each in tensors().items() if not key.endswith(name)}


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({}, "has no tensors"),
        (tensors(3), "is [3, 4]; this base and r = 2 take [2, 4]"),
        (tensors() | {f"{Q}.lora_B.weight": torch.ones(7, 2)}, "is [7, 2]; this base and r = 2 take [6, 2]"),
        (tensors() | {f"{Q}.lora_A.weight": torch.ones(8)}, "is [8]; this base and r = 2 take [2, 4]"),
        (without("lora_A.weight"), f"'{Q}.lora_B.weight' without '{Q}.lora_A.weight'"),
        (without("lora_B.weight"), f"'{Q}.lora_A.weight' without '{Q}.lora_B.weight'"),
        (tensors() | {f"{Q}.lora_magnitude_vector": torch.ones(6)}, "which is DoRA"),
        (tensors() | {"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(2, 4)}, "an embedding"),
        (tensors() | {"base_model.model.lm_head.weight": torch.ones(2, 4)}, "which is no part of plain LoRA"),
        (tensors() | {"base_model.model.layers.9.q_proj.lora_A.weight": torch.ones(2, 4)}, "is of another base"),
        (tensors() | {f"{Q}.lora_A.weight": torch.ones(2, 4, dtype=torch.float64)}, "is in torch.float64"),
        (tensors() | {f"{Q}.lora_A.weight": torch.full((2, 4), math.nan)}, "are not finite"),
        (tensors() | {f"{Q}.lora_B.weight": torch.full((6, 2), math.inf)}, "are not finite"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path: Path, weights: dict[str, torch.Tensor], words: str) -> None:
    assert words in refusal(written(tmp_path, weights))


def test_a_pickle_is_never_read(tmp_path: Path) -> None:
    (written(tmp_path) / "adapter_model.safetensors").unlink()
    (tmp_path / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    assert "a pickle, which may run any code when it is read" in refusal(tmp_path)


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_folder_without_a_file(tmp_path: Path, missing: str) -> None:
    (written(tmp_path) / missing).unlink()
    assert f"has no {missing}; expected a folder that PEFT's save_pretrained wrote" in refusal(tmp_path)


def test_files_are_bounded_before_they_are_read(tmp_path: Path) -> None:
    written(tmp_path)
    with (tmp_path / "adapter_model.safetensors").open("r+b") as file:
        file.truncate(1 << 40)  # sparse: it takes no space
    assert "has 1099511627776 bytes; an adapter of rank 2 for this base has at most" in refusal(tmp_path)
    (tmp_path / "adapter_config.json").write_text(" " * (MAX_ADAPTER_CONFIG_BYTES + 1))
    assert f"expected at most {MAX_ADAPTER_CONFIG_BYTES}" in refusal(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 8, b"\x10\0\0\0\0\0\0\0{" + b"[" * 15, b"\x02\0\0\0\0\0\0\0{}garbage"]
)
def test_weights_that_are_no_safetensors(tmp_path: Path, content: bytes) -> None:
    (written(tmp_path) / "adapter_model.safetensors").write_bytes(content)
    assert "cannot be read" in refusal(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{", "[" * 500, '{"r": 1'])
def test_a_configuration_that_is_no_object(tmp_path: Path, content: str) -> None:
    (written(tmp_path) / "adapter_config.json").write_text(content)
    assert "adapter_config.json" in refusal(tmp_path)
