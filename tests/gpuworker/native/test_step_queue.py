"""The native queue of steps: order, outcomes, and its end."""

from __future__ import annotations

import ctypes
import itertools
import threading

import numpy as np
import pytest

from gpuworker.native.library import best
from gpuworker.native.ranks import BoardStruct, RanksStruct
from gpuworker.native.step_queue import StepQueue, address_of
from gpuworker.runner.native_executor import WholeStep
from gpuworker.sampling.native_sampler import ROW

pytestmark = pytest.mark.skipif(best() is None, reason="the native library was not built")
CALL = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)
PATIENCE = 120.0


def queue() -> StepQueue:
    library = best()
    assert library is not None
    return StepQueue(library)


def test_calls_are_made_in_order_and_answered_by_number() -> None:
    made: list[int] = []

    def make(address: int) -> int:
        made.append(ctypes.c_int32.from_address(address).value)
        return 10 + made[-1]

    call, arguments, steps = CALL(make), [ctypes.c_int32(n) for n in range(5)], queue()
    numbers = [steps.put(address_of(call), ctypes.addressof(argument)) for argument in arguments]
    statuses = [steps.wait(number)[0] for number in numbers]
    steps.close()
    assert (made, statuses) == ([0, 1, 2, 3, 4], [10, 11, 12, 13, 14])


def test_a_call_gets_its_argument() -> None:
    number = ctypes.c_int32(41)
    call = CALL(lambda address: ctypes.c_int32.from_address(address).value + 1)
    steps = queue()
    status, times = steps.wait(steps.put(address_of(call), ctypes.addressof(number)))
    steps.close()
    assert status == 42
    assert 0 < times.took < PATIENCE
    assert 0 < times.idle_before < PATIENCE


def test_who_waits_holds_nobody_up() -> None:
    """A call that ends only when another Python thread lets it: waiting for it must not keep the GIL."""
    may_end = threading.Event()
    call = CALL(lambda _: int(may_end.wait(PATIENCE)))
    steps = queue()
    number = steps.put(address_of(call), 0)
    threading.Timer(0.0, may_end.set).start()
    assert steps.wait(number)[0] == 1
    steps.close()


def test_closing_makes_what_was_put_first() -> None:
    made = itertools.count()
    call, steps = CALL(lambda _: next(made)), queue()
    for _ in range(3):
        steps.put(address_of(call), 0)
    steps.close()
    steps.close()
    assert next(made) == 3


def test_tokens_are_taken_from_the_table() -> None:
    library = best()
    assert library is not None

    class Take(ctypes.Structure):
        _fields_ = [(name, ctypes.c_void_p) for name in ("table", "places", "token_ids")] + [("count", ctypes.c_int64)]

    table, places = np.arange(100, 120, dtype=np.int32), np.array([3, 0, 19], dtype=np.int64)
    token_ids = np.zeros(3, dtype=np.int64)
    take = Take(*(array.ctypes.data for array in (table, places, token_ids)), 3)
    steps = StepQueue(library)
    steps.wait(steps.put(address_of(library.quire_take_tokens), ctypes.addressof(take)))
    steps.close()
    assert token_ids.tolist() == [103, 100, 119]


def test_python_and_c_agree_on_the_sizes_of_what_passes_between_them() -> None:
    library = best()
    assert library is not None
    sizes = ctypes.sizeof(WholeStep), ROW.itemsize
    assert (library.quire_whole_step_bytes(), library.quire_sample_row_bytes()) == sizes
    library.quire_ranks_bytes.restype = library.quire_rank_board_bytes.restype = ctypes.c_int64
    sizes = ctypes.sizeof(RanksStruct), ctypes.sizeof(BoardStruct)
    assert (library.quire_ranks_bytes(), library.quire_rank_board_bytes()) == sizes
