"""Calls of a real server that end with another status than OK: what is reported, and that nothing of them stays."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import pytest
from grpc import aio

from common.contracts.errors import AlreadyExists, FieldViolation, InvalidRequest, QuireError, Unavailable
from common.rpc.call_notes import NOTES
from common.rpc.options import Callers
from common.rpc.server import RpcServer, open_channel
from router.api.grpc.refused_calls import RefusedCalls
from router.contracts.refusals import Refusal
from tests.support.deadlines import TooSlow, with_enough_time
from tests.support.router.refusal_list import RefusalList
from tests.support.waiting import PATIENCE_S, until

KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
MOST_BYTES = 1_000
_ENDED_CALLS = 60


class Handlers(grpc.GenericRpcHandler):
    """A method of each kind; each raises `error`, or answers if there is none. `waits` waits until it is cancelled."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.chosen = ""

    def _end(self) -> bytes:
        if (notes := NOTES.get()) is not None:
            notes.chosen_id, notes.owner = self.chosen, "acme"
        if self.error is not None:
            raise self.error
        return b"answer"

    async def unary_unary(self, request: bytes, context: Any) -> bytes:
        return self._end()

    async def unary_stream(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"first"
        yield self._end()

    async def stream_unary(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        return self._end()

    async def stream_stream(self, requests: AsyncIterator[bytes], context: Any) -> None:
        await context.write(b"first")
        self._end()

    async def aborts(self, request: bytes, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.NOT_FOUND, "as health does")
        raise AssertionError

    async def waits(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"first"
        await asyncio.get_running_loop().create_future()

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        name = details.method.rpartition("/")[2]
        kind = {"aborts": "unary_unary", "waits": "unary_stream"}.get(name, name)
        return getattr(grpc, f"{kind}_rpc_method_handler")(getattr(self, name)) if hasattr(self, name) else None


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Any, Handlers, RefusalList]]:
    """Serve; yield a channel. Methods without serialisers carry bytes, which the type stubs lack."""
    watch, handlers = RefusalList(), Handlers()
    rpc = RpcServer([], [RefusedCalls(watch)], callers=Callers(most_bytes=MOST_BYTES))
    rpc.server.add_generic_rpc_handlers([handlers])
    await rpc.start("127.0.0.1", 0)
    async with open_channel(f"127.0.0.1:{rpc.port}") as channel:
        yield channel, handlers, watch
    await rpc.stop(0)


async def called(channel: Any, name: str, kind: str = "", request: bytes = b"", **metadata: str) -> dict[str, Any]:
    """Make a call to its end; return its code and trailers by name."""
    kind = kind or name
    sent = [(each.replace("_", "-"), value) for each, value in metadata.items()]
    given = iter([request]) if kind.startswith("stream") else request
    call = getattr(channel, kind)(f"/quire.test.Service/{name}")(given, metadata=sent, timeout=PATIENCE_S)
    try:
        if kind.endswith("stream"):
            async for _ in call:
                pass
        else:
            await call
    except aio.AioRpcError:
        pass
    return {**dict(await call.trailing_metadata() or ()), "code": (await call.code()).name}


async def reported(watch: RefusalList, count: int = 1) -> list[Refusal]:
    """Return what is reported, once it is so much: a client may have its status before the handler has ended."""
    return await until(lambda: watch.seen, lambda seen: len(seen) >= count)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("error", "code", "reason", "words"),
    [
        (InvalidRequest(FieldViolation("sampling.n", "is 0")), "INVALID_ARGUMENT", "INVALID_FIELD", "sampling.n: is 0"),
        (Unavailable("draining"), "UNAVAILABLE", "UNAVAILABLE", "draining"),
        (ZeroDivisionError("secret"), "INTERNAL", "INTERNAL", "an unexpected error; the log of the router has it"),
        (MemoryError(), "UNAVAILABLE", "UNAVAILABLE", "no memory is left for this request; try again, or send a"),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_an_error_of_each_kind_of_method_is_reported_once(
    kind: str, error: BaseException, code: str, reason: str, words: str
) -> None:
    async with served() as (channel, handlers, watch):
        handlers.error = error
        found = await called(channel, kind, x_request_id="mine")
        (seen,) = await reported(watch)
    assert (found["code"], found["x-request-id"], found["x-quire-request-id"]) == (code, "mine", seen.request_id)
    assert (seen.api, seen.method, seen.code, seen.reason) == ("grpc", f"quire.test.Service/{kind}", code, reason)
    assert (seen.client_id, seen.owner) == ("mine", "acme")
    assert seen.words[0].startswith(words)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_call_that_ends_well_has_its_ids_and_is_not_reported(kind: str) -> None:
    async with served() as (channel, handlers, watch):
        first = await called(channel, kind)
        handlers.chosen = "chosen"
        second = await called(channel, kind, x_request_id="mine")
    assert first["x-request-id"] == first["x-quire-request-id"]
    assert first["x-request-id"].startswith("quire-")
    assert (second["x-request-id"], second["x-quire-request-id"]) == ("chosen", "chosen")
    assert watch.seen == []


@pytest.mark.parametrize(
    ("sent", "shown", "recorded"),
    [
        ("a b", "a b", "a b"),
        ("  padded ", "padded", "padded"),
        ("n" * 300, "n" * 128, "n" * 128),
        ("quire-00", "quire-00", ""),
    ],
)
async def test_an_id_of_the_client_is_bounded_and_never_recorded_as_one_of_the_routers(
    sent: str, shown: str, recorded: str
) -> None:
    async with served() as (channel, handlers, watch):
        handlers.error = Unavailable("draining")
        assert (await called(channel, "unary_unary", x_request_id=sent))["x-request-id"] == shown
        assert [each.client_id for each in await reported(watch)] == [recorded]


async def test_an_id_in_use_is_that_of_the_other_request() -> None:
    async with served() as (channel, handlers, watch):
        handlers.error, handlers.chosen = AlreadyExists("in use"), "taken"
        found = await called(channel, "unary_unary")
        (seen,) = await reported(watch)
    assert (found["x-request-id"], found["x-quire-request-id"]) == ("taken", seen.request_id)
    assert seen.request_id.startswith("quire-")


async def test_a_status_that_no_error_stands_behind_is_reported() -> None:
    async with served() as (channel, _, watch):
        found = await called(channel, "aborts", "unary_unary", x_request_id="mine")
        await reported(watch)
    assert (found["code"], found["x-request-id"]) == ("NOT_FOUND", "mine")
    assert found["x-quire-request-id"] == watch.seen[0].request_id
    assert [(each.code, each.reason, each.words) for each in watch.seen] == [("NOT_FOUND", "NOT_FOUND", ())]


@pytest.mark.parametrize("kind", KINDS)
async def test_methods_that_there_are_not_have_one_name_and_nothing_of_theirs_is_kept(kind: str) -> None:
    async with served() as (channel, _, watch):
        for number in range(3):
            assert (await called(channel, f"m{number}", kind))["code"] == "UNIMPLEMENTED"
        await reported(watch, 3)
    assert [(each.method, each.reason) for each in watch.seen] == [("unknown", "UNKNOWN_PATH")] * 3


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream"])
async def test_a_message_above_the_limit_is_reported_each_time(kind: str) -> None:
    async with served() as (channel, _, watch):
        assert (await called(channel, kind, request=b"x" * MOST_BYTES))["code"] == "OK"
        for number in range(1, 3):
            found = await called(channel, kind, request=b"x" * (MOST_BYTES + 1), x_request_id="large")
            assert found["code"] == "RESOURCE_EXHAUSTED"
            await until(lambda number=number: len(watch.seen) == number)  # type: ignore[misc]
    seen = {(each.method, each.code, each.reason, each.client_id) for each in watch.seen}
    assert seen == {(f"quire.test.Service/{kind}", "RESOURCE_EXHAUSTED", "NOT_RECEIVED", "large")}


async def test_a_call_that_its_client_leaves_is_cancelled() -> None:
    async with served() as (channel, _, watch):
        call = channel.unary_stream("/quire.test.Service/waits")(b"", timeout=PATIENCE_S)
        assert await call.read() == b"first"
        call.cancel()
        await until(lambda: len(watch.seen) == 1)
    assert [(each.code, each.reason) for each in watch.seen] == [("CANCELLED", "CANCELLED")]


async def test_a_call_whose_deadline_passes_is_reported_so() -> None:
    async def attempt(seconds: float) -> None:
        async with served() as (channel, _, watch):
            await called(channel, "unary_unary")
            call = channel.unary_stream("/quire.test.Service/waits")(b"", timeout=seconds)
            with suppress(aio.AioRpcError):
                await call.read()
                await call.read()
            assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await until(lambda: len(watch.seen) == 1)
        if watch.seen[0].reason in ("CANCELLED", "NOT_RECEIVED"):
            raise TooSlow  # the server began to count late, so that the client's end came first
        assert [(each.code, each.reason) for each in watch.seen] == [("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED")]

    await with_enough_time(attempt, 0.3)


def _states() -> int:
    """Return how many calls are in memory: gRPC's own state of each."""
    return sum(type(each).__name__ == "RPCState" for each in gc.get_objects())


@pytest.mark.parametrize("refused", [False, True])
async def test_an_ended_call_leaves_nothing_to_the_collector(refused: bool) -> None:
    async with served() as (channel, handlers, watch):
        handlers.error = QuireError("refused") if refused else None
        await called(channel, "unary_unary")
        gc.collect()
        gc.disable()
        try:
            before = _states()
            for _ in range(_ENDED_CALLS):
                if refused:
                    handlers.error = QuireError("refused")
                await called(channel, "unary_unary")
            # The server has a few states for the next calls, and the last call may not be over yet.
            await until(lambda: _states() < before + _ENDED_CALLS // 2)
        finally:
            gc.enable()
    assert len(watch.seen) == (_ENDED_CALLS + 1) * refused
