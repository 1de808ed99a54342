"""The reference of the native path's start-up test: a few layers of the model, run by other code on the same weights.

transformers runs them, except where the configuration is plain (`plain_config`): then it has one meaning, which tests
compare with transformers, and plain torch runs them. The import of transformers' models would take longer than the
whole start of a small model.

Layers differ in their window, in what mixes their tokens, in their sizes, and in whether they have experts. So the
first two and the first of each other kind stand for all. They use the weights that the native model multiplies by: on
pages of the files, or dequantised where the model holds integers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch

from gpuworker.attention.interface import LayerAttention
from gpuworker.models.hf.loader import make_module
from gpuworker.models.hf.model import TransformersModel
from gpuworker.models.llama.gpu_model import LlamaGpuModel
from gpuworker.models.llama.gpu_weights import fused_weights
from gpuworker.models.llama.plain_config import PlainConfig
from gpuworker.models.llama.spec import LlamaSpec, llama_spec
from gpuworker.models.llama.weights import (
    EMBEDDING,
    HEAD,
    TOKEN_NORM,
    FusedLinear,
    LayerTensors,
    TensorOf,
    final_norm,
    head_tensors,
    layer_tensors,
    token_projection,
    token_table,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig

WeightsOf = Callable[[FusedLinear], Sequence[torch.Tensor]]
"""Gives the weights of a linear's parts as they are multiplied."""


def tested_layers(spec: LlamaSpec) -> tuple[int, ...]:
    """Return the layers that the test runs: the first two, and the first of each kind."""
    sizes = None if spec.gemma is None else spec.gemma.layers
    kinds = [
        (window, spec.has_experts(layer), spec.kind(layer), sizes and sizes[layer])
        for layer, window in enumerate(spec.windows)
    ]
    return tuple(sorted({*range(min(2, spec.num_layers)), *map(kinds.index, kinds)}))


