"""The router's ports: Protocols between its parts. Only `main` names the classes that implement them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from common.contracts.adapters import AdapterRef
from common.contracts.types import BlockHash, Constraint, Decision, PoolIdentity, SamplingParams
from quire.inference.v1 import inference_pb2
from router.contracts.answer_parts import Parser
from router.contracts.events import GenerateEvent, ValidatedRequest
from router.contracts.index_answer import IndexAnswer
from router.contracts.refusals import Refusal
from router.placement.worker_model import WorkerModel
from router.tenants.tenancy import ANYONE, Caller, Charge


@dataclass(frozen=True, slots=True)
class CallContext:
    """The context of a call. Times are readings of Clock.monotonic, in seconds."""

    arrived: float
    deadline: float | None = None
    traceparent: str = ""
    caller: Caller = ANYONE
    # For a request that names none of its own: the id that the API made, and the trace that begins with it.
    request_id: str = ""
    trace_id: str = ""
    # The client's name for one or several requests.
    correlation_id: str = ""
    # The client's name for the session that it belongs to; "" for none.
    session_id: str = ""
    # What it called the model; "" where it named none.
    model: str = ""
    # What other systems keep in the trace of `traceparent`.
    tracestate: str = ""
    # Whether the API answers with as many tokens as the context holds, where more are asked for.
    lowers_max_tokens: bool = False
    # What the client should know of the answer, beside the answer.
    notes: tuple[str, ...] = ()
    # What its tenant's rates were charged before the work for it; contexts that are made from this one share it.
    charge: Charge = field(default_factory=Charge, compare=False)


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The served model. Parts of `identity` that no worker has reported yet are empty or zero.

    Clients may call the model by `name` or by an alias; answers have `name`.
    """

    name: str
    identity: PoolIdentity
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool
    aliases: tuple[str, ...] = ()
    # Numbers of a token's hidden state, and so of a vector where the pool embeds; 0 where config.json has none.
    hidden_size: int = 0
    # The tokens of yes and no where the model ranks by its answer.
    ranks: tuple[int, int] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


class AdapterSource(Protocol):
    """The LoRA adapters that requests may name as their model."""

    def find_adapter(self, name: str) -> AdapterRef | None:
        """Return the adapter that a model name stands for; None where it is none, as the names of the base."""
        ...

    def adapter_names(self) -> Sequence[str]: ...

    def check_model(self, name: str) -> None:
        """Raise ModelNotFound for a name that is neither one of the base nor of an adapter."""
        ...


class NoAdapters:
    """Implements `AdapterSource` without any."""

    def find_adapter(self, name: str) -> AdapterRef | None:
        return None

    def adapter_names(self) -> Sequence[str]:
        return ()

    def check_model(self, name: str) -> None:
        """Take any name: whoever has no adapters has checked it, or serves one model alone."""


class KnownPool(Protocol):
    """The pool of workers, as far as this router knows it now."""

    @property
    def identity(self) -> PoolIdentity:
        """What workers share; parts that none has reported yet are empty or zero."""
        ...

    def models(self) -> Sequence[WorkerModel]:
        """Return the workers with an open stream."""
        ...


class RedisState(Protocol):
    """Whether Redis answers this router, and what of its answers is passed over ("": nothing)."""

    @property
    def connected(self) -> bool: ...

    @property
    def problem(self) -> str: ...


class Leaving(Protocol):
    """A router that is `leaving` takes no new clients; one that is `draining` takes no new requests either."""

    leaving: bool
    draining: bool


class NamedCallers(Protocol):
    def named(self, tenant: str) -> Caller:
        """Return a caller of this tenant, for an operator's question. Raises InvalidRequest when there is none."""
        ...


class Authenticator(Protocol):
    """Recognises callers. All client APIs share one."""

    def caller(self, authorization: str, host: str) -> Caller:
        """Return who calls, by the header of that name (metadata in gRPC) and the address of the peer.

        Raises Unauthenticated for a credential that is missing or unknown, and PermissionDenied where the tenant may
        not use the served model.
        """
        ...

    def is_live(self, caller: Caller) -> bool:
        """Return whether the caller's credential would still be accepted."""
        ...


class Frontend(Protocol):
    """Serves validated requests. All client APIs share one frontend, and so its admission limits."""

    def generate(self, request: ValidatedRequest) -> AsyncGenerator[GenerateEvent, None]:
        """Admit, route and stream one request; closing the generator (`aclosing`) cancels it at the worker.

        Raises Overloaded, Unavailable, DeadlineExceeded, AlreadyExists or InvalidRequest (larger than any pool) before
        the first event; Unavailable or EngineFailure later when the request was lost with its worker; DeadlineExceeded
        after the last event when the deadline ended a sequence.
        """
        ...


