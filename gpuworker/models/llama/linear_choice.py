"""The fastest kind of packed weight for a shape on this machine, measured briefly at start.

Reading decides at few rows and arithmetic at many, and both differ from machine to machine. So the kinds are timed, on
memory of the packed size whose content does not matter, large enough that no cache holds it.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from gpuworker.native import library as native
from gpuworker.native.linear import Kind, LinearStruct, Memory, Store, declared

# Calls read weights in turn from so much memory that no cache keeps a weight until its next use.
_BYTES: Final = 128 << 20
# The fastest call of each kind counts, among at least so many calls in at least so many seconds.
_TURNS: Final = 6
_SECONDS: Final = 0.006
_FILL: Final = 0x3C  # makes small numbers of bytes, halves and floats alike


@dataclass(frozen=True, slots=True)
class LinearShape:
    """A weight [n, k]; `group` inputs share a scale in the int4 kinds."""

    n: int
    k: int
    group: int = 128


@dataclass(frozen=True, slots=True)
class LinearChoice:
    """The kind that takes the least time, and the seconds of each kind for each number of rows."""

    shape: LinearShape
    kind: Kind
    rows: tuple[int, ...]
    seconds: Mapping[Kind, tuple[float, ...]]

    def __str__(self) -> str:
        timed = (
            f"{kind.name} {'/'.join(f'{second * 1e6:.0f}' for second in seconds)}"
            for kind, seconds in self.seconds.items()
        )
        rows = "/".join(map(str, self.rows))
        return f"linear {self.shape.n} x {self.shape.k}: {self.kind.name} (us for {rows} rows: {', '.join(timed)})"


def choose(
    shapes: Sequence[LinearShape],
    kinds: Sequence[Kind],
    threads: int,
    rows: tuple[int, ...] = (1, 8, 64),
    library: ctypes.CDLL | None = None,
) -> list[LinearChoice]:
    """Return the choice for each shape: the kind with the least geometric mean of the times over `rows`.

    Raises NativeUnavailable without a library, ValueError for a shape that a kind cannot serve.
    """
    found = declared(library or native.best())
    memory = Memory(_BYTES)
    ctypes.memset(memory.address, _FILL, memory.nbytes)
    choices = []
    for shape in shapes:
        timed = [_seconds(found, memory, [_struct(shape, kind) for kind in kinds], count, threads) for count in rows]
        seconds = dict(zip(kinds, zip(*timed, strict=True), strict=True))
        best = min((math.prod(each), kind) for kind, each in seconds.items())[1]
        choices.append(LinearChoice(shape, best, rows, seconds))
    return choices


def _struct(shape: LinearShape, kind: Kind) -> LinearStruct:
    group = shape.group if kind in (Kind.I4_F32, Kind.I4_BF16) else 0
    return LinearStruct(kind, group, False, False, False, 0, shape.n, shape.k, None)


def _seconds(
    library: ctypes.CDLL, memory: Memory, linears: Sequence[LinearStruct], rows: int, threads: int
) -> list[float]:
    """Return the seconds of a call for each; calls take turns, so that a disturbance affects all alike."""
    calls = [_Call(library, memory, linear, rows, threads) for linear in linears]
    best, until, turn = [math.inf] * len(calls), time.perf_counter() + _SECONDS * len(calls), 0
    while turn <= _TURNS or time.perf_counter() < until:
        for place, call in enumerate(calls):
            began = time.perf_counter()
            call(turn)
            if turn:  # the first call warms up
                best[place] = min(best[place], time.perf_counter() - began)
        turn += 1
    return [second * call.parts for second, call in zip(best, calls, strict=True)]


class _Call:
    """A product whose weights come from another place of the memory at each call."""

    def __init__(self, library: ctypes.CDLL, memory: Memory, linear: LinearStruct, rows: int, threads: int) -> None:
        nbytes = int(library.quire_linear_bytes(ctypes.byref(linear)))
        if not nbytes:
            raise ValueError(f"no native linear of kind {Kind(linear.kind).name}, {linear.n} x {linear.k}")
        self.parts = 1
        while nbytes > memory.nbytes // 2:  # a part of so many outputs shows the same
            self.parts *= 2
            linear.n = max(1, linear.n // 2)
            nbytes = int(library.quire_linear_bytes(ctypes.byref(linear)))
        halves = linear.kind in (Kind.BF16, Kind.I8_BF16, Kind.I4_BF16)
        self._x = torch.ones(rows, linear.k, dtype=torch.bfloat16 if halves else torch.float32)
        self._out = torch.empty(rows, linear.n)
        self._scratch = Memory(int(library.quire_linear_scratch(ctypes.byref(linear), rows)))
        self._linear, self._run = linear, library.quire_linear_run
        self._places = range(memory.address, memory.address + memory.nbytes - nbytes + 1, -(-nbytes // 64) * 64)
        target = (self._out.data_ptr(), linear.n, int(Store.F32), self._scratch.address, threads)
        self._arguments = (self._x.data_ptr(), int(halves), linear.k, rows, *target)

    def __call__(self, turn: int) -> None:
        self._linear.memory = self._places[turn % len(self._places)]
        self._run(ctypes.byref(self._linear), *self._arguments)
