"""The record that ends a request: how it ended, and in which phase each second of it went.

It is one decision record, and all durations stand in it alone. Other records say why a phase took so long. A lost
record can therefore hide a cause, and never lengthens or shortens a phase.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, Final

from common.contracts.types import Decision

# A request decodes slowly from so many times the usual inter-token latency on.
SLOW_GAPS: Final = 2.0

Seconds = tuple[tuple[str, float], ...]


class Phase(StrEnum):
    """What a request waited for, or what was done for it; a request is in one phase at a time."""

    READING = "reading"
    QUEUE = "queue"
    LOOKUP = "lookup"
    PREFILL_ELSEWHERE = "prefill_elsewhere"
    ADAPTER = "adapter"
    CONSTRAINT = "constraint"
    ROUTER_STILL = "router_still"
    ON_THE_WAY = "on_the_way"
    WORKER_STILL = "worker_still"
    BLOCKS = "blocks"
    FETCH = "fetch"
    MESSAGES = "messages"  # of BLOCKS: what the KV manager did not let it wait; in no record
    MANAGER_AWAY = "manager_away"
    PREFILL_WAIT = "prefill_wait"
    LOADING = "loading"
    PREFILL = "prefill"
    STALLED = "stalled"
    DECODE = "decode"
    SILENT = "silent"
    PREEMPTED = "preempted"
    MOVED = "moved"
    SENDING = "sending"
    CLIENT = "client"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended, and its seconds by phase: `before` its first token and `after` it.

    `ended` is the finish reason of its last sequence, or the reason of its error with `failure` in words. `miss` is the
    manager's reason why no more of its prompt was cached; empty while it had no blocks. `other_domain_tokens` is how
    much of its prompt another cache domain has sent, `other_domain` which one. `client_longest` is the longest time
    that the client left an event unread. When the request came, the router had stood still for up to `unread_before`.
    `passed_by` requests of a higher priority got a worker before this one, which waited for one. `usual_gap` is the
    median of seconds a token of requests that its worker served before; 0: not known. With `counts_pages`, records of
    its KV manager have pages in place of blocks. `shared_tokens` begin the prompt and an earlier one of its cache
    domain. `ahead_tokens` are positions that its worker computed for others between its admission and its own first
    step, most of them for `ahead_of`. `gaps` are the times between two events of output that a client sees, `late_gaps`
    those above the objective of the router. Its workers copied `loaded_blocks` from host memory in `load_seconds`, and
    would have computed them in `spared_seconds`; 0: not known. Before that it waited `fetch_seconds` for `fetch_asked`
    blocks from `fetch_source` ("disk", or a worker), and shared `fetched_blocks` of them. `prompt_worker` computed
    `computed_elsewhere` tokens of the prompt for the worker that sampled, or did not because of `prompt_end`. It waited
    until `adapter_worker` had loaded its `adapter`; both are empty where that was in memory. `adapter_wait` says why
    the adapter first found no room, empty where it did. `kept` names the tail rules that keep it. `index` is what the
    prefix index said (`IndexAnswer.words`): empty for a whole answer.
    """

    time_ns: int = 0
    ended: str = ""
    failure: str = ""
    worker: str = ""
    miss: str = ""
    other_domain: str = ""
    ahead_of: str = ""
    prompt_worker: str = ""
    adapter: str = ""
    adapter_worker: str = ""
    adapter_wait: str = ""
    prompt_end: str = ""
    kept: str = ""
    index: str = ""
    fetch_source: str = ""
    tenant: str = ""
    before: Seconds = ()
    after: Seconds = ()
    has_first_token: bool = False
    started: bool = False
    queued: bool = False
    index_answered: bool = True
    counts_pages: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    computed_elsewhere: int = 0
    block_size: int = 0
    admissions: int = 0
    placements: int = 0
    preemptions: int = 0
    moves: int = 0
    ahead_tokens: int = 0
    loaded_blocks: int = 0
    fetched_blocks: int = 0
    fetch_asked: int = 0
    other_domain_tokens: int = 0
    shared_tokens: int = 0
    sequences: int = 0
    passed_by: int = 0
    diverged_at: int = 0
    gaps: int = 0
    late_gaps: int = 0
    longest_gap: float = 0.0
    client_longest: float = 0.0
    unread_before: float = 0.0
    usual_gap: float = 0.0
    load_seconds: float = 0.0
    spared_seconds: float = 0.0
    fetch_seconds: float = 0.0

    @property
    def first_token_s(self) -> float:
        """Seconds to the first token; to the end where there was none."""
        return sum(seconds for _, seconds in self.before)

    @property
    def unfetched_blocks(self) -> int:
        """Blocks that it waited for and did not get."""
        return max(0, self.fetch_asked - self.fetched_blocks)

    @property
    def fetch_spared_s(self) -> float:
        """About what computing the fetched blocks would have taken; 0: not known."""
        return self.spared_seconds * self.fetched_blocks / self.loaded_blocks if self.loaded_blocks else 0.0

    @property
    def decode_gap(self) -> float:
        """Seconds a token after the first one, of each of its sequences; 0 where there are none."""
        sequences = max(1, self.sequences)
        further = self.output_tokens - sequences
        return dict(self.after).get(Phase.DECODE, 0.0) * sequences / further if further > 0 else 0.0

    @property
    def decodes_slowly(self) -> bool:
        """Whether its tokens came at less than half of the pace that is usual at its worker."""
        return 0.0 < SLOW_GAPS * self.usual_gap < self.decode_gap

    @property
    def total_s(self) -> float:
        return self.first_token_s + sum(seconds for _, seconds in self.after)


