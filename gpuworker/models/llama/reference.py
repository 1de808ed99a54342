"""The reference of the native path's start-up test: a few layers of the model, run by transformers.

Layers differ in nothing but their window, so the first two and one for each other window stand for all. They use the
weights that the native model multiplies by: on pages of the files, or dequantised where the model holds integers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from transformers import PretrainedConfig, PreTrainedModel

from gpuworker.models.hf.loader import make_module
from gpuworker.models.llama.spec import LlamaSpec
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
    """Return the layers that the test runs: the first two, and the first of each window."""
    first_of_window = {spec.windows.index(window) for window in spec.windows}
    return tuple(sorted({*range(min(2, spec.num_layers)), *first_of_window}))


def reference_part(
    config: PretrainedConfig, spec: LlamaSpec, tensor_of: TensorOf, weights_of: WeightsOf, dtype: torch.dtype
) -> PreTrainedModel:
    """Return the model of `tested_layers`, on the CPU. Its last linear stands by itself: it may be held otherwise.

    Raises KeyError or ValueError where a tensor is missing or has another shape.
    """
    layers = tested_layers(spec)
    part = copy.deepcopy(config)
    part.num_hidden_layers, part.tie_word_embeddings = len(layers), False
    if getattr(config, "layer_types", None):
        part.layer_types = [config.layer_types[layer] for layer in layers]
    tensors = {EMBEDDING: tensor_of(EMBEDDING), FINAL_NORM: tensor_of(FINAL_NORM)}
    tensors[HEAD] = weights_of(head_tensors(spec))[0]
    for number, layer in enumerate(layers):
        here, there = layer_tensors(spec, number), layer_tensors(spec, layer)
        for name, whole in zip(here.norms, there.norms, strict=True):
            if name is not None and whole is not None:
                tensors[name] = tensor_of(whole)
        for linear, in_whole in zip(here.linears, there.linears, strict=True):
            tensors |= zip(linear.weights, weights_of(in_whole), strict=True)
            tensors |= zip(linear.biases, map(tensor_of, in_whole.biases), strict=True)
    return make_module(part, tensors, dtype)
