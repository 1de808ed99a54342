"""Both clients over real gRPC against a router that plays scripts: answers, retries, broken streams, deadlines."""

from __future__ import annotations

import asyncio
import math
import sys
import threading
from subprocess import run

import grpc
import pytest

from cli.suite.stack import free_ports
from common.contracts.errors import (
    Cancelled,
    DeadlineExceeded,
    FieldViolation,
    InvalidRequest,
    NotFound,
    Overloaded,
    QuotaViolation,
    Unavailable,
)
from common.contracts.types import FinishReason
from quire.client import AsyncClient, Client, Interrupted, InterruptedByDeadline, Retry
from quire.client.retry import Attempts
from quire.inference.v1 import inference_pb2 as pb
from tests.support.deadlines import TooSlow, with_enough_time
from tests.support.fake_router import HELLO, PATIENCE_S, RouterDouble, admitted, facing, finished, served, tokens
from tests.support.waiting import until

QUICK = Retry(attempts=3, first_backoff=0.001)
NEVER = Retry(attempts=1)
both = pytest.mark.parametrize("kind", ["threads", "asyncio"])


@both
async def test_generate_returns_the_whole_answer(kind: str) -> None:
    double = RouterDouble()
    async with served(double) as address, facing(kind, address, metadata=(("tenant", "a"),)) as face:
        done = await face.call("generate", "x", temperature=0.0)
    assert (done.text, done.token_ids, done.cached_tokens, done.finish_reason) == ("Hello", (1, 2, 3), 4, "stop")
    assert double.requests[0].prompt.text == "x"
    assert double.metadata[0]["tenant"] == "a"


@both
@pytest.mark.parametrize("timeout", [math.inf, 1e300])
async def test_an_endless_timeout_is_no_timeout_that_passed(kind: str, timeout: float) -> None:
    double = RouterDouble()
    async with served(double) as address, facing(kind, address) as face:
        assert (await face.call("generate", "x", timeout=timeout)).text == "Hello"


@both
async def test_chat_sends_a_text_as_the_users_message(kind: str) -> None:
    double = RouterDouble()
    async with served(double) as address, facing(kind, address) as face:
        assert (await face.call("chat", "Hi")).text == "Hello"
    (message,) = double.requests[0].prompt.chat.messages
    assert (message.role, message.content) == ("user", "Hi")


@both
async def test_embed_returns_a_vector_for_each_input(kind: str) -> None:
    double = RouterDouble()
    async with served(double) as address, facing(kind, address) as face:
        found = await face.call("embed", ["x", [4, 5]], dimensions=2)
        with pytest.raises(InvalidRequest, match="dimensions: is 'two'"):
            await face.call("embed", ["x"], dimensions="two")
        with pytest.raises(InvalidRequest, match="inputs: is one text; expected a list"):
            await face.call("embed", "x")
    assert (found.vectors, found.usage.prompt_tokens) == (((0.5, 1.0), (0.5, 1.0)), 6)
    (asked,) = double.requests
    assert [each.WhichOneof("content") for each in asked.inputs] == ["text", "token_ids"]
    assert asked.dimensions == 2


@both
async def test_a_stream_brings_chunks_and_then_the_completion(kind: str) -> None:
    async with served(RouterDouble()) as address, facing(kind, address) as face:
        chunks, done = await face.chunks("x")
    assert [chunk.text for chunk in chunks] == ["Hel", "lo", ""]
    assert [chunk.finish_reason for chunk in chunks] == [None, None, FinishReason.STOP]
    assert done.text == "Hello"


@both
async def test_n_outputs_come_by_their_index(kind: str) -> None:
    script = [admitted(), tokens("a", 1), tokens("b", 2, index=1), finished(1, index=1), finished(1)]
    async with served(RouterDouble([script])) as address, facing(kind, address) as face:
        done = await face.call("generate", "x", n=2)
    assert [(output.index, output.text) for output in done.outputs] == [(0, "a"), (1, "b")]


