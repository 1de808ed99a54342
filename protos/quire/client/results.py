"""The client's results: frozen records, and how messages are converted to them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, TypeVar

from google.protobuf.message import Message

from quire.api.types import (
    FinishReason,
    KvGeometry,
    KvGroup,
    KvGroupKind,
    MissReason,
    PoolIdentity,
    TokenLogprobs,
    Usage,
)
from quire.inference.v1 import inference_pb2 as pb
from quire.types.v1 import types_pb2

_RecordT = TypeVar("_RecordT")


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds, as the router saw them; `time_per_output_token` is the mean inter-token latency (TPOT)."""

    queue_seconds: float = 0.0
    time_to_first_token: float = 0.0
    time_per_output_token: float = 0.0
    total_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Chunk:
    """The addition of one event to the output `index`. An output's last chunk has the `finish_reason`.

    `text` is complete UTF-8 and never part of a stop string. It may be empty while the router holds tokens back.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """One sequence. Its `finish_reason` is None when the stream ended first.

    `stopped_by` is the stop string, or the id of the stop token, that ended the sequence.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason | None
    stopped_by: str | int | None
    usage: Usage
    timings: Timings


@dataclass(frozen=True, slots=True)
class Completion:
    """A request and its outputs by index. Text, tokens and finish reason of the first output are attributes too.

    `decision_id` names the routing decision; `trace_id` is the argument of `quire trace`. Where the request asked for
    `prompt_logprobs`, they have an entry for each token of the prompt but the first.
    """

    request_id: str
    worker_id: str
    decision_id: str
    trace_id: str
    seed: int
    prompt_tokens: int
    cached_tokens: int
    miss_reason: MissReason | None
    queue_seconds: float
    outputs: tuple[Output, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.outputs[0].finish_reason

    @property
    def usage(self) -> Usage:
        return self.outputs[0].usage

    @property
    def timings(self) -> Timings:
        return self.outputs[0].timings


@dataclass(frozen=True, slots=True)
class Embeddings:
    """The vectors of a request's inputs, in their order, and what all of them cost."""

    vectors: tuple[tuple[float, ...], ...]
    usage: Usage

    @staticmethod
    def from_proto(message: pb.EmbedResponse) -> Embeddings:
        return Embeddings(tuple(tuple(each.values) for each in message.embeddings), record(Usage, message.usage))


@dataclass(frozen=True, slots=True)
class Model:
    """The model that a router serves. `max_model_len` bounds the tokens of prompt and output together."""

    name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool
    identity: PoolIdentity

    @staticmethod
    def from_proto(message: pb.GetModelResponse) -> Model:
        shape = message.identity.kv_geometry
        geometry = record(KvGeometry, shape, groups=tuple(map(_group, shape.groups)))
        return Model(
            name=message.model,
            max_model_len=message.max_model_len,
            vocab_size=message.vocab_size,
            eos_token_ids=tuple(message.eos_token_ids),
            has_chat_template=message.has_chat_template,
            identity=record(PoolIdentity, message.identity, kv_geometry=geometry),
        )


def _group(message: types_pb2.KvGroup) -> KvGroup:
    kind = types_pb2.KvGroupKind.Name(message.kind).removeprefix("KV_GROUP_KIND_")
    return KvGroup(KvGroupKind[kind], message.span, message.pages, tuple(message.layers))


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker as the router sees it. `state`: connected, connecting, draining, hung or mismatched.

    `unheld_blocks` counts blocks that are free, or cached and evictable. Where the identity of the model has groups of
    layers, both counts are of pages. `reason` says why the router avoids a worker. `disaggregation` is prefill or
    decode where a worker does not do all.
    """

    worker_id: str
    address: str
    state: str
    reason: str
    running_sequences: int
    waiting_sequences: int
    num_blocks: int
    unheld_blocks: int
    manager_attached: bool
    prefill_tokens_per_second: float
    decode_step_seconds: float
    heartbeat_age: float
    disaggregation: str = ""


@dataclass(frozen=True, slots=True)
class Manager:
    """One KV manager of a group; `term` rises with each one that takes the lead there.

    `state_seconds` is for how long it has led, stood by or been out of reach.
    """

    address: str
    reachable: bool
    leads: bool
    term: int
    state_seconds: float
    group: str = ""


@dataclass(frozen=True, slots=True)
class Status:
    """A router's queue and its workers."""

    version: str
    draining: bool
    redis_connected: bool
    discovery_problem: str
    queued_requests: int
    running_requests: int
    workers: tuple[Worker, ...]
    managers: tuple[Manager, ...] = ()

    @staticmethod
    def from_proto(message: pb.GetStatusResponse) -> Status:
        workers = tuple(record(Worker, each) for each in message.workers)
        managers = tuple(record(Manager, each) for each in message.managers)
        return record(Status, message, workers=workers, managers=managers)


def record(kind: type[_RecordT], message: Message, **values: Any) -> _RecordT:
    """Return a record: each field comes from `values`, or from the message's field of the same name."""
    names = [each.name for each in fields(kind) if each.name not in values]  # type: ignore[arg-type]
    return kind(**{name: getattr(message, name) for name in names}, **values)