class TorchReference(LlamaGpuModel):
    """A plain model in torch's operations alone, on the CPU."""

    @torch.inference_mode()
    def reference_logits(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [N, T, vocab] of N sequences, [N, T], by attention that is written out."""
        positions = torch.arange(token_ids.shape[1])
        return torch.stack([self.forward(row, positions, positions, _WholeAttention()) for row in token_ids])


class _WholeAttention:
    """Attends over one whole sequence, by the formula. A plain model has no windows."""

    def write_and_attend(
        self, layer: LayerAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        count, group = len(query), query.shape[1] // key.shape[1]
        keys, values = (each.float().repeat_interleave(group, dim=1) for each in (key, value))  # [T, num_heads, d]
        scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * layer.scale
        hidden = torch.ones(count, count, dtype=torch.bool).triu(1)
        shares = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", shares, values).to(query.dtype)


def reference_part(
    config: PretrainedConfig,
    spec: LlamaSpec,
    tensor_of: TensorOf,
    weights_of: WeightsOf,
    dtype: torch.dtype,
    device: torch.device,
    kv_dtype: str,
) -> TransformersModel | TorchReference:
    """Return the model of `tested_layers`. Its last linear stands by itself: it may be held otherwise.

    Raises KeyError or ValueError where a tensor is missing or has another shape.
    """
    layers = tested_layers(spec)
    if isinstance(config, PlainConfig):
        plain = replace(config, num_hidden_layers=len(layers), tie_word_embeddings=False)
        part = cast("PretrainedConfig", plain)
    else:
        part = _part_of(config, spec, layers)
    spec_of_part = llama_spec(part)
    assert spec_of_part is not None
    tensors = _tensors(spec, spec_of_part, layers, tensor_of, weights_of)
    if isinstance(config, PlainConfig):
        weights = fused_weights(spec_of_part, tensors.__getitem__, dtype, device)
        return TorchReference(part, weights, kv_dtype, config.max_position_embeddings)
    token_rows = None
    if (table := token_table(spec)) is not None:
        token_rows = _TokenRows(tensor_of(table), _columns(spec, layers))
        part.vocab_size_per_layer_input = 1
    module: Any = make_module(part, tensors, dtype, device)
    if token_rows is not None:
        token_rows.scale = module.model.embed_tokens_per_layer.embed_scale.to(dtype)
        module.model.embed_tokens_per_layer = token_rows
    return TransformersModel(module, kv_dtype)


def _tensors(
    spec: LlamaSpec, spec_of_part: LlamaSpec, layers: Sequence[int], tensor_of: TensorOf, weights_of: WeightsOf
) -> Mapping[str, torch.Tensor]:
    """Return the tensors of a model of some of the layers, by their names in that model."""
    tensors = {name: tensor_of(name) for name in (EMBEDDING, final_norm(spec))}
    tensors[HEAD] = weights_of(head_tensors(spec))[0]
    if (table := token_table(spec)) is not None:
        tensors |= _token_inputs(spec, table, layers, tensor_of, weights_of)
    for number, layer in enumerate(layers):
        here, there = layer_tensors(spec_of_part, number), layer_tensors(spec, layer)
        for name, whole in zip(here.singles, there.singles, strict=True):
            if name is not None and whole is not None:
                tensors[name] = tensor_of(whole)
        for linear, in_whole in zip(here.linears, there.linears, strict=True):
            tensors |= zip(linear.weights, weights_of(in_whole), strict=True)
            tensors |= zip(linear.biases, map(tensor_of, in_whole.biases), strict=True)
        if spec.gemma is not None and here.router is not None:
            _merge_experts(tensors, here, f"model.layers.{number}.experts")
    return tensors


def _merge_experts(tensors: dict[str, torch.Tensor], layer: LayerTensors, name: str) -> None:
    """Put the experts of a layer of Gemma 4 into two tensors: its files have no single ones."""
    gate_up = [torch.cat([tensors.pop(each) for each in mlp.gate_up.weights]) for mlp in layer.mlps]
    down = [tensors.pop(mlp.down.weights[0]) for mlp in layer.mlps]
    tensors |= {f"{name}.gate_up_proj": torch.stack(gate_up), f"{name}.down_proj": torch.stack(down)}


def _token_inputs(
    spec: LlamaSpec, table: str, layers: Sequence[int], tensor_of: TensorOf, weights_of: WeightsOf
) -> Mapping[str, torch.Tensor]:
    """Return what some of the layers take of tokens besides, and a table without rows: `_TokenRows` takes its place."""
    linear, columns = token_projection(spec), _columns(spec, layers)
    projection = weights_of(linear)[0][columns]
    norm = tensor_of(TOKEN_NORM)
    return {table: norm.new_zeros(1, len(columns)), linear.weights[0]: projection, TOKEN_NORM: norm}


def _columns(spec: LlamaSpec, layers: Sequence[int]) -> torch.Tensor:
    """Return which numbers of a token some of the layers take."""
    assert spec.gemma is not None
    size = spec.gemma.input_size
    return torch.cat([torch.arange(layer * size, (layer + 1) * size) for layer in layers])


class _TokenRows(torch.nn.Module):
    """Some columns of a table of tokens, which stays on the pages of its file: a copy would read all of it."""

    scale: torch.Tensor

    def __init__(self, table: torch.Tensor, columns: torch.Tensor) -> None:
        super().__init__()
        self._table, self._columns = table, columns

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._table[token_ids][..., self._columns].to(self.scale.dtype) * self.scale


def _part_of(config: PretrainedConfig, spec: LlamaSpec, layers: Sequence[int]) -> PretrainedConfig:
    """Return the configuration of a model of some of the layers."""
    part = copy.deepcopy(config)
    part.num_hidden_layers, part.tie_word_embeddings = len(layers), False
    if getattr(config, "layer_types", None):
        part.layer_types = [config.layer_types[layer] for layer in layers]
    if spec.gemma is not None:
        heads = (spec.heads(layer) for layer in layers)
        part.per_layer_config = {n: {"head_dim": dim, "num_key_value_heads": kv} for n, (dim, kv) in enumerate(heads)}
        part.num_kv_shared_layers = sum(spec.gemma.layers[layer].borrows for layer in layers)
    if hasattr(part, "num_dense_layers"):
        part.num_dense_layers = sum(not spec.has_experts(layer) for layer in layers)
    if hasattr(part, "decoder_sparse_step"):
        part.decoder_sparse_step = 1
        part.mlp_only_layers = [number for number, layer in enumerate(layers) if not spec.has_experts(layer)]
    return part