@both
async def test_leaving_a_stream_cancels_the_request(kind: str) -> None:
    double = RouterDouble([[admitted(), tokens("Hel", 1), asyncio.Event()]])
    async with served(double) as address, facing(kind, address) as face:
        chunks, partial = await face.chunks("x", most=1)
        await asyncio.wait_for(double.cancelled.wait(), PATIENCE_S)
    assert [chunk.text for chunk in chunks] == ["Hel"]
    assert (partial.text, partial.finish_reason) == ("Hel", None)


async def test_a_cancelled_task_cancels_the_request() -> None:
    double = RouterDouble([[admitted(), asyncio.Event()]])
    async with served(double) as address, facing("asyncio", address) as face:
        task = asyncio.create_task(face.call("generate", "x"))
        await until(lambda: double.requests, every=0)
        task.cancel()
        await asyncio.wait_for(double.cancelled.wait(), PATIENCE_S)
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_another_thread_may_close_a_stream() -> None:
    double = RouterDouble([[admitted(), tokens("Hel", 1), asyncio.Event()]])

    def read(address: str) -> list[str]:
        with Client(address, timeout=10 * PATIENCE_S) as client, client.stream("x") as stream:
            texts = [next(stream).text]
            threading.Thread(target=stream.close).start()
            return [*texts, *(chunk.text for chunk in stream)]

    async with served(double) as address:
        assert await asyncio.wait_for(asyncio.to_thread(read, address), PATIENCE_S) == ["Hel"]


async def test_a_thread_may_close_a_stream_that_waits_to_try_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(address: str) -> list[str]:
        with Client(address, timeout=10 * PATIENCE_S) as client, client.stream("x") as stream:

            def wait_after(*_: object) -> float:
                stream.close()
                return 0.0

            monkeypatch.setattr(Attempts, "wait_after", wait_after)
            return [chunk.text for chunk in stream]

    async with served(RouterDouble([[Unavailable("draining")], HELLO])) as address:
        assert await asyncio.wait_for(asyncio.to_thread(read, address), PATIENCE_S) == []


async def test_a_task_may_close_a_stream_that_waits_to_try_again(monkeypatch: pytest.MonkeyPatch) -> None:
    double, closing = RouterDouble([[Unavailable("draining")], HELLO]), list[asyncio.Task[None]]()
    async with served(double) as address, AsyncClient(address) as client, client.stream("x") as stream:

        def wait_after(*_: object) -> float:
            closing.append(asyncio.create_task(stream.aclose()))
            return 0.0

        monkeypatch.setattr(Attempts, "wait_after", wait_after)
        assert [chunk.text async for chunk in stream] == []
        await closing[0]
    assert len(double.requests) == 1


async def test_another_thread_may_close_the_client() -> None:
    double = RouterDouble([[asyncio.Event()], HELLO])

    def read(client: Client) -> None:
        with pytest.raises(Cancelled):
            client.generate("x")

    async with served(double) as address:
        client = Client(address, timeout=10 * PATIENCE_S)
        reading = asyncio.create_task(asyncio.to_thread(read, client))
        await until(lambda: double.requests, every=0)
        client.close()
        await asyncio.wait_for(reading, PATIENCE_S)


# ------------------------------------------------------------ retries


@both
async def test_a_refused_request_is_sent_again_as_it_was(kind: str) -> None:
    full = Overloaded(QuotaViolation("router.queue", "full"), 0.01)
    double = RouterDouble([[full], [Unavailable("starting", 0.0)], HELLO])
    async with served(double) as address, facing(kind, address, retry=QUICK) as face:
        assert (await face.call("generate", "x", seed=3)).text == "Hello"
    assert len(double.requests) == 3
    assert double.requests[0] == double.requests[1] == double.requests[2]


@both
async def test_the_last_refusal_is_raised_with_its_details(kind: str) -> None:
    double = RouterDouble([[Overloaded(QuotaViolation("router.queue", "9 of 9"), 0.01)]])
    async with served(double) as address, facing(kind, address, retry=QUICK) as face:
        with pytest.raises(Overloaded) as error:
            await face.call("generate", "x")
    assert (error.value.violation.description, error.value.retry_after_s) == ("9 of 9", 0.01)
    assert len(double.requests) == 3


