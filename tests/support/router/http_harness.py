"""The HTTP application on a real server, with a scripted frontend behind it and the official client before it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from openai.types.chat import ChatCompletionMessageParam

from cli.demo_model import CHECKPOINT
from common.contracts.clock import ManualClock
from common.contracts.types import KvGeometry, PoolIdentity
from quire.inference.v1 import inference_pb2 as pb
from router.answers.constraints.checker import ConstraintChecker
from router.answers.reading import AnswerReader, Dialects
from router.answers.text.checkpoint import read_checkpoint
from router.answers.text.checkpoint_text import CheckpointText
from router.api.anthropic.app import add_messages
from router.api.http.http_server import serve_http
from router.api.openai.app import create_app
from router.api.openai.batches.runner import BatchParts
from router.api.openai.responses.background import BackgroundResponses, ResponseParts
from router.api.openai.responses.store import MemoryStore, ResponseStore, StoreLimits
from router.api.openai.service import HttpParts
from router.contracts.ports import Authenticator, ModelCard
from router.observe.sampling import ChosenTraceIds
from router.requests.validate import Validator
from tests.support.router.callers import OneCaller
from tests.support.router.fake_frontend import ScriptedFrontend, ScriptedResumer
from tests.support.router.fake_worker import PATIENCE_S
from tests.support.router.refusal_list import RefusalList
from tests.support.spans import CollectedSpans

HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hi"}]
FACTS = read_checkpoint(CHECKPOINT)
DEADLINE_S = 120.0


class Api:
    """The application and the fakes behind it; `client` and `http` speak to a server that runs it at `url`."""

    client: AsyncOpenAI
    http: httpx.AsyncClient
    url: str

    def __init__(
        self,
        authenticator: Authenticator | None = None,
        tools: str = "auto",
        reasoning: str = "auto",
        store: ResponseStore | None = None,
        refuses_media: bool = False,
        batches: BatchParts | None = None,
        ranks: tuple[int, int] | None = None,
        forces_usage: bool = False,
        **app: Any,
    ) -> None:
        self.frontend = ScriptedFrontend()
        self.resumer = ScriptedResumer(self.frontend)
        self.is_ready = True
        self.background, self.refusals = BackgroundResponses(), RefusalList()
        self.spans = CollectedSpans(ids=ChosenTraceIds())
        self.text = CheckpointText.load(CHECKPOINT, FACTS.max_model_len)
        self.constraints = ConstraintChecker.load(CHECKPOINT, FACTS.eos_token_ids)
        identity = PoolIdentity(
            "0123456789abcdef", FACTS.tokenizer_fingerprint, 16, KvGeometry(4, 2, 64, 64, "float32")
        )
        card = ModelCard("demo", identity, FACTS.max_model_len, FACTS.vocab_size, FACTS.eos_token_ids, True, ("alias",))
        card = replace(card, ranks=ranks)
        text, self.clock = self.text, ManualClock(3.0)
        templates = text.template_source, text.tool_template_source
        dialects = Dialects.of(tools, reasoning, *templates, text.added_tokens, text.sees_tools)
        parts = HttpParts(
            frontend=self.frontend,
            validator=Validator(self.text, FACTS, draw_seed=lambda: 11, constraints=self.constraints),
            codec=self.text,
            card=card,
            why_not_ready=lambda: "" if self.is_ready else "no worker takes requests: none is known",
            clock=self.clock,
            authenticator=authenticator or OneCaller(),
            reader=AnswerReader(dialects, self.text),
            responses=ResponseParts(store or MemoryStore(StoreLimits(), ManualClock(3.0)), self.background),
            model=lambda: card,
            resumer=self.resumer,
            refuses_media=refuses_media,
            forces_usage=forces_usage,
            batches=batches,
            refusals=self.refusals,
            tracer=self.spans.tracer,
        )
        self.app = create_app(parts, **app)
        add_messages(self.app, parts)

    def reset(self) -> None:
        """Restore the initial script."""
        self.frontend.reset()
        self.is_ready = True
        self.refusals.seen.clear()
        self.refusals.probes.clear()

    async def encode(self, text: str) -> list[int]:
        return await self.text.encode(pb.Prompt(text=text))

    async def aclose(self) -> None:
        await self.background.aclose()
        self.text.close()
        if self.constraints is not None:
            await self.constraints.aclose()


@asynccontextmanager
async def served_api(
    authenticator: Authenticator | None = None,
    tools: str = "auto",
    reasoning: str = "auto",
    store: ResponseStore | None = None,
    refuses_media: bool = False,
    batches: BatchParts | None = None,
    ranks: tuple[int, int] | None = None,
    forces_usage: bool = False,
    **app: Any,
) -> AsyncIterator[Api]:
    """Serve the application on a free port, with these parsers of calls and thoughts, and arguments of `create_app`."""
    made = Api(authenticator, tools, reasoning, store, refuses_media, batches, ranks, forces_usage, **app)
    server = await serve_http(made.app, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{server.port}"
    # To read the certificates of the system takes longer than most tests.
    plain = DefaultAsyncHttpxClient(verify=False)
    async with (
        AsyncOpenAI(base_url=f"{made.url}/v1", api_key="none", max_retries=0, http_client=plain) as client,
        httpx.AsyncClient(base_url=made.url, timeout=PATIENCE_S, verify=False) as http,
    ):
        made.client, made.http = client, http
        yield made
    await server.stop()
    await made.aclose()
