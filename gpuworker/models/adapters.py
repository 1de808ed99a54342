"""LoRA adapters beside a model: what a step knows of the adapters of its rows, and how each path adds their products.

A model that can be adapted names its linears (`targets`), and prepares an adapter for its own kernels on any thread,
beside running steps. A step holds the adapters of its rows. An adapter's memory is free when neither a step, nor a
sequence, nor the worker's table holds it.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch
from torch import nn

from common.contracts.errors import EngineFailure
from gpuworker.attention.interface import Int32Array
from gpuworker.checkpoints.lora import LoraAdapter, LowRank, Targets
from gpuworker.models.llama.spec import LlamaSpec
from gpuworker.models.llama.weights import layer_tensors
from gpuworker.native.llama import LoraLayerStruct, LoraStruct

_LANES: Final = 16  # numbers of a vector of the library
QUIRE_TYPES: Final = {torch.float32: 0, torch.bfloat16: 1}  # quire_type


class PreparedAdapter(Protocol):
    """An adapter in the form that a model's kernels take."""

    @property
    def num_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True, eq=False)
class StepAdapters:
    """The adapters of a step: those that are in it, and for each token which of them; below 0: none."""

    adapters: tuple[PreparedAdapter, ...]
    of_token: Int32Array  # [T]

    @staticmethod
    def of_rows(adapters: Sequence[PreparedAdapter | None], lengths: Int32Array) -> StepAdapters | None:
        """Return those of rows, each with its adapter and its number of tokens; None where no row has an adapter."""
        places: dict[int, int] = {}
        found: list[PreparedAdapter] = []
        of_row = np.full(len(adapters), -1, dtype=np.int32)
        for row, adapter in enumerate(adapters):
            if adapter is None:
                continue
            if id(adapter) not in places:
                places[id(adapter)] = len(found)
                found.append(adapter)
            of_row[row] = places[id(adapter)]
        return StepAdapters(tuple(found), np.repeat(of_row, lengths)) if found else None


class AdaptedModel(Protocol):
    """A model that can be adapted. `adapters` are those of the next forward; the caller sets them for each one."""

    adapters: StepAdapters | None

    @property
    def adapter_targets(self) -> Targets:
        """Return the linears that adapters may change."""
        ...

    def allow_adapters(self, max_rank: int) -> None:
        """Get ready for adapters of up to this rank, before memory is planned. Call once, before the first step."""
        ...

    def prepare_adapter(self, adapter: LoraAdapter) -> PreparedAdapter:
        """Return an adapter for this model's kernels; any thread may call it beside a step."""
        ...


# ------------------------------------------------------------ the native path


class NativeAdapter:
    """An adapter as the library reads it: one piece of memory, and a structure for each layer that points into it."""

    def __init__(self, num_layers: int, parts: Sequence[tuple[NativePlace, LowRank]], dtype: torch.dtype) -> None:
        """The factors are held in `dtype`, float32 or bfloat16, which is that of the model."""
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


# ------------------------------------------------------------ transformers' path


class TorchAdapter:
    """An adapter as torch multiplies by it: the factors of each linear on the model's device, in float32."""

    def __init__(self, adapter: LoraAdapter, device: torch.device) -> None:
        self.parts = {
            name: (part.a.T.contiguous().to(device), part.b.T.contiguous().to(device))
            for name, part in adapter.parts.items()
        }

    @property
    def num_bytes(self) -> int:
        return sum(a.nbytes + b.nbytes for a, b in self.parts.values())


class LinearHooks:
    """Adds the products of a step's adapters to the outputs of a module's linears, rows of others untouched.

    `adapters_of` returns those of the step that runs.
    """

    def __init__(
        self, module: nn.Module, targets: Iterable[str], adapters_of: Callable[[], StepAdapters | None]
    ) -> None:
        self._adapters_of = adapters_of
        self._rows: tuple[StepAdapters, list[torch.Tensor]] | None = None
        for name in targets:
            module.get_submodule(name).register_forward_hook(partial(self._add, name))

    def _add(self, name: str, module: nn.Module, given: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        """Add B · (A · x) in place for the tokens of each adapter: given[0] is [..., inputs], output [..., outputs]."""
        step = self._adapters_of()
        if step is None:
            return
        inputs, outputs = given[0].flatten(0, -2), output.view(-1, output.shape[-1])
        if len(inputs) != len(step.of_token):
            raise EngineFailure(f"{name} sees {len(inputs)} rows of a step of {len(step.of_token)} tokens")
        for adapter, rows in zip(step.adapters, self._rows_of(step, output.device), strict=True):
            factors = adapter.parts.get(name) if isinstance(adapter, TorchAdapter) else None
            if factors is not None:
                a, b = factors
                added = (inputs[rows].float() @ a) @ b
                outputs[rows] = (outputs[rows].float() + added).to(output.dtype)

    def _rows_of(self, step: StepAdapters, device: torch.device) -> list[torch.Tensor]:
        """Return the indices of each adapter's tokens, made once a step."""
        if self._rows is None or self._rows[0] is not step:
            places = [np.flatnonzero(step.of_token == place) for place in range(len(step.adapters))]
            self._rows = step, [torch.from_numpy(each).to(device) for each in places]
        return self._rows[1]

    def forget(self) -> None:
        """Hold nothing of the last step."""
        self._rows = None


def find_linears(module: nn.Module, run: Callable[[], object], tokens: int, without: Collection[int]) -> Targets:
    """Return the linears that a forward over so many tokens, `run`, calls once with a row for each token.

    So experts, which see some of the rows, are not among them, nor the last linear, nor linears whose weights other
    code multiplies by; `without` has ids of more of these.
    """
    seen: Counter[str] = Counter()
    found: dict[str, tuple[int, int]] = {}

    def note(name: str, each: nn.Module, given: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        seen[name] += 1
        shapes = given[0].shape, output.shape
        if all(shape.numel() == tokens * shape[-1] for shape in shapes):
            found[name] = (output.shape[-1], given[0].shape[-1])

    handles = [
        each.register_forward_hook(partial(note, name))
        for name, each in module.named_modules()
        if isinstance(getattr(each, "in_features", None), int) and id(each) not in without and not _is_router(name)
    ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return {name: shape for name, shape in found.items() if seen[name] == 1}


def _is_router(name: str) -> bool:
    """Return whether a linear chooses experts: an adapter would change which ones run."""
    return name.rpartition(".")[2] in ("gate", "router")
