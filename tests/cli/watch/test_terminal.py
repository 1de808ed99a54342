"""`quire status --watch` on a pseudo-terminal, with keys, against a router and a KV manager."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest_asyncio

from common.contracts.types import Decision, DecisionKind
from common.process.python import module_command
from common.wire.decision_codec import decision_to_proto
from quire.decision.v1 import decision_pb2 as decisions
from quire.decision.v1 import decision_pb2_grpc as decisions_rpc
from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc as rpc
from quire.kvmanager.v1 import kvmanager_pb2, kvmanager_pb2_grpc
from quire.types.v1 import types_pb2 as types
from router.observe.diagnosis.outcome import Outcome, figures_of, texts_of
from tests.support.terminal import Terminal


def outcome(name: str, seconds: float) -> Decision:
    told = Outcome(
        ended="stop", worker="worker-0", has_first_token=True, started=True, prompt_tokens=100, admissions=1,
        before=(("prefill", seconds),), after=(("decode", 0.5),),
    )  # fmt: skip
    return Decision(
        f"end-{name}", DecisionKind.OUTCOME, time.time_ns(), "stop", name, (), texts_of(told), figures=figures_of(told)
    )


class Router(rpc.InferenceServiceServicer):
    async def GetModel(self, request: pb.GetModelRequest, context: object) -> pb.GetModelResponse:
        groups = [
            types.KvGroup(kind=types.KV_GROUP_KIND_FULL, pages=2),
            types.KvGroup(kind=types.KV_GROUP_KIND_WINDOW, span=64, pages=3),
        ]
        identity = types.PoolIdentity(block_size=16, kv_geometry=types.KvGeometry(groups=groups))
        return pb.GetModelResponse(model="m", identity=identity)

    async def GetStatus(self, request: pb.GetStatusRequest, context: object) -> pb.GetStatusResponse:
        lost = pb.ManagerStatus(address="10.0.0.9:50052", state_seconds=7300.0)
        return pb.GetStatusResponse(
            version="0.9.0", redis_connected=True, queued_requests=3, running_requests=2, managers=[lost]
        )

    async def GetLoads(self, request: pb.GetLoadsRequest, context: object) -> pb.GetLoadsResponse:
        workers = [
            pb.WorkerLoad(worker_id="worker-0", state="connected", output_tokens_per_second=100.0, num_blocks=64),
            pb.WorkerLoad(worker_id="worker-1", state="connected", output_tokens_per_second=700.0, num_blocks=64),
        ]
        return pb.GetLoadsResponse(workers=workers)


class Manager(kvmanager_pb2_grpc.KvManagerServiceServicer):
    async def GetPool(self, request: kvmanager_pb2.GetPoolRequest, context: object) -> kvmanager_pb2.GetPoolResponse:
        groups = [
            kvmanager_pb2.GroupUse(kind=types.KV_GROUP_KIND_FULL, pages=2, in_use=11, cached=2),
            kvmanager_pb2.GroupUse(kind=types.KV_GROUP_KIND_WINDOW, span=64, pages=3, in_use=6, cached=3),
        ]
        pool = kvmanager_pb2.Pool(worker_id="worker-0", num_blocks=64, in_use=41, leased=7, cached=13, free=3)
        pool.groups.extend(groups)
        stalled = kvmanager_pb2.Pool(worker_id="worker-2", stalled="nothing was granted")
        return kvmanager_pb2.GetPoolResponse(pools=[pool, stalled])


class Decisions(decisions_rpc.DecisionServiceServicer):
    def __init__(self) -> None:
        self.records = [outcome("quick-1", 0.1), outcome("slow-1", 2.0)]

    async def ListDecisions(
        self, request: decisions.ListDecisionsRequest, context: object
    ) -> decisions.ListDecisionsResponse:
        found = [] if request.from_manager else self.records
        wanted = [each for each in found if request.request_id in ("", each.request_id)]
        return decisions.ListDecisionsResponse(decisions=map(decision_to_proto, wanted))


@pytest_asyncio.fixture
async def command(tmp_path: Path) -> AsyncIterator[list[str]]:
    """The command against an admin plane without TLS."""
    server = grpc.aio.server()
    rpc.add_InferenceServiceServicer_to_server(Router(), server)  # type: ignore[abstract]
    kvmanager_pb2_grpc.add_KvManagerServiceServicer_to_server(Manager(), server)  # type: ignore[abstract]
    decisions_rpc.add_DecisionServiceServicer_to_server(Decisions(), server)  # type: ignore[abstract]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    words = module_command("cli.main", "status", "--watch")
    yield [*words, "--admin-address", f"127.0.0.1:{port}", "--state-dir", str(tmp_path)]
    await server.stop(None)


def played(command: list[str]) -> tuple[int, str]:
    """Press keys, each when the one before has had its effect; return the exit status and all that was drawn."""
    with Terminal([*command, "--every", "3600"], 80) as terminal:
        terminal.until("request by first token")
        terminal.type("r")
        terminal.until("request by took")
        terminal.type("r")
        terminal.until("request by newest")
        terminal.type("j")  # the second newest
        terminal.type("\r")
        terminal.until("any key: back")
        terminal.type("x")
        terminal.type("q")
        return terminal.wait(), terminal.text


async def test_keys_sort_select_open_and_quit(command: list[str]) -> None:
    status, text = await asyncio.to_thread(played, command)
    assert status == 0
    assert "3 queued, 2 running, 800 tokens/s" in text
    # The request that was opened, in the words of `quire why`.
    assert "request quick-1" in text or "request slow-1" in text
    assert "computing its prompt" in text


async def test_one_screen_and_json_for_programs(command: list[str]) -> None:
    async def run(*flags: str) -> str:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, *flags, stdout=pipe, stderr=pipe)
        out, err = await process.communicate()
        assert (process.returncode, err) == (0, b"")
        return out.decode()

    screen, whole = await asyncio.gather(run(), run("--json"))
    assert "slow-1" in screen
    first, second = json.loads(whole)["workers"]
    assert (first["in_use"], first["runway"], first["cached"], first["free"]) == (41, 7, 13, 3)
    assert second["in_use"] is None
    troubles = json.loads(whole)["troubles"]
    assert troubles == ["the ledger of worker-2 stands still: nothing was granted"]
    line = "10.0.0.9:50052 has not been reached for 2 h"
    assert json.loads(whole)["managers"] == [line]
    assert f"KV managers: {line}" in screen
    pages = "Blocks are counted in pages: 16 tokens take 2 in full layers and 3 in windows of 64"
    assert json.loads(whole)["pages"] == pages
    assert pages[:76] in screen
    held = "full: 11 blocks in use, 2 cached; window of 64: 6 blocks in use, 3 cached"
    assert json.loads(whole)["held"] == held
    assert held[:50] in screen
