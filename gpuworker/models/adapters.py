"""LoRA adapters beside a model: what a step knows of the adapters of its rows, and what a model offers for them.

A model that can be adapted names its linears (`adapter_targets`), and prepares an adapter for its own kernels on any
thread, beside running steps: `llama/adapters.py` and `hf/adapters.py`. A step holds the adapters of its rows. An
adapter's memory is free when neither a step, nor a sequence, nor the worker's table holds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from gpuworker.attention.interface import Int32Array
from gpuworker.checkpoints.lora import LoraAdapter, Targets


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
