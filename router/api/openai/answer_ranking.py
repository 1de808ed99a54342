"""Scores of a decoder that ranks by its answer: the probability of yes, where it may say yes or no alone.

Each pair is a chat with the roles `query` and `document`, which the checkpoint's template writes, and one token of
output, whose log-probabilities are those of both answers. Their difference is that of the logits, and the probability
of yes follows from it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from common.contracts.errors import EngineFailure, FieldViolation, InvalidRequest
from common.contracts.limits import MAX_EMBEDDING_INPUTS, MAX_EMBEDDINGS_AT_ONCE
from common.contracts.types import TokenLogprobs
from quire.inference.v1 import inference_pb2 as pb
from quire.types.v1 import types_pb2
from router.api.openai.answer import failure_of
from router.api.openai.request import Order
from router.api.openai.service import Service
from router.api.shared.embedding import each_of
from router.contracts.events import Admitted, Finished, Tokens, ValidatedRequest
from router.contracts.ports import CallContext


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