@both
async def test_a_wrong_request_is_sent_once_and_names_its_fields(kind: str) -> None:
    double = RouterDouble([[InvalidRequest(FieldViolation("sampling.top_p", "is 2"), FieldViolation("n", "is 0"))]])
    async with served(double) as address, facing(kind, address, retry=QUICK) as face:
        with pytest.raises(InvalidRequest) as error:
            await face.call("generate", "x")
    assert [violation.field for violation in error.value.violations] == ["sampling.top_p", "n"]
    assert len(double.requests) == 1


@both
async def test_questions_are_asked_again_too(kind: str) -> None:
    double = RouterDouble([[grpc.StatusCode.UNAVAILABLE], []])
    async with served(double) as address, facing(kind, address, retry=QUICK) as face:
        assert await face.call("tokenize", "x", add_special_tokens=False) == (4, 5)
    assert [request.add_special_tokens for request in double.requests] == [False, False]


@both
async def test_nobody_there_is_unavailable(kind: str) -> None:
    async with facing(kind, f"127.0.0.1:{free_ports(1)[0]}", retry=NEVER) as face:
        with pytest.raises(Unavailable):
            await face.call("status")


BROKEN = (admitted(), tokens("Hel", 1, 2), grpc.StatusCode.UNAVAILABLE)


@both
async def test_a_stream_whose_router_dies_goes_on_at_the_next_address(kind: str) -> None:
    first, second = RouterDouble([BROKEN]), RouterDouble([(admitted(), tokens("lo", 3), finished(3))])
    async with served(first) as one, served(second) as other, facing(kind, [one, other], retry=QUICK) as face:
        whole = await face.call("generate", "x")
        assert (whole.text, whole.token_ids) == ("Hello", (1, 2, 3))
        assert len(first.requests) == 1
        (asked,) = second.requests
        expected = pb.Resume(request_id="r1", output_tokens_received=[2])
        assert asked == pb.GenerateRequest(resume=expected), "and nothing beside it"
        await face.call("generate", "y")
        assert len(first.requests) == 1, "the client stays with the router that answers"


@both
async def test_what_comes_again_counts_once(kind: str) -> None:
    """The text that an output holds back at its end, and the end of an output, come again with every resume."""
    rest, end = tokens("!"), finished(2)
    double = RouterDouble(
        [
            (admitted(), tokens("a", 1), tokens("Hel", 1, 2, index=1), rest, end, grpc.StatusCode.UNAVAILABLE),
            (admitted(), grpc.StatusCode.UNAVAILABLE),
            (admitted(), rest, end, tokens("lo", 3, index=1), finished(3, index=1)),
        ]
    )
    async with served(double) as address, facing(kind, address, retry=QUICK) as face:
        chunks, _ = await face.chunks("x", n=2)
    assert "".join(each.text for each in chunks if not each.index) == "a!"
    assert [each.index for each in chunks if each.finish_reason] == [0, 1]
    assert [list(each.resume.output_tokens_received) for each in double.requests[1:]] == [[1, 2], [1, 2]]


@both
async def test_a_stream_that_no_router_knows_raises_what_had_come(kind: str) -> None:
    double = RouterDouble([BROKEN, [NotFound("no request r1")]])
    async with served(double) as address, facing(kind, address, retry=QUICK) as face:
        with pytest.raises(Interrupted) as error:
            await face.call("generate", "x")
    assert (error.value.partial.text, error.value.partial.token_ids) == ("Hel", (1, 2))
    assert isinstance(error.value.meant, Unavailable)
    assert len(double.requests) == 2


