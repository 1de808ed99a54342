"""Packs the weights of a model of the Llama family for the native forward, straight from the pages of its files.

A tensor of the checkpoint is read once and released when it is packed. Only an embedding that is not also the last
linear, packed in floats, stays on the pages of its file: a step reads a few rows of it.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Iterator, Sequence
from typing import Final

import torch
from transformers.utils.logging import tqdm

from gpuworker.models.llama.linears import LinearReader, in_words
from gpuworker.models.llama.spec import LlamaSpec
from gpuworker.models.llama.weights import (
    EMBEDDING,
    FINAL_NORM,
    FusedLinear,
    LayerTensors,
    head_tensors,
    layer_tensors,
)
from gpuworker.native.linear import Arena, Kind, LinearStruct, PackedLinear
from gpuworker.native.llama import LlamaLayerStruct, LlamaStruct, bind

_TYPES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # quire_type


class PackedModel:
    """Packed weights, and the structures that describe them to the native forward; `struct` is the model's."""

    def __init__(self, library: ctypes.CDLL, spec: LlamaSpec, dtype: torch.dtype) -> None:
        """Describe everything but the weights, which `pack_model` fills in."""
        self.library, self.spec, self.dtype = bind(library), spec, dtype
        self.layers: ctypes.Array[LlamaLayerStruct] = (LlamaLayerStruct * spec.num_layers)()
        self.struct = LlamaStruct(
            num_layers=spec.num_layers,
            hidden=spec.hidden_size,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            vocab=spec.vocab_size,
            norm_eps=spec.norm_eps,
            scale=spec.scale,
            layers=self.layers,
        )
        self.arena = Arena()
        self._kept: list[torch.Tensor] = []

    def linears(self) -> Iterator[tuple[FusedLinear, LlamaLayerStruct | LlamaStruct]]:
        """Yield all linears in the order in which a step runs them, and the structure that each is a field of."""
        for index, layer in enumerate(self.layers):
            yield from ((linear, layer) for linear in layer_tensors(self.spec, index).linears)
        yield head_tensors(self.spec), self.struct

    @property
    def kinds_in_words(self) -> str:
        return in_words((linear.role, Kind(getattr(holder, linear.role).kind)) for linear, holder in self.linears())

    @property
    def rounds_activations(self) -> bool:
        """Whether some linear multiplies activations of eight bits."""
        return any(getattr(holder, linear.role).kind == Kind.W8A8 for linear, holder in self.linears())

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights, the pages of a file among them."""
        return self.arena.nbytes + sum(tensor.nbytes for tensor in self._kept)

    def keep(self, tensor: torch.Tensor) -> int:
        """Keep a tensor as long as the model; return its address."""
        self._kept.append(tensor)
        return tensor.data_ptr()

    def only(self, layers: Sequence[int]) -> PackedModel:
        """Return a model of some of the layers, in this order, on the same memory."""
        part = copy.copy(self)
        part.struct = LlamaStruct.from_buffer_copy(self.struct)
        part.layers = (LlamaLayerStruct * len(layers))(*(self.layers[layer] for layer in layers))
        part.struct.layers, part.struct.num_layers = part.layers, len(layers)
        return part


def pack_model(library: ctypes.CDLL, spec: LlamaSpec, reader: LinearReader) -> PackedModel:
    """Return the packed weights of a model, whose linears are held as the reader says.

    Raises KeyError where a tensor is missing, ValueError where one has another shape than the configuration says.
    """
    packed = PackedModel(library, spec, reader.dtype)
    linears = list(packed.linears())
    reader.choose((linear for linear, _ in linears), library)
    for linear, holder in tqdm(linears, desc="Loading weights"):
        setattr(holder, linear.role, _pack(packed, linear, reader))
    for index, layer in enumerate(packed.layers):
        _fill_norms(packed, layer_tensors(spec, index), layer, reader)
        layer.window = spec.windows[index] or 0
    packed.struct.final_norm = _norm(packed, FINAL_NORM, spec.hidden_size, reader)
    if not spec.tied or Kind(packed.struct.head.kind).whole:
        embedding = reader.tensor(EMBEDDING, (spec.vocab_size, spec.hidden_size))
        packed.struct.embedding, packed.struct.embedding_type = packed.keep(embedding), _TYPES[embedding.dtype]
    return packed


def _pack(packed: PackedModel, linear: FusedLinear, reader: LinearReader) -> LinearStruct:
    weight, threads = reader.read(linear), torch.get_num_threads()
    return PackedLinear(
        weight.parts, weight.kind, paired=linear.paired, threads=threads, library=packed.library, arena=packed.arena
    ).struct


def _fill_norms(packed: PackedModel, tensors: LayerTensors, layer: LlamaLayerStruct, reader: LinearReader) -> None:
    hidden, head_dim = packed.spec.hidden_size, packed.spec.head_dim
    layer.attention_norm = _norm(packed, tensors.attention_norm, hidden, reader)
    layer.mlp_norm = _norm(packed, tensors.mlp_norm, hidden, reader)
    layer.query_norm = _norm(packed, tensors.query_norm, head_dim, reader)
    layer.key_norm = _norm(packed, tensors.key_norm, head_dim, reader)


def _norm(packed: PackedModel, name: str | None, size: int, reader: LinearReader) -> int | None:
    """Copy a norm as float32; return its address."""
    return None if name is None else packed.keep(reader.tensor(name, (size,)).to(torch.float32, copy=True))
