"""The native queue of steps (gpuworker/native/step_queue.h): a thread that the GIL cannot delay."""

from __future__ import annotations

import ctypes

_Address = ctypes.c_void_p


class Times(ctypes.Structure):
    """quire_queue_times: how long a call took, and how long the thread was idle before it, in seconds."""

    _fields_ = (("took", ctypes.c_double), ("idle_before", ctypes.c_double))


class StepQueue:
    """Makes native calls one after the other. `put` is for one thread; so is `wait`, in order and once for each."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Raises OSError when the thread cannot be started."""
        self._put, self._wait, self._stop = (
            getattr(library, f"quire_queue_{name}") for name in ("put", "wait", "stop")
        )
        start = library.quire_queue_start
        start.argtypes, start.restype = (), _Address
        self._put.argtypes, self._put.restype = (_Address, _Address, _Address), ctypes.c_int64
        self._wait.argtypes = (_Address, ctypes.c_int64, ctypes.POINTER(Times))
        self._wait.restype = ctypes.c_int32
        self._stop.argtypes, self._stop.restype = (_Address,), None
        self._queue = start()
        if not self._queue:
            raise OSError("the thread of the native step queue could not be started")

    def put(self, call: int, argument: int) -> int:
        """Queue `call`, the address of an int32 (*)(void *), on an argument that stays; return the call's number."""
        number: int = self._put(self._queue, call, argument)
        return number

    def wait(self, number: int) -> tuple[int, Times]:
        """Wait until a call is over; return its result and the time it took."""
        times = Times()
        status: int = self._wait(self._queue, number, ctypes.byref(times))
        return status, times

    def close(self) -> None:
        """Make the queued calls, and end the thread; a second call does nothing."""
        queue, self._queue = self._queue, None
        if queue:
            self._stop(queue)


def address_of(function: object) -> int:
    """Return the address of a function of a library."""
    address = ctypes.cast(function, _Address).value  # type: ignore[arg-type]
    assert address is not None
    return address
