"""Encodes the router's events as responses of the Open Inference Protocol."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from common.contracts.errors import QuireError
from common.contracts.types import TokenLogprobs
from quire.kserve.v2 import kserve_pb2 as pb
from router.api.kserve import tensors
from router.api.kserve.request import Asked
from router.api.kserve.tensors import Elements, Tensor, add_output
from router.contracts.events import Admitted, Finished, GenerateEvent, PromptLogprobs, Tokens

VERSION: Final = "1"
# The finish reason of an unfinished sequence, as Triton's vLLM backend writes it and its clients expect it.
_UNFINISHED: Final = "None"
_FINAL: Final = "triton_final_response"
# Bytes of a log-probability in JSON at least:  "5": {"logprob": -1.5}
LEAST_ENTRY_BYTES: Final = 20
# Characters of an error message, which may quote the request.
_MOST_CHARACTERS: Final = 4096


@dataclass(slots=True)
class _Sequence:
    """One sequence: its output since the last response, and the state that every response repeats."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[str] = field(default_factory=list)  # in JSON, made as they come
    cumulative_logprob: float = 0.0
    reason: str = _UNFINISHED

    def take(self, event: Tokens, with_logprobs: bool) -> int:
        """Take output; return the bytes that it adds to the answer at least."""
        self.text.append(event.text)
        self.token_ids += event.token_ids
        added = [json.dumps(_ranked(entry)) for entry in event.logprobs] if with_logprobs else []
        self.logprobs += added
        self.cumulative_logprob += sum(each.logprob for each in event.logprobs)
        return len(event.text) + sum(map(len, added))

    def clear(self) -> None:
        self.text, self.token_ids, self.logprobs = [], [], []


class Answer:
    """The answer to one request. Each response has the output since the last one.

    `grow` is called with the bytes that an event adds at least, and may raise.
    """

    def __init__(
        self,
        request: pb.ModelInferRequest,
        asked: Asked,
        sequences: int,
        grow: Callable[[int], None] = lambda size: None,
    ) -> None:
        self._id, self._model, self._asked, self._grow = request.id, request.model_name, asked, grow
        self._sequences = [_Sequence() for _ in range(sequences)]
        for sequence in self._sequences:
            sequence.text.append(asked.prefix)
        self._admitted: Admitted | None = None
        self._cached_tokens = 0

    def take(self, event: GenerateEvent) -> None:
        match event:
            case Admitted():
                self._admitted, self._cached_tokens = event, event.cached_tokens
            case Tokens():
                self._grow(self._sequences[event.index].take(event, tensors.LOGPROBS in self._asked.outputs))
            case Finished():
                self._sequences[event.index].reason = event.reason.value
                if not event.index:
                    self._cached_tokens = event.usage.cached_tokens
            case PromptLogprobs():
                pass  # this face has no parameter that asks for them

    def response(self, final: bool = False) -> pb.ModelInferResponse:
        response = pb.ModelInferResponse(id=self._id, model_name=self._model, model_version=VERSION)
        response.parameters[_FINAL].bool_param = final
        if final and self._admitted is not None:
            response.parameters["request_id"].string_param = self._admitted.request_id
            response.parameters["trace_id"].string_param = self._admitted.trace_id
            response.parameters["cached_tokens"].int64_param = self._cached_tokens
        if not (final and self._nothing_to_tell()):
            for tensor in self._asked.outputs:
                add_output(response, tensor, self._elements(tensor), self._asked.raw)
        for sequence in self._sequences:
            sequence.clear()
        return response

    def _nothing_to_tell(self) -> bool:
        asked = self._asked
        new = any("".join(sequence.text) or sequence.token_ids for sequence in self._sequences)
        return asked.stream and asked.empty_final and asked.outputs == (tensors.TEXT_OUTPUT,) and not new

    def _elements(self, tensor: Tensor) -> Elements:
        if tensor == tensors.NUM_INPUT_TOKENS:
            return [0 if self._admitted is None else self._admitted.prompt_tokens]
        if tensor == tensors.OUTPUT_IDS:
            return [token_id for each in self._sequences for token_id in each.token_ids]
        return list(map(_OF_EACH_SEQUENCE[tensor], self._sequences))


def error_response(
    request: pb.ModelInferRequest, error: QuireError, request_id: str = ""
) -> pb.ModelStreamInferResponse:
    """Return the response that ends one request of a stream with an error. Some clients show the message alone."""
    whose = f"request {request.id}: " if request.id else ""
    response = pb.ModelStreamInferResponse(error_message=f"{whose}{error}"[:_MOST_CHARACTERS])
    response.infer_response.id = request.id
    response.infer_response.parameters[_FINAL].bool_param = True
    response.infer_response.parameters["reason"].string_param = error.reason
    response.infer_response.parameters["request_id"].string_param = request_id
    return response


def _ranked(entry: TokenLogprobs) -> dict[str, dict[str, float | int]]:
    """Return one token's log-probabilities by token id: the sampled token first, then the likeliest with their rank."""
    ranks = {token_id: {"logprob": logprob, "rank": rank} for rank, (token_id, logprob) in enumerate(entry.top, 1)}
    sampled: dict[int, dict[str, float | int]] = {entry.token_id: {"logprob": entry.logprob}}
    return {str(token_id): entries for token_id, entries in {**sampled, **ranks}.items()}


_OF_EACH_SEQUENCE: Final[Mapping[Tensor, Callable[[_Sequence], Any]]] = {
    tensors.TEXT_OUTPUT: lambda sequence: "".join(sequence.text).encode(),
    tensors.FINISH_REASON: lambda sequence: sequence.reason.encode(),
    tensors.CUMULATIVE_LOGPROB: lambda sequence: sequence.cumulative_logprob,
    tensors.LOGPROBS: lambda sequence: f"[{', '.join(sequence.logprobs)}]".encode(),
    tensors.NUM_OUTPUT_TOKENS: lambda sequence: len(sequence.token_ids),
}
