"""POST /v1/rerank and /v1/score, in the forms of vLLM, Jina and Cohere.

The score of two texts is the cosine of their vectors, -1 to 1, as vLLM has it for models that embed. Of a model that
ranks by its answer it is the probability of yes.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from common.contracts.errors import EngineFailure, FieldViolation, InvalidRequest
from common.contracts.limits import MAX_ANSWER_BYTES, MAX_EMBEDDING_INPUTS, MAX_EMBEDDINGS_AT_ONCE
from common.contracts.types import TokenLogprobs
from quire.inference.v1 import inference_pb2 as pb
from quire.types.v1 import types_pb2
from router.api.openai import schema
from router.api.openai.answer import failure_of
from router.api.openai.errors import UnsupportedField
from router.api.openai.foreign_fields import NOTHING
from router.api.openai.request import Order
from router.api.openai.service import Service, unless_gone
from router.api.openai.types import Texts
from router.api.shared.embedding import Embedder, Embedding, each_of, usage_of
from router.api.shared.field_names import Int32
from router.contracts.embedding import cosine, numbers_of
from router.contracts.events import Admitted, Finished, Tokens, ValidatedRequest
from router.contracts.ports import CallContext


# Scores of a decoder that ranks by its answer: the probability of yes, where it may say yes or no alone.
# Each pair is a chat with the roles `query` and `document`, which the checkpoint's template writes, and one token
# of output, whose log-probabilities are those of both answers. Their difference is that of the logits, and the
# probability of yes follows from it.
@dataclass(frozen=True, slots=True)
class Scored:
    """The scores of pairs, the tokens of their prompts, and the trace of the first."""

    scores: Sequence[float]
    prompt_tokens: int
    trace_id: str

    @property
    def headers(self) -> dict[str, str]:
        return {"x-trace-id": self.trace_id} if self.trace_id else {}


@dataclass(slots=True)
class _Judged:
    """What became of one pair."""

    prompt_tokens: int = 0
    trace_id: str = ""
    logprobs: TokenLogprobs | None = None


class AnswerRanker:
    """Scores pairs by the tokens `yes` and `no`."""

    def __init__(self, service: Service, yes: int, no: int) -> None:
        self._service, self._yes, self._no = service, yes, no

    async def scored(
        self, first: Sequence[str], second: Sequence[str], instruction: str, message: pb.EmbedRequest, call: CallContext
    ) -> Scored:
        """Return the score of each of the second with its query in the first, or with the only one.

        `message` has what all pairs share. Errors name the texts `inputs[N]`, those of the first before the others.
        """
        _check(first, second)
        pairs = [(first[place % len(first)], each) for place, each in enumerate(second)]
        order = Order([_prompt(*each, instruction) for each in pairs], self._common(message), {})
        try:
            requests = await self._service.validated(order, call)
        except InvalidRequest as error:
            raise InvalidRequest(*(_of_text(each, len(first)) for each in error.violations)) from None
        found = await each_of(len(pairs), MAX_EMBEDDINGS_AT_ONCE, lambda place: self._judged(requests[place]))
        tokens = sum(each.prompt_tokens for each in found)
        return Scored([self._score(each) for each in found], tokens, found[0].trace_id)

    def _common(self, message: pb.EmbedRequest) -> pb.GenerateRequest:
        """Return what the requests share. No default of the checkpoint may change how likely a token is."""
        sampling = types_pb2.SamplingParams(
            temperature=0.0,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            repetition_penalty=1.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            max_tokens=1,
            n=1,
            logprobs=0,
            logprob_token_ids=[self._yes, self._no],
        )
        return pb.GenerateRequest(sampling=sampling, priority=message.priority, cache=message.cache)

    async def _judged(self, request: ValidatedRequest) -> _Judged:
        judged = _Judged()
        async with aclosing(self._service.parts.frontend.generate(replace(request, whole=True))) as events:
            async for event in events:
                match event:
                    case Admitted():
                        judged.prompt_tokens, judged.trace_id = event.prompt_tokens, event.trace_id
                    case Tokens() if event.logprobs:
                        judged.logprobs = judged.logprobs or event.logprobs[0]
                    case Finished() if (failure := failure_of(event)) is not None:
                        raise failure
        return judged

    def _score(self, judged: _Judged) -> float:
        likely = {} if judged.logprobs is None else dict(judged.logprobs.top)
        if not {self._yes, self._no} <= likely.keys():
            raise EngineFailure("an answer came without the probabilities of yes and no")
        return yes_probability(likely[self._yes], likely[self._no])


def yes_probability(yes: float, no: float) -> float:
    """Return the probability of yes among yes and no, from their log-probabilities in any distribution."""
    return 1.0 / (1.0 + math.exp(min(700.0, no - yes)))


def _check(first: Sequence[str], second: Sequence[str]) -> None:
    """Raise InvalidRequest for texts that make no chat."""
    if (count := len(first) + len(second)) > MAX_EMBEDDING_INPUTS:
        raise InvalidRequest(FieldViolation("inputs", f"has {count} inputs; expected 1 to {MAX_EMBEDDING_INPUTS}"))
    for place, text in enumerate((*first, *second)):
        if not text:
            raise InvalidRequest(FieldViolation(f"inputs[{place}]", "is empty; expected a text"))


def _prompt(query: str, document: str, instruction: str) -> pb.Prompt:
    said = (("system", instruction), ("query", query), ("document", document))
    messages = [pb.ChatMessage(role=role, content=content) for role, content in said if content]
    return pb.Prompt(chat=pb.Chat(messages=messages))


def _of_text(violation: FieldViolation, queries: int) -> FieldViolation:
    """Return a violation of a pair as one of its document: of equal queries it is what makes the pair too long."""
    if violation.field == "prompt" or violation.field.startswith("prompt."):
        return replace(violation, field=f"inputs[{queries}]")
    if violation.field.startswith("messages["):
        number = int(violation.field.removeprefix("messages[").partition("]")[0])
        return replace(violation, field=f"inputs[{queries + number}]")
    return violation


# Fields of other servers that change the scores, each with the values that have no effect.
_REFUSED: Final[Mapping[str, tuple[Any, ...]]] = {
    "max_chunks_per_doc": (None,),
    "max_tokens_per_doc": (None,),
    "mm_processor_kwargs": NOTHING,
    "rank_fields": NOTHING,
}
# The same of a pool that embeds, and of one that ranks by its answer.
_OF_VECTORS: Final[Mapping[str, tuple[Any, ...]]] = {"instruction": NOTHING}
_OF_ANSWERS: Final[Mapping[str, tuple[Any, ...]]] = {
    "activation": (None, True),
    "softmax": (None, True),
    "truncate_prompt_tokens": (None,),
    "use_activation": (None, True),
}
_PREFIX: Final = "inputs["
# Of the texts of a request by their number: the field of each.
Named = Callable[[int], str]


class _Fields(BaseModel):
    """Fields of both kinds of request."""

    model_config = ConfigDict(extra="allow")

    model: str | None = Field(None, description="a name from /v1/models; optional")
    user: str | None = None
    instruction: str | None = Field(None, description="what the query asks for; of models that rank by their answer")
    truncate_prompt_tokens: Int32 | None = Field(
        None, description="keep so many of each text's last tokens; -1: what the context holds"
    )
    request_id: str | None = Field(None, description="a correlation id, instead of the header X-Request-Id")
    priority: Int32 | None = Field(None, description="-100 to 100; higher is served first")
    cache_salt: str | None = Field(None, description="share cached prefixes only with requests of the same salt")
    shared_domain: str | None = Field(None, description="share cached prefixes with all users of an open domain")

    def check(self, more: Mapping[str, tuple[Any, ...]]) -> None:
        """Raise Unsupported for fields that would change the scores."""
        given = (self.model_extra or {}) | {name: getattr(self, name) for name in self.model_fields_set}
        unsupported = [name for name, harmless in {**_REFUSED, **more}.items() if given.get(name) not in harmless]
        if unsupported:
            raise UnsupportedField(unsupported[0], f"{', '.join(unsupported)}: not offered here; leave it out")

    def message(self, texts: Sequence[str]) -> pb.EmbedRequest:
        return pb.EmbedRequest(
            inputs=[pb.Prompt(text=each) for each in texts],
            priority=self.priority or 0,
            cache=pb.CacheOptions(salt=self.cache_salt or "", shared_domain=self.shared_domain or ""),
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
    relevance_score: float = Field(..., description="-1 to 1, or of a model that ranks 0 to 1")
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
    score: float = Field(..., description="-1 to 1, or of a model that ranks 0 to 1")


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
        self._ranker = None if parts.card.ranks is None else AnswerRanker(service, *parts.card.ranks)

    async def rerank(self, body: RerankRequest, request: Request) -> Response:
        """Sort documents by how well they fit a query. 400 where the pool generates, with what to start instead."""
        texts, most = body.texts, body.top_n or None
        if not texts:
            raise InvalidRequest(FieldViolation("documents", "has no document; expected at least one"))
        if most is not None and most < 0:
            raise InvalidRequest(FieldViolation("top_n", f"is {most}; expected 0 for all, or more"))
        found = await self._scored(
            body, request, [body.query], texts, lambda place: f"documents[{place - 1}]" if place else "query"
        )
        best = sorted(range(len(texts)), key=lambda place: -found.scores[place])[:most]
        shown = body.return_documents is not False
        results = [_result(place, found.scores[place], texts[place] if shown else None) for place in best]
        answer = {"id": self._id("rerank", request), "model": self._model, "usage": _usage(found)}
        return JSONResponse(answer | {"results": results}, headers=found.headers)

    async def score(self, body: ScoreRequest, request: Request) -> Response:
        """Return the score of each pair of texts. 400 where the pool generates, with what to start instead."""
        first, second = body.both()
        count = len(first)

        def named(place: int) -> str:
            name, number, given = (
                ("text_1", place, body.text_1) if place < count else ("text_2", place - count, body.text_2)
            )
            return name if isinstance(given, str) else f"{name}[{number}]"

        found = await self._scored(body, request, first, second, named)
        data = [{"index": place, "object": "score", "score": each} for place, each in enumerate(found.scores)]
        answer = {"id": self._id("score", request), "object": "list", "created": int(time.time()), "model": self._model}
        return JSONResponse(answer | {"data": data, "usage": _usage(found)}, headers=found.headers)

    async def _scored(
        self, body: _Fields, request: Request, first: Sequence[str], second: Sequence[str], named: Named
    ) -> Scored:
        """Return the score of each of the second with its partner, or with the only one.

        `named` has the field of each text, those of the first before the others. Raises InvalidRequest and Overloaded.
        """
        self._service.begin_with(body.request_id, body.model, request)
        by_answer = self._ranker is not None
        body.check(_OF_ANSWERS if by_answer else _OF_VECTORS)
        with _in_words_of(named):
            work = self._judged if by_answer else self._compared
            return await unless_gone(request, work(body, request, first, second))

    async def _judged(self, body: _Fields, request: Request, first: Sequence[str], second: Sequence[str]) -> Scored:
        assert self._ranker is not None
        message, call = body.message(()), self._service.call(request)
        return await self._ranker.scored(first, second, body.instruction or "", message, call)

    async def _compared(self, body: _Fields, request: Request, first: Sequence[str], second: Sequence[str]) -> Scored:
        place = self._service.room.place(MAX_ANSWER_BYTES)
        try:
            message = body.message([*first, *second])
            # The vectors are not part of the answer: their numbers take none of its bytes.
            asked = await self._embedder.validated(message, self._service.call(request), 0, MAX_ANSWER_BYTES)
            found = await self._embedder.run(asked, place.grow)
        finally:
            place.leave()
        scores = await _cosines(found[: len(first)], found[len(first) :])
        return Scored(scores, usage_of(found).prompt_tokens, found[0].trace_id)

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


def _usage(found: Scored) -> dict[str, int]:
    return {"prompt_tokens": found.prompt_tokens, "total_tokens": found.prompt_tokens}


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
