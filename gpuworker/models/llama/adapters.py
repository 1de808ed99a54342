"""LoRA adapters as the native library and the kernels of GPUs read them: the linears they change, and their memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from gpuworker.attention.interface import Int32Array
from gpuworker.attention.step_inputs import to_device
from gpuworker.checkpoints.lora import LoraAdapter, LowRank
from gpuworker.kernels.torch_adapters import NUM_PARTS, ROW_TILE, AdapterRows, DeviceAdapter, LowRankPart
from gpuworker.models.adapters import StepAdapters
from gpuworker.models.llama.spec import LlamaSpec
from gpuworker.models.llama.weights import layer_tensors
from gpuworker.native.llama import LoraLayerStruct, LoraStruct

_LANES: Final = 16  # numbers of a vector of the library
QUIRE_TYPES: Final = {torch.float32: 0, torch.bfloat16: 1}  # quire_type


class NativeAdapter:
    """An adapter as the library reads it: one piece of memory, and a structure for each layer that points into it."""

    def __init__(self, num_layers: int, parts: Sequence[tuple[NativePlace, LowRank]], dtype: torch.dtype) -> None:
        """The factors are held in `dtype`, float32 or bfloat16, which is that of the model."""
        self.number = 0
        """By which other ranks know it."""
        sizes = [len(part.a) * (_padded(place.inputs) + _padded(place.outputs)) for place, part in parts]
        self._memory = torch.zeros(sum(sizes), dtype=dtype)
        self.layers = (LoraLayerStruct * num_layers)()
        at = 0
        for (place, part), size in zip(parts, sizes, strict=True):
            a = self._copy(at, part.a)
            b = self._copy(at + a.numel(), part.b.T)
            where = a.data_ptr(), b.data_ptr()
            struct = LoraStruct(*where, place.first, place.outputs, len(part.a), QUIRE_TYPES[dtype])
            getattr(self.layers[place.layer], place.role)[place.place] = struct
            at += size

    @property
    def num_bytes(self) -> int:
        return self._memory.nbytes

    def _copy(self, at: int, values: torch.Tensor) -> torch.Tensor:
        """Copy rows into the memory from number `at` on, each padded with zeros to whole vectors."""
        rank, width = len(values), _padded(values.shape[1])
        rows = self._memory[at : at + rank * width].view(rank, width)
        rows[:, : values.shape[1]] = values
        return rows


def _padded(count: int) -> int:
    return -(-count // _LANES) * _LANES


class NativePlace(NamedTuple):
    """Where a linear stands in a packed model: its first output within `place` of a role, its outputs and inputs."""

    layer: int
    role: str
    place: int
    first: int
    outputs: int
    inputs: int


def native_places(spec: LlamaSpec) -> dict[str, NativePlace]:
    """Return the linears of a packed model that adapters may change, by name. Experts are not among them."""
    found = {}
    for layer in range(spec.num_layers):
        tensors = layer_tensors(spec, layer)
        for linear in (tensors.qkv, tensors.output, *(() if tensors.router else (tensors.gate_up, tensors.down))):
            first = 0
            for place, (name, size) in enumerate(zip(linear.parts, linear.sizes, strict=True)):
                start = 0 if linear.paired else first
                found[name] = NativePlace(layer, linear.role, place, start, size, linear.inputs)
                first += size
    return found


def native_adapter(spec: LlamaSpec, adapter: LoraAdapter, dtype: torch.dtype) -> NativeAdapter:
    """Return an adapter in the form that the library reads, its factors in the type of the model."""
    places = native_places(spec)
    return NativeAdapter(spec.num_layers, [(places[name], part) for name, part in adapter.parts.items()], dtype)


def pointers_of(step: StepAdapters) -> tuple[Any, Int32Array]:
    """Return what a native run reads: an array of pointers to the layers of each adapter, and the adapters of tokens.

    The step must stay for as long.
    """
    layers = [each.layers for each in step.adapters if isinstance(each, NativeAdapter)]
    array = (ctypes.POINTER(LoraLayerStruct) * len(layers))(
        *(ctypes.cast(each, ctypes.POINTER(LoraLayerStruct)) for each in layers)
    )
    return array, np.ascontiguousarray(step.of_token, dtype=np.int32)


# On a GPU each layer has four products, in this order.
PRODUCTS: Final = ("qkv", "output", "gate_up", "down")


def device_adapter(spec: LlamaSpec, adapter: LoraAdapter, dtype: torch.dtype, device: torch.device) -> DeviceAdapter:
    """Return an adapter for the kernels of a GPU, in one piece of memory there and in the type of the model."""
    places = native_places(spec)
    sizes = [_padded(part.a.numel()) + _padded(part.b.numel()) for part in adapter.parts.values()]
    memory = torch.empty(sum(sizes), dtype=dtype, device=device)
    products: list[list[LowRankPart | None]] = [[None] * NUM_PARTS for _ in range(spec.num_layers * len(PRODUCTS))]
    at = 0

    def copied(values: torch.Tensor) -> torch.Tensor:
        nonlocal at
        into = memory[at : at + values.numel()].view(values.shape)
        at += _padded(values.numel())
        return into.copy_(values)

    for name, part in adapter.parts.items():
        place = places[name]
        number = place.layer * len(PRODUCTS) + PRODUCTS.index(place.role)
        products[number][place.place] = LowRankPart(copied(part.a), copied(part.b))
    return DeviceAdapter.of(adapter.rank, products, device)


def adapter_rows(step: StepAdapters, device: torch.device) -> AdapterRows:
    """Return the rows of a step gathered by adapter, on the device; nothing waits for it."""
    adapters = tuple(each for each in step.adapters if isinstance(each, DeviceAdapter))
    of_row = step.of_token
    rows = np.argsort(of_row, kind="stable")[np.count_nonzero(of_row < 0) :].astype(np.int32)
    counts = np.bincount(of_row[of_row >= 0], minlength=len(adapters))
    firsts = np.cumsum(counts) - counts
    tiles = [
        (number, firsts[number] + start, min(ROW_TILE, count - start))
        for number, count in enumerate(counts)
        for start in range(0, count, ROW_TILE)
    ]
    tables = np.array([each.addresses.data_ptr() for each in adapters], dtype=np.int64)
    ranks = np.array([each.rank for each in adapters], dtype=np.int32)
    # The addresses are first, so that they are aligned as what they are.
    arrays = [tables.view(np.int32), rows, np.array(tiles, dtype=np.int32).reshape(-1, 3), ranks]
    on_device = to_device(arrays, device)
    counted = tuple(int(count) for count in counts)
    return AdapterRows(on_device[1], on_device[2], on_device[0].view(torch.int64), on_device[3], adapters, counted)
