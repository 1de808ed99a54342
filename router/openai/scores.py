"""POST /v1/rerank and /v1/score, in the forms of vLLM, Jina and Cohere, from the vectors of a pool that embeds.

The score of two texts is the cosine of their vectors, -1 to 1, as vLLM has it for models that embed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Any, Final

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from common.errors import FieldViolation, InvalidRequest
from common.limits import MAX_ANSWER_BYTES
from quire.inference.v1 import inference_pb2 as pb
from router.core.embedding import cosine, numbers_of
from router.openai import schema
from router.openai.errors import UnsupportedField
from router.openai.foreign_fields import NOTHING
from router.openai.service import Service, unless_gone
from router.openai.types import Texts
from router.serving.embedding import Embedder, Embedding, usage_of
from router.serving.numbers import Int32

# Fields of other servers that change the scores, each with the values that have no effect.
_REFUSED: Final[Mapping[str, tuple[Any, ...]]] = {
    "instruction": NOTHING,
    "max_chunks_per_doc": (None,),
    "max_tokens_per_doc": (None,),
    "mm_processor_kwargs": NOTHING,
    "rank_fields": NOTHING,
}
_PREFIX: Final = "inputs["
# Of the texts of a request by their number: the field of each.
Named = Callable[[int], str]


class _Fields(BaseModel):
    """Fields of both kinds of request."""

    model_config = ConfigDict(extra="allow")

    model: str | None = Field(None, description="a name from /v1/models; optional")
    user: str | None = None
    truncate_prompt_tokens: Int32 | None = Field(
        None, description="keep so many of each text's last tokens; -1: what the context holds"
    )
    request_id: str | None = Field(None, description="a correlation id, instead of the header X-Request-Id")
    priority: Int32 | None = Field(None, description="-100 to 100; higher is served first")
    cache_salt: str | None = Field(None, description="share cached prefixes only with requests of the same salt")
    shared_domain: str | None = Field(None, description="share cached prefixes with all users of an open domain")

    def check(self) -> None:
        """Raise Unsupported for fields that would change the scores."""
        extra = self.model_extra or {}
        unsupported = [name for name, harmless in _REFUSED.items() if extra.get(name) not in harmless]
        if unsupported:
            raise UnsupportedField(unsupported[0], f"{', '.join(unsupported)}: not offered; leave it out")

    def message(self, texts: Sequence[str], headers: Mapping[str, str]) -> pb.EmbedRequest:
        return pb.EmbedRequest(
            inputs=[pb.Prompt(text=each) for each in texts],
            priority=self.priority or 0,
            cache=pb.CacheOptions(salt=self.cache_salt or "", shared_domain=self.shared_domain or ""),
            traceparent=headers.get("traceparent", ""),
            truncate_prompt_tokens=self.truncate_prompt_tokens,
        )


class Document(BaseModel):
    """A document as an object."""

    text: str


class RerankRequest(_Fields):
    """Body of POST /v1/rerank."""

    query: str
    documents: Annotated[list[str | Document], Field(fail_fast=True)]
    top_n: Int32 | None = Field(None, description="so many results, the best; unset or 0: all")
    return_documents: bool | None = Field(None, description="false: results leave out the documents")

    @property
    def texts(self) -> list[str]:
        return [each if isinstance(each, str) else each.text for each in self.documents]


class ScoreRequest(_Fields):
    """Body of POST /v1/score: one text with each of others, or as many as there are others, pair by pair."""

    text_1: str | Texts = Field(..., validation_alias=AliasChoices("text_1", "queries", "data_1"))
    text_2: str | Texts = Field(..., validation_alias=AliasChoices("text_2", "documents", "items", "data_2"))

    def both(self) -> tuple[list[str], list[str]]:
        """Return the texts of both sides. Raises InvalidRequest where they make no pairs."""
        first, second = ([each] if isinstance(each, str) else each for each in (self.text_1, self.text_2))
        for name, texts in (("text_1", first), ("text_2", second)):
            if not texts:
                raise InvalidRequest(FieldViolation(name, "has no text; expected at least one"))
        if len(first) not in (1, len(second)):
            what = f"has {len(first)} texts, and text_2 {len(second)}; expected one, or as many"
            raise InvalidRequest(FieldViolation("text_1", what))
        return first, second


class RankedDocument(BaseModel):
    """A document of a result."""

    text: str


class RankedResult(BaseModel):
    """A document by its place in the request; the best one comes first."""

    index: int
    relevance_score: float = Field(..., description="-1 to 1")
    document: RankedDocument | None = None


class Ranking(BaseModel):
    """Answer of POST /v1/rerank."""

    id: str
    model: str
    usage: schema.EmbeddingUsage
    results: list[RankedResult]


class Score(BaseModel):
    """The score of one pair."""

    index: int
    object: str = "score"
    score: float = Field(..., description="-1 to 1")


class Scores(BaseModel):
    """Answer of POST /v1/score; `data` is in the order of the pairs."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Score]
    usage: schema.EmbeddingUsage


