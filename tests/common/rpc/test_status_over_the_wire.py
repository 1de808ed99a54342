"""Every error of Quire over a real socket: raised in handlers of each kind, and rebuilt whole by the client."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc import aio

from common.contracts import errors
from common.contracts.errors import FieldViolation, Mismatch, QuotaViolation
from common.rpc.interceptor import AroundInterceptor, ErrorsToStatuses
from common.rpc.server import RpcServer, open_channel
from common.rpc.status import code_of
from quire.api.status import DETAILS_KEY, error_from_rpc, error_from_status
from tests.support.deadlines import TooSlow, with_enough_time

KINDS = ("unary", "yielding", "writing", "stream_unary", "stream_stream")
MISMATCH = Mismatch("block_size", ours="16", theirs="32", flag="--block-size")
CASES: list[tuple[errors.QuireError, grpc.StatusCode]] = [
    (
        errors.InvalidRequest(FieldViolation("a", "x"), FieldViolation("b", "y", "TOO_LONG")),
        grpc.StatusCode.INVALID_ARGUMENT,
    ),
    (
        errors.InvalidRequest(FieldViolation("prompt", "z", errors.CONTEXT_LENGTH_EXCEEDED)),
        grpc.StatusCode.INVALID_ARGUMENT,
    ),
    (errors.NotFound("no sequence 7"), grpc.StatusCode.NOT_FOUND),
    (errors.ModelNotFound("model 'x' is not served here", "x"), grpc.StatusCode.NOT_FOUND),
    (errors.AlreadyExists("request r1"), grpc.StatusCode.ALREADY_EXISTS),
    (errors.Overloaded(QuotaViolation("router.queue", "1024 of 1024"), 2.5), grpc.StatusCode.RESOURCE_EXHAUSTED),
    (
        errors.RateLimited(QuotaViolation("tenant a.streams", "1 is open; at most 1"), 1.5),
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    ),
    (errors.Unavailable("draining", 0.5), grpc.StatusCode.UNAVAILABLE),
    (errors.DeadlineExceeded("needs 9 s, has 1 s"), grpc.StatusCode.DEADLINE_EXCEEDED),
    (errors.Cancelled("stopped by the operator"), grpc.StatusCode.CANCELLED),
    (errors.Unsupported("falcon: its attention cannot be served"), grpc.StatusCode.UNIMPLEMENTED),
    (errors.IdentityMismatch((MISMATCH,)), grpc.StatusCode.FAILED_PRECONDITION),
    (errors.StaleEpoch("epoch 3 < 4"), grpc.StatusCode.FAILED_PRECONDITION),
    (errors.ProtocolViolation("seq 5 after 3"), grpc.StatusCode.INTERNAL),
    (errors.EngineFailure("step 12 failed"), grpc.StatusCode.INTERNAL),
]
# Methods without serialisers carry bytes, which the type stubs lack.
Channel = Any


class Raising(grpc.GenericRpcHandler):
    """Serves one method of each kind; each raises what the test put into `error`."""

    def __init__(self) -> None:
        self.error: BaseException = AssertionError("unset")
        self.cancelled = asyncio.Event()

    async def unary(self, request: bytes, context: Any) -> bytes:
        raise self.error

    async def yielding(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"first"
        raise self.error

    async def writing(self, request: bytes, context: Any) -> None:
        await context.write(b"first")
        raise self.error

    async def stream_unary(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        async for _ in requests:
            raise self.error
        return b""

    async def stream_stream(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request
            raise self.error

    async def waiting(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"first"
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        name = handler_call_details.method.rpartition("/")[2]
        make = {
            "unary": grpc.unary_unary_rpc_method_handler,
            "stream_unary": grpc.stream_unary_rpc_method_handler,
            "stream_stream": grpc.stream_stream_rpc_method_handler,
        }.get(name, grpc.unary_stream_rpc_method_handler)
        return make(getattr(self, name)) if hasattr(self, name) else None


@pytest.fixture
def raising() -> Raising:
    return Raising()


@pytest.fixture
async def channel(raising: Raising) -> AsyncIterator[Channel]:
    rpc = RpcServer([])
    rpc.server.add_generic_rpc_handlers([raising])
    await rpc.start("127.0.0.1", 0)
    async with open_channel(f"127.0.0.1:{rpc.port}") as opened:
        yield opened
    await rpc.stop(0)


async def call(channel: Channel, kind: str) -> None:
    """Call a method to its end."""
    name = f"/test.Raising/{kind}"
    if kind == "unary":
        await channel.unary_unary(name)(b"")
    elif kind == "stream_unary":
        await channel.stream_unary(name)(iter([b""]))
    else:
        responses = (
            channel.stream_stream(name)(iter([b""])) if kind == "stream_stream" else channel.unary_stream(name)(b"")
        )
        async for _ in responses:
            pass


async def failure(channel: Channel, kind: str) -> aio.AioRpcError:
    with pytest.raises(aio.AioRpcError) as caught:
        await call(channel, kind)
    return caught.value


def details(error: aio.AioRpcError) -> dict[str, Any]:
    """Return the google.rpc details of a failed RPC by the name of their message."""
    packed = dict(error.trailing_metadata() or ())[DETAILS_KEY]
    found = {}
    for detail in status_pb2.Status.FromString(packed).details:
        name = detail.TypeName().rpartition(".")[2]
        found[name] = getattr(error_details_pb2, name).FromString(detail.value)
    return found


@pytest.mark.parametrize(("error", "code"), CASES, ids=lambda value: type(value).__name__)
async def test_an_error_comes_back_as_itself(
    channel: Channel, raising: Raising, error: errors.QuireError, code: grpc.StatusCode
) -> None:
    raising.error = error
    failed = await failure(channel, "unary")
    rebuilt = error_from_rpc(failed)
    assert failed.code() is code
    assert type(rebuilt) is type(error)
    assert vars(rebuilt) == vars(error) or isinstance(error, errors.IdentityMismatch)


@pytest.mark.parametrize("kind", KINDS)
async def test_every_kind_of_handler_maps_errors(channel: Channel, raising: Raising, kind: str) -> None:
    raising.error = errors.NotFound("no such thing")
    failed = await failure(channel, kind)
    assert (failed.code(), failed.details()) == (grpc.StatusCode.NOT_FOUND, "no such thing")


async def test_invalid_argument_names_every_field(channel: Channel, raising: Raising) -> None:
    raising.error = errors.InvalidRequest(FieldViolation("sampling.top_p", "is 2"), FieldViolation("n", "is 0"))
    found = details(await failure(channel, "unary"))
    assert [(each.field, each.description) for each in found["BadRequest"].field_violations] == [
        ("sampling.top_p", "is 2"),
        ("n", "is 0"),
    ]


LONG_NAME = "m" * 1_000
FAULTS: list[tuple[errors.QuireError, str, dict[str, str], str | None]] = [
    (
        errors.InvalidRequest(FieldViolation("sampling.n", "is 0"), FieldViolation("x", "y")),
        "INVALID_FIELD",
        {"field": "sampling.n"},
        None,
    ),
    (
        errors.InvalidRequest(FieldViolation("prompt", "too long", errors.CONTEXT_LENGTH_EXCEEDED)),
        "CONTEXT_LENGTH_EXCEEDED",
        {"field": "prompt"},
        None,
    ),
    (
        errors.RateLimited(QuotaViolation("tenant a.b.requests_per_minute", "at most 2"), 12.0004),
        "RATE_LIMITED",
        {"limit": "requests_per_minute"},
        "12001",
    ),
    (errors.Overloaded(QuotaViolation("router.queue", "full"), 2.5), "OVERLOADED", {"limit": "router.queue"}, "2500"),
    (errors.Unavailable("draining", 0.25), "UNAVAILABLE", {}, "250"),
    (errors.ModelNotFound("no model", LONG_NAME), "MODEL_NOT_FOUND", {"model": "m" * 200}, None),
    (errors.NotFound("no request"), "NOT_FOUND", {}, None),
    (errors.Unauthenticated("no key"), "UNAUTHENTICATED", {}, None),
    (errors.DeadlineExceeded("too late"), "DEADLINE_EXCEEDED", {}, None),
]


@pytest.mark.parametrize(("error", "reason", "facts", "pushback"), FAULTS, ids=lambda value: str(value)[:20])
async def test_error_info_names_the_fault_and_a_pushback_stands_where_a_retry_may_help(
    channel: Channel,
    raising: Raising,
    error: errors.QuireError,
    reason: str,
    facts: dict[str, str],
    pushback: str | None,
) -> None:
    raising.error = error
    failed = await failure(channel, "unary")
    info = details(failed)["ErrorInfo"]
    assert (info.reason, dict(info.metadata), info.domain) == (reason, facts, "quire")
    assert dict(failed.trailing_metadata() or ()).get("grpc-retry-pushback-ms") == pushback
    assert ("RetryInfo" in details(failed)) == (pushback is not None)


def test_a_reason_of_a_newer_version_is_kept_in_an_error_of_its_code() -> None:
    status = status_pb2.Status(code=grpc.StatusCode.PERMISSION_DENIED.value[0], message="not today")
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="KEY_EXPIRED", domain="quire"))
    found = error_from_status(status)
    assert (type(found), found.reason, str(found)) == (errors.PermissionDenied, "KEY_EXPIRED", "not today")


class Noting(Raising):
    async def unary(self, request: bytes, context: Any) -> bytes:
        context.set_trailing_metadata((("x-note", "seen"),))
        raise self.error


async def test_trailers_that_a_handler_has_set_stand_beside_those_of_its_error() -> None:
    noting, rpc = Noting(), RpcServer([])
    noting.error = errors.NotFound("gone")
    rpc.server.add_generic_rpc_handlers([noting])
    await rpc.start("127.0.0.1", 0)
    async with open_channel(f"127.0.0.1:{rpc.port}") as opened:
        failed = await failure(opened, "unary")
    await rpc.stop(0)
    assert dict(failed.trailing_metadata() or ())["x-note"] == "seen"
    assert details(failed)["ErrorInfo"].reason == "NOT_FOUND"


async def test_violations_beyond_what_trailers_hold_are_counted(channel: Channel, raising: Raising) -> None:
    raising.error = errors.InvalidRequest(*(FieldViolation(f"field{n}", "x" * 90) for n in range(200)))
    rebuilt = error_from_rpc(await failure(channel, "unary"))
    assert isinstance(rebuilt, errors.InvalidRequest)
    kept = len(rebuilt.violations) - 1
    assert 40 < kept < 60
    assert rebuilt.violations[-1] == FieldViolation("...", f"{200 - kept} more are wrong")


async def test_resource_exhausted_says_which_quota_and_when_to_retry(channel: Channel, raising: Raising) -> None:
    raising.error = errors.Overloaded(QuotaViolation("router.queue", "1024 of 1024 wait"), 2.5)
    found = details(await failure(channel, "yielding"))
    assert found["QuotaFailure"].violations[0].subject == "router.queue"
    assert found["QuotaFailure"].violations[0].description == "1024 of 1024 wait"
    assert found["RetryInfo"].retry_delay.ToMilliseconds() == 2500


async def test_unavailable_says_when_to_retry(channel: Channel, raising: Raising) -> None:
    raising.error = errors.Unavailable("draining", 0.25)
    found = details(await failure(channel, "writing"))
    assert found["RetryInfo"].retry_delay.ToMilliseconds() == 250


async def test_a_mismatch_carries_both_values_and_is_read_from_the_readers_side(
    channel: Channel, raising: Raising
) -> None:
    raising.error = errors.IdentityMismatch((MISMATCH, Mismatch("model_fingerprint", "aa", "bb", "--model")))
    failed = await failure(channel, "stream_stream")
    first = details(failed)["PreconditionFailure"].violations[0]
    assert first.subject == "block_size"
    assert first.description == "block_size: here 16, there 32 (change it with --block-size)"
    rebuilt = error_from_rpc(failed)
    assert isinstance(rebuilt, errors.IdentityMismatch)
    assert set(rebuilt.mismatches) == {
        Mismatch("block_size", ours="32", theirs="16", flag="--block-size"),
        Mismatch("model_fingerprint", ours="bb", theirs="aa", flag="--model"),
    }


@pytest.mark.parametrize("kind", KINDS)
async def test_a_request_without_memory_ends_and_may_be_sent_again(
    channel: Channel, raising: Raising, kind: str
) -> None:
    raising.error = MemoryError()
    failed = await failure(channel, kind)
    assert failed.code() is grpc.StatusCode.UNAVAILABLE
    assert isinstance(error_from_rpc(failed), errors.Unavailable)
    assert failed.details() == "no memory is left for this request; try again, or send a smaller one"


@pytest.mark.parametrize("kind", KINDS)
async def test_a_bug_is_internal_logged_and_says_nothing(
    channel: Channel, raising: Raising, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    raising.error = ZeroDivisionError("secret text")
    failed = await failure(channel, kind)
    assert failed.code() is grpc.StatusCode.INTERNAL
    assert failed.details() == "internal error; the server's log has the details"
    logged = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(logged) == 1
    assert logged[0].exc_info is not None
    assert logged[0].exc_info[0] is ZeroDivisionError


async def test_a_failure_further_behind_keeps_its_meaning(channel: Channel, raising: Raising) -> None:
    raising.error = aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, aio.Metadata(), aio.Metadata(), "connection refused")
    failed = await failure(channel, "unary")
    assert (failed.code(), failed.details()) == (grpc.StatusCode.UNAVAILABLE, "connection refused")


async def read_all(stream: Any, seen: list[bytes]) -> None:
    """Read a stream to its end, whatever that is; keep what came."""
    async for each in stream:
        seen.append(each)  # noqa: PERF401 - kept when the next one raises


async def test_a_passed_deadline_cancels_the_handler(channel: Channel, raising: Raising) -> None:
    async def attempt(seconds: float) -> None:
        seen: list[bytes] = []
        stream = channel.unary_stream("/test.Raising/waiting")(b"", timeout=seconds)
        with pytest.raises(aio.AioRpcError) as caught:
            await read_all(stream, seen)
        if not seen:
            raise TooSlow
        assert isinstance(error_from_rpc(caught.value), errors.DeadlineExceeded)
        async with asyncio.timeout(60.0):
            await raising.cancelled.wait()

    await with_enough_time(attempt, 0.3)


async def test_a_clients_cancellation_reaches_the_handler(
    channel: Channel, raising: Raising, caplog: pytest.LogCaptureFixture
) -> None:
    stream = channel.unary_stream("/test.Raising/waiting")(b"")
    assert await stream.read() == b"first"
    stream.cancel()
    async with asyncio.timeout(60.0):
        await raising.cancelled.wait()
    assert await stream.code() is grpc.StatusCode.CANCELLED
    assert caplog.records == []


async def test_an_unknown_method_is_unsupported(channel: Channel) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await channel.unary_unary("/test.Raising/missing")(b"")
    assert isinstance(error_from_rpc(caught.value), errors.Unsupported)


async def test_nobody_listening_is_unavailable() -> None:
    closed: Channel = open_channel("127.0.0.1:1")
    async with closed:
        with pytest.raises(aio.AioRpcError) as caught:
            await closed.unary_unary("/test.Raising/unary")(b"")
    assert isinstance(error_from_rpc(caught.value), errors.Unavailable)


def test_every_error_of_the_tree_has_a_code() -> None:
    def below(error: type[errors.QuireError]) -> set[type[errors.QuireError]]:
        return {error}.union(*(below(each) for each in error.__subclasses__()))

    tree = (each for each in below(errors.QuireError) if each.__module__ == errors.QuireError.__module__)
    codes = {each.__name__: code_of(each.__new__(each)).name for each in tree}
    assert codes.pop("QuireError") == codes.pop("ProtocolViolation") == codes.pop("EngineFailure") == "INTERNAL"
    assert "INTERNAL" not in codes.values()


class Gone:
    """The context of a call whose client is gone, a moment before gRPC cancels it."""

    async def write(self, response: bytes) -> None:
        raise aio.InternalError("execute_batch failed")


async def test_a_client_that_is_gone_amid_a_write_is_no_error(
    raising: Raising, caplog: pytest.LogCaptureFixture
) -> None:
    async def handler_of(details: Any) -> Any:
        return raising.service(details)

    asked: Any = SimpleNamespace(method="/test.Raising/yielding")
    wrapped: Any = await AroundInterceptor(ErrorsToStatuses).intercept_service(handler_of, asked)
    with pytest.raises(asyncio.CancelledError):
        await wrapped.unary_stream(b"", Gone())
    assert not caplog.records
