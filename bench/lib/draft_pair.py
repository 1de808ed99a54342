"""A random model whose first layers guess it well, and these layers alone: a target and its draft model.

No small draft model of a small served model is at hand. So the output of the target's later layers is scaled down: the
smaller `faint`, the likelier the first layers sample the same token. The work of both models is that of their shapes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file

from bench.lib.checkpoints import MEDIUM, SMALL

LAYERS: Final = 1
"""Layers of the draft model."""

SHAPES: Final[Mapping[str, Mapping[str, object]]] = {
    "medium": {**MEDIUM, "vocab_size": 8192},
    "small": {**SMALL, "head_dim": 32},
}
"""Shapes of targets. With a vocabulary of 8192 the draft model has a seventh of the weights of "medium"."""

_DEVIATION: Final = 0.1


def write_pair(folder: Path, faint: float, shape: Mapping[str, object]) -> tuple[Path, Path]:
    """Write both checkpoints in bfloat16, and return their folders."""
    generator = torch.Generator().manual_seed(1)
    tensors = dict(_tensors(shape, faint, generator))
    first = tuple(f"model.layers.{layer}." for layer in range(LAYERS))
    own = {name: each for name, each in tensors.items() if not name.startswith("model.layers.") or name[:15] in first}
    target, draft = folder / "target", folder / "draft"
    _write(target, shape, tensors)
    _write(draft, {**shape, "num_hidden_layers": LAYERS}, own)
    return target, draft


def write_wrong(folder: Path, shape: Mapping[str, object]) -> Path:
    """Write a draft model of the same shape that guesses nothing right."""
    small = {**shape, "num_hidden_layers": LAYERS}
    _write(folder / "wrong", small, dict(_tensors(small, 1.0, torch.Generator().manual_seed(2))))
    return folder / "wrong"


def _tensors(
    shape: Mapping[str, object], faint: float, generator: torch.Generator
) -> Iterator[tuple[str, torch.Tensor]]:
    size, inner, layers, head = (
        _number(shape, key) for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "head_dim")
    )
    queries, kv = head * _number(shape, "num_attention_heads"), head * _number(shape, "num_key_value_heads")

    def weight(*sizes: int, scale: float = 1.0) -> torch.Tensor:
        return (scale * _DEVIATION * torch.randn(sizes, generator=generator)).bfloat16()

    yield "model.embed_tokens.weight", weight(_number(shape, "vocab_size"), size)
    yield "model.norm.weight", torch.ones(size).bfloat16()
    for layer in range(layers):
        name, scale = f"model.layers.{layer}.", 1.0 if layer < LAYERS else faint
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{name}{norm}.weight", torch.ones(size).bfloat16()
        for part, rows in (("q", queries), ("k", kv), ("v", kv)):
            yield f"{name}self_attn.{part}_proj.weight", weight(rows, size)
        yield f"{name}self_attn.o_proj.weight", weight(size, queries, scale=scale)
        for part in ("gate", "up"):
            yield f"{name}mlp.{part}_proj.weight", weight(inner, size)
        yield f"{name}mlp.down_proj.weight", weight(size, inner, scale=scale)


def _number(shape: Mapping[str, object], key: str) -> int:
    found = shape[key]
    assert isinstance(found, int)
    return found


def _write(folder: Path, shape: Mapping[str, object], tensors: dict[str, torch.Tensor]) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**shape, "dtype": "bfloat16"}))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
