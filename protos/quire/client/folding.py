"""Collects the events of a stream into one completion."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from quire.api.errors import ProtocolViolation
from quire.api.types import FinishReason, MissReason, TokenLogprobs, Usage
from quire.client.results import Chunk, Completion, Output, Timings, record
from quire.inference.v1 import inference_pb2 as pb
from quire.types.v1 import types_pb2

_FINISH_REASONS: Final = {types_pb2.FinishReason.Value(f"FINISH_REASON_{each.name}"): each for each in FinishReason}
_MISS_REASONS: Final = {types_pb2.MissReason.Value(f"MISS_REASON_{each.name}"): each for each in MissReason}


@dataclass(slots=True)
class _Growing:
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    # Whether the text is there that the output held back at its end; it has no tokens.
    rested: bool = False
    finished: pb.Finished | None = None


class Fold:
    """Takes the events of one request in their order; `completion` may be read at any time."""

    def __init__(self, sequences: int = 1) -> None:
        """`sequences` is the n of the request."""
        self.begun = False
        self._admitted = pb.Admitted()
        self._outputs = [_Growing() for _ in range(max(1, sequences))]
        self._prompt_logprobs: list[TokenLogprobs] = []

    @property
    def complete(self) -> bool:
        return all(output.finished is not None for output in self._outputs)

    def take(self, event: pb.GenerateResponse) -> Chunk | None:
        """Add an event; return the chunk for the caller."""
        self.begun = True
        match event.WhichOneof("event"):
            case "tokens":
                return self._tokens(event.tokens)
            case "finished":
                growing = self._outputs[event.finished.index]
                known, growing.finished = growing.finished, event.finished
                if known is not None:  # a resumed stream ends its outputs again
                    return None
                return Chunk(event.finished.index, "", (), finish_reason=_reason(event.finished))
            case "admitted":
                self._admitted = event.admitted
            case "prompt_logprobs":
                self._prompt_logprobs += map(_logprobs, event.prompt_logprobs.logprobs)
        return None

    def resume(self) -> pb.Resume:
        """Return what continues the stream after what is here."""
        return pb.Resume(
            request_id=self._admitted.request_id,
            output_tokens_received=[len(output.token_ids) for output in self._outputs],
            prompt_logprobs_received=len(self._prompt_logprobs),
        )

    def completion(self) -> Completion:
        admitted = self._admitted
        outputs = tuple(_output(index, growing) for index, growing in enumerate(self._outputs))
        miss = _MISS_REASONS.get(admitted.miss_reason, MissReason.DISABLED) if admitted.miss_reason else None
        scored = tuple(self._prompt_logprobs)
        return record(Completion, admitted, miss_reason=miss, outputs=outputs, prompt_logprobs=scored)

    def _tokens(self, tokens: pb.Tokens) -> Chunk | None:
        ids, logprobs = tuple(tokens.token_ids), tuple(map(_logprobs, tokens.logprobs))
        growing = self._outputs[tokens.index]
        if not ids:
            if growing.rested:  # of a resumed stream
                return None
            growing.rested = True
        growing.text.append(tokens.text)
        growing.token_ids += ids
        growing.logprobs += logprobs
        return Chunk(tokens.index, tokens.text, ids, logprobs)


def _output(index: int, growing: _Growing) -> Output:
    finished = growing.finished
    return Output(
        index=index,
        text="".join(growing.text),
        token_ids=tuple(growing.token_ids),
        logprobs=tuple(growing.logprobs),
        finish_reason=_reason(finished) if finished else None,
        stopped_by=_stopped_by(finished) if finished else None,
        usage=record(Usage, finished.usage) if finished else Usage(),
        timings=record(Timings, finished.timings) if finished else Timings(),
    )


def _reason(finished: pb.Finished) -> FinishReason:
    return _FINISH_REASONS.get(finished.reason, FinishReason.ERROR)


def _logprobs(message: types_pb2.TokenLogprobs) -> TokenLogprobs:
    """Return the log-probabilities of one token. Raises ProtocolViolation when ids and values differ in number."""
    if len(message.top_token_ids) != len(message.top_logprobs):
        raise ProtocolViolation(f"{len(message.top_token_ids)} tokens have {len(message.top_logprobs)} probabilities")
    top = tuple(zip(message.top_token_ids, message.top_logprobs, strict=True))
    return TokenLogprobs(message.token_id, message.logprob, top, message.rank)


def _stopped_by(finished: pb.Finished) -> str | int | None:
    name = finished.WhichOneof("stopped_by")
    return None if name is None else getattr(finished, name)
