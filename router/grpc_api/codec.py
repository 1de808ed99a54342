"""Encodes the router's events and its status as messages of the public API."""

from __future__ import annotations

from collections.abc import Iterable

from common.wire.enum_codec import finish_to_proto, miss_to_proto
from common.wire.identity_codec import identity_to_proto
from common.wire.output_codec import logprobs_to_proto, usage_to_proto
from quire.inference.v1 import inference_pb2 as pb
from router.core.events import Admitted, Finished, GenerateEvent, Tokens
from router.ports import ModelCard


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


def unary_to_proto(events: Iterable[GenerateEvent], sequences: int) -> pb.GenerateUnaryResponse:
    """Return the events of a whole request as one message, its outputs in the order of their index."""
    response = pb.GenerateUnaryResponse(outputs=[pb.Output(index=index) for index in range(sequences)])
    texts: list[list[str]] = [[] for _ in range(sequences)]
    for event in events:
        match event:
            case Admitted():
                response.admitted.CopyFrom(admitted_to_proto(event))
            case Tokens():
                texts[event.index].append(event.text)
                response.outputs[event.index].token_ids.extend(event.token_ids)
                response.outputs[event.index].logprobs.extend(map(logprobs_to_proto, event.logprobs))
            case Finished():
                response.outputs[event.index].finished.CopyFrom(finished_to_proto(event))
    for output, text in zip(response.outputs, texts, strict=True):
        output.text = "".join(text)
    return response


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


def finished_to_proto(event: Finished) -> pb.Finished:
    timings = event.timings
    message = pb.Finished(
        index=event.index,
        reason=finish_to_proto(event.reason),
        usage=usage_to_proto(event.usage),
        timings=pb.Timings(
            queue_seconds=timings.queue_seconds,
            time_to_first_token=timings.time_to_first_token,
            time_per_output_token=timings.time_per_output_token,
            total_seconds=timings.total_seconds,
        ),
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
    )
