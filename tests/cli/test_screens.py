"""`quire status`, `trace` and `why` as processes on terminals of 80 and of 200 columns, and their golden screens.

A screen that is meant to change: `GOLDEN=write pytest tests/cli/test_screens.py` writes the files again.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from common.contracts.types import Candidate, Decision, DecisionKind
from common.process.python import module_command
from common.telemetry.decisions import EVENT, attributes_of
from common.wire.decision_codec import decision_to_proto
from quire.decision.v1 import decision_pb2 as decisions
from quire.decision.v1 import decision_pb2_grpc as decisions_rpc
from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc as rpc
from quire.kvmanager.v1 import kvmanager_pb2 as manager_pb
from quire.kvmanager.v1 import kvmanager_pb2_grpc as manager_rpc
from quire.types.v1 import types_pb2 as types
from router.observe.diagnosis.outcome import Outcome, figures_of, texts_of
from tests.support.fake_router import RouterDouble
from tests.support.terminal import screen

GOLDEN = Path(__file__).parent / "golden"
TRACE = "2229c39fecd5ded17bfc813d3b6c9ccd"
BEGAN = 1_700_000_000_000_000_000
Context = grpc.aio.ServicerContext[Any, Any]
WORKERS = [
    pb.WorkerStatus(
        worker_id="worker-0", address="127.0.0.1:50053", state="connected", running_sequences=12, num_blocks=262144,
        unheld_blocks=261950, manager_attached=True, prefill_tokens_per_second=15432.0, decode_step_seconds=0.0123,
    ),
    pb.WorkerStatus(
        worker_id="gpuworker-5f7d9c6b8-x2x7q", address="10.244.1.17:50053",
        state="mismatched", waiting_sequences=4, num_blocks=2048, unheld_blocks=2048,
        reason="model_fingerprint is 0f3a, expected 77b1",
    ),
]  # fmt: skip


MANAGERS = [
    pb.ManagerStatus(address="10.244.1.5:50052", state_seconds=119.9),
    pb.ManagerStatus(address="10.244.1.6:50052", reachable=True, leads=True, term=4, state_seconds=7200.0),
    pb.ManagerStatus(address="10.244.1.7:50052", reachable=True, term=4, state_seconds=200_000.0),
]


def at(milliseconds: float) -> int:
    return BEGAN + round(milliseconds * 1e6)


def span(name: str, parent: str, service: str, start: float, end: float, **more: Any) -> decisions.Span:
    return decisions.Span(
        span_id=name, parent_span_id=parent, service=f"quire-{service}", name=name, start_unix_nano=at(start),
        end_unix_nano=at(end), **more,
    )  # fmt: skip


def routed() -> decisions.SpanEvent:
    """The routing decision of the second question of the demonstration."""
    costs = (("queue_delay", 0.0), ("prefill", 0.00288), ("decode_pressure", 0.0128))
    candidates = (
        Candidate("worker-0", 0.0157, costs, figures=(("hit_blocks", 31.0),)),
        Candidate("worker-1", 0.0658, costs, figures=(("hit_blocks", 0.0), ("trust", 0.993))),
    )
    told = attributes_of(
        Decision("d1", DecisionKind.ROUTING, at(4.07), "worker-0", reasons=("lowest cost",), candidates=candidates)
    )
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in told.items()}
    return decisions.SpanEvent(name=EVENT, time_unix_nano=at(4.07), attributes=texts)


RPC, CHAT = "quire.inference.v1.InferenceService/Generate", "chat quire-demo"
SPANS = [
    span(RPC, "", "router", 0, 29.1, attributes={"rpc.method": RPC, "rpc.response.status_code": "OK"}),
    span(CHAT, RPC, "router", 1.91, 29.0, attributes={"quire.request_id": "router-3472b6ff-13"}),
    span("queue", CHAT, "router", 1.98, 4.07, events=[routed()]),
    span("lookup", "queue", "router", 2.01, 3.84, attributes={"db.system.name": "redis"}),
    span("stream", CHAT, "router", 4.37, 28.9),
    span("sequence", "stream", "gpuworker", 5.37, 26.4),
    span("reserve", "sequence", "gpuworker", 5.4, 10.1, attributes={"quire.cached_tokens": "496"}),
    span("kvmanager.reserve", "reserve", "kvmanager", 7.42, 7.52),
    span("prefill chunk", "sequence", "gpuworker", 8.83, 14.8),
    span("decode", "sequence", "gpuworker", 14.8, 25.7),
]


WAITED = "chat-7"
LATE = Outcome(
    ended="stop", worker="worker-1", miss="evicted", has_first_token=True, started=True, prompt_tokens=4096,
    cached_tokens=1024, output_tokens=97, block_size=16, admissions=2, placements=1, preemptions=1,
    before=(("queue", 0.0012), ("lookup", 0.0021), ("blocks", 1.91), ("prefill_wait", 0.11), ("prefill", 0.42)),
    after=(("decode", 1.31), ("preempted", 0.62)),
)  # fmt: skip
OPTIONS = (
    Candidate("worker-0", 2.61, (("queue_delay", 2.2), ("prefill", 0.41)), figures=(("hit_blocks", 12.0),)),
    Candidate("worker-1", 0.87, (("queue_delay", 0.4), ("prefill", 0.47)), figures=(("hit_blocks", 64.0),)),
)
HOLDERS = (
    Candidate("tenant blue", terms=(("blocks", 1410.0), ("sequences", 3.0))),
    Candidate("batch-31", terms=(("blocks", 702.0),)),
    Candidate("batch-32", terms=(("blocks", 640.0),)),
)
NEEDED = (("needed", 196.0), ("head_needed", 196.0), ("available", 80.0), ("num_blocks", 2048.0))
ROUTER_RECORDS = [
    Decision("r-1", DecisionKind.ADMISSION, at(0), "admitted", WAITED, tenant="red"),
    Decision("r-2", DecisionKind.ROUTING, at(3.4), "worker-1", WAITED, OPTIONS, tenant="red"),
    Decision("r-3", DecisionKind.OUTCOME, at(4374), "stop", WAITED, (), texts_of(LATE), figures=figures_of(LATE),
             tenant="red"),
]  # fmt: skip
MANAGER_RECORDS = [
    Decision("m-1", DecisionKind.SHORTFALL, at(4.1), "waits", WAITED, HOLDERS, ("too few blocks",), figures=NEEDED),
    Decision("m-2", DecisionKind.GRANT, at(1910), "64 shared and 196 fresh blocks", WAITED, (), ("evicted",), (), "",
             "batch-31", (("waited_seconds", 1.906), ("evicted", 116.0))),
    Decision("m-3", DecisionKind.PREEMPTION, at(3000), WAITED, WAITED, (), ("a higher priority waits",), (), WAITED,
             "urgent-2", (("blocks_freed", 198.0), ("tokens_lost", 64.0))),
    Decision("m-4", DecisionKind.GRANT, at(3540), "250 shared and 12 fresh blocks", WAITED, (),
             ("capped", "computed again after a preemption"), figures=(("waited_seconds", 0.54),)),
]  # fmt: skip


def _calibrated(number: int) -> list[Decision]:
    """Return the choice and the end of a request, each slower than the one before."""
    predicted, actual = 0.004 * 1.1**number, 0.004 * 1.1**number * (0.6 + number % 7 / 5)
    terms = (("queue_delay", predicted / 4), ("prefill", predicted), ("decode_pressure", 1.0))
    chosen = Candidate("worker-0", 1.0 + predicted, terms, figures=(("hit_blocks", float(number % 4)),))
    before = (("blocks", actual / 5), ("prefill", actual))
    ended = Outcome(ended="stop", before=before, has_first_token=True, block_size=16, cached_tokens=16 * (number % 3))
    return [
        Decision(f"p-{number}", DecisionKind.ROUTING, number, "worker-0", f"c{number}", (chosen,), worker="worker-0"),
        Decision(f"a-{number}", DecisionKind.OUTCOME, number + 1, "stop", f"c{number}", (), texts_of(ended),
                 figures=figures_of(ended)),
    ]  # fmt: skip


CALIBRATED = [each for number in range(60) for each in _calibrated(number)]


# What `quire explain` shows: a hit that wins, a worker with more of the prompt that is out, and one without any.
EXPLAINED = decisions.ExplainResponse(
    outcome="placed", worker_id="worker-0", tied=["worker-0"], prompt_tokens=512, max_tokens=256, sequences=1,
    block_size=16, cached_tokens=480, first_token_seconds=0.0421, index_answered=True, shareable_tokens=512,
    signal_ages={"worker-0.heartbeat": 0.08},
    workers=[
        decisions.Candidate(name="worker-1", cost=2.61, terms={"prefill": 0.41, "decode_pressure": 2.2},
                            figures={"hit_blocks": 0.0}),
        decisions.Candidate(name="worker-0", cost=0.87, figures={"hit_blocks": 30.0},
                            terms={"queue_delay": 0.012, "prefill": 0.03, "decode_pressure": 0.828}),
        decisions.Candidate(name="gpuworker-5f7d9c6b8-x2x7q", rejected="hung: no heartbeat for 7.1 s",
                            figures={"hit_blocks": 31.0}),
    ],
)  # fmt: skip


class Router(RouterDouble):
    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        identity = types.PoolIdentity(model_fingerprint="m", block_size=16)
        return pb.GetModelResponse(model="HuggingFaceTB/SmolLM2-135M-Instruct", identity=identity, max_model_len=8192)

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        return pb.GetStatusResponse(
            version="0.1.0", redis_connected=True, queued_requests=2, running_requests=13, workers=WORKERS,
            managers=MANAGERS, admin_http_port=51051,
        )  # fmt: skip


class Manager(manager_rpc.KvManagerServiceServicer):
    async def GetPool(self, request: manager_pb.GetPoolRequest, context: Context) -> manager_pb.GetPoolResponse:
        why = "3 sequences wait, none runs, 64 of 2048 blocks are free and none was granted, for more than 30 s"
        pools = [manager_pb.Pool(worker_id="worker-0"), manager_pb.Pool(worker_id="worker-1", stalled=why)]
        return manager_pb.GetPoolResponse(pools=pools)


class Traces(decisions_rpc.DecisionServiceServicer):
    async def ListDecisions(
        self, request: decisions.ListDecisionsRequest, context: Context
    ) -> decisions.ListDecisionsResponse:
        if not request.request_id:
            of_kind = [each for each in CALIBRATED if each.kind == request.kind]
            return decisions.ListDecisionsResponse(decisions=map(decision_to_proto, of_kind))
        records = MANAGER_RECORDS if request.from_manager else ROUTER_RECORDS
        found = [each for each in records if request.request_id in (each.request_id, each.victim, each.beneficiary)]
        return decisions.ListDecisionsResponse(decisions=map(decision_to_proto, found))

    async def GetTrace(self, request: decisions.GetTraceRequest, context: Context) -> decisions.GetTraceResponse:
        return decisions.GetTraceResponse(trace_id=TRACE, spans=SPANS)

    async def Explain(self, request: decisions.ExplainRequest, context: Context) -> decisions.ExplainResponse:
        return EXPLAINED

    async def WatchDecisions(
        self, request: decisions.WatchDecisionsRequest, context: Context
    ) -> AsyncIterator[decisions.WatchDecisionsResponse]:
        yield decisions.WatchDecisionsResponse(position=decisions.Position(source="a", sequence=1))

    def WatchRequests(
        self, request: decisions.WatchRequestsRequest, context: Any
    ) -> AsyncIterator[decisions.WatchRequestsResponse]:
        raise NotImplementedError


@pytest_asyncio.fixture
async def admin() -> AsyncIterator[str]:
    """The address of an admin plane without TLS."""
    server = grpc.aio.server()
    rpc.add_InferenceServiceServicer_to_server(Router(), server)
    decisions_rpc.add_DecisionServiceServicer_to_server(Traces(), server)
    manager_rpc.add_KvManagerServiceServicer_to_server(Manager(), server)  # type: ignore[abstract]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


SCREENS = pytest.mark.parametrize(
    "words",
    [
        ("status",),
        ("trace", TRACE),
        ("why", WAITED),
        ("explain", "Why?"),
        ("decisions", "--request", WAITED),
        ("calibration",),
    ],
    ids=lambda words: words[0],
)


@pytest.mark.parametrize("columns", [80, 200])
@SCREENS
async def test_a_screen_is_the_golden_one(
    words: tuple[str, ...], columns: int, admin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "UTC")
    command = module_command("cli.main", *words, "--admin-address", admin, "--state-dir", str(tmp_path))
    shown = await asyncio.to_thread(screen, command, columns)
    golden = GOLDEN / f"{words[0]}_{columns}.txt"
    if os.environ.get("GOLDEN") == "write":
        golden.write_text("".join(f"{line}\n" for line in shown))
    assert shown == golden.read_text().splitlines()
    assert max(map(len, shown)) <= columns


@SCREENS
async def test_a_terminal_without_utf_8_gets_the_same_in_ascii(
    words: tuple[str, ...], admin: str, tmp_path: Path
) -> None:
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "", "TZ": "UTC"}
    command = module_command("cli.main", *words, "--admin-address", admin, "--state-dir", str(tmp_path))
    shown = await asyncio.to_thread(screen, command, 80, plain)
    golden = (GOLDEN / f"{words[0]}_80.txt").read_text().splitlines()
    assert all(map(str.isascii, shown))
    assert len(shown) == len(golden)
    assert not any("?" in ours and "?" not in theirs for ours, theirs in zip(shown, golden, strict=True))
