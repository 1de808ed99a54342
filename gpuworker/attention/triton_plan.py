"""Brings the work list of a step to the device, into memory that outlives the step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from gpuworker.attention.interface import Int32Array
from gpuworker.attention.triton_tuning import Heads, Tuning
from gpuworker.attention.work_list import ITEM_FIELDS, QUERY_FIELDS, WorkList


@dataclass(frozen=True, slots=True)
class Launches:
    """The launches of a layer: items of one query, items of many, and queries whose parts may need merging."""

    single: int
    many: int
    merged: int


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """A step's work list on the device, cut for one kind of layer."""

    heads: Heads
    tuning: Tuning
    launches: Launches
    single: torch.Tensor  # [launches.single, ITEM_FIELDS]
    many: torch.Tensor  # [launches.many, ITEM_FIELDS]
    queries: torch.Tensor  # [T, QUERY_FIELDS]
    partial_out: torch.Tensor  # [n, num_heads, head_dim_v] float32
    partial_lse: torch.Tensor  # [n, num_heads] float32


@dataclass(frozen=True, slots=True)
class Room:
    """The capacity for items and partial results: in a step of `queries` decodes, always enough."""

    queries: int
    single: int
    many: int
    partials: int

    @classmethod
    def of(cls, work: WorkList) -> Room:
        """Return the exact room of a work list."""
        return cls(len(work.queries), len(work.single), len(work.many), work.partials)

    @classmethod
    def for_decodes(cls, rows: int, tuning: Tuning) -> Room:
        """Return what any step of `rows` decodes takes; one with more shared prefixes than that is cut without them.

        Chunks are never shorter than the whole over the items wanted: each row adds one item to these at most.
        """
        stack = tuning.many_cut.queries
        single = rows + tuning.single_cut.items
        many = tuning.many_cut.items + 2 * -(-rows // stack) + 4
        return cls(rows, single, many, single + many * stack)

    def admits(self, work: WorkList) -> bool:
        return (
            len(work.queries) == self.queries
            and len(work.single) <= self.single
            and len(work.many) <= self.many
            and work.partials <= self.partials
        )

    @property
    def integers(self) -> int:
        """Size of the tables together."""
        return (self.single + self.many) * ITEM_FIELDS + self.queries * QUERY_FIELDS

    def launches(self, work: WorkList) -> Launches:
        """Return the launches of a work list that is padded to this room."""
        return Launches(self.single, self.many if len(work.many) else 0, self.queries if work.merged else 0)


class PlanBuffers:
    """Device memory for one plan at a time: its tables and its partial results."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tables = torch.empty(0, dtype=torch.int32, device=device)
        self._partials = torch.empty(0, dtype=torch.float32, device=device)

    @torch.inference_mode(False)  # a tensor made in that mode could be filled in no other
    def reserve(self, integers: int, floats: int) -> None:
        """Make room; the present contents are lost when the memory moves."""
        if not self.has(integers, 0):
            self._tables = torch.empty(2 * integers, dtype=torch.int32, device=self._device)
        if not self.has(0, floats):
            self._partials = torch.empty(floats, dtype=torch.float32, device=self._device)

    def has(self, integers: int, floats: int) -> bool:
        return integers <= len(self._tables) and floats <= len(self._partials)

    def load(self, work: WorkList, room: Room, launches: Launches, tuning: Tuning, heads: Heads) -> DevicePlan:
        """Move a work list to the device, padded to `room`, behind the kernels that read the one before.

        One transfer; waits for nothing. Raises ValueError where the work list or the room for it does not fit.
        """
        floats = heads.partial_floats(room.partials)
        if not room.admits(work) or not self.has(room.integers, floats):
            raise ValueError(f"a plan of {Room.of(work)} does not fit into {room}")
        host = torch.from_numpy(_packed(work, room))
        if self._device.type == "cuda":
            host = host.pin_memory()
        table = self._tables[: room.integers].copy_(host, non_blocking=True)
        sizes = (room.single * ITEM_FIELDS, room.many * ITEM_FIELDS, room.queries * QUERY_FIELDS)
        single, many, queries = table.split(sizes)
        out, lse = self._partials[:floats].split(
            (floats - room.partials * heads.num_heads, room.partials * heads.num_heads)
        )
        return DevicePlan(
            heads,
            tuning,
            launches,
            single.view(-1, ITEM_FIELDS),
            many.view(-1, ITEM_FIELDS),
            queries.view(-1, QUERY_FIELDS),
            out.view(room.partials, heads.num_heads, heads.head_dim_v),
            lse.view(room.partials, heads.num_heads),
        )


def _packed(work: WorkList, room: Room) -> Int32Array:
    """Return the three tables behind each other; items that pad have no row."""
    packed = np.full(room.integers, -1, dtype=np.int32)
    at = 0
    for table, rows in ((work.single, room.single), (work.many, room.many), (work.queries, room.queries)):
        packed[at : at + table.size] = table.ravel()
        at += rows * table.shape[1]
    return packed
