"""The HTTP application on a real server, with a scripted frontend behind it and the official client before it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from cli.demo_model import CHECKPOINT
from common.clock import ManualClock
from common.process.metrics import new_registry
from common.types import KvGeometry, PoolIdentity
from quire.inference.v1 import inference_pb2 as pb
from router.constraints.checker import ConstraintChecker
from router.openai.app import HttpParts, create_app
from router.ports import ModelCard
from router.requests.validate import Validator
from router.serving.http_server import serve_http
from router.text.assembler import CheckpointText
from router.text.checkpoint import read_checkpoint
from tests.support.router.fake_frontend import ScriptedFrontend

HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hi"}]
FACTS = read_checkpoint(CHECKPOINT)
DEADLINE_S = 120.0


class Api:
    """The application and the fakes behind it; `client` and `http` speak to a server that runs it at `url`."""

    client: AsyncOpenAI
    http: httpx.AsyncClient
    url: str

    def __init__(self) -> None:
        self.frontend = ScriptedFrontend()
        self.is_ready = True
        self.text = CheckpointText.load(CHECKPOINT, FACTS.max_model_len)
        self.constraints = ConstraintChecker.load(CHECKPOINT, FACTS.eos_token_ids)
        identity = PoolIdentity(
            "0123456789abcdef", FACTS.tokenizer_fingerprint, 16, KvGeometry(4, 2, 64, 64, "float32")
        )
        self.app = create_app(
            HttpParts(
                frontend=self.frontend,
                validator=Validator(self.text, FACTS, draw_seed=lambda: 11, constraints=self.constraints),
                codec=self.text,
                card=ModelCard("demo", identity, FACTS.max_model_len, FACTS.vocab_size, FACTS.eos_token_ids, True),
                registry=new_registry(),
                ready=lambda: self.is_ready,
                clock=ManualClock(3.0),
            )
        )

    def reset(self) -> None:
        """Restore the initial script."""
        self.frontend.reset()
        self.is_ready = True

    async def encode(self, text: str) -> list[int]:
        return await self.text.encode(pb.Prompt(text=text))

    def close(self) -> None:
        self.text.close()
        if self.constraints is not None:
            self.constraints.close()


@asynccontextmanager
async def served_api() -> AsyncIterator[Api]:
    """Serve the application on a free port."""
    made = Api()
    server = await serve_http(made.app, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{server.port}"
    async with (
        AsyncOpenAI(base_url=f"{made.url}/v1", api_key="none", max_retries=0) as client,
        httpx.AsyncClient(base_url=made.url) as http,
    ):
        made.client, made.http = client, http
        yield made
    await server.stop()
    made.close()
