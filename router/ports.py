"""The router's ports: Protocols between its parts. Only `main` names the classes that implement them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from common.types import BlockHash, Constraint, Decision, PoolIdentity, SamplingParams
from quire.inference.v1 import inference_pb2
from router.core.events import GenerateEvent, ValidatedRequest


@dataclass(frozen=True, slots=True)
class CallContext:
    """The context of a call. Times are readings of Clock.monotonic, in seconds."""

    arrived: float
    deadline: float | None = None
    traceparent: str = ""
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The served model. Parts of `identity` that no worker has reported yet are empty or zero."""

    name: str
    identity: PoolIdentity
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool


class Frontend(Protocol):
    """Serves validated requests. All client APIs share one frontend, and so its admission limits."""

    def generate(self, request: ValidatedRequest) -> AsyncGenerator[GenerateEvent, None]:
        """Admit, route and stream one request; closing the generator (`aclosing`) cancels it at the worker.

        Raises Overloaded, Unavailable, DeadlineExceeded, AlreadyExists or InvalidRequest (larger than any pool) before
        the first event; Unavailable or EngineFailure later when the request was lost with its worker; DeadlineExceeded
        after the last event when the deadline ended a sequence.
        """
        ...


class RequestValidator(Protocol):
    """Turns a client's message into a request that the frontend can serve."""

    async def validate(self, request: inference_pb2.GenerateRequest, call: CallContext) -> ValidatedRequest:
        """Tokenise (off the event loop), fill in defaults, check every field.

        Raises InvalidRequest with all violations at once; Unsupported for `resume`, and for constraints without a
        tokenizer.
        """
        ...

    def check_token_ids(self, token_ids: Sequence[int]) -> None:
        """Raise InvalidRequest that names each id (of very many the first) which is not in the model's vocabulary."""
        ...


class ConstraintCheck(Protocol):
    async def check(self, constraint: Constraint) -> None:
        """Raise InvalidRequest for a wrong constraint, Unsupported if none can be enforced here."""
        ...


class TextCodec(Protocol):
    """The checkpoint's tokenizer and chat template."""

    async def encode(self, prompt: inference_pb2.Prompt, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, of a chat rendered with the template, or the ids as they were given.

        Raises InvalidRequest when the prompt is empty or cannot be encoded.
        """
        ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; one that the tokenizer does not know has none. InvalidRequest if negative."""
        ...

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes of a token, special ones included; None where the tokenizer has text alone."""
        ...


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The text that a push completed, and the stop string that ended the output, if any.

    `taken` counts the pushed tokens that belong to the output: all, unless a stop string ended it earlier.
    """

    text: str
    taken: int
    stop_string: str | None = None


class TextAssembler(Protocol):
    """Turns one sequence's output tokens into text, in order."""

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Take the next output tokens. After a `stop_string` was returned nothing may be pushed."""
        ...

    def finish(self) -> str:
        """Return the text that was held back (an incomplete character, the beginning of a stop string)."""
        ...


class TextAssemblers(Protocol):
    """Makes assemblers. The frontend does not pass a stop token to them unless `sampling.include_stop` is set."""

    def assembler(self, sampling: SamplingParams) -> TextAssembler: ...


class PrefixIndex(Protocol):
    """The prefix index: how many leading blocks each worker has cached."""

    @property
    def connected(self) -> bool:
        """Whether the last lookup was answered."""
        ...

    async def lookup(self, block_hashes: Sequence[BlockHash]) -> Mapping[str, int] | None:
        """Return hit blocks by worker id; None without an answer or for an empty index. Never raises or waits long."""
        ...


class DecisionSink(Protocol):
    def record(self, decision: Decision) -> None:
        """Keep a record; must not block."""
        ...
