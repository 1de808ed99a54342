"""What ranks send to each other: named tuples of numbers, words and arrays, and nothing else.

They are pickled, and come over a network where ranks run on several hosts. So reading makes no object but the tuples of
`_MODULES` and arrays of integers, calls nothing else, and reads no more than `MAX_BYTES`. Pickles of numpy are not
among it: they make arrays of objects whose pointers are any bytes.
"""

from __future__ import annotations

import importlib
import io
import os
import pickle
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

MAX_BYTES: Final = 256 << 20
"""Of a message: a plan of 4096 rows with 8192 blocks each has half of it."""
_MODULES: Final = ("gpuworker.runner.rank_messages", "gpuworker.runner.rank_steps", "gpuworker.runner.executor")
_MOST_FACTS: Final = 64 << 10
_WHOLE_S: Final = 2.0  # for the rest of a message that has begun
_NUMBERS: Final = ("<i4", "<i8")


class Start(NamedTuple):
    """What a rank is told first."""

    settings: str  # JSON
    rank: int
    size: int
    sizes: tuple[int, int]


class Facts(NamedTuple):
    """What a rank says of itself: all ranks must have the same."""

    by_name: dict[str, str]


class Agreed(NamedTuple):
    """What all ranks are told that have the same: they load now."""


class Loaded(NamedTuple):
    """What a rank says behind its load: the bytes of its weights, or why it has none."""

    weight_bytes: int
    failure: str = ""


class Begin(NamedTuple):
    """The sizes with which steps begin, alike at all ranks."""

    num_blocks: int
    max_num_seqs: int
    table_width: int
    tokens: int  # of a step
    kept: int  # rows of logits that are reserved


class Closed(NamedTuple):
    """What rank 0 says last where it ends well. Else its connections just end."""


class Ended(NamedTuple):
    """The last word on a rank of another host, by the process that started it there: how it ended."""

    how: str


def array_of(numbers: bytearray, kind: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Return an array of int32 or int64 over these bytes. Raises ValueError for other kinds and sizes."""
    if kind not in _NUMBERS or not isinstance(numbers, bytearray):
        raise ValueError(f"an array is of bytes as {kind!r:.20}; expected one of {', '.join(_NUMBERS)}")
    return np.frombuffer(numbers, dtype=kind).reshape(shape)


class _Writer(pickle.Pickler):
    def reducer_override(self, value: Any) -> tuple[Callable[..., Any], tuple[Any, ...]] | Any:
        if isinstance(value, np.ndarray):
            return array_of, (bytearray(value), value.dtype.str, value.shape)
        return (type(value), tuple(value)) if isinstance(value, tuple) else NotImplemented


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return what makes a tuple or an array, and is for this message alone: a pickle can change what it names."""
        found = getattr(importlib.import_module(module), name, None) if module in _MODULES else None
        is_tuple = isinstance(found, type) and issubclass(found, tuple) and found.__module__ == module
        if found is not None and (is_tuple or found is array_of):
            return lambda *parts: found(*parts)  # noqa: PLW0108 - one of its own
        raise pickle.UnpicklingError(f"a rank sent a {module}.{name}; expected plans and facts alone")


def packed(message: NamedTuple) -> bytes:
    """Return a message as bytes. Raises ValueError for an array that no message has."""
    written = io.BytesIO()
    _Writer(written, protocol=pickle.HIGHEST_PROTOCOL).dump(message)
    return written.getvalue()


def unpacked(data: bytes) -> Any:
    """Return the message. Raises pickle.UnpicklingError for what is none."""
    try:
        return _Reader(io.BytesIO(data)).load()
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # of pickle, of numpy, or of a tuple that is given too much
        raise pickle.UnpicklingError(f"what a rank sent cannot be read: {error!r}") from error


def send(connection: Connection, message: NamedTuple) -> None:
    """Raises OSError when nobody reads it any more."""
    connection.send_bytes(packed(message))


def received(connection: Connection, most: int = MAX_BYTES) -> Any:
    """Return the next message. Raises EOFError at the end, OSError for one of more than `most` bytes."""
    return unpacked(connection.recv_bytes(most))


def first_received(connection: Connection, seconds: float) -> Any:
    """Return what a rank says first, as `received`. Raises TimeoutError where it does not begin in so many seconds, or
    has begun and does not end.
    """
    if not connection.poll(seconds):
        raise TimeoutError
    late = threading.Event()

    def give_up() -> None:
        late.set()
        with socket.socket(fileno=os.dup(connection.fileno())) as link, suppress(OSError):
            link.shutdown(socket.SHUT_RDWR)  # the read below ends

    timer = threading.Timer(_WHOLE_S, give_up)
    timer.daemon = True
    timer.start()
    try:
        return received(connection, _MOST_FACTS)
    except (EOFError, OSError):
        if late.is_set():
            raise TimeoutError from None
        raise
    finally:
        timer.cancel()
