"""InferenceService over a real socket, in front of fake workers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from common.contracts.clock import SystemClock
from common.rpc.server import RpcServer, open_channel
from common.telemetry.server_spans import server_spans
from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc as rpc
from quire.types.v1 import types_pb2
from router.answers.constraints.checker import ConstraintChecker
from router.answers.text.checkpoint import read_checkpoint
from router.answers.text.checkpoint_text import CheckpointText
from router.answers.text.tokenizer_files import TokenizerFiles
from router.api.grpc.servicer import InferenceServicer, Routers
from router.api.shared.call_context import Calls
from router.contracts.ports import ModelCard
from router.observe.siblings import Siblings
from router.observe.status import RouterStatus
from router.placement.admission import AdmissionLimits
from router.requests.resumer import RequestResumer
from router.requests.resumption import Resumption
from router.requests.validate import Validator
from tests.support.router.callers import OneCaller
from tests.support.router.fake_worker import PATIENCE_S, FakeWorker
from tests.support.router.frontend_harness import Harness, frontend_over
from tests.support.router.known_router import KnownRouter

CHECKPOINT = Path(__file__).resolve().parents[3] / "cli" / "demo_model" / "checkpoint"


@dataclass
class Service:
    """A served router, and a stub to call it by."""

    harness: Harness
    stub: rpc.InferenceServiceStub
    status: RouterStatus
    known: KnownRouter


@asynccontextmanager
async def served(*workers: FakeWorker, limits: AdmissionLimits | None = None) -> AsyncIterator[Service]:
    """Serve the frontend over these workers."""
    clock, checkpoint = SystemClock(), read_checkpoint(CHECKPOINT)
    text = CheckpointText.load(CHECKPOINT, checkpoint.max_model_len)
    async with frontend_over(*workers, limits=limits, patience=0.1) as harness:
        card = ModelCard("demo", harness.pool.identity, 4096, checkpoint.vocab_size, checkpoint.eos_token_ids, True)
        known = KnownRouter(harness.pool.identity)
        status = RouterStatus(card, harness.pool, harness.admission, known, harness.frontend, known, clock)
        constraints = ConstraintChecker.load(CHECKPOINT, checkpoint.eos_token_ids)
        validator = Validator(text, checkpoint, constraints=constraints)
        resumer = RequestResumer(Resumption(harness.pool, clock, search_seconds=0.5), harness.frontend)
        routers, files = Routers(harness.frontend.abort_request, Siblings(), resumer), TokenizerFiles(CHECKPOINT)
        calls = Calls(clock, OneCaller())
        servicer = InferenceServicer(harness.frontend, validator, text, status, calls, routers, files)
        server = RpcServer(["quire.inference.v1.InferenceService"], [server_spans(harness.tracer)])
        rpc.add_InferenceServiceServicer_to_server(servicer, server.server)
        port = await server.start("127.0.0.1", 0)
        async with open_channel(f"127.0.0.1:{port}") as channel:
            yield Service(harness, rpc.InferenceServiceStub(channel), status, known)
        await server.server.stop(None)
        text.close()
        if constraints is not None:
            await constraints.aclose()


def generate(ids: tuple[int, ...] = (1, 2, 3, 4, 5), **fields: object) -> pb.GenerateRequest:
    """Return a request for three tokens after these ids."""
    sampling = fields.pop("sampling", None) or types_pb2.SamplingParams(max_tokens=3)
    prompt = pb.Prompt(token_ids=pb.TokenIds(ids=ids))
    return pb.GenerateRequest(prompt=prompt, sampling=sampling, **fields)  # type: ignore[arg-type]


async def whole(stub: rpc.InferenceServiceStub, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    return [response async for response in stub.Generate(request, timeout=PATIENCE_S)]
