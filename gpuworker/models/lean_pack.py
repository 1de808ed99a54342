"""Packs the weights of a model of the Llama family for the native forward, straight from the pages of its files.

All packed weights lie in one piece of memory. A tensor of the checkpoint is read once and let go of when it is packed;
only the embedding of a model that is not tied stays on the pages of its file, because a step reads a few rows of it.
"""

from __future__ import annotations

import copy
import ctypes
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

import torch
from transformers.utils.logging import tqdm

from common.errors import EngineFailure
from gpuworker.kernels.cpu_linear import Kind, LinearStruct, Memory, SourceStruct
from gpuworker.kernels.llama_calls import LlamaLayerStruct, LlamaStruct, bind
from gpuworker.models.lean_spec import LeanSpec
from gpuworker.models.lean_weights import (
    EMBEDDING,
    FINAL_NORM,
    FusedLinear,
    LayerTensors,
    TensorOf,
    head_tensors,
    layer_tensors,
)

KINDS: Final = {torch.float32: Kind.F32, torch.bfloat16: Kind.BF16}
_TYPES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # quire_type
_ALIGNMENT: Final = 64


class PackedModel:
    """Packed weights, and the structures that describe them to the native forward; `struct` is the model's."""

    def __init__(self, library: ctypes.CDLL, spec: LeanSpec, dtype: torch.dtype) -> None:
        """Describe the linears and take their memory, which is filled by `pack_model`."""
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
        self.kept: list[torch.Tensor] = []
        sizes = []
        for linear, struct in self.linears():
            struct.kind, struct.n, struct.k = KINDS[dtype], linear.outputs, linear.inputs
            struct.has_bias, struct.paired = linear.bias, linear.paired
            sizes.append(self._size(struct))
        self.memory, at = Memory(sum(sizes)), 0
        for (_, struct), size in zip(self.linears(), sizes, strict=True):
            struct.memory, at = self.memory.address + at, at + size

    def linears(self) -> Iterator[tuple[FusedLinear, LinearStruct]]:
        """Yield all linears in the order in which a step runs them."""
        for index, layer in enumerate(self.layers):
            structs = (layer.qkv, layer.output, layer.gate_up, layer.down)
            yield from zip(layer_tensors(self.spec, index).linears, structs, strict=True)
        yield head_tensors(self.spec), self.struct.head

    @property
    def kinds_in_words(self) -> str:
        """The kinds of the linears and how many there are of each, for the log."""
        count = Counter(Kind(struct.kind).name for _, struct in self.linears())
        return ", ".join(f"{number} linears {kind}" for kind, number in sorted(count.items()))

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights, the pages of a file among them."""
        return self.memory.nbytes + sum(tensor.nbytes for tensor in self.kept)

    def keep(self, tensor: torch.Tensor) -> int:
        """Keep a tensor as long as the model; return where it lies."""
        self.kept.append(tensor)
        return tensor.data_ptr()

    def only(self, layers: Sequence[int]) -> PackedModel:
        """Return a model of some of the layers, in this order, on the same memory."""
        part = copy.copy(self)
        part.struct = LlamaStruct.from_buffer_copy(self.struct)
        part.layers = (LlamaLayerStruct * len(layers))(*(self.layers[layer] for layer in layers))
        part.struct.layers, part.struct.num_layers = part.layers, len(layers)
        return part

    def _size(self, struct: LinearStruct) -> int:
        nbytes = int(self.library.quire_linear_bytes(struct))
        if not nbytes:
            raise EngineFailure(f"no native linear of kind {struct.kind}, {struct.n} x {struct.k}")
        return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def pack_model(library: ctypes.CDLL, spec: LeanSpec, tensor_of: TensorOf, dtype: torch.dtype) -> PackedModel:
    """Return the packed weights of a model, for products in float32 or bfloat16.

    Raises KeyError where a tensor is missing, ValueError where one has another shape than the configuration says.
    """
    packed = PackedModel(library, spec, dtype)
    packing = _Packing(packed, tensor_of)
    for linear, struct in tqdm(list(packed.linears()), desc="Loading weights"):
        packing.linear(linear, struct)
    for index, layer in enumerate(packed.layers):
        packing.norms(layer_tensors(spec, index), layer)
        layer.window = spec.windows[index] or 0
    packed.struct.final_norm = packing.norm(FINAL_NORM, spec.hidden_size)
    if not spec.tied:
        embedding = packing.read(EMBEDDING, (spec.vocab_size, spec.hidden_size))
        packed.struct.embedding, packed.struct.embedding_type = packed.keep(embedding), _TYPES[embedding.dtype]
    return packed


class _Packing:
    """Reads tensors and writes them into the model."""

    def __init__(self, packed: PackedModel, tensor_of: TensorOf) -> None:
        self._packed, self._tensor_of = packed, tensor_of

    def linear(self, linear: FusedLinear, struct: LinearStruct) -> None:
        """Pack a linear."""
        named = zip(linear.weights, linear.sizes, strict=True)
        weights = [self.read(name, (size, linear.inputs)) for name, size in named]
        biases = [self.read(name, (size,)).float() for name, size in zip(linear.biases, linear.sizes, strict=False)]
        sources = (SourceStruct * len(weights))()
        for index, (source, weight) in enumerate(zip(sources, weights, strict=True)):
            source.data, source.type = weight.data_ptr(), _TYPES[weight.dtype]
            source.rows, source.row_stride = weight.shape
            source.bias = biases[index].data_ptr() if biases else None
        if self._packed.library.quire_linear_pack(struct, sources, len(sources), torch.get_num_threads()):
            raise EngineFailure(f"{linear.parts[0]} cannot be packed as kind {struct.kind}")

    def norms(self, tensors: LayerTensors, layer: LlamaLayerStruct) -> None:
        """Copy the norms of a layer."""
        hidden, head_dim = self._packed.spec.hidden_size, self._packed.spec.head_dim
        layer.attention_norm = self.norm(tensors.attention_norm, hidden)
        layer.mlp_norm = self.norm(tensors.mlp_norm, hidden)
        layer.query_norm = self.norm(tensors.query_norm, head_dim)
        layer.key_norm = self.norm(tensors.key_norm, head_dim)

    def norm(self, name: str | None, size: int) -> int | None:
        """Copy a norm as float32; return where it lies."""
        if name is None:
            return None
        return self._packed.keep(self.read(name, (size,)).to(torch.float32, copy=True))

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor in a type that the library reads."""
        tensor = self._tensor_of(name)
        if tensor.shape != shape:
            raise ValueError(f"{name} is {tuple(tensor.shape)}; the configuration says {shape}")
        return (tensor if tensor.dtype in _TYPES else tensor.float()).contiguous()
