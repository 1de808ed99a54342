"""The service of the Open Inference Protocol on a real socket, with a scripted frontend behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from grpc import aio

from common.contracts.clock import ManualClock
from common.contracts.types import FinishReason, KvGeometry, PoolIdentity, TokenLogprobs
from common.rpc.server import RpcServer, open_channel
from quire.kserve.v2 import kserve_pb2 as pb
from quire.kserve.v2 import kserve_pb2_grpc as rpc
from router.answers.text.checkpoint import read_checkpoint
from router.answers.text.checkpoint_text import CheckpointText
from router.api.kserve.servicer import KSERVE_SERVICE, KserveServicer
from router.api.shared.call_context import Calls
from router.contracts.events import ValidatedRequest
from router.contracts.ports import ModelCard
from router.requests.validate import Validator
from tests.support.router.callers import OneCaller
from tests.support.router.fake_frontend import ScriptedFrontend, Step, admitted, finished, tokens

DEMO = Path(__file__).parents[3] / "cli" / "demo_model" / "checkpoint"
FACTS = read_checkpoint(DEMO)
PATIENCE_S = 120.0
ARRIVED = 3.0


@dataclass
class Api:
    """The service, the fakes behind it, and stubs."""

    channel: aio.Channel
    stub: rpc.GRPCInferenceServiceStub
    frontend: ScriptedFrontend
    clock: ManualClock
    is_ready: bool = True

    def reset(self) -> Api:
        """Restore the script of a short answer, the time of the start, and readiness."""
        self.frontend.reset()
        self.is_ready, self.clock.now = True, ARRIVED
        return self

    async def infer(self, request: pb.ModelInferRequest) -> pb.ModelInferResponse:
        return await self.stub.ModelInfer(request, timeout=PATIENCE_S)

    async def refused(self, request: pb.ModelInferRequest) -> tuple[grpc.StatusCode, str]:
        """Return the status of a request that fails."""
        with pytest.raises(aio.AioRpcError) as error:
            await self.infer(request)
        return error.value.code(), error.value.details() or ""

    async def stream(
        self, *requests: pb.ModelInferRequest, metadata: Sequence[tuple[str, str]] = ()
    ) -> list[pb.ModelStreamInferResponse]:
        """Send requests on one stream, half-close it, and return all responses."""
        call = self.stub.ModelStreamInfer(iter(requests), timeout=PATIENCE_S, metadata=metadata)
        return [response async for response in call]


@asynccontextmanager
async def served_api() -> AsyncIterator[Api]:
    """Serve the demo model's tokenizer and a scripted frontend."""
    text, frontend = CheckpointText.load(DEMO, FACTS.max_model_len), ScriptedFrontend()
    identity = PoolIdentity("m", FACTS.tokenizer_fingerprint, 16, KvGeometry(4, 2, 64, 64, "float32"))
    card = ModelCard("demo", identity, FACTS.max_model_len, FACTS.vocab_size, FACTS.eos_token_ids, True, ("alias",))
    server = RpcServer([KSERVE_SERVICE])
    port = await server.start("127.0.0.1", 0)
    async with open_channel(f"127.0.0.1:{port}") as channel:
        api = Api(channel, rpc.GRPCInferenceServiceStub(channel), frontend, ManualClock(ARRIVED))
        validator = Validator(text, FACTS, draw_seed=lambda: 11)
        service = KserveServicer(frontend, validator, card, lambda: api.is_ready, Calls(api.clock, OneCaller()))
        rpc.add_GRPCInferenceServiceServicer_to_server(service, server.server)
        await server.ready()
        yield api
    await server.server.stop(None)
    text.close()


def two_sequences(request: ValidatedRequest) -> list[Step]:
    entry = TokenLogprobs(5, -0.5, ((6, -0.25), (5, -0.5)))
    return [
        admitted(request, cached=2),
        tokens("a", 5, 6, index=1, logprobs=(entry, entry)),
        tokens("b", 5, index=0, logprobs=(entry,)),
        finished(2, index=1, reason=FinishReason.LENGTH),
        tokens("c", 8, index=0, logprobs=(TokenLogprobs(8, -1.0),)),
        finished(2, index=0, cached=2),
    ]
