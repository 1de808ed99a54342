"""Encodes the router's events and its status as messages of the public API."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from common.contracts.types import TokenLogprobs
from common.wire.enum_codec import finish_to_proto, miss_to_proto
from common.wire.identity_codec import identity_to_proto
from common.wire.output_codec import logprobs_to_proto, usage_to_proto
from quire.inference.v1 import inference_pb2 as pb
from router.api.shared.embedding import Embedding, usage_of
from router.contracts.embedding import numbers_of
from router.contracts.events import Admitted, Finished, GenerateEvent, PromptLogprobs, Timings, Tokens
from router.contracts.ports import ModelCard

# Bytes of an output token in a message at least, and of a log-probability with its token.
LEAST_TOKEN_BYTES: Final = 1
LEAST_ENTRY_BYTES: Final = 5


def event_to_proto(event: GenerateEvent) -> pb.GenerateResponse:
    match event:
        case Admitted():
            return pb.GenerateResponse(admitted=admitted_to_proto(event))
        case Tokens():
            tokens = pb.Tokens(
                index=event.index,
                text=event.text,
                token_ids=event.token_ids,
                logprobs=map(logprobs_to_proto, event.logprobs),
            )
            return pb.GenerateResponse(tokens=tokens)
        case Finished():
            return pb.GenerateResponse(finished=finished_to_proto(event))
        case PromptLogprobs():
            prompt = pb.PromptLogprobs(logprobs=map(logprobs_to_proto, event.logprobs))
            return pb.GenerateResponse(prompt_logprobs=prompt)


class UnaryAnswer:
    """The events of a whole request as one message, its outputs in the order of their index.

    Each event is encoded as it comes. `grow` is called with the bytes that it adds at least, and may raise.
    """

    def __init__(self, sequences: int, grow: Callable[[int], None]) -> None:
        self._grow = grow
        self._response = pb.GenerateUnaryResponse(outputs=[pb.Output(index=index) for index in range(sequences)])
        self._texts: list[list[str]] = [[] for _ in range(sequences)]

    def take(self, event: GenerateEvent) -> None:
        response = self._response
        match event:
            case Admitted():
                response.admitted.CopyFrom(admitted_to_proto(event))
            case Tokens():
                tokens = len(event.text) + len(event.token_ids) * LEAST_TOKEN_BYTES
                self._grow(tokens + _least_bytes(event.logprobs))
                self._texts[event.index].append(event.text)
                response.outputs[event.index].token_ids.extend(event.token_ids)
                response.outputs[event.index].logprobs.extend(map(logprobs_to_proto, event.logprobs))
            case PromptLogprobs():
                self._grow(_least_bytes(event.logprobs))
                response.prompt_logprobs.extend(map(logprobs_to_proto, event.logprobs))
            case Finished():
                response.outputs[event.index].finished.CopyFrom(finished_to_proto(event))

    def message(self) -> pb.GenerateUnaryResponse:
        """Return the message, which has taken its last event."""
        for output, text in zip(self._response.outputs, self._texts, strict=True):
            output.text = "".join(text)
        return self._response


def _least_bytes(logprobs: Sequence[TokenLogprobs]) -> int:
    return LEAST_ENTRY_BYTES * sum(1 + len(entry.top) for entry in logprobs)


def admitted_to_proto(event: Admitted) -> pb.Admitted:
    return pb.Admitted(
        request_id=event.request_id,
        worker_id=event.worker_id,
        prompt_tokens=event.prompt_tokens,
        cached_tokens=event.cached_tokens,
        queue_seconds=event.queue_seconds,
        decision_id=event.decision_id,
        trace_id=event.trace_id,
        seed=event.seed,
        miss_reason=miss_to_proto(event.miss_reason),
        diverged_at=event.diverged_at,
    )


def embeddings_to_proto(embeddings: Sequence[Embedding]) -> pb.EmbedResponse:
    return pb.EmbedResponse(embeddings=map(_embedding_to_proto, embeddings), usage=usage_to_proto(usage_of(embeddings)))


def _embedding_to_proto(embedding: Embedding) -> pb.Embedding:
    return pb.Embedding(
        values=numbers_of(embedding.vector),
        usage=usage_to_proto(embedding.usage),
        timings=_timings_to_proto(embedding.timings),
        worker_id=embedding.worker_id,
        trace_id=embedding.trace_id,
    )


def _timings_to_proto(timings: Timings) -> pb.Timings:
    return pb.Timings(
        queue_seconds=timings.queue_seconds,
        time_to_first_token=timings.time_to_first_token,
        time_per_output_token=timings.time_per_output_token,
        total_seconds=timings.total_seconds,
    )


def finished_to_proto(event: Finished) -> pb.Finished:
    message = pb.Finished(
        index=event.index,
        reason=finish_to_proto(event.reason),
        usage=usage_to_proto(event.usage),
        timings=_timings_to_proto(event.timings),
    )
    if event.stop_string is not None:
        message.stop_string = event.stop_string
    elif event.stop_token_id is not None:
        message.stop_token_id = event.stop_token_id
    return message


def model_to_proto(card: ModelCard) -> pb.GetModelResponse:
    return pb.GetModelResponse(
        model=card.name,
        identity=identity_to_proto(card.identity),
        max_model_len=card.max_model_len,
        vocab_size=card.vocab_size,
        eos_token_ids=card.eos_token_ids,
        has_chat_template=card.has_chat_template,
        embedding_dimensions=card.hidden_size if card.identity.embeds else 0,
    )
