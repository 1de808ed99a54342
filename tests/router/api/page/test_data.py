"""What each source of data answers, from records that are made up here and from a fake manager."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from common.contracts.errors import InvalidRequest, NotFound, Unavailable
from common.contracts.types import BlockId, Candidate, Decision, DecisionKind
from common.decisions.ring import DecisionRing
from common.process.loop_turns import A_STEP
from common.wire.decision_codec import decision_to_proto
from common.wire.packing import pack_blocks
from quire.decision.v1 import decision_pb2
from quire.inference.v1 import inference_pb2
from quire.kvmanager.v1 import kvmanager_pb2 as pb
from router.api.grpc.decision_servicer import DecisionServicer, RecordSources
from router.api.page.answers import json_of
from router.api.page.blocks import Blocks
from router.api.page.overview import columns, hits, slowest, troubles, worker_row
from router.api.page.query import Query
from router.api.page.records import Records, record_of
from router.api.page.requests import Requests
from router.api.page.routing import Routing
from router.observe.diagnosis.calibration import actual_s
from router.observe.diagnosis.outcome import Outcome, figures_of, texts_of
from router.observe.siblings import Siblings
from router.observe.trace_store import TraceStore
from tests.support.turns import counted_turns

SECOND = 1_000_000_000


class Manager:
    """A KV manager that has these records and blocks, or does not answer."""

    def __init__(self, records: list[decision_pb2.DecisionRecord] | None = None) -> None:
        self.records = records
        self.live: dict[int, list[int]] = {}
        self.asked: list[pb.GetBlockMapRequest] = []

    async def decisions(self, request: decision_pb2.ListDecisionsRequest) -> decision_pb2.ListDecisionsResponse:
        assert request.from_manager
        if self.records is None:
            raise Unavailable("no KV manager answers at 127.0.0.1:1")
        found = [each for each in self.records if each.request_id == request.request_id]
        return decision_pb2.ListDecisionsResponse(decisions=found)

    async def block_map(self, request: pb.GetBlockMapRequest) -> pb.GetBlockMapResponse:
        self.asked.append(request)
        uses = [pb.SequenceUse(sequence=9, request_id="big", phase=pb.SEQUENCE_PHASE_RUNNING, blocks=3, max_blocks=4)]
        return pb.GetBlockMapResponse(num_blocks=4, block_size=16, uses=b"\1\2\3\7", sequences=uses, num_sequences=1)

    async def block_tables(self, request: pb.GetBlockTableRequest) -> pb.GetBlockTableResponse:
        if request.sequence not in self.live:
            raise NotFound("no live sequence has this id")
        table = pb.BlockTable(sequence=request.sequence, block_ids=self.live[request.sequence], n_shared=1)
        return pb.GetBlockTableResponse(tables=[table])

    async def block(self, request: pb.GetBlockRequest) -> pb.GetBlockResponse:
        figures = {"released_since": 3.0, "odd": float("inf")}
        return pb.GetBlockResponse(
            block=request.block, use=pb.BLOCK_USE_CACHED, block_hash=b"\xab" * 16, figures=figures
        )


class Paged(Manager):
    """A KV manager whose pool has groups of layers: page 2 is a part of the windowed block 1."""

    async def block_map(self, request: pb.GetBlockMapRequest) -> pb.GetBlockMapResponse:
        return pb.GetBlockMapResponse(num_blocks=4, block_size=16, uses=b"\3\3\3\1", groups=b"\0\1\1\xff")

    async def block(self, request: pb.GetBlockRequest) -> pb.GetBlockResponse:
        assert request.block == 2
        return pb.GetBlockResponse(block=1, use=pb.BLOCK_USE_FILLING, group=1, pages=pack_blocks(map(BlockId, (1, 2))))


class Suite:
    """The sources over one ring."""

    def __init__(self, manager: Manager | None = None) -> None:
        self.ring, self.manager = DecisionRing(1_000), manager or Manager([])
        servicer = DecisionServicer(RecordSources(self.ring, TraceStore(100)), Siblings())
        given: Any = self.manager
        self.records, self.blocks = Records(servicer, given), Blocks(given)
        self.requests = Requests(self.records, servicer)
        self.routing = Routing(self.records, self.requests)

    def add(self, kind: DecisionKind, request_id: str, second: int = 1, **fields: Any) -> Decision:
        decision = Decision(f"d{self.ring.made}", kind, second * SECOND, fields.pop("chosen", ""), request_id, **fields)
        self.ring.record(decision)
        return decision

    def end(self, request_id: str, outcome: Outcome, second: int = 2) -> None:
        texts, figures = texts_of(outcome), figures_of(outcome)
        self.add(DecisionKind.OUTCOME, request_id, second, chosen=outcome.ended, reasons=texts, figures=figures)


def ended(first: float, **fields: Any) -> Outcome:
    parts = {"before": (("prefill", first),), "after": (("decode", 1.0),), "has_first_token": True}
    return Outcome(**{"ended": "length", "worker": "w0", "admissions": 1, "prompt_tokens": 100, **parts, **fields})


COSTS = (
    Candidate(
        "w0", 0.9, (("queue_delay", 0.1), ("prefill", 0.3), ("decode_pressure", 0.5)), figures=(("hit_blocks", 2.0),)
    ),
    Candidate("w1", rejected="draining: asked to"),
)


async def test_records_are_json_with_finite_numbers_alone() -> None:
    suite = Suite()
    suite.add(
        DecisionKind.ROUTING,
        "r1",
        candidates=COSTS,
        worker="w0",
        chosen="w0",
        figures=(("bad", float("nan")), ("good", 1.0)),
    )
    found = await suite.records.answer(Query(""))
    (record,) = found["records"]
    assert (record["request"], record["service"], record["at"], record["figures"]) == (
        "r1",
        "router",
        1.0,
        {"good": 1.0},
    )
    assert [(each["name"], each["cost"], each["rejected"]) for each in record["candidates"]] == [
        ("w0", 0.9, ""),
        ("w1", None, "draining: asked to"),
    ]
    json.dumps(found, allow_nan=False)


async def test_records_by_kind_and_page() -> None:
    suite = Suite()
    for number in range(5):
        suite.add(DecisionKind.ADMISSION, f"r{number}", number + 1)
        suite.add(DecisionKind.ROUTING, f"r{number}", number + 1)
    found = await suite.records.answer(Query("kind=routing&limit=2"))
    assert [each["request"] for each in found["records"]] == ["r3", "r4"]
    before = await suite.records.answer(Query(f"kind=routing&limit=2&page={found['page']}"))
    assert [each["request"] for each in before["records"]] == ["r1", "r2"]
    with pytest.raises(InvalidRequest, match="expected one of"):
        await suite.records.answer(Query("kind=colour"))


async def test_one_request_with_its_verdict() -> None:
    granted = Decision("m1", DecisionKind.GRANT, SECOND, "4 fresh blocks", "r1")
    suite = Suite(Manager([decision_to_proto(granted)]))
    suite.add(DecisionKind.ROUTING, "r1", candidates=COSTS, worker="w0", chosen="w0")
    suite.end("r1", ended(0.5, started=True))
    found = await suite.requests.one(Query("id=chatcmpl-r1"))
    assert (found["request"], found["began"], found["spans"]) == ("r1", 1.0, [])
    assert [(each["service"], each["kind"]) for each in found["records"]] == [
        ("router", "routing"),
        ("kvmanager", "grant"),
        ("router", "outcome"),
    ]
    diagnosis = found["diagnosis"]
    assert [(each["label"], each["seconds"], each["is_work"]) for each in diagnosis["phases"]] == [
        ("computing its prompt", 0.5, True),
        ("sampling its tokens", 1.0, True),
    ]
    assert diagnosis["verdict"]["cause"] == "decode"
    timeline = [(each["label"], each["end"] - each["start"]) for each in found["timeline"]]
    assert timeline == [(each["label"], pytest.approx(each["seconds"])) for each in diagnosis["phases"]]
    assert found["timeline"][-1]["end"] == pytest.approx(found["outcome"]["at"])
    assert diagnosis["advised"][0]["link"].startswith("/page/runbook#")
    json.dumps(found, allow_nan=False)


async def test_without_a_manager_a_request_says_what_is_missing() -> None:
    suite = Suite(Manager(None))
    suite.end("r1", ended(0.5))
    found = await suite.requests.one(Query("id=r1"))
    assert [each["kind"] for each in found["records"]] == ["outcome"]
    assert any("no KV manager answers" in each for each in found["diagnosis"]["missing"])


@pytest.mark.parametrize(
    ("query", "error"), [("id=r2", NotFound), ("id=a%0Ab", InvalidRequest), ("id=", InvalidRequest)]
)
async def test_requests_that_there_are_not(query: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        await Suite().requests.one(Query(query))


async def test_requests_that_ended_come_newest_first() -> None:
    suite = Suite()
    for number in range(3):
        suite.end(f"r{number}", ended(0.1 * (number + 1)), second=number + 1)
    found = (await suite.requests.listed(Query("limit=2")))["requests"]
    assert [(each["request"], each["at"], each["first_token_s"]) for each in found] == [
        ("r2", 3.0, pytest.approx(0.3)),
        ("r1", 2.0, pytest.approx(0.2)),
    ]


async def test_long_lists_leave_turns_of_the_loop_to_others() -> None:
    suite = Suite()
    for number in range(200):
        suite.add(DecisionKind.ROUTING, f"r{number}", candidates=COSTS, worker="w0", chosen="w0")
        suite.end(f"r{number}", ended(0.5))
    for source in (suite.routing.answer, suite.requests.listed, suite.records.answer):
        async with counted_turns() as turns:
            found = await source(Query("limit=200"))
            made = turns.count
            assert json.loads(await json_of(found)) == found
            written = turns.count - made
        assert made >= 200 // A_STEP
        assert written >= 200 // A_STEP


async def test_predicted_against_measured() -> None:
    suite = Suite()
    suite.add(DecisionKind.ROUTING, "r1", candidates=COSTS, worker="w0", chosen="w0")
    suite.add(DecisionKind.ROUTING, "r2", candidates=COSTS[1:], chosen="no_worker")
    suite.end("r1", ended(0.7, cached_tokens=32))
    second, first = (await suite.routing.answer(Query("")))["decisions"]
    assert (first["predicted_s"], first["actual_s"], first["cached_tokens"]) == (pytest.approx(0.4), 0.7, 32)
    assert (second["predicted_s"], second["actual_s"], second["cached_tokens"]) == (None, None, None)


@pytest.mark.parametrize("outcome", [None, ended(0.5, has_first_token=False), ended(0.5, moves=1)])
def test_some_requests_have_no_time_to_compare(outcome: Outcome | None) -> None:
    assert actual_s(outcome) is None


async def test_the_map_has_the_table_of_the_asked_sequence_while_it_lives() -> None:
    suite = Suite()
    suite.manager.live = {9: [0, 2, 3], 8: [1]}
    found = await suite.blocks.map(Query("worker=w0&sequence=8&first=2&limit=7"))
    assert (found["table"]["sequence"], found["table"]["blocks"], found["table"]["shared"]) == ("8", [1], 1)
    assert base64.b64decode(found["uses"]) == b"\1\2\3\7"
    assert [(each["request"], each["phase"], each["max_blocks"]) for each in found["sequences"]] == [
        ("big", "running", 4)
    ]
    (asked,) = suite.manager.asked
    assert (asked.worker_id, asked.first_block, asked.limit) == ("w0", 2, 7)
    del suite.manager.live[8]
    assert (await suite.blocks.map(Query("worker=w0&sequence=8")))["table"]["blocks"] == [0, 2, 3]
    suite.manager.live.clear()
    assert (await suite.blocks.map(Query("worker=w0&sequence=8")))["table"] is None


async def test_one_block() -> None:
    found = await Suite().blocks.one(Query("worker=w0&block=3"))
    assert (found["block"], found["use"], found["hash"], found["figures"]) == (3, 7, "ab" * 16, {"released_since": 3.0})


async def test_the_pages_of_a_pool_have_the_group_of_their_block() -> None:
    paged = Paged()
    found = await Suite(paged).blocks.map(Query("worker=w0"))
    assert (base64.b64decode(found["groups"]), len(base64.b64decode(found["uses"]))) == (b"\0\1\1\xff", 4)
    one = await Suite(paged).blocks.one(Query("worker=w0&block=2"))
    assert (one["block"], one["group"], one["pages"]) == (1, 1, [1, 2])


async def test_where_a_pool_counts_blocks_no_group_is_named() -> None:
    suite = Suite()
    assert (await suite.blocks.map(Query("worker=w0")))["groups"] == ""
    one = await suite.blocks.one(Query("worker=w0&block=3"))
    assert (one["group"], one["pages"]) == (0, [])


def test_a_worker_says_how_much_of_its_host_memory_is_used() -> None:
    load = inference_pb2.WorkerLoad(worker_id="w0", num_blocks=64)
    pool = pb.Pool(worker_id="w0", host_frames=512, host_held=7, host_stores=9, host_loads=3, host_drops=2)
    names = ("host_frames", "host_held", "host_stores", "host_loads", "host_drops")
    assert [worker_row(load, pool)[name] for name in names] == [512, 7, 9, 3, 2]
    assert [worker_row(load, None)[name] for name in names] == [None] * 5


def test_a_worker_says_how_much_of_its_disk_is_used_and_how_transfers_ended() -> None:
    load = inference_pb2.WorkerLoad(worker_id="w0", num_blocks=64)
    pool = pb.Pool(disk_frames=900, disk_held=70, disk_stores=90, disk_loads=30, disk_lost=4, unsaved=6)
    pool.fetching, pool.fetches, pool.peer_loads = 1, 5, 8
    pool.transfer_ends.update({"done": 120, "late": 2})
    names = (
        "disk_frames",
        "disk_held",
        "disk_stores",
        "disk_loads",
        "disk_lost",
        "unsaved",
        "fetching",
        "fetches",
        "peer_loads",
    )
    row, unknown = worker_row(load, pool), worker_row(load, None)
    assert [row[name] for name in names] == [900, 70, 90, 30, 4, 6, 1, 5, 8]
    assert (row["disk_closed"], row["transfer_ends"]) == (False, {"done": 120, "late": 2})
    assert ([unknown[name] for name in names], unknown["transfer_ends"]) == ([None] * 9, {})


def test_a_worker_says_what_comes_and_came_ahead_of_need() -> None:
    load, pool = inference_pb2.WorkerLoad(worker_id="w0", num_blocks=64), pb.Pool(ahead=2)
    pool.ahead_loads.update({"prefetch": 30, "replica": 7})
    row, unknown = worker_row(load, pool), worker_row(load, None)
    assert (row["ahead"], row["ahead_loads"]) == (2, {"prefetch": 30, "replica": 7})
    assert (unknown["ahead"], unknown["ahead_loads"]) == (None, {})


def test_hits_by_reason() -> None:
    found = hits(
        [
            ended(0.1, cached_tokens=64, miss="diverged_at"),
            ended(0.1, cached_tokens=20, miss="never_seen"),
            ended(0.1, cached_tokens=99, miss="full_hit"),
            ended(0.1, admissions=0, prompt_tokens=1000),
        ]
    )
    assert (found["requests"], found["prompt_tokens"], found["cached_tokens"]) == (3, 300, 183)
    assert found["missed"] == [{"reason": "never_seen", "tokens": 80}, {"reason": "diverged_at", "tokens": 36}]


def test_the_slowest_come_first_and_are_few() -> None:
    found = slowest([(f"r{number}", ended(float(number % 7))) for number in range(20)])
    assert [request_id for request_id, _ in found] == ["r6", "r13", "r5", "r12", "r19", "r4", "r11", "r18"]


def test_troubles_in_words() -> None:
    worker = inference_pb2.WorkerStatus(worker_id="w0", reason="no heartbeat for 5 s")
    status = inference_pb2.GetStatusResponse(draining=True, workers=[worker])
    assert troubles(status, "it does not answer") == [
        "the KV manager: it does not answer",
        "Redis is not connected: the router goes by load and its own memory",
        "this router is draining",
        "w0: no heartbeat for 5 s",
    ]


def test_columns_of_no_points() -> None:
    assert {len(each) for each in columns([]).values()} == {0}


def test_a_cost_that_is_infinite_is_none() -> None:
    record = decision_pb2.DecisionRecord(candidates=[decision_pb2.Candidate(name="w0", cost=float("inf"))])
    assert record_of(record, "router")["candidates"][0]["cost"] is None
