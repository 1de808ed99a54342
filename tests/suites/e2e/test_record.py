"""`quire record` on a running suite, and `quire replay` of what it wrote."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from cli.demo_model import CHECKPOINT
from cli.replay.trace import Trace, read_trace
from cli.suite.stack import StackOptions
from common.process.python import module_command
from quire.inference.v1 import inference_pb2 as pb
from tests.support.suite import PATIENCE, Suite, greedy, running_suite

pytestmark = pytest.mark.asyncio(loop_scope="module")

WORKERS, BLOCKS = 2, 512
_random = random.Random(7)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def suite(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Suite]:
    flags = ("--kv-blocks", str(BLOCKS), "--max-num-seqs", "32", "--simulate", "base=8ms,decode=50us,prefill=100us")
    options = StackOptions(model=CHECKPOINT, workers=WORKERS, worker_flags=flags)
    async with running_suite(tmp_path_factory.mktemp("record"), options) as running:
        yield running


def request(prompt: list[int], output: int) -> pb.GenerateRequest:
    """Return a request whose output is as long as it says."""
    made = greedy(prompt, output)
    made.sampling.ignore_eos = True
    return made


async def recorded(suite: Suite, path: Path, requests: list[pb.GenerateRequest]) -> tuple[Trace, str]:
    """Return the log of so many requests, and what the command printed."""
    where = ["--admin-address", suite.stack.admin_address, "--state-dir", str(suite.stack.options.state_dir)]
    command = module_command("cli.main", "record", str(path), "--requests", str(len(requests)), *where)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE):
        said = (await process.stdout.readline()).decode()
        await asyncio.gather(*(suite.generate(each) for each in requests))
        said += (await process.stdout.read()).decode()
        assert await process.wait() == 0
    return read_trace(path), said


async def test_a_log_has_lengths_times_and_names_and_no_token(suite: Suite, tmp_path: Path) -> None:
    shared = _random.choices(range(1000, 2000), k=64)
    first, again = request([*shared, 7, 8, 9], 20), request([*shared, 11], 5)
    trace, said = await recorded(suite, tmp_path / "log", [first])
    more, _ = await recorded(suite, tmp_path / "more", [first, again])
    assert "Recording until Ctrl-C" in said
    assert f"1 sequence recorded. Next: quire replay {tmp_path / 'log'}" in said.replace("\n", "")
    (found,) = trace.arrivals
    assert (found.prompt_tokens, found.output_tokens, len(found.blocks)) == (67, 20, 86 // 16)
    assert found.measured is not None
    assert 0 < found.measured.first_token_s < found.measured.finished_s
    assert trace.suite == {"workers": WORKERS, "num_blocks": BLOCKS, "max_num_seqs": 32}
    assert trace.block_size == 16
    long, short = sorted(more.arrivals, key=lambda each: -each.prompt_tokens)
    assert long.blocks[:4] == short.blocks
    assert {*found.blocks} & {*long.blocks} == set()
    tokens = {str(token) for token in shared}
    assert not tokens & {*(tmp_path / "log").read_text(encoding="utf-8").replace(",", " ").split()}


async def test_a_recording_is_replayed(suite: Suite, tmp_path: Path) -> None:
    asked = [request(_random.choices(range(100, 400), k=_random.choice((32, 200))), 24) for _ in range(24)]
    trace, _ = await recorded(suite, tmp_path / "log", asked)
    assert len(trace.arrivals) == len(asked)
    command = module_command("cli.main", "replay", str(tmp_path / "log"), "--seeds", "1", "--workers", "1", "--json")
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    async with asyncio.timeout(PATIENCE):
        out, _ = await process.communicate()
    found = json.loads(out)
    assert process.returncode == 0
    assert list(found["columns"]) == ["recorded", "replayed", "changed"]
    assert found["columns"]["replayed"]["refused"]["mean"] == 0
    # The simulated steps of this suite cost at least as much as their costs say.
    assert found["timing"]["costs"]["base"] > 0


async def test_ctrl_c_ends_a_recording_and_without_a_request_there_is_no_log(suite: Suite, tmp_path: Path) -> None:
    path = tmp_path / "log"
    where = ["--admin-address", suite.stack.admin_address, "--state-dir", str(suite.stack.options.state_dir)]
    process = await asyncio.create_subprocess_exec(
        *module_command("cli.main", "record", str(path), *where), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE):
        await process.stdout.readline()
        process.send_signal(signal.SIGINT)
        said = (await process.stdout.read()).decode()
        await process.wait()
    assert "No request ended, so there is no log." in said
    assert not path.exists()


async def test_a_file_that_is_there_is_not_overwritten(suite: Suite, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("mine", encoding="utf-8")
    process = await asyncio.create_subprocess_exec(
        *module_command("cli.main", "record", str(path)), stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(PATIENCE):
        _, err = await process.communicate()
    assert process.returncode == 2
    assert "File exists; name a new file in a folder that is there" in err.decode()
    assert path.read_text(encoding="utf-8") == "mine"
