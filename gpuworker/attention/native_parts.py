"""What a native forward attends by: one backend, or one for each shape of layers, or for each part of groups of layers.

Where some layers do not attend, the numbers of the others in the cache are not those in the model.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

from gpuworker.attention.by_shape import AttentionByShape
from gpuworker.attention.interface import AttentionBackend, AttentionMetadata
from gpuworker.attention.native_backend import CacheStruct, NativeAttention, StepStruct, step_struct
from gpuworker.native.llama import PartsStruct

_int32, _pointer = ctypes.c_int32, ctypes.c_void_p


class NativeParts:
    """The backends of a model whose layers have equally many query heads; `struct` describes them to the library."""

    def __init__(
        self, sink: AttentionBackend, layers: int, num_heads: int, sources: Mapping[int, int] | None = None
    ) -> None:
        """Take them from the backend of a model of so many layers. Raises TypeError for one without a native call.

        `sources` has the layers that attend on the K and V of another one, and which that is.
        """
        backends = sink.backends if isinstance(sink, AttentionByShape) else (sink,)
        self._backends = [each for each in backends if isinstance(each, NativeAttention)]
        if len(self._backends) < len(backends):
            raise TypeError(f"{', '.join(sorted({type(each).__name__ for each in backends}))} has no native call")
        count = len(backends)
        self._num_heads = num_heads
        self._heads, self._caches = (_int32 * count)(*[num_heads] * count), (CacheStruct * count)()
        for index, each in enumerate(self._backends):
            self._caches[index] = each.cache
        self.struct = PartsStruct(
            plans=(_pointer * count)(*(each.plan.value for each in self._backends)),
            caches=ctypes.addressof(self._caches),
            heads=self._heads,
            num_plans=count,
        )
        kept = [(sources or {}).get(layer, layer) for layer in range(layers)]
        if isinstance(sink, AttentionByShape):
            self._place([sink.places_of(layer) for layer in kept])
        else:
            self._place([[(0, layer)] for layer in kept])

    def _place(self, places: Sequence[Sequence[tuple[int, int]]]) -> None:
        """Describe where the K and V of each layer lie, in pieces by heads: in which layers of which caches."""
        first = [0]
        for its in places:
            first.append(first[-1] + len(its))
            for part, _ in its:
                self._heads[part] = self._num_heads // len(its)
        pieces = [piece for its in places for piece in its]
        self.struct.first = (_int32 * len(first))(*first)
        self.struct.part = (_int32 * len(pieces))(*(part for part, _ in pieces))
        self.struct.lane = (_int32 * len(pieces))(*(lane for _, lane in pieces))

    @property
    def deterministic(self) -> bool:
        return self._backends[0].deterministic

    def plan_step(self) -> None:
        """Start the plans of the step that was announced to all backends."""
        for each, heads in zip(self._backends, self._heads, strict=True):
            each.plan_step(heads)

    def steps(self, step: AttentionMetadata) -> ctypes.Array[StepStruct]:
        """Return a step as each backend sees it; the step's arrays must outlive the result."""
        each = step.parts or (step,) * len(self._backends)
        return (StepStruct * len(each))(*map(step_struct, each))
