"""What a native forward attends by: one backend, or where layers are groups one for each part of them.

Where some layers do not attend, the numbers of the others in the cache are not those in the model.
"""

from __future__ import annotations

import ctypes

from gpuworker.attention.by_shape import AttentionByShape
from gpuworker.attention.interface import AttentionBackend, AttentionMetadata
from gpuworker.attention.native_backend import CacheStruct, NativeAttention, StepStruct, step_struct
from gpuworker.native.llama import PartsStruct

_int32, _pointer = ctypes.c_int32, ctypes.c_void_p
_NOWHERE = (-1, -1)


class NativeParts:
    """The backends of a model whose layers are alike, all on one cache; `struct` describes them to the library."""

    def __init__(self, sink: AttentionBackend, layers: int) -> None:
        """Take them from the backend of a model of so many layers. Raises TypeError for one without a native call."""
        backends = sink.backends if isinstance(sink, AttentionByShape) else (sink,)
        self._backends = [each for each in backends if isinstance(each, NativeAttention)]
        if len(self._backends) < len(backends):
            raise TypeError(f"{', '.join(sorted({type(each).__name__ for each in backends}))} has no native call")
        self.struct = PartsStruct(
            plans=(_pointer * len(backends))(*(each.plan.value for each in self._backends)), num_plans=len(backends)
        )
        if isinstance(sink, AttentionByShape):
            places = [sink.place_of(layer) or _NOWHERE for layer in range(layers)]
            self.struct.part = (_int32 * layers)(*(part for part, _ in places))
            self.struct.lane = (_int32 * layers)(*(lane for _, lane in places))

    @property
    def cache(self) -> CacheStruct:
        return self._backends[0].cache

    @property
    def deterministic(self) -> bool:
        return self._backends[0].deterministic

    def plan_step(self, num_heads: int) -> None:
        """Start the plans of the step that was announced to all backends."""
        for each in self._backends:
            each.plan_step(num_heads)

    def steps(self, step: AttentionMetadata) -> ctypes.Array[StepStruct]:
        """Return a step as each backend sees it; the step's arrays must outlive the result."""
        each = step.parts or (step,) * len(self._backends)
        return (StepStruct * len(each))(*map(step_struct, each))