def score_routes(service: Service) -> APIRouter:
    """Return the routes, under the names that clients call them by."""
    router, api = APIRouter(tags=["OpenAI"]), _Scores(service)
    post: dict[str, Any] = {"methods": ["POST"], "response_model": None}
    router.add_api_route("/v1/rerank", api.rerank, responses=schema.answers(Ranking), **post)
    router.add_api_route("/v1/score", api.score, responses=schema.answers(Scores), **post)
    for path in ("/rerank", "/v2/rerank"):
        router.add_api_route(path, api.rerank, include_in_schema=False, **post)
    router.add_api_route("/score", api.score, include_in_schema=False, **post)
    return router


class _Scores:
    """The handlers of the routes."""

    def __init__(self, service: Service) -> None:
        parts = service.parts
        self._service, self._model = service, parts.card.name
        self._embedder = Embedder(parts.frontend, parts.validator, parts.card.hidden_size, parts.meter)

    async def rerank(self, body: RerankRequest, request: Request) -> Response:
        """Sort documents by how well they fit a query. 400 where the pool generates, with what to start instead."""
        texts, most = body.texts, body.top_n or None
        if not texts:
            raise InvalidRequest(FieldViolation("documents", "has no document; expected at least one"))
        if most is not None and most < 0:
            raise InvalidRequest(FieldViolation("top_n", f"is {most}; expected 0 for all, or more"))
        query, *documents = await self._embedded(
            body, request, [body.query, *texts], lambda place: f"documents[{place - 1}]" if place else "query"
        )
        scores = await _cosines([query], documents)
        best = sorted(range(len(texts)), key=lambda place: -scores[place])[:most]
        shown = body.return_documents is not False
        results = [_result(place, scores[place], texts[place] if shown else None) for place in best]
        answer = {"id": self._id("rerank", request), "model": self._model, "usage": _usage([query, *documents])}
        return JSONResponse(answer | {"results": results}, headers=_trace_of(query))

    async def score(self, body: ScoreRequest, request: Request) -> Response:
        """Return the score of each pair of texts. 400 where the pool generates, with what to start instead."""
        first, second = body.both()
        count = len(first)

        def named(place: int) -> str:
            name, number, given = (
                ("text_1", place, body.text_1) if place < count else ("text_2", place - count, body.text_2)
            )
            return name if isinstance(given, str) else f"{name}[{number}]"

        found = await self._embedded(body, request, [*first, *second], named)
        scores = await _cosines(found[:count], found[count:])
        data = [{"index": place, "object": "score", "score": each} for place, each in enumerate(scores)]
        answer = {"id": self._id("score", request), "object": "list", "created": int(time.time()), "model": self._model}
        return JSONResponse(answer | {"data": data, "usage": _usage(found)}, headers=_trace_of(found[0]))

    async def _embedded(self, body: _Fields, request: Request, texts: Sequence[str], named: Named) -> list[Embedding]:
        """Return the vectors of texts; `named` has the field of each. Raises InvalidRequest and Overloaded."""
        service = self._service
        service.begin_with(body.request_id, body.model, request)
        body.check()
        place = service.room.place(MAX_ANSWER_BYTES)
        try:
            with _in_words_of(named):
                return await unless_gone(request, self._run(body.message(texts, request.headers), request, place.grow))
        finally:
            place.leave()

    async def _run(self, message: pb.EmbedRequest, request: Request, grow: Callable[[int], None]) -> list[Embedding]:
        # The vectors are not part of the answer: their numbers take no bytes of it.
        asked = await self._embedder.validated(message, self._service.call(request), 0, MAX_ANSWER_BYTES)
        return await self._embedder.run(asked, grow)

    def _id(self, kind: str, request: Request) -> str:
        return f"{kind}-{request.state.ids.request}"


async def _cosines(first: Sequence[Embedding], second: Sequence[Embedding]) -> list[float]:
    """Return the score of each of the second with its partner, or with the only one; other tasks run in between."""
    ours, scores = [numbers_of(each.vector) for each in first], list[float]()
    for place, each in enumerate(second):
        scores.append(cosine(ours[place % len(ours)], numbers_of(each.vector)))
        await asyncio.sleep(0)
    return scores


def _result(index: int, score: float, text: str | None) -> dict[str, Any]:
    shown = {} if text is None else {"document": {"text": text}}
    return {"index": index, **shown, "relevance_score": score}


def _usage(found: Sequence[Embedding]) -> dict[str, int]:
    tokens = usage_of(found).prompt_tokens
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def _trace_of(embedding: Embedding) -> dict[str, str]:
    return {"x-trace-id": embedding.trace_id} if embedding.trace_id else {}


@contextmanager
def _in_words_of(named: Named) -> Iterator[None]:
    """Let errors about inputs name the texts of the body."""
    try:
        yield
    except InvalidRequest as error:
        raise InvalidRequest(*(_renamed(each, named) for each in error.violations)) from None


def _renamed(violation: FieldViolation, named: Named) -> FieldViolation:
    field = violation.field
    if field.startswith(_PREFIX):
        number = field.removeprefix(_PREFIX).partition("]")[0]
        return replace(violation, field=named(int(number)))
    # The number of all of them: the last one is one of those that are too many.
    return replace(violation, field=named(1).partition("[")[0]) if field == "inputs" else violation
