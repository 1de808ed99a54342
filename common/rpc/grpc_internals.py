"""The private parts of grpcio that services use, each where no public way exists. Another grpcio may lack them.

Services then run on without: the event loop turns in vain for some wake-ups, a client that leaves may cost a traceback
in the log, and a stream that its other end has ended loses what came before. Each service says at its start which part
is missing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import grpc
from grpc import aio

try:
    from grpc._cython import cygrpc  # type: ignore[attr-defined]
except ImportError:
    cygrpc = None

_COMPLETIONS: Final[type | None] = getattr(cygrpc, "PollerCompletionQueue", None)
_FAILED_BATCH: Final[type | None] = getattr(cygrpc, "ExecuteBatchError", None)
LOG: Final = "grpc._cython.cygrpc"
"""The logger of grpcio's core."""


def missing_parts() -> tuple[str, ...]:
    """Return the parts that this grpcio lacks."""
    parts = {
        "PollerCompletionQueue": _COMPLETIONS,
        "ExecuteBatchError": _FAILED_BATCH,
        "Call._cython_call": _has_core(),
    }
    return tuple([name for name, part in parts.items() if not part])


def missing_words() -> str:
    """Return in words what is missing, "" where nothing is."""
    missing = ", ".join(missing_parts())
    return f"grpcio {grpc.__version__} has no {missing}; services run on without" if missing else ""


def is_completion_reader(callback: Callable[..., object]) -> bool:
    """Return whether a reader of the event loop is the one that takes finished operations from gRPC's own thread."""
    inner = callback.func if isinstance(callback, functools.partial) else callback
    return _COMPLETIONS is not None and isinstance(getattr(inner, "__self__", None), _COMPLETIONS)


def is_failed_batch(error: BaseException | None) -> bool:
    """Return whether gRPC's core could not send something."""
    return _FAILED_BATCH is not None and isinstance(error, _FAILED_BATCH)


def core_of(call: aio.StreamStreamCall[Any, Any]) -> Any:
    """Return a call's core, which sends below the rules of grpc.aio; None for an intercepted call, which has none."""
    return getattr(call, "_cython_call", None)


def _has_core() -> bool:
    """Return whether calls keep their core under the known name: it is set when a call begins."""
    call = getattr(getattr(aio, "_call", None), "Call", None)
    return call is not None and "_cython_call" in call.__init__.__code__.co_names
