"""The worker as a real process, over a ledger of its own: READY, SIGTERM idle and while it loads, a dead engine."""

from __future__ import annotations

import json
import signal

import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.rpc.server import open_channel
from common.wire.identity_codec import identity_from_proto
from quire.gpuworker.v1 import gpuworker_pb2 as pb
from quire.gpuworker.v1 import gpuworker_pb2_grpc
from tests.support.gpuworker.worker_harness import RouterEnd, chain_of, submit
from tests.support.gpuworker.worker_process import PATIENCE, ended, until, worker_process

# What each process does before it becomes a worker.
LOADS_FOR_EVER = (
    "import time, gpuworker.main as m; m.assemble = lambda _: (print('loading', flush=True), time.sleep(600))"
)
TORCH_FAILS = "sys.modules['torch'] = sys.modules['transformers'] = None"
CAPPED = "import resource; resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))"
GRANTS_NOTHING = "e.EmbeddedChannel.send_report = lambda *_: None"
ATTACH_FAILS = "e.EmbeddedChannel.attach = lambda *_: {}['a bug']"


async def serving(channel: aio.Channel, wanted: bool) -> None:
    """Wait until health says so."""
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=PATIENCE)
    async for answer in watch:
        if (answer.status == health_pb2.HealthCheckResponse.SERVING) == wanted:
            break
    watch.cancel()


async def test_it_says_where_the_memory_goes_and_that_it_is_ready_and_stops_on_a_signal() -> None:
    async with worker_process() as process:
        await until(process, "READY")
        process.send_signal(signal.SIGTERM)
        status, log = await ended(process)
        said = [json.loads(line) for line in log.splitlines()]
        assert (status, {line["level"] for line in said} - {"info"}) == (0, set())
        plan = [line["msg"] for line in said if "KV cache" in line["msg"]]
        assert len(plan) == 1
        assert "16 blocks of 16 slots" in plan[0]


REFUSED = [
    (("--device", "gpu"), "  --device: is 'gpu'; expected auto, cpu, cuda or cuda:N"),
    (
        ("--max-model-len", "2000"),
        "  --max-model-len: is 2000; the model's positions end at 1024: lower it, or leave it out",
    ),
]


@pytest.mark.parametrize(("flags", "line"), REFUSED)
async def test_what_cannot_work_is_said_once_and_before_torch_is_there(flags: tuple[str, ...], line: str) -> None:
    async with worker_process(TORCH_FAILS, *flags) as process:
        status, said = await ended(process)
        assert (status, said.splitlines()) == (2, ["quire-gpuworker cannot start:", line])


async def test_a_process_whose_addresses_are_capped_says_so() -> None:
    async with worker_process(CAPPED) as process:
        status, said = await ended(process)
        heading, line = said.splitlines()
        assert (status, heading) == (2, "quire-gpuworker cannot start:")
        assert line.startswith(
            "  ulimit -v: caps the addresses of a process at 4.0 GiB, and a worker of this model takes"
        )
        assert line.endswith(" GiB; lift it with `ulimit -v unlimited`")


async def test_while_it_loads_there_is_nothing_to_wait_for() -> None:
    async with worker_process(LOADS_FOR_EVER) as process:
        await until(process, "loading")
        process.send_signal(signal.SIGTERM)
        assert await ended(process) == (128 + signal.SIGTERM, "")


async def test_a_worker_whose_engine_ended_ends_and_says_why() -> None:
    async with worker_process(ATTACH_FAILS, "--simulate", "base=1ms") as process:
        status, said = await ended(process)
        assert status == 1
        assert "quire-gpuworker: the engine ended early: KeyError('a bug')" in said


async def test_sequences_that_wait_and_no_step_that_ends_are_not_healthy_until_nothing_waits() -> None:
    flags = ("--simulate", "base=1ms", "--stall-timeout", "0.1", "--log-format", "text")
    async with worker_process(GRANTS_NOTHING, *flags) as process:
        address = (await until(process, "READY"))[-1].split()[1]
        async with open_channel(address) as channel:
            router = RouterEnd(gpuworker_pb2_grpc.GpuWorkerServiceStub(channel).Stream())
            await router.send(pb.StreamRequest(hello=pb.Hello(router_id="r0")))
            hello = (await router.until("hello")).hello
            await serving(channel, wanted=True)
            hashes, digest = chain_of([1, 2, 3], identity_from_proto(hello.info.identity))
            await router.send(submit(1, [1, 2, 3], 4, block_hashes=hashes, parent_digest=digest))
            await serving(channel, wanted=False)
            await router.send(pb.StreamRequest(cancel=pb.Cancel(handle=1)))
            await serving(channel, wanted=True)
        process.send_signal(signal.SIGTERM)
        status, log = await ended(process)
        assert status == 0
        assert "0 sequences run and 1 wait, and no step has ended, for more than 0.1 s (--stall-timeout)" in log
