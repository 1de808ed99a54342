"""The router as a real process: health follows its workers, SIGTERM drains, a bad option starts nothing."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cli.suite.stack import free_ports
from common.checkpoint.fingerprint import model_fingerprint, tokenizer_fingerprint
from common.contracts.types import FinishReason
from common.process.metrics import metrics_port
from common.process.python import module_command
from common.rpc.server import open_channel
from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc as rpc
from quire.types.v1 import types_pb2
from tests.support.router.fake_worker import IDENTITY, PATIENCE_S, FakeWorker, running

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT = ROOT / "cli" / "demo_model" / "checkpoint"
DEMO = replace(
    IDENTITY,
    model_fingerprint=model_fingerprint(CHECKPOINT),
    tokenizer_fingerprint=tokenizer_fingerprint(CHECKPOINT),
)
SERVING = health_pb2.HealthCheckResponse.SERVING


@asynccontextmanager
async def router(*flags: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run the router's process; it is killed at the end if it still runs."""
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}"}
    ports = ("--port", "0", "--grpc-port", "0", "--admin-port", "0")
    common = ("--model", str(CHECKPOINT), "--block-size", "4", *ports)
    process = await asyncio.create_subprocess_exec(
        *module_command("router", *common, "--log-format", "text", *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environ,
        cwd=ROOT,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def address_in(stream: asyncio.StreamReader | None, word: str) -> str:
    """Return the HOST:PORT after a word that the process prints."""
    return (await _words_after(stream, word)).split(",")[0].strip()


async def planes_in(stream: asyncio.StreamReader | None) -> tuple[str, str]:
    """Return the gRPC addresses of the public and of the admin plane of a router that becomes ready."""
    words = await _words_after(stream, "READY ")
    public, admin = (part.split(",")[0].strip() for part in words.split("admin on "))
    return public, admin


async def _words_after(stream: asyncio.StreamReader | None, word: str) -> str:
    assert stream is not None
    async with asyncio.timeout(60.0):
        while line := (await stream.readline()).decode():
            if word in line:
                return line.partition(word)[2]
    raise AssertionError(f"the process ended without saying {word!r}")


async def health(channel: aio.Channel) -> int:
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
    return int(answer.status)


async def healthy(channel: aio.Channel, wanted: bool) -> None:
    """Wait until health says so."""
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
    async for answer in watch:
        if (answer.status == SERVING) == wanted:
            break
    watch.cancel()


async def test_health_follows_the_workers() -> None:
    worker = FakeWorker(identity=DEMO)
    async with running(worker), router("--worker", worker.address) as process:
        address = await address_in(process.stdout, "READY ")
        async with open_channel(address) as channel:
            assert await health(channel) == SERVING
            await worker.kill()
            await healthy(channel, wanted=False)
            await worker.restart()
            await healthy(channel, wanted=True)


async def test_the_admin_plane_has_pages_for_operators_without_secrets_and_without_paths() -> None:
    worker = FakeWorker(identity=DEMO)
    flags = ("--redis-url", "redis://user:secret@127.0.0.1:1/0", "--open-schemas")
    async with (
        running(worker),
        router("--worker", worker.address, *flags) as process,
        httpx.AsyncClient(timeout=PATIENCE_S) as client,
    ):
        words = await _words_after(process.stdout, "READY ")
        metrics = words.partition("metrics on ")[2].split(",")[0].strip()
        pages = ("/server_info", "/load", "/tokenizer_info")
        answers = {page: await client.get(f"http://{metrics}{page}") for page in pages}
        missing = await client.get(f"http://{metrics}/nothing")
    info, load, tokenizer = (answers[page].json() for page in pages)
    assert (info["model"], info["options"]["open_schemas"], info["options"]["block_size"]) == ("checkpoint", True, 4)
    assert (load["server_load"], load["workers"][0]["running_sequences"]) == (0, 0)
    assert tokenizer["vocab_size"] == info["vocab_size"]
    assert tokenizer["chat_template"] == (CHECKPOINT / "chat_template.jinja").read_text()
    shown = "".join(answer.text for answer in answers.values())
    assert "secret" not in shown
    assert str(ROOT) not in shown
    assert (missing.status_code, "/server_info" in missing.text) == (404, True)


async def test_names_aliases_and_the_seed_of_requests_that_name_none() -> None:
    worker = FakeWorker(identity=DEMO, automatic=True)
    names = ("--model-name", "one", "--model-name", "two", "--seed", "7")
    async with (
        running(worker),
        router("--worker", worker.address, *names) as process,
        httpx.AsyncClient(timeout=PATIENCE_S) as client,
    ):
        words = await _words_after(process.stdout, "READY ")
        url = f"http://{words.partition('HTTP on ')[2].partition(',')[0]}/v1"
        listed = (await client.get(f"{url}/models")).json()["data"]
        assert [each["id"] for each in listed] == ["one", "two"]
        for model, seed in (("one", None), ("two", 9)):
            body = {"model": model, "prompt": "The river", "max_tokens": 2, "seed": seed}
            answer = await client.post(f"{url}/completions", json=body, timeout=PATIENCE_S)
            assert answer.json()["model"] == "one"
        assert [submit.sampling.seed for submit in worker.submits] == [7, 9]


async def test_without_a_worker_it_listens_and_does_not_serve() -> None:
    async with router() as process:
        address = await address_in(process.stderr, "listening on ")
        async with open_channel(address) as channel:
            assert await health(channel) == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_sigterm_lets_running_streams_finish_and_takes_no_new_ones() -> None:
    worker = FakeWorker(identity=DEMO)
    async with running(worker), router("--worker", worker.address) as process:
        address = await address_in(process.stdout, "READY ")
        async with open_channel(address) as channel:
            prompt = pb.Prompt(text="The river runs past the old mill.")
            wanted = pb.GenerateRequest(prompt=prompt, sampling=types_pb2.SamplingParams(max_tokens=2))
            call = rpc.InferenceServiceStub(channel).Generate(wanted, timeout=PATIENCE_S)
            await worker.until(lambda: bool(worker.submits))
            process.send_signal(signal.SIGTERM)
            await healthy(channel, wanted=False)
            with pytest.raises(aio.AioRpcError, match="draining"):
                await rpc.InferenceServiceStub(channel).GenerateUnary(pb.GenerateUnaryRequest(request=wanted))
            worker.step({1: [100, 101]}, admitted={1: 0}, finished={1: FinishReason.LENGTH})
            events = [response.WhichOneof("event") async for response in call]
            assert (events[0], events[-1]) == ("admitted", "finished")
        assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0


async def until_refused(port: int) -> None:
    """Wait until no process listens on a port."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except ConnectionRefusedError:
                return
            except ConnectionResetError:
                continue  # the listener was closed between the connection's arrival and its acceptance
            writer.close()
            await asyncio.sleep(0.01)


async def test_of_two_routers_on_one_port_the_one_that_drains_leaves_new_connections_to_the_other() -> None:
    grpc_port, port, admin_port, *own = free_ports(5)
    old, new = FakeWorker("w0", identity=DEMO), FakeWorker("w1", identity=DEMO, automatic=True)

    def flags(mine: int, other: int, worker: FakeWorker) -> tuple[str, ...]:
        alone = ("--own-port", str(mine), "--sibling", f"127.0.0.1:{other}", "--worker", worker.address)
        return ("--port", str(port), "--grpc-port", str(grpc_port), "--admin-port", str(admin_port), *alone)

    wanted = pb.GenerateRequest(prompt=pb.Prompt(text="The river"), sampling=types_pb2.SamplingParams(max_tokens=2))
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running(old, new))
        leaving = await stack.enter_async_context(router(*flags(own[0], own[1], old)))
        await address_in(leaving.stdout, "READY ")
        channel = await stack.enter_async_context(open_channel(f"127.0.0.1:{grpc_port}"))
        call = rpc.InferenceServiceStub(channel).Generate(wanted, timeout=PATIENCE_S)
        await old.until(lambda: bool(old.submits))
        staying = await stack.enter_async_context(router(*flags(own[1], own[0], new)))
        await address_in(staying.stdout, "READY ")
        leaving.send_signal(signal.SIGTERM)
        await until_refused(own[0])
        for _ in range(8):
            async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
                assert (await client.get(f"http://127.0.0.1:{port}/health")).status_code == 200
        for _ in range(8):
            async with open_channel(f"127.0.0.1:{grpc_port}") as another:
                answer = await rpc.InferenceServiceStub(another).GenerateUnary(pb.GenerateUnaryRequest(request=wanted))
                assert answer.admitted.worker_id == "w1"
        async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
            page = (await client.get(metrics_of(own[1]))).text
            assert 'quire:generation_tokens_total{model_name="checkpoint"} 16.0' in page
        old.step({1: [100, 101]}, admitted={1: 0}, finished={1: FinishReason.LENGTH})
        events = [response.WhichOneof("event") async for response in call]
        assert (events[0], events[-1]) == ("admitted", "finished")
        assert await asyncio.wait_for(leaving.wait(), PATIENCE_S) == 0


def metrics_of(own_port: int) -> str:
    """Return where one of several routers serves its own figures."""
    return f"http://127.0.0.1:{metrics_port(None, own_port)}/metrics"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            (),
            (
                "waiting for a worker, and none can be found: name each with --worker HOST:PORT, or"
                " give the Redis of the KV"
                " manager with --redis-url redis://HOST:PORT"
            ),
        ),
        (("--worker", "127.0.0.1:1"), "waiting for a worker: 127.0.0.1:1"),
        (
            ("--redis-url", "redis://127.0.0.1:1/0"),
            "waiting for a worker in Redis: one that serves this model, attached to a KV manager there",
        ),
    ],
)
async def test_a_router_without_a_worker_says_what_it_waits_for(flags: tuple[str, ...], said: str) -> None:
    async with router(*flags) as process:
        assert process.stderr is not None
        async with asyncio.timeout(PATIENCE_S):
            while "listening on" not in (line := (await process.stderr.readline()).decode()):
                assert line, "the router ended"
        assert said in line


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--port", "99999", "--max-queued-requests", "0"), "2 bad options; nothing was started."),
        (("--model", "/nowhere"), "/nowhere is not a folder on this machine"),
    ],
)
async def test_bad_options_are_all_told_and_nothing_starts(flags: tuple[str, ...], said: str) -> None:
    async with router(*flags) as process:
        _, err = await asyncio.wait_for(process.communicate(), 60.0)
        assert process.returncode == 2
        assert said in err.decode()
