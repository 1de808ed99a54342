"""The worker as a real process, over a ledger of its own: READY, SIGTERM idle and while it loads, a dead engine."""

from __future__ import annotations

import json
import signal

import pytest

from tests.support.gpuworker.worker_process import ended, until, worker_process

# What each process does before it becomes a worker.
LOADS_FOR_EVER = (
    "import time, gpuworker.main as m; m.assemble = lambda _: (print('loading', flush=True), time.sleep(600))"
)
TORCH_FAILS = "sys.modules['torch'] = sys.modules['transformers'] = None"
CAPPED = "import resource; resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))"
ATTACH_FAILS = "e.EmbeddedChannel.attach = lambda *_: {}['a bug']"


async def test_it_says_where_the_memory_goes_and_that_it_is_ready_and_stops_on_a_signal() -> None:
    async with worker_process() as process:
        lines = await until(process, "READY")
        assert any("KV cache" in line and "16 blocks of 16 slots" in line for line in lines)
        process.send_signal(signal.SIGTERM)
        status, log = await ended(process)
        assert (status, {json.loads(line)["level"] for line in log.splitlines()} - {"info"}) == (0, set())


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
