"""Steps at several ranks, tensor parallel: rank 0 sends each plan one way, and the others run it as it does.

A plan says which positions, pages and places a step has, never which tokens were sampled: those come through the memory
that ranks share, when the step begins (`share_tokens` of gpuworker/native/ranks.h). So plans go ahead of steps, and two
steps are in flight at every rank.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from common.contracts.types import BlockId
from gpuworker.attention.interface import AttentionMetadata, DeviceTables, Int32Array
from gpuworker.attention.step_inputs import StepInputs
from gpuworker.models.adapters import PreparedAdapter, StepAdapters
from gpuworker.models.llama.adapters import NativeAdapter
from gpuworker.runner.executor import PlacedCheckpoint
from gpuworker.runner.rank_messages import Closed, Ended, packed, received, send

Int64Array = npt.NDArray[np.int64]
_IN_FLIGHT: Final = 3  # steps of which a rank keeps the memory: one runs, and two wait


class PlannedRows(NamedTuple):
    """The rows of a forward: the arrays of `AttentionMetadata`, with a table and slots for each part of the layers."""

    num_decodes: int
    query_start: Int32Array
    context_len: Int32Array
    tables: tuple[tuple[Int32Array, Int32Array], ...]
    positions: Int64Array  # [T]
    keep: Int64Array  # [S + K]
    places: Int32Array | None  # [R], of states
    hidden: bool  # whether hidden states are wanted in place of logits
    adapters: tuple[int, ...] = ()  # numbers of those in the step
    adapter_of: Int32Array | None = None  # [T], as in `StepAdapters`

    @classmethod
    def of(
        cls, inputs: StepInputs, places: Int32Array | None, hidden: bool, adapters: StepAdapters | None = None
    ) -> PlannedRows:
        step = inputs.metadata
        parts = step.parts or (step,)
        tables = tuple((each.block_table, each.slot_mapping) for each in parts)
        return cls(
            step.num_decodes,
            step.query_start,
            step.context_len,
            tables,
            inputs.positions.numpy(),
            inputs.keep.numpy(),
            places,
            hidden,
            () if adapters is None else tuple(_number_of(each) for each in adapters.adapters),
            None if adapters is None else adapters.of_token,
        )

    def inputs(self) -> StepInputs:
        """Return the rows as rank 0 has them, without the places of tokens, which it alone reads."""
        parts = [
            AttentionMetadata(self.num_decodes, self.query_start, self.context_len, table, slots, _ON_HOST)
            for table, slots in self.tables
        ]
        step = parts[0]
        if len(parts) > 1:
            step = AttentionMetadata(
                step.num_decodes,
                step.query_start,
                step.context_len,
                step.block_table,
                step.slot_mapping,
                _ON_HOST,
                tuple(parts),
            )
        positions, keep = torch.from_numpy(self.positions), torch.from_numpy(self.keep)
        nothing = torch.empty(0, dtype=torch.int64)
        return StepInputs(step, positions, nothing, keep, nothing)


def _number_of(adapter: PreparedAdapter) -> int:
    assert isinstance(adapter, NativeAdapter), "ranks run the native path"
    return adapter.number


class AdapterLoad(NamedTuple):
    """Have a rank read the adapter in a folder, beside its steps, and know it by a number from then on."""

    number: int
    folder: str
    forgotten: tuple[int, ...] = ()  # as of a plan: steps may be long in coming


class AdapterLoaded(NamedTuple):
    """What a rank says behind that: the content that it read, or why it has none."""

    fingerprint: str
    failure: str = ""


class RankPlan(NamedTuple):
    """What a step does, for all ranks alike: copies, checkpoints of states, and the rows of a forward, if any."""

    copies: Int32Array  # [C, 2]
    rows: PlannedRows | None
    loads: tuple[PlacedCheckpoint, ...] = ()
    saves: tuple[PlacedCheckpoint, ...] = ()
    cleared: tuple[BlockId, ...] = ()
    forgotten: tuple[int, ...] = ()  # adapters that no later step has


_NONE: Final = torch.empty(0, dtype=torch.int32)
_ON_HOST: Final = DeviceTables(_NONE, _NONE, _NONE, _NONE)


@dataclass(slots=True)
class PlanTimes:
    """How many plans were sent, and the seconds of processor time that the engine's thread took for them."""

    plans: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class RankLinks:
    """Rank 0's connections to the others. `lost` is called with a rank that is, and how; it must not return.

    Numbers of adapters that are `forgotten` go with the next message.
    """

    connections: Mapping[int, Connection]
    lost: Callable[[int, str], None]
    times: PlanTimes = field(default_factory=PlanTimes)
    forgotten: deque[int] = field(default_factory=deque)
    _sending: threading.Lock = field(default_factory=threading.Lock)

    def send_plan(self, plan: RankPlan) -> None:
        began = time.thread_time()
        self._send(plan)
        self.times.plans += 1
        self.times.seconds += time.thread_time() - began

    def load_adapter(self, load: AdapterLoad) -> dict[int, AdapterLoaded]:
        """Have all other ranks load an adapter, and return what each says; for one load at a time, on any thread.

        Raises EOFError or OSError for a rank that has ended, which ends the worker.
        """
        self._send(load)
        return {rank: self._answer_of(rank, connection) for rank, connection in self.connections.items()}

    def _answer_of(self, rank: int, connection: Connection) -> AdapterLoaded:
        answer = received(connection)
        if isinstance(answer, Ended):
            self.lost(rank, answer.how)  # said once, and not left for who watches the link
        if not isinstance(answer, AdapterLoaded):
            raise EOFError("the rank has ended")
        return answer

    def _send(self, message: RankPlan | AdapterLoad) -> None:
        with self._sending:
            if self.forgotten:
                message = message._replace(
                    forgotten=tuple(self.forgotten.popleft() for _ in range(len(self.forgotten)))
                )
            data = packed(message)
            for rank, connection in self.connections.items():
                try:
                    connection.send_bytes(data)
                except OSError as error:
                    self.lost(rank, f"takes no plan: {error}")
                    raise


def received_plan(connection: Connection) -> RankPlan | AdapterLoad | None:
    """Return the next plan of rank 0, or an adapter to load; None when it ends. Raises EOFError when it is lost."""
    plan = received(connection)
    assert isinstance(plan, RankPlan | AdapterLoad | Closed)
    return None if isinstance(plan, Closed) else plan


def answer_load(connection: Connection, answer: AdapterLoaded) -> None:
    """Tell rank 0 what became of a load. Nothing else is sent to it once steps have begun."""
    with suppress(OSError):  # rank 0 has ended, and so does this one
        send(connection, answer)


class InFlightSteps:
    """Keeps the memory of queued steps until they are over."""

    def __init__(self, wait: Callable[[int], object]) -> None:
        self._wait, self._steps = wait, deque[tuple[int, object]]()

    def add(self, number: int, memory: object) -> None:
        self._steps.append((number, memory))
        while len(self._steps) > _IN_FLIGHT:
            self._end_first()

    def finish(self) -> None:
        while self._steps:
            self._end_first()

    def _end_first(self) -> None:
        self._wait(self._steps[0][0])
        self._steps.popleft()
