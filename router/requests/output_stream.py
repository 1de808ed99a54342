"""The output of one sequence for the client: text, stops, timings and usage, over all its runs."""

from __future__ import annotations

from dataclasses import dataclass

from common.types import FinishReason, Usage
from router.core.events import Finished, Timings, Tokens, ValidatedRequest
from router.core.worker_events import SequenceAdmitted, SequenceFinished, TokensSampled
from router.ports import TextAssembler

# Ends that the router decides: at a stop string, and at the deadline.
STOPPED = SequenceFinished(FinishReason.STOP, Usage())
EXPIRED = SequenceFinished(FinishReason.DEADLINE, Usage())


@dataclass(frozen=True, slots=True)
class StopTokens:
    """The tokens that end an output. The worker applies the same rule and ends the sequence at them."""

    token_ids: frozenset[int]
    min_tokens: int

    @staticmethod
    def of(request: ValidatedRequest, eos_token_ids: tuple[int, ...]) -> StopTokens:
        sampling = request.sampling
        eos = () if sampling.ignore_eos else eos_token_ids
        return StopTokens(frozenset((*sampling.stop_token_ids, *eos)), sampling.min_tokens)

    def ends(self, token_id: int, output_tokens: int) -> bool:
        """Return whether a token ends the output; the count includes it."""
        return token_id in self.token_ids and output_tokens >= self.min_tokens


class OutputStream:
    """One sequence. Times are readings of Clock.monotonic."""

    def __init__(self, index: int, request: ValidatedRequest, assembler: TextAssembler, stops: StopTokens) -> None:
        self.index, self._request, self._assembler, self._stops = index, request, assembler, stops
        self.tokens: list[int] = []
        # The stop string that ended the output. The worker has no stop strings, so the router cancels the sequence.
        self.stop_string: str | None = None
        self.first_token_at: float | None = None
        self.last_token_at = request.arrived
        self.admitted_at: float | None = None
        self._attempt = 0
        self._cached_tokens = 0
        self._computed_again = 0
        self._preemptions = 0

    def admitted(self, event: SequenceAdmitted, attempt: int, now: float) -> None:
        """Note that run number `attempt` has blocks; after a preemption a run is admitted again."""
        if self.admitted_at is None:
            self.admitted_at, self._cached_tokens = now, event.cached_tokens
        elif attempt != self._attempt:
            # The worker itself counts tokens that it computes again after a preemption.
            self._computed_again += len(self._request.prompt) + len(self.tokens) - event.cached_tokens
        self._attempt = attempt

    def preempted(self) -> None:
        self._preemptions += 1

    def sampled(self, event: TokensSampled, now: float) -> Tokens | None:
        """Take new tokens and return the client's part of them; afterwards `stop_string` may be set."""
        tokens = event.token_ids
        if not tokens:
            return None
        visible = tokens
        total = len(self.tokens) + len(tokens)
        if self._stops.ends(tokens[-1], total) and not self._request.sampling.include_stop:
            visible = tokens[:-1]
        delta = self._assembler.push(visible)
        self.stop_string = delta.stop_string
        taken = len(tokens) if delta.stop_string is None else delta.taken
        self.tokens.extend(tokens[:taken])
        self.first_token_at = now if self.first_token_at is None else self.first_token_at
        self.last_token_at = now
        return Tokens(self.index, delta.text, tokens[:taken], event.logprobs[:taken])

    def rest(self) -> Tokens | None:
        """Return the text that was held back, at the end of an output that no stop string ended."""
        text = self._assembler.finish() if self.stop_string is None else ""
        return Tokens(self.index, text, ()) if text else None

    def finished(self, ended: SequenceFinished, now: float) -> Finished:
        """Return the end of the output, with its cost over all its runs."""
        usage = Usage(
            prompt_tokens=len(self._request.prompt),
            cached_tokens=self._cached_tokens,
            output_tokens=len(self.tokens),
            recomputed_tokens=ended.usage.recomputed_tokens + self._computed_again,
            preemptions=max(self._preemptions, ended.usage.preemptions),
        )
        stop_token = ended.stop_token_id if self.stop_string is None else None
        return Finished(
            self.index, ended.reason, usage, self._timings(now), self.stop_string, stop_token, ended.message
        )

    def _timings(self, now: float) -> Timings:
        arrived, gaps = self._request.arrived, len(self.tokens) - 1
        first = now if self.first_token_at is None else self.first_token_at
        return Timings(
            queue_seconds=(now if self.admitted_at is None else self.admitted_at) - arrived,
            time_to_first_token=first - arrived,
            time_per_output_token=(self.last_token_at - first) / gaps if gaps > 0 else 0.0,
            total_seconds=now - arrived,
        )
