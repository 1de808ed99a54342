"""A validated request, and the events that answer it: the contract between the client APIs and the frontend.

A request yields one Admitted, then PromptLogprobs if it asks for them, then Tokens as the workers sample them, then one
Finished for each of its `sampling.n` sequences. The PromptLogprobs precede the tokens of the first sequence alone.
Sequences are interleaved and carry their index. The names are those of the messages in inference.proto. A refused
request yields no event: the iterator raises a QuireError at its first step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from common.contracts.adapters import AdapterRef
from common.contracts.lease import RetainedTokens
from common.contracts.types import FinishReason, MissReason, SamplingParams, TokenLogprobs, Usage
from router.contracts.answer_parts import Parser
from router.placement.fair_queue import Flow
from router.tenants.tenancy import ANYONE, Caller


@dataclass(frozen=True, slots=True)
class ValidatedRequest:
    """A request in which every field is checked and every default filled in.

    `sampling.seed` is the given value or a random one. `arrived` and `deadline` are readings of Clock.monotonic, in
    seconds.
    `cache_domain` is that of the authenticated tenant, or a shared one that is open to it; `salt` narrows it.
    `priority` is at most the tenant's maximum.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams
    arrived: float
    request_id: str | None = None
    deadline: float | None = None
    priority: int = 0
    no_cache: bool = False
    caller: Caller = ANYONE
    cache_domain: bytes = b""
    salt: str = ""
    traceparent: str = ""
    # What other systems keep in the trace of `traceparent`; it is passed on as it is.
    tracestate: str = ""
    # The trace that begins here where there is no traceparent; "" for a random one.
    trace_id: str = ""
    # The client's name for one or several requests, for traces alone.
    correlation_id: str = ""
    # The name of its session (`session_ids.py`); "" where it belongs to none.
    session: str = ""
    # What the client calls the answer, for traces alone; "" where it is the id of the request.
    response_id: str = ""
    # What the client called the model, for traces alone; "" where it named none.
    model: str = ""
    # What the client should know of the answer: in a header, and in the record of the decision.
    notes: tuple[str, ...] = ()
    # The prompt is a conversation, rendered by a chat template.
    chat: bool = False
    # The client gets one answer at the end: tokens need not be passed on one by one.
    whole: bool = False
    # Special tokens whose text stays in the output.
    kept_special_tokens: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    # The prompt's vector is wanted, and no output; `sampling.max_tokens` is 1 and counts for nothing.
    embeds: bool = False
    # What the client expects as output; it changes how fast the output comes alone.
    prediction: tuple[int, ...] = ()
    # Which of its blocks are to stay cached for longer than others, or not for as long.
    retention: tuple[RetainedTokens, ...] = ()
    # Seconds for which its constraint was compiled, to see whether it can be followed.
    constraint_seconds: float = field(default=0.0, compare=False)
    # Tokens that the tenant's rate was charged before its prompt was read, with the request; None where it was not.
    paid: int | None = field(default=None, compare=False)
    # How its answers are read, where stop texts concern the words of an answer alone.
    new_parser: Callable[[], Parser] | None = field(default=None, compare=False)
    # Workers that are not to serve it: they have computed the prompt.
    avoids: frozenset[str] = frozenset()
    # What computes it; None: the base.
    adapter: AdapterRef | None = None

    @property
    def tenant(self) -> str:
        """The name of the caller's tenant."""
        return self.caller.tenant.name

    @property
    def flow(self) -> Flow:
        """The tenant in the queue."""
        return Flow(self.tenant, self.caller.tenant.weight)

    @property
    def takes_hits(self) -> bool:
        """Whether cached blocks spare work: all of a prompt is computed for its log-probabilities."""
        return self.sampling.prompt_logprobs is None

    @property
    def max_len(self) -> int:
        """Tokens of one sequence at most: prompt and output."""
        return len(self.prompt) + (0 if self.embeds else self.sampling.max_tokens)

    @property
    def tokens(self) -> int:
        """Tokens that the request may hold at once: one prompt, and the output of every sequence."""
        return len(self.prompt) + (0 if self.embeds else self.sampling.n * self.sampling.max_tokens)


@dataclass(frozen=True, slots=True)
class Admitted:
    """The first sequence has its blocks. `queue_seconds` counts from arrival at the router."""

    request_id: str
    worker_id: str
    prompt_tokens: int
    cached_tokens: int
    queue_seconds: float
    decision_id: str
    trace_id: str
    seed: int
    miss_reason: MissReason
    diverged_at: int = 0


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens of one sequence and the text that they complete.

    The text is whole in UTF-8 and cannot become part of a stop string; it may be empty while text is held back, and
    `token_ids` may be empty when held-back text is released at the end. `logprobs` has one entry a token, or none.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """The next tokens of the prompt with their log-probabilities, from its second token on."""

    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds, as the router saw them; `time_per_output_token` is the mean inter-token latency (TPOT)."""

    queue_seconds: float
    time_to_first_token: float
    time_per_output_token: float
    total_seconds: float


@dataclass(frozen=True, slots=True)
class Finished:
    """One sequence has ended. At most one of `stop_string` and `stop_token_id` is set; `message` explains an ERROR.

    `embedding` is the vector of a request that embeds, in little-endian float32.
    """

    index: int
    reason: FinishReason
    usage: Usage
    timings: Timings
    stop_string: str | None = None
    stop_token_id: int | None = None
    message: str = ""
    embedding: bytes = b""


GenerateEvent = Admitted | PromptLogprobs | Tokens | Finished
