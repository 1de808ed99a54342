"""The attention backends by name, and the choice of one for a KV cache.

The Triton backend is imported when it is made: Triton is absent on hosts without CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from common.contracts.errors import FieldViolation, InvalidConfig, Unsupported
from gpuworker.attention.by_shape import AttentionByIndex, AttentionByPart, AttentionByShape
from gpuworker.attention.index_keys import PagedIndexKeys
from gpuworker.attention.interface import AttentionBackend
from gpuworker.attention.native_backend import NativeAttention
from gpuworker.attention.native_backend import runs as native_runs
from gpuworker.attention.torch_backend import TorchAttention
from gpuworker.attention.whole_prompts import WholePrompts
from gpuworker.memory.kv_cache import KvCache
from gpuworker.memory.layout import page_layout, pools_of

BackendFactory = Callable[[KvCache], AttentionBackend]


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """How a backend computes.

    `deterministic`: the result of a query is the same to the bit, whatever else the step contains, however its sequence
    was cut into steps, and however many threads run.
    """

    deterministic: bool = False


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """How to make a backend, the types of device it runs on (empty: all), and whether it can be deterministic.

    `runs` says whether the backend supports a given cache on such a device.
    """

    make: Callable[[KvCache, BackendOptions], AttentionBackend]
    device_types: tuple[str, ...] = ()
    deterministic: bool = False
    runs: Callable[[KvCache], bool] = lambda _: True


def _triton_backend(cache: KvCache, options: BackendOptions) -> AttentionBackend:
    from gpuworker.attention.triton_backend import TritonAttention

    return TritonAttention(cache)


_ANY_BITS = BackendOptions()
# A backend that names a type of device is faster there than one that runs anywhere.
BACKENDS: dict[str, BackendChoice] = {
    "torch": BackendChoice(lambda cache, _: TorchAttention(cache)),
    "triton": BackendChoice(_triton_backend, ("cuda",)),
    "native": BackendChoice(
        lambda cache, options: NativeAttention(cache, options.deterministic),
        ("cpu",),
        deterministic=True,
        runs=native_runs,
    ),
}


def backends_on(device_type: str) -> list[str]:
    """Return the names of the backends that run on this type of device, the fastest first."""
    able = [name for name, choice in BACKENDS.items() if device_type in choice.device_types or not choice.device_types]
    return sorted(able, key=lambda name: not BACKENDS[name].device_types)


def make_backend(name: str, cache: KvCache, options: BackendOptions = _ANY_BITS) -> AttentionBackend:
    """Return the backend called `name` on `cache`; "auto" is the fastest that runs on this cache here.

    Raises InvalidConfig for a name that is unknown or that does not run here. Raises Unsupported when determinism is
    required and no remaining backend offers it.
    """
    if cache.geometry.groups:
        parts = page_layout(cache.geometry).parts
        backends = [make_backend(name, cache.parts[part.shape], options) for part in parts]
        return AttentionByPart(backends, [part.lanes for part in parts])
    if cache.parts or not cache.geometry.num_layers:
        return _by_shape(name, cache, options)
    made = _chosen(name, cache, options)
    if not cache.geometry.values_in_keys:
        return made
    return WholePrompts(made, cache, lambda scratch: make_backend(name, scratch, options))


def _chosen(name: str, cache: KvCache, options: BackendOptions) -> AttentionBackend:
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


def _by_shape(name: str, cache: KvCache, options: BackendOptions) -> AttentionBackend:
    layers = [pool.layers for pool in pools_of(cache.geometry)]
    places = [{number: index for index, number in enumerate(numbers)} for numbers in layers]
    if all(part.index_keys is None for part in cache.parts):
        return AttentionByShape([make_backend(name, part, options) for part in cache.parts], places)
    if options.deterministic:
        raise Unsupported("--deterministic cannot be kept: layers that attend by index do so in torch, in any order")
    # Layers without index keys may take the indices of layers before them.
    by_index = [AttentionByIndex(_chosen(name, part, options), TorchAttention(part)) for part in cache.parts]
    return AttentionByShape(by_index, places, PagedIndexKeys(cache, layers))
