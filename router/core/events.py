"""A validated request, and the events that answer it: the contract between the client APIs and the frontend.

A request yields one Admitted, then Tokens as the workers sample them, then one Finished for each of its `sampling.n`
sequences. Sequences are interleaved and carry their index. The names are those of the messages in inference.proto. A
refused request yields no event: the iterator raises a QuireError at its first step.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.types import FinishReason, MissReason, SamplingParams, TokenLogprobs, Usage


@dataclass(frozen=True, slots=True)
class ValidatedRequest:
    """A request in which every field is checked and every default filled in.

    `sampling.seed` is the given value or a random one. `arrived` and `deadline` are readings of Clock.monotonic, in
    seconds.
    `cache_domain` is derived from the authenticated tenant, never set by the client; `salt` narrows it.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams
    arrived: float
    request_id: str | None = None
    deadline: float | None = None
    priority: int = 0
    no_cache: bool = False
    tenant: str = ""
    cache_domain: str = ""
    salt: str = ""
    traceparent: str = ""
    # The client gets one answer at the end: tokens need not be passed on one by one.
    whole: bool = False

    @property
    def max_len(self) -> int:
        """Tokens of one sequence at most: prompt and output."""
        return len(self.prompt) + self.sampling.max_tokens

    @property
    def tokens(self) -> int:
        """Tokens that the request may hold at once: one prompt, and the output of every sequence."""
        return len(self.prompt) + self.sampling.n * self.sampling.max_tokens


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
class Timings:
    """Seconds, as the router saw them; `time_per_output_token` is the mean gap after the first token."""

    queue_seconds: float
    time_to_first_token: float
    time_per_output_token: float
    total_seconds: float


@dataclass(frozen=True, slots=True)
class Finished:
    """One sequence has ended. At most one of `stop_string` and `stop_token_id` is set; `message` explains an ERROR."""

    index: int
    reason: FinishReason
    usage: Usage
    timings: Timings
    stop_string: str | None = None
    stop_token_id: int | None = None
    message: str = ""


GenerateEvent = Admitted | Tokens | Finished
