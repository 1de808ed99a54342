"""`quire batch` as a process of its own against a running suite with keys: answers, refusals, kills, a busy server."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from cli.demo_model import CHECKPOINT
from cli.suite.stack import StackOptions, free_ports
from common.process.python import module_command
from quire.decision.v1 import decision_pb2
from tests.support.suite import PATIENCE, greedy
from tests.support.tenants import TenantSuite, tenant_suite
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

# So that a stream of LONG tokens, which a test ends, takes 80 s.
SLOW, LONG = ("--kv-blocks", "1024", "--simulate", "base=20ms,prefill=10us"), 4000


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tenants(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TenantSuite]:
    stack = StackOptions(model=CHECKPOINT, worker_flags=SLOW)
    async with tenant_suite(tmp_path_factory.mktemp("batch"), {"red": "", "narrow": "streams = 1"}, stack) as running:
        yield running


def completion(custom_id: str, max_tokens: int = 4, **body: Any) -> dict[str, Any]:
    body = {"prompt": f"Anna {custom_id}", "max_tokens": max_tokens, "ignore_eos": True} | body
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def written(path: Path, entries: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def results(path: Path) -> dict[str, dict[str, Any]]:
    """Return the lines of an output by id; each id stands there once."""
    entries = [json.loads(line) for line in path.read_bytes().splitlines()]
    found = {entry["custom_id"]: entry for entry in entries}
    assert len(found) == len(entries)
    return found


class Batch:
    """Calls of `quire batch` in a folder, with the key of one tenant."""

    def __init__(self, tenants: TenantSuite, folder: Path, tenant: str = "red") -> None:
        self.address = f"127.0.0.1:{tenants.suite.stack.options.port}"
        self.environ = os.environ | {"QUIRE_API_KEY": tenants.keys.get(tenant, "wrong")}
        self.source, self.output = folder / "in.jsonl", folder / "out.jsonl"

    def start(self, *words: str) -> subprocess.Popen[str]:
        command = module_command("cli.main", "batch", str(self.source), str(self.output))
        command += ["--http-address", self.address, *words]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=self.environ)

    async def run(self, *words: str) -> tuple[int, str, str]:
        """Return the exit status and both outputs."""
        process = self.start(*words)
        output, errors = await asyncio.to_thread(process.communicate, timeout=PATIENCE)
        return process.returncode, output, errors


async def test_every_kind_of_request_is_answered_and_a_second_run_sends_nothing(
    tenants: TenantSuite, tmp_path: Path
) -> None:
    batch = Batch(tenants, tmp_path)
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
    entries = [
        completion("c"),
        {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": chat},
        {
            "custom_id": "r",
            "method": "POST",
            "url": "/v1/responses",
            "body": {"input": "Hello", "store": False, "max_output_tokens": 5},
        },
        completion("bad", temperature=-1),
    ]
    written(batch.source, entries)
    status, output, errors = await batch.run("--json")
    summary, found = json.loads(output), results(batch.output)
    assert (status, summary["requests"], summary["succeeded"], summary["refused"]) == (1, 4, 3, 1), errors
    assert summary["output_tokens"] >= 7
    assert {custom_id: entry["response"]["status_code"] for custom_id, entry in found.items()} == {
        "c": 200, "chat": 200, "r": 200, "bad": 400,
    }  # fmt: skip
    assert found["chat"]["response"]["body"]["object"] == "chat.completion"
    assert found["r"]["response"]["body"]["object"] == "response"
    assert found["bad"]["response"]["body"]["error"]["param"] == "temperature"
    assert all(entry["response"]["request_id"] for entry in found.values())
    before = batch.output.read_bytes()
    status, output, _ = await batch.run("--json")
    again = json.loads(output)
    assert (status, again["done_before"], again["succeeded"], again["refused_before"]) == (1, 4, 0, 1)
    assert batch.output.read_bytes() == before


async def test_a_run_that_is_killed_goes_on_where_it_was(tenants: TenantSuite, tmp_path: Path) -> None:
    batch = Batch(tenants, tmp_path)
    names = [f"n{number}" for number in range(6)]
    # One at a time: the run is killed during the third, which lasts.
    written(batch.source, [completion(name, LONG if name == "n2" else 4) for name in names])
    process = batch.start("--concurrency", "1")
    await until(lambda: batch.output.exists() and batch.output.read_bytes().count(b"\n") >= 2, seconds=PATIENCE)
    process.kill()
    await asyncio.to_thread(process.communicate, timeout=PATIENCE)
    kept = batch.output.read_bytes()
    assert list(results(batch.output)) == names[:2]
    batch.output.write_bytes(kept + b'{"id": "batch_req_1", "custom_id": "n4", "resp')
    written(batch.source, [completion(name) for name in names])
    status, output, errors = await batch.run("--json")
    summary, found = json.loads(output), results(batch.output)
    assert (status, summary["done_before"], summary["succeeded"]) == (0, 2, 4), errors
    assert batch.output.read_bytes().startswith(kept), "what was done is not asked for again"
    assert set(found) == set(names)


@asynccontextmanager
async def the_only_stream(tenants: TenantSuite) -> AsyncIterator[None]:
    """Take the one stream that the narrow tenant may have."""
    stub, metadata = tenants.suite.inference, tenants.metadata("narrow")
    call = stub.Generate(greedy([5, 6, 7], LONG), timeout=PATIENCE, metadata=metadata)
    await call.read()
    try:
        yield
    finally:
        call.cancel()
    await tenants.suite.until_all_free(1)


async def refusals(tenants: TenantSuite) -> int:
    """Return how often the narrow tenant was refused until now."""
    wanted = decision_pb2.ListDecisionsRequest(kind="rejection", tenant="narrow")
    return len((await tenants.suite.decisions.ListDecisions(wanted, timeout=PATIENCE)).decisions)


async def test_a_busy_server_is_asked_again_until_all_is_answered(tenants: TenantSuite, tmp_path: Path) -> None:
    batch = Batch(tenants, tmp_path, "narrow")
    written(batch.source, [completion(f"n{number}") for number in range(3)])
    before = await refusals(tenants)
    async with the_only_stream(tenants):
        running = asyncio.create_task(batch.run("--json", "--concurrency", "3", "--attempts", "1000"))
        await until(lambda: refusals(tenants), lambda found: found >= before + 3, every=0.02, seconds=PATIENCE)
    status, output, errors = await running
    summary = json.loads(output)
    assert (status, summary["succeeded"], summary["failed"]) == (0, 3, 0), errors
    assert summary["retries"] >= 3, "one stream at once is all that the tenant may have"


async def test_requests_that_get_no_answer_are_written_as_errors_and_tried_again(
    tenants: TenantSuite, tmp_path: Path
) -> None:
    batch = Batch(tenants, tmp_path, "narrow")
    written(batch.source, [completion(f"n{number}") for number in range(4)])
    async with the_only_stream(tenants):
        status, output, _ = await batch.run("--json", "--concurrency", "4", "--attempts", "1")
    summary, found = json.loads(output), results(batch.output)
    assert (status, summary["failed"], summary["succeeded"]) == (1, 4, 0)
    failed = [entry for entry in found.values() if entry["error"]]
    assert len(failed) == 4
    assert "after 1 attempts: HTTP 429" in failed[0]["error"]["message"]
    status, _, errors = await batch.run("--concurrency", "1")
    assert (status, all(entry["response"] for entry in results(batch.output).values())) == (0, True), errors


async def test_bad_lines_are_named_before_anything_is_sent(tenants: TenantSuite, tmp_path: Path) -> None:
    batch = Batch(tenants, tmp_path)
    written(batch.source, [completion("a"), completion("a"), completion("b") | {"url": "/v1/models"}])
    status, output, errors = await batch.run()
    assert (status, output) == (2, "")
    assert 'line 2: custom_id "a" stands in line 1 too' in errors
    assert 'line 3: url is "/v1/models"; expected one of' in errors
    assert "nothing was sent" in errors
    assert not batch.output.exists()


async def test_a_wrong_key_ends_the_batch_and_leaves_no_line(tenants: TenantSuite, tmp_path: Path) -> None:
    batch = Batch(tenants, tmp_path, "none")
    written(batch.source, [completion("a")])
    status, _, errors = await batch.run()
    assert (status, batch.output.read_bytes()) == (1, b"")
    assert "QUIRE_API_KEY" in errors


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--concurrency", "0"), "--concurrency: is 0; expected 1 to 1024"),
        (("--attempts", "0", "--timeout", "-1"), "--timeout: is -1; expected seconds above 0"),
    ],
)
async def test_numbers_out_of_range_are_refused(
    tenants: TenantSuite, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    batch = Batch(tenants, tmp_path)
    written(batch.source, [completion("a")])
    status, _, errors = await batch.run(*words)
    assert (status, said in errors) == (2, True), errors


async def test_no_router_is_one_error_with_advice(tenants: TenantSuite, tmp_path: Path) -> None:
    batch = Batch(tenants, tmp_path)
    batch.address = f"127.0.0.1:{free_ports(1)[0]}"
    written(batch.source, [completion("a")])
    status, _, errors = await batch.run()
    assert status == 1
    assert f"no router answers at http://{batch.address}" in errors
    assert "Traceback" not in errors
