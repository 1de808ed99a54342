"""The private parts of grpcio: the installed one has all, and services run on without them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import cast

import grpc
import pytest
from google.protobuf import empty_pb2

from common.rpc import event_loop, grpc_internals, stream_writes
from tests.common.rpc.test_event_loop import CALLS, _echoes


@pytest.fixture
def other_grpc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A grpcio whose core has none of the names."""
    monkeypatch.setitem(sys.modules, "grpc._cython", ModuleType("grpc._cython"))
    monkeypatch.setitem(sys.modules, "grpc._cython.cygrpc", None)
    importlib.reload(grpc_internals)
    yield
    monkeypatch.undo()
    importlib.reload(grpc_internals)


def test_the_installed_grpcio_has_all_parts() -> None:
    assert grpc_internals.missing_parts() == ()
    assert grpc_internals.missing_words() == ""


def test_what_another_grpcio_lacks_is_named_and_calls_are_served(other_grpc: None) -> None:
    missing = "PollerCompletionQueue, ExecuteBatchError"
    assert grpc_internals.missing_words() == f"grpcio {grpc.__version__} has no {missing}; services run on without"
    assert not grpc_internals.is_failed_batch(ValueError())
    assert event_loop.run(_echoes()) == CALLS


async def test_a_call_without_a_core_is_written_by_the_public_way() -> None:
    written = []

    class Intercepted:
        def done(self) -> bool:
            return False

        async def wait_for_connection(self) -> None:
            pass

        async def write(self, message: object) -> None:
            written.append(message)

    call = cast("stream_writes.StreamCall", Intercepted())
    assert grpc_internals.core_of(call) is None
    assert await stream_writes.write(call, empty_pb2.Empty())
    assert written == [empty_pb2.Empty()]
