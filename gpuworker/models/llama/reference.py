"""The reference of the native path's start-up test: a few layers of the model, run by transformers.

Layers differ in their window and in whether they have experts. So the first two and the first of each other kind stand
for all. They use the weights that the native model multiplies by: on pages of the files, or dequantised where the model
holds integers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from transformers import PretrainedConfig, PreTrainedModel

from gpuworker.models.hf.loader import make_module
from gpuworker.models.llama.spec import LlamaSpec, llama_spec
from gpuworker.models.llama.weights import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    FusedLinear,
    TensorOf,
    head_tensors,
    layer_tensors,
)

WeightsOf = Callable[[FusedLinear], Sequence[torch.Tensor]]
"""Gives the weights of a linear's parts as they are multiplied."""


def tested_layers(spec: LlamaSpec) -> tuple[int, ...]:
    """Return the layers that the test runs: the first two, and the first of each kind."""
    kinds = [(window, spec.has_experts(layer)) for layer, window in enumerate(spec.windows)]
    return tuple(sorted({*range(min(2, spec.num_layers)), *map(kinds.index, kinds)}))


def reference_part(
    config: PretrainedConfig, spec: LlamaSpec, tensor_of: TensorOf, weights_of: WeightsOf, dtype: torch.dtype
) -> PreTrainedModel:
    """Return the model of `tested_layers`, on the CPU. Its last linear stands by itself: it may be held otherwise.

    Raises KeyError or ValueError where a tensor is missing or has another shape.
    """
    layers = tested_layers(spec)
    part = _part_of(config, spec, layers)
    spec_of_part = llama_spec(part)
    assert spec_of_part is not None
    tensors = {EMBEDDING: tensor_of(EMBEDDING), FINAL_NORM: tensor_of(FINAL_NORM)}
    tensors[HEAD] = weights_of(head_tensors(spec))[0]
    for number, layer in enumerate(layers):
        here, there = layer_tensors(spec_of_part, number), layer_tensors(spec, layer)
        for name, whole in zip(here.singles, there.singles, strict=True):
            if name is not None and whole is not None:
                tensors[name] = tensor_of(whole)
        for linear, in_whole in zip(here.linears, there.linears, strict=True):
            tensors |= zip(linear.weights, weights_of(in_whole), strict=True)
            tensors |= zip(linear.biases, map(tensor_of, in_whole.biases), strict=True)
    return make_module(part, tensors, dtype)


def _part_of(config: PretrainedConfig, spec: LlamaSpec, layers: Sequence[int]) -> PretrainedConfig:
    """Return the configuration of a model of some of the layers."""
    part = copy.deepcopy(config)
    part.num_hidden_layers, part.tie_word_embeddings = len(layers), False
    if getattr(config, "layer_types", None):
        part.layer_types = [config.layer_types[layer] for layer in layers]
    if spec.experts is not None and spec.experts.family == "qwen3_moe":
        part.decoder_sparse_step = 1
        part.mlp_only_layers = [number for number, layer in enumerate(layers) if not spec.has_experts(layer)]
    return part
