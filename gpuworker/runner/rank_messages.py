"""What ranks send to each other: named tuples of numbers, words and arrays, and nothing else.

They are pickled, and come over a network where ranks run on several hosts. So reading makes no object but those of
`_KINDS` and arrays of numpy, calls nothing else, and reads no more than `MAX_BYTES`.
"""

from __future__ import annotations

import importlib
import io
import pickle
from multiprocessing.connection import Connection
from typing import Any, Final, NamedTuple

MAX_BYTES: Final = 256 << 20
"""Of a message: a plan of 4096 rows with 8192 blocks each has half of it."""
_MODULES: Final = ("gpuworker.runner.rank_messages", "gpuworker.runner.rank_steps", "gpuworker.runner.executor")
_ARRAYS: Final = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    *((f"numpy.{core}.{module}", name) for core in ("core", "_core") for module, name in (
        ("multiarray", "_reconstruct"),
        ("numeric", "_frombuffer"),
    )),
}  # fmt: skip


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


class Ended(NamedTuple):
    """The last word on a rank of another host, by the process that started it there: how it ended."""

    how: str


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ARRAYS:
            return getattr(importlib.import_module(module), name)
        found = getattr(importlib.import_module(module), name, None) if module in _MODULES else None
        if isinstance(found, type) and issubclass(found, tuple) and found.__module__ == module:
            return found
        raise pickle.UnpicklingError(f"a rank sent a {module}.{name}; expected plans and facts alone")


def packed(message: NamedTuple) -> bytes:
    return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)


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


def received(connection: Connection) -> Any:
    """Return the next message. Raises EOFError at the end, OSError for one that is too long."""
    return unpacked(connection.recv_bytes(MAX_BYTES))