@both
async def test_a_stream_that_is_whole_when_its_router_dies_is_no_failure(kind: str) -> None:
    double = RouterDouble([(admitted(), tokens("Hel", 1), finished(1), grpc.StatusCode.UNAVAILABLE)])
    async with served(double) as address, facing(kind, address, retry=QUICK) as face:
        assert (await face.call("generate", "x")).text == "Hel"
    assert len(double.requests) == 1


@both
async def test_an_admission_is_an_event_too(kind: str) -> None:
    double = RouterDouble([[admitted(), Unavailable("its worker is gone", 0.0)], HELLO])
    async with served(double) as address, facing(kind, address, retry=QUICK) as face:
        with pytest.raises(Interrupted, match="its worker is gone"):
            await face.call("generate", "x")
    assert len(double.requests) == 1


@both
async def test_a_stream_that_just_ends_is_broken(kind: str) -> None:
    async with served(RouterDouble([[admitted(), tokens("Hel", 1)]])) as address, facing(kind, address) as face:
        with pytest.raises(Interrupted, match="before every output had ended"):
            await face.call("generate", "x")


# ------------------------------------------------------------ deadlines


@both
async def test_the_deadline_is_the_servers_too_and_covers_all_tries(kind: str) -> None:
    async def attempt(seconds: float) -> None:
        double = RouterDouble([[Unavailable("starting", seconds / 8)], HELLO])
        async with served(double) as address, facing(kind, address, timeout=10 * PATIENCE_S, retry=QUICK) as face:
            try:
                await face.call("generate", "x", timeout=seconds)
            except DeadlineExceeded:
                raise TooSlow from None
        first, second = double.time_left
        assert first is not None
        assert second is not None
        assert 0.0 < first <= 1.02 * seconds
        assert second <= first - seconds / 10  # an eighth, less what gRPC rounds up on the wire

    await with_enough_time(attempt, 4.0)


@both
async def test_a_deadline_before_the_first_event(kind: str) -> None:
    double = RouterDouble([[asyncio.Event()]])
    async with served(double) as address, facing(kind, address, retry=QUICK) as face:
        with pytest.raises(DeadlineExceeded) as error:
            await face.call("generate", "x", timeout=0.1)
    assert not isinstance(error.value, Interrupted)


@both
async def test_a_deadline_amid_the_tokens_carries_them(kind: str) -> None:
    async def attempt(seconds: float) -> None:
        double = RouterDouble([[admitted(), tokens("Hel", 1), asyncio.Event()]])
        async with served(double) as address, facing(kind, address, timeout=seconds) as face:
            with pytest.raises(DeadlineExceeded) as error:
                await face.call("generate", "x")
        if not isinstance(error.value, InterruptedByDeadline):
            raise TooSlow
        assert error.value.partial.token_ids == (1,)

    await with_enough_time(attempt, 0.5)


@both
async def test_without_a_timeout_there_is_no_deadline(kind: str) -> None:
    double = RouterDouble()
    async with served(double) as address, facing(kind, address, timeout=None) as face:
        await face.call("generate", "x")
    assert double.time_left[0] is None or double.time_left[0] > 86_400.0


# ------------------------------------------------------------ questions


@both
async def test_what_is_served_and_how_it_is(kind: str) -> None:
    async with served(RouterDouble()) as address, facing(kind, address) as face:
        model, status = await face.call("model"), await face.call("status")
        text = await face.call("detokenize", [4, 5])
    assert (model.name, model.max_model_len, model.eos_token_ids, model.identity.block_size) == ("demo", 512, (2,), 16)
    assert (status.version, status.queued_requests, status.running_requests) == ("0.1.0", 2, 1)
    assert [(worker.worker_id, worker.state, worker.num_blocks) for worker in status.workers] == [
        ("worker-0", "connected", 64)
    ]
    assert text == "back"


def test_importing_the_client_loads_no_service() -> None:
    script = "import sys, quire.client; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    loaded = set(run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split())
    assert "grpc" in loaded
    unwanted = (
        "torch numpy redis pydantic opentelemetry prometheus_client psutil uvloop common router kvmanager gpuworker cli"
    )
    assert not loaded & set(unwanted.split())