_TEXTS: Final = (
    *("ended", "failure", "worker", "miss", "other_domain", "ahead_of", "kept", "index", "fetch_source"),
    *("prompt_worker", "prompt_end", "adapter", "adapter_worker", "adapter_wait"),
)
_FLAGS: Final = ("has_first_token", "started", "queued", "index_answered", "counts_pages")
_APART: Final = frozenset((*_TEXTS, *_FLAGS, "time_ns", "tenant", "before", "after"))
_COUNTS: Final = tuple(field.name for field in fields(Outcome) if field.name not in _APART)
_SECONDS: Final = (
    "client_longest", "longest_gap", "usual_gap", "unread_before", "load_seconds", "spared_seconds", "fetch_seconds"
)  # fmt: skip
# Texts that name other requests or tenants: the public plane leaves them out, with the counts that go with them.
PRIVATE_TEXTS: Final = ("other_domain", "ahead_of")
PRIVATE_COUNTS: Final = ("other_domain_tokens", "shared_tokens")


def texts_of(outcome: Outcome) -> tuple[str, ...]:
    """Return the words of an outcome as the reasons of its decision record; empty ones are left out."""
    return tuple([f"{name}: {value}" for name in _TEXTS if (value := getattr(outcome, name))])


def figures_of(outcome: Outcome) -> Seconds:
    """Return the numbers of an outcome as the figures of its decision record; zeros are left out."""
    counts = [(name, float(getattr(outcome, name))) for name in (*_COUNTS, *_FLAGS)]
    phases = [(f"{part}.{name}", seconds) for part in ("before", "after") for name, seconds in getattr(outcome, part)]
    return tuple([each for each in (*counts, *phases) if each[1]])


def outcome_of(decision: Decision) -> Outcome:
    """Return the outcome that a decision record holds; unknown names in it are ignored."""
    figures, texts = dict(decision.figures), dict(map(_named, decision.reasons))
    values: dict[str, Any] = {name: texts.get(name, "") for name in _TEXTS}
    values |= {name: bool(figures.get(name, 0.0)) for name in _FLAGS}
    values |= {name: int(figures.get(name, 0.0)) for name in _COUNTS}
    values |= {"before": _phases(figures, "before."), "after": _phases(figures, "after.")}
    values |= {name: figures.get(name, 0.0) for name in _SECONDS}
    return Outcome(time_ns=decision.time_ns, tenant=decision.tenant, **values)


def _named(reason: str) -> tuple[str, str]:
    name, _, value = reason.partition(": ")
    return name, value


def _phases(figures: Mapping[str, float], prefix: str) -> Seconds:
    """Return the seconds of one part, in the order of the phases, whatever the order of the record's map is."""
    found = [(phase.value, figures.get(prefix + phase, 0.0)) for phase in Phase]
    return tuple([each for each in found if each[1] > 0.0])
