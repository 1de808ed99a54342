"""The gRPC services that gateways call vLLM by, on a real socket, with a scripted frontend behind them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from google.rpc import status_pb2
from grpc import aio

from common.contracts.adapters import AdapterRef
from common.contracts.clock import ManualClock
from common.contracts.errors import FieldViolation, InvalidRequest, NotFound
from common.contracts.types import Constraint, KvGeometry, PoolIdentity
from common.rpc.server import RpcServer, open_channel
from quire.api.status import error_from_status
from quire.inference.v1 import inference_pb2 as own
from quire.types.v1 import types_pb2
from quire.vllm.v1 import control_pb2_grpc, engine_pb2_grpc, inference_pb2_grpc
from router.answers.text.checkpoint import read_checkpoint
from router.answers.text.checkpoint_text import CheckpointText
from router.answers.text.tokenizer_files import TokenizerFiles
from router.api.shared.call_context import Calls
from router.api.vllm.control_servicer import CONTROL, ControlServicer
from router.api.vllm.engine_servicer import ENGINE, EngineServicer
from router.api.vllm.inference_servicer import INFERENCE, InferenceServicer
from router.contracts.events import ValidatedRequest
from router.contracts.ports import ModelCard
from router.requests.validate import Validator
from router.tenants.tenancy import Caller, Tenant
from tests.support.router.fake_frontend import ScriptedFrontend
from tests.support.router.kserve_harness import DEMO

FACTS = read_checkpoint(DEMO)
PATIENCE_S = 120.0
ARRIVED = 3.0
ADMIN_PLANE = "127.0.0.1:50050"
STRANGER = Caller(Tenant("test", max_priority=100))
KEYED = Caller(Tenant("keyed", max_priority=100), credential="key")
OPERATOR = Caller(Tenant("operator", admin=True), credential="key")


@dataclass
class Callers:
    """Every call is of one caller, which a test may change."""

    now: Caller = STRANGER

    def caller(self, authorization: str, host: str) -> Caller:
        return self.now

    def is_live(self, caller: Caller) -> bool:
        return True


@dataclass
class Aborts:
    """Two routers. What was to be ended, as (id, tenant); ids that begin with `gone` run nowhere."""

    asked: list[tuple[str, str]] = field(default_factory=list)

    async def add_to(self, answer: own.GetStatusResponse) -> None:
        """Add one request that waits and one that runs at the other router."""
        answer.queued_requests += 1
        answer.running_requests += 1

    async def abort(self, request: own.AbortRequest) -> own.AbortResponse:
        self.asked.append((request.request_id, request.tenant))
        if request.request_id.startswith("gone"):
            raise NotFound("no such request")
        return own.AbortResponse(aborted=1)


@dataclass
class Status:
    """A suite of two workers that serve, one that computes prompts for them, and one that drains."""

    card: ModelCard
    kv_events: types_pb2.KvEventSource | None = None
    """Where the second worker publishes KV events."""

    def model(self) -> ModelCard:
        return self.card

    def status(self) -> own.GetStatusResponse:
        answer = own.GetStatusResponse(
            queued_requests=2,
            running_requests=3,
            workers=[
                _worker("connected", running=3, waiting=1, unheld=6),
                _worker("connected", running=2, waiting=0, unheld=9),
                _worker("connected", running=1, waiting=1, unheld=9, disaggregation="prefill"),
                _worker("draining", running=1, waiting=1, unheld=9),
            ],
        )
        if self.kv_events is not None:
            answer.workers[1].kv_events.CopyFrom(self.kv_events)
        return answer


class Adapters:
    """Two adapters beside the base."""

    def find_adapter(self, name: str) -> AdapterRef | None:
        return AdapterRef(name, name[0] * 64) if name in self.adapter_names() else None

    def adapter_names(self) -> list[str]:
        return ["sql", "chat"]

    def check_model(self, name: str) -> None:
        """Take any name: the services have checked it."""


class Constraints:
    """Every constraint can be followed, but for the text of one parenthesis."""

    async def check_constraint(self, constraint: Constraint, peer: str) -> None:
        if constraint.text == "(":
            raise InvalidRequest(FieldViolation(constraint.kind.value, "is not closed"))


def _worker(state: str, running: int, waiting: int, unheld: int, disaggregation: str = "") -> own.WorkerStatus:
    return own.WorkerStatus(
        state=state,
        running_sequences=running,
        waiting_sequences=waiting,
        num_blocks=10,
        unheld_blocks=unheld,
        max_num_seqs=8,
        disaggregation=disaggregation,
    )


@dataclass
class Api:
    """The services, the fakes behind them, and stubs."""

    inference: inference_pb2_grpc.InferenceStub
    control: control_pb2_grpc.ControlStub
    engine: engine_pb2_grpc.VllmEngineStub
    channel: aio.Channel
    frontend: ScriptedFrontend
    clock: ManualClock
    callers: Callers
    aborts: Aborts
    status: Status
    why_not_ready: str = ""

    def reset(self) -> Api:
        """Restore the script of a short answer, the time of the start, readiness and the caller."""
        self.frontend.reset()
        self.why_not_ready, self.clock.now, self.callers.now = "", ARRIVED, STRANGER
        self.aborts.asked.clear()
        return self

    @property
    def served(self) -> ValidatedRequest:
        """The only request that reached the frontend."""
        (request,) = self.frontend.requests
        return request


async def refused(call: Any) -> tuple[grpc.StatusCode, str]:
    """Return the status of a call that fails, streamed or not."""
    with pytest.raises(aio.AioRpcError) as error:
        await _end_of(call)
    return error.value.code(), error.value.details() or ""


async def mistakes_in(call: Any) -> dict[str, str]:
    """Return what is wrong with each field of a request that is refused for that."""
    with pytest.raises(aio.AioRpcError) as error:
        await _end_of(call)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT, error.value.details()
    trailers = dict(error.value.trailing_metadata() or ())
    found = error_from_status(status_pb2.Status.FromString(trailers["grpc-status-details-bin"]))
    assert isinstance(found, InvalidRequest)
    assert len({each.field for each in found.violations}) == len(found.violations)
    return {each.field: each.description for each in found.violations}


async def _end_of(call: Any) -> None:
    if hasattr(call, "__aiter__"):
        async for _ in call:
            pass
    else:
        await call


@asynccontextmanager
async def served_api() -> AsyncIterator[Api]:
    """Serve the demo model's tokenizer and a scripted frontend."""
    text, frontend = CheckpointText.load(DEMO, FACTS.max_model_len), ScriptedFrontend()
    identity = PoolIdentity("m", FACTS.tokenizer_fingerprint, 16, KvGeometry(4, 2, 64, 64, "float32"))
    card = ModelCard("demo", identity, FACTS.max_model_len, FACTS.vocab_size, FACTS.eos_token_ids, True, ("alias",))
    server = RpcServer([INFERENCE, CONTROL, ENGINE])
    port = await server.start("127.0.0.1", 0)
    async with open_channel(f"127.0.0.1:{port}") as channel:
        stubs = (
            inference_pb2_grpc.InferenceStub(channel),
            control_pb2_grpc.ControlStub(channel),
            engine_pb2_grpc.VllmEngineStub(channel),
        )
        status = Status(card)
        api = Api(*stubs, channel, frontend, ManualClock(ARRIVED), Callers(), Aborts(), status)
        validator = Validator(text, FACTS, draw_seed=lambda: 11, constraints=Constraints())
        adapters = validator.adapters = Adapters()
        calls = Calls(api.clock, api.callers)
        generation = InferenceServicer(frontend, validator, card, calls, adapters)
        inference_pb2_grpc.add_InferenceServicer_to_server(generation, server.server)
        control = ControlServicer(status, api.aborts, calls, "router-1", lambda: ADMIN_PLANE, adapters)
        control_pb2_grpc.add_ControlServicer_to_server(control, server.server)
        files = TokenizerFiles(DEMO)
        engine = EngineServicer(frontend, validator, status, api.aborts, calls, files, lambda: api.why_not_ready)
        engine_pb2_grpc.add_VllmEngineServicer_to_server(engine, server.server)
        await server.ready()
        yield api
    await server.server.stop(None)
    text.close()