@dataclass(frozen=True, slots=True)
class Resumed:
    """A request that another router began. `events` goes on with it, as `Frontend.generate` does with a new one.

    It takes the request, in which the API has said how its client reads the output.
    """

    request: ValidatedRequest
    events: Callable[[ValidatedRequest], AsyncGenerator[GenerateEvent, None]]


class Resumer(Protocol):
    """Goes on with requests whose router died."""

    async def resumed(self, request: inference_pb2.GenerateRequest, call: CallContext, again: bool = False) -> Resumed:
        """Find the request that `request.resume` names; `again` gives once more what the client has.

        Raises InvalidRequest; NotFound for a request that is unknown, another tenant's or incomplete; AlreadyExists
        while another stream has it; Unavailable when a worker did not answer; Overloaded.
        """
        ...


class RequestValidator(Protocol):
    """Turns a client's message into a request that the frontend can serve."""

    async def validate(
        self, request: inference_pb2.GenerateRequest, call: CallContext, embeds: bool = False
    ) -> ValidatedRequest:
        """Tokenise (off the event loop), fill in defaults, check every field. A prompt that `embeds` has no output.

        Raises InvalidRequest with all violations at once; Unsupported for constraints without a tokenizer. A request
        with `resume` is for a Resumer.
        """
        ...

    def check_token_ids(self, token_ids: Sequence[int]) -> None:
        """Raise InvalidRequest that names each id (of very many the first) which is not in the model's vocabulary."""
        ...


class ConstraintCheck(Protocol):
    async def check_constraint(self, constraint: Constraint, peer: str) -> None:
        """Raise InvalidRequest for a wrong constraint, Unsupported if none can be enforced here, or Overloaded.

        `peer` is the tenant or the address that sent it.
        """
        ...


class TextCodec(Protocol):
    """The checkpoint's tokenizer and chat template."""

    def __hash__(self) -> int: ...

    @property
    def added_tokens(self) -> Sequence[tuple[str, int, bool]]:
        """Text and id of the tokens that were added to the vocabulary, and whether they are special."""
        ...

    @property
    def hidden_tokens(self) -> Mapping[str, int]:
        """The special tokens, which texts leave out, and their ids."""
        ...

    @property
    def sees_tools(self) -> bool:
        """Whether the chat template writes the tools of a request into the prompt."""
        ...

    async def encode(self, prompt: inference_pb2.Prompt, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, of a chat rendered with the template, or the ids as they were given.

        Raises InvalidRequest when the prompt is empty or cannot be encoded.
        """
        ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; an id outside the tokenizer has none. InvalidRequest if negative."""
        ...

    async def text_of(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return what `decode` returns; many tokens are decoded off the event loop."""
        ...

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes of a token, special ones included; None where the tokenizer has text alone."""
        ...

    def token_name(self, token_id: int) -> str:
        """Return a token as the vocabulary has it, "" for an unknown id."""
        ...


class ChatRenderer(Protocol):
    """The checkpoint's chat template alone."""

    async def rendered(self, chat: inference_pb2.Chat) -> str:
        """Return the prompt of a chat as text. Raises InvalidRequest, and Unsupported without a template."""
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

    def assembler(
        self,
        sampling: SamplingParams,
        kept: Collection[str] = (),
        skip: bool = True,
        after: Sequence[int] = (),
        parser: Parser | None = None,
    ) -> TextAssembler:
        """Return an assembler of an output `after` a prompt.

        It leaves out special tokens, but for those in `kept`; without `skip` none. With a `parser` stop strings concern
        the words of the answer alone.
        """
        ...


class PrefixIndex(Protocol):
    """The prefix index: how many leading blocks of a prompt each worker need not compute."""

    @property
    def connected(self) -> bool:
        """Whether the last lookup was answered."""
        ...

    async def lookup(self, block_hashes: Sequence[BlockHash]) -> IndexAnswer:
        """Return hit blocks by worker id, or why there are none. Never raises or waits long."""
        ...


class RefusalWatch(Protocol):
    """Sees each answer with an error, of all client APIs."""

    def now_ns(self) -> int:
        """Return the time, as records have it."""
        ...

    def note_refusal(self, refusal: Refusal, since_ns: int) -> None:
        """Count, log and record an answer to a request that came at a time."""
        ...

    def count_refusal(self, refusal: Refusal) -> None:
        """Count alone what a probe was answered."""
        ...


class _Unwatched:
    def now_ns(self) -> int:
        return 0

    def note_refusal(self, refusal: Refusal, since_ns: int) -> None:
        pass

    def count_refusal(self, refusal: Refusal) -> None:
        pass


UNWATCHED: Final[RefusalWatch] = _Unwatched()
"""Sees nothing."""


class DecisionSink(Protocol):
    def record(self, decision: Decision) -> None:
        """Keep a record; must not block."""
        ...
