"""The one interface of attention and cache write, which every backend implements (torch, Triton, C++).

A backend is bound to a KV cache. For each step it is told once what the step computes (`begin`: the place to plan
work that all layers share), then called once per layer: it writes K and V of all tokens of the step into their slots
and only then attends, so that a row may read what another row of the same step has just written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from common.errors import FieldViolation, InvalidConfig, Unsupported
from gpuworker.memory.kv_cache import KvCache

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """How one layer attends.

    `scale` multiplies the scores; `softcap` bounds them to ±softcap by tanh; `window` counts the positions that a query
    sees, itself included; `sinks` [num_heads] are logits of a key without value that enters the softmax's denominator.
    """

    layer: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """What a step computes, for attention: R rows, T tokens; row r has queries query_start[r] : query_start[r+1].

    Arrays lie on the host; the tensors of the same names in `device` hold the same numbers on the device.
    Rows with one query stand first: `num_decodes` of them.
    """

    num_decodes: int
    query_start: Int32Array  # [R + 1], where each row's queries begin; the last entry is T
    context_len: Int32Array  # [R], positions of K/V that exist once this step's are written
    block_table: Int32Array  # [R, max_blocks]; trimmed entries and those past a row's end name any block, unseen
    slot_mapping: Int32Array  # [T], block * block_size + offset
    device: DeviceTables

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.context_len)

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.slot_mapping)


@dataclass(frozen=True, slots=True)
class DeviceTables:
    """The arrays of `AttentionMetadata` on the device, int32, of the same shapes."""

    query_start: torch.Tensor
    context_len: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor


class AttentionBackend(Protocol):
    """Attention over one KV cache. Used by one thread; steps and layers come in order."""

    def begin(self, step: AttentionMetadata) -> None:
        """Plan what all layers of the step share; called before its first layer."""
        ...

    def write_and_attend(
        self, layer: LayerAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Write key and value into their slots, then attend from every query over its row's context, causally.

        query [T, num_heads, head_dim_k], key [T, num_kv_heads, head_dim_k], value [T, num_kv_heads, head_dim_v], all of
        any strides; returns [T, num_heads, head_dim_v] in the type of `query`.
        """
        ...


BackendFactory = Callable[[KvCache], AttentionBackend]


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """How a backend is to compute.

    `deterministic`: what a query gets is the same to the bit whatever else is in the step, however its sequence was cut
    into steps, and however many threads run.
    """

    deterministic: bool = False


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """How to make a backend, the types of device it runs on (none named: all), and whether it can be deterministic.

    `runs` tells, for a cache on such a device, whether it can work on it here.
    """

    make: Callable[[KvCache, BackendOptions], AttentionBackend]
    device_types: tuple[str, ...] = ()
    deterministic: bool = False
    runs: Callable[[KvCache], bool] = lambda _: True


def _torch_backend(cache: KvCache, options: BackendOptions) -> AttentionBackend:
    from gpuworker.attention.torch_backend import TorchAttention

    return TorchAttention(cache)


def _triton_backend(cache: KvCache, options: BackendOptions) -> AttentionBackend:
    from gpuworker.attention.triton_backend import TritonAttention

    return TritonAttention(cache)


def _native_backend(cache: KvCache, options: BackendOptions) -> AttentionBackend:
    from gpuworker.attention.native_backend import NativeAttention

    return NativeAttention(cache, options.deterministic)


def _native_runs(cache: KvCache) -> bool:
    from gpuworker.attention.native_backend import runs

    return runs(cache)


_ANY_BITS = BackendOptions()
# On each type of device a backend that names it is faster than one that runs anywhere.
BACKENDS: dict[str, BackendChoice] = {
    "torch": BackendChoice(_torch_backend),
    "triton": BackendChoice(_triton_backend, ("cuda",)),
    "native": BackendChoice(_native_backend, ("cpu",), deterministic=True, runs=_native_runs),
}


def backends_on(device_type: str) -> list[str]:
    """Return the names of the backends that run on this type of device, the fastest first."""
    able = [name for name, choice in BACKENDS.items() if device_type in choice.device_types or not choice.device_types]
    return sorted(able, key=lambda name: not BACKENDS[name].device_types)


def make_backend(name: str, cache: KvCache, options: BackendOptions = _ANY_BITS) -> AttentionBackend:
    """Return the backend called `name` on `cache`; "auto" is the fastest that runs on this cache here.

    Raises InvalidConfig for a name that is unknown or that does not run here, Unsupported when what is left cannot be
    deterministic and must.
    """
    able = [each for each in backends_on(cache.keys.device.type) if BACKENDS[each].runs(cache)]
    if name not in ("auto", *able):
        raise InvalidConfig(FieldViolation("--attention", f"{name!r}; expected auto, {', '.join(able)}"))
    allowed = able if name == "auto" else [name]
    fit = [each for each in allowed if BACKENDS[each].deterministic or not options.deterministic]
    if not fit:
        kind = cache.keys.device.type
        raise Unsupported(
            f"--deterministic cannot be kept: no attention for {kind} here computes the same bits in every batch"
            f" (tried {', '.join(allowed)}); on a CPU the native kernels do, which need a C++ compiler at install"
        )
    return BACKENDS[fit[0]].make(cache, options)
