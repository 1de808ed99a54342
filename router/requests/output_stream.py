"""The output of one sequence for the client: text, stops, timings and usage, over all its runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from common.contracts.transfers import FROM_DISK, Fetched
from common.contracts.types import FinishReason, Usage
from router.contracts.events import Finished, Timings, Tokens, ValidatedRequest
from router.contracts.ports import TextAssembler
from router.workers.resuming import Continuation, Orphan
from router.workers.worker_events import SequenceAdmitted, SequenceFinished, TokensSampled

_SOURCES: Final = ("host_cached_tokens", "disk_cached_tokens", "peer_cached_tokens")
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
        # Tokens of the prompt whose log-probabilities the client has.
        self.scored = 0
        # The stop string that ended the output. The worker has no stop strings, so the router cancels the sequence.
        self.stop_string: str | None = None
        self.first_token_at: float | None = None
        self.last_token_at = request.arrived
        self.admitted_at: float | None = None
        self._attempt = 0
        self.cached_tokens = 0
        # Tokens whose blocks the first run loaded from host memory, as its worker said at its start, and those that it
        # had waited for before: from disk, and from other workers.
        self._loaded_tokens = 0
        self._from_disk = self._from_peers = 0
        self._computed_again = 0
        # Both as the present run found them; None in the first run.
        self._found: tuple[int, int] | None = None
        self._preemptions = 0
        # Times between two events that a client sees: all, those above the objective, and the longest.
        self.gaps = self.late_gaps = 0
        self.longest_gap = 0.0
        # Of a sequence that another router began: how many tokens it had, when the last one came, and its admission.
        self._resumed_tokens = 0
        self._resumed_at = self._resumed_admission = 0.0

    def admitted(self, event: SequenceAdmitted, attempt: int, now: float, block_size: int) -> None:
        """Note that run number `attempt` has blocks; after a preemption a run is admitted again."""
        if event.recounted:
            self._count_hits(event.cached_tokens)
        elif self.admitted_at is None:
            self.admitted_at, self._attempt = self._resumed_admission or now, attempt
            self._count_hits(event.cached_tokens)
            self._count_fetched(event.fetched, block_size)
        elif attempt != self._attempt:
            self._attempt, self._found = attempt, (self.cached_tokens, self._computed_again)
            self._count_hits(event.cached_tokens)

    def started(self, loaded_tokens: int) -> None:
        """Note how many tokens' blocks were loaded from host memory; later runs do not change what was cached."""
        if self._found is None and self.first_token_at is None:
            self._loaded_tokens += loaded_tokens

    def _count_fetched(self, fetched: Fetched | None, block_size: int) -> None:
        """Note what the first run waited for before it was admitted."""
        if fetched is not None:
            tokens = fetched.blocks * block_size
            self._from_disk, self._from_peers = (tokens, 0) if fetched.source == FROM_DISK else (0, tokens)

    def resume(self, orphan: Orphan, now: float) -> None:
        """Take over the times and the costs of a sequence that another router began; its tokens come again."""
        before, arrived = orphan.continuation, self._request.arrived
        self.scored = orphan.prompt_logprobs_before
        if before.usage_before is not None and before.admitted_seconds is not None:
            self.admitted_at = arrived + before.admitted_seconds
            self.cached_tokens = before.usage_before.cached_tokens
            self._from_disk = before.usage_before.disk_cached_tokens
            self._from_peers = before.usage_before.peer_cached_tokens
            fetched = self._from_disk + self._from_peers
            self._loaded_tokens = before.usage_before.host_cached_tokens + fetched
            self._computed_again = before.usage_before.recomputed_tokens
            self._preemptions = before.usage_before.preemptions
        elif orphan.admitted_seconds is not None:
            self._resumed_admission = now - orphan.admitted_seconds
        if before.first_token_seconds is not None:
            self.first_token_at = arrived + before.first_token_seconds
        elif orphan.first_token_seconds is not None:
            self.first_token_at = now - orphan.first_token_seconds
        self._resumed_tokens = orphan.total
        self._resumed_at = now - (orphan.last_token_seconds or 0.0)

    def continuation(self, of_request: Continuation | None) -> Continuation | None:
        """Return what another router needs, with this sequence's times and costs so far."""
        if of_request is None or self.admitted_at is None:
            return of_request
        arrived, first = self._request.arrived, self.first_token_at
        return replace(
            of_request,
            admitted_seconds=self.admitted_at - arrived,
            first_token_seconds=None if first is None else first - arrived,
            usage_before=Usage(
                cached_tokens=self.cached_tokens,
                recomputed_tokens=self._computed_again,
                preemptions=self._preemptions,
                **self._sources(Usage()),
            ),
        )

    def _count_hits(self, hits: int) -> None:
        """Count what the present run takes from the cache, by its admission or as its worker corrects that.

        Tokens that a run computes again count as such. Before the first output token those that were cached for earlier
        runs do not: they are computed for the first time, and no longer cached. How far a lost run was is not known: it
        counts as if it had computed the whole prompt. The worker itself counts what follows a preemption.
        """
        if self._found is None:
            self.cached_tokens = hits
            return
        cached, again = self._found
        lost = max(0, cached - hits) if self.first_token_at is None else 0
        self.cached_tokens = cached - lost
        self._computed_again = again + len(self._request.prompt) + len(self.tokens) - hits - lost

    def _sources(self, usage: Usage) -> dict[str, int]:
        """Return how many cached tokens came from where: as the worker says that ended the only run, or began."""
        disk, peers = self._from_disk, self._from_peers
        found = (max(0, self._loaded_tokens - disk - peers), disk, peers)
        if usage.prompt_tokens > 0 and self._found is None:
            found = (usage.host_cached_tokens, usage.disk_cached_tokens, usage.peer_cached_tokens)
        return {name: min(count, self.cached_tokens) for name, count in zip(_SOURCES, found, strict=True)}

    @property
    def replays(self) -> bool:
        """Whether the next tokens are of before the resume: the time since the last one says nothing."""
        return len(self.tokens) < self._resumed_tokens

    def preempted(self) -> None:
        self._preemptions += 1

    def waited(self, seconds: float, objective: float) -> None:
        """Count a time between two events of output."""
        self.gaps += 1
        self.longest_gap = max(self.longest_gap, seconds)
        if seconds > objective:
            self.late_gaps += 1

    def sampled(self, event: TokensSampled, now: float) -> Tokens | None:
        """Take new tokens and return the client's part of them; afterwards `stop_string` may be set."""
        tokens = event.token_ids
        if not tokens:
            return None
        if len(self.tokens) < self._resumed_tokens:
            now = min(now, self._resumed_at)
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
            cached_tokens=self.cached_tokens,
            output_tokens=len(self.tokens),
            recomputed_tokens=ended.usage.recomputed_tokens + self._computed_again,
            preemptions=max(self._preemptions, ended.usage.preemptions),
            drafted_tokens=ended.usage.drafted_tokens,
            accepted_draft_tokens=ended.usage.accepted_draft_tokens,
            model_drafted_tokens=ended.usage.model_drafted_tokens,
            accepted_model_draft_tokens=ended.usage.accepted_model_draft_tokens,
            **self._sources(ended.usage),
        )
        stop_token = ended.stop_token_id if self.stop_string is None else None
        ending = self.stop_string, stop_token, ended.message, ended.embedding
        return Finished(self.index, ended.reason, usage, self._timings(now), *ending)

    def _timings(self, now: float) -> Timings:
        arrived, gaps = self._request.arrived, len(self.tokens) - 1
        first = now if self.first_token_at is None else self.first_token_at
        return Timings(
            queue_seconds=(now if self.admitted_at is None else self.admitted_at) - arrived,
            time_to_first_token=first - arrived,
            time_per_output_token=(self.last_token_at - first) / gaps if gaps > 0 else 0.0,
            total_seconds=now - arrived,
        )
