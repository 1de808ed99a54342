"""The cause of each phase of a request, and in words what happened in it.

A phase has one cause or none that is known. A record that is missing turns its cause into "not known", never into
another one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from common.contracts.lease import FETCH_REASON
from common.contracts.types import ShortfallReason
from router.observe.diagnosis.causes import Cause
from router.observe.diagnosis.index_words import index_words
from router.observe.diagnosis.outcome import Outcome, Phase
from router.observe.diagnosis.request_history import Holder, Placement, Preemption, RequestHistory, Shortfall
from router.observe.diagnosis.words import count, duration, listed

LABELS: Final = {
    Phase.READING: "reading the request",
    Phase.QUEUE: "waiting for a worker",
    Phase.LOOKUP: "looking up its prefix",
    Phase.PREFILL_ELSEWHERE: "computing its prompt elsewhere",
    Phase.ADAPTER: "waiting for its adapter",
    Phase.CONSTRAINT: "compiling its constraint",
    Phase.ROUTER_STILL: "while the router stood still",
    Phase.ON_THE_WAY: "between router and worker",
    Phase.WORKER_STILL: "while its worker stood still",
    Phase.BLOCKS: "waiting for blocks",
    Phase.FETCH: "waiting for a fetch",
    Phase.MESSAGES: "messages with the KV manager",
    Phase.MANAGER_AWAY: "without a KV manager",
    Phase.PREFILL_WAIT: "behind other prompts",
    Phase.LOADING: "loading blocks from host memory",
    Phase.PREFILL: "computing its prompt",
    Phase.STALLED: "lacking further blocks",
    Phase.DECODE: "sampling its tokens",
    Phase.SILENT: "without output",
    Phase.PREEMPTED: "preempted",
    Phase.MOVED: "moving to another worker",
    Phase.SENDING: "sending its output",
    Phase.CLIENT: "waiting for the client",
}
# Phases in which the request itself is worked on.
WORK: Final = frozenset({Phase.PREFILL_ELSEWHERE, Phase.LOADING, Phase.PREFILL, Phase.DECODE})
# An event that the client leaves unread for longer has nothing to do with a busy event loop.
SLOW_READ_S: Final = 0.25
# A shorter duration is written as 0.0 ms.
_LEAST_SHOWN_S: Final = 0.00005
# A shorter wait at the KV manager is none.
_LEAST_WAIT_S: Final = 0.001
_ALWAYS: Final = {
    Phase.READING: Cause.READING,
    Phase.LOOKUP: Cause.INDEX_SLOW,
    Phase.PREFILL_ELSEWHERE: Cause.PREFILL_ELSEWHERE,
    Phase.ADAPTER: Cause.ADAPTER,
    Phase.CONSTRAINT: Cause.CONSTRAINT,
    Phase.ROUTER_STILL: Cause.ROUTER_STILL,
    Phase.ON_THE_WAY: Cause.ON_THE_WAY,
    Phase.WORKER_STILL: Cause.WORKER_STILL,
    Phase.SENDING: Cause.SENDING,
    Phase.MESSAGES: Cause.MESSAGES,
    Phase.MANAGER_AWAY: Cause.MANAGER_AWAY,
    Phase.PREFILL_WAIT: Cause.HEAD_OF_LINE,
    Phase.LOADING: Cause.LOADED,
    Phase.STALLED: Cause.STALLED,
    Phase.PREEMPTED: Cause.PREEMPTED,
    Phase.MOVED: Cause.WORKER_LOST,
}


def parts_of(
    phase: Phase, seconds: float, history: RequestHistory, outcome: Outcome
) -> tuple[tuple[Phase, float], ...]:
    """Return the phases that so many recorded seconds of a phase are, each with its own cause.

    Of a wait for blocks, the KV manager's record of the admission says how long it let the sequence wait, beside the
    wait for a fetch, which is a phase of its own.
    """
    if phase is not Phase.BLOCKS or not outcome.admissions or len(history.grants) < outcome.admissions:
        return ((phase, seconds),)
    waited = min(seconds, history.grants[0].lacked)
    parts = ((Phase.BLOCKS, waited), (Phase.MESSAGES, seconds - waited))
    return tuple([each for each in parts if each[1] > 0.0])


def cause_of(phase: Phase, history: RequestHistory, outcome: Outcome) -> Cause:
    """Return the cause of the seconds in a phase."""
    match phase:
        case Phase.QUEUE:
            return _queue_cause(history, outcome)
        case Phase.BLOCKS | Phase.FETCH:
            return _blocks_cause(history, outcome) if phase is Phase.BLOCKS else _fetch_cause(outcome)
        case Phase.DECODE:
            return Cause.SLOW_DECODE if outcome.decodes_slowly else Cause.DECODE
        case Phase.PREFILL:
            return Cause.PREFILL if outcome.started else Cause.NOT_KNOWN
        case Phase.CLIENT:
            return Cause.SLOW_CLIENT if outcome.client_longest >= SLOW_READ_S else Cause.NOT_KNOWN
        case _:
            return _ALWAYS.get(phase, Cause.NOT_KNOWN)


def _queue_cause(history: RequestHistory, outcome: Outcome) -> Cause:
    if not outcome.queued:
        return Cause.ROUTER
    if not history.queued:
        return Cause.NOT_KNOWN
    return Cause.OUTRANKED if outcome.passed_by else Cause.WORKER_QUEUE


def _blocks_cause(history: RequestHistory, outcome: Outcome) -> Cause:
    """Return why the manager let the sequence wait. That needs its records of all admissions, and of the wait."""
    if len(history.grants) < outcome.admissions or not history.shortfalls:
        return Cause.NOT_KNOWN
    if not history.lacks:
        return _fetch_cause(outcome)
    return Cause.OUTRANKED if _passed_at_manager(history) else Cause.BLOCKS


def _fetch_cause(outcome: Outcome) -> Cause:
    return Cause.FETCH_FAILED if outcome.unfetched_blocks else Cause.FETCHING


def _passed_at_manager(history: RequestHistory) -> int:
    """Return how many sequences of a higher priority were admitted while the request waited for its blocks."""
    return history.grants[0].passed_by if history.grants else 0


# ------------------------------------------------------------ in words


def phrase(cause: Cause, seconds: float, history: RequestHistory, outcome: Outcome) -> str:
    """Return what happened in the time of a cause, as the end of a sentence."""
    return _PHRASES[cause](seconds, history, outcome)


def unknown_words(phase: Phase, history: RequestHistory, outcome: Outcome) -> str:
    """Return what is known of a phase whose cause is not."""
    match phase:
        case Phase.QUEUE:
            return "it waited for a worker, and the router's record of that is gone"
        case Phase.BLOCKS:
            return f"it waited at {_worker(outcome)} to be admitted, and {_unrecorded_words(history, outcome)}"
        case Phase.PREFILL:
            return "it had its blocks, and its worker did not say when it began to compute the prompt"
        case Phase.SILENT:
            return f"{_worker(outcome)} put out nothing for so long, until the end, and had not said why yet"
        case _:
            return "its output waited for the client or for the router's own event loop"


def _unrecorded_words(history: RequestHistory, outcome: Outcome) -> str:
    """Return why no record of a KV manager says what a sequence waited for."""
    if history.unread:
        return f"the KV manager's records of that could not be read ({'; '.join(history.unread)})"
    if not outcome.admissions:
        return "no KV manager has a record of that: it may have been away"
    return "the KV manager's records of that are gone"


def _worker(outcome: Outcome) -> str:
    return outcome.worker or "its worker"


def _queued_words(history: RequestHistory) -> str:
    first = history.queued[0]
    reasons = [f"{name}: {reason}" for name, reason in first.workers]
    ahead = f", with {count(first.ahead, 'request')} before it" if first.ahead else ""
    return f"no worker could take it{ahead} ({listed(reasons)})" if reasons else f"it waited for a worker{ahead}"


def _blocks_words(history: RequestHistory, outcome: Outcome) -> str:
    if not history.lacks:
        return fetch_words(history, outcome)
    first, unit = history.lacks[0], history.unit
    at = f"at {_worker(outcome)}"
    if first.reason == ShortfallReason.PLACES:
        return f"it waited {at} for a slot in the batch, which {_holders_words(first, unit)}"
    if first.reason == ShortfallReason.BEHIND:
        head = f"{first.head or 'another request'}, which goes first and needs {count(first.head_needed, unit)}"
        return f"it waited {at} behind {head}; {first.available} of {first.num_blocks} {unit}s were free or cached"
    if first.reason == ShortfallReason.CHECKPOINT:
        other = first.head or "another request"
        return f"it waited {at} while {other} computed what both begin with, to go on from its checkpoint"
    return f"it waited {at} for {count(first.needed, unit)}, and {_holders_words(first, unit)}"


def _outranked_words(history: RequestHistory, outcome: Outcome) -> str:
    """Return who went first: at the router, where it waited for a worker, and at the KV manager."""
    words = []
    if outcome.passed_by and history.queued:
        first = f"{count(outcome.passed_by, 'request')} of a higher priority went first"
        words.append(f"{first} while it waited for a worker: {_queued_words(history)}")
    if passed := _passed_at_manager(history):
        first = f"{count(passed, 'sequence')} of a higher priority went first"
        words.append(f"{first} at {_worker(outcome)}: {_blocks_words(history, outcome)}")
    return "; ".join(words)


def _stalled_words(history: RequestHistory, outcome: Outcome) -> str:
    lacking = history.grants[0].lacking if history.grants else 0
    if lacking:
        others = f"{lacking} pages more" if history.unit == "page" else f"the other {lacking}"
        began = f"it began with a part of its prompt's blocks, and waited at {_worker(outcome)} for {others}"
    else:
        lacks = "which had no block for its next tokens: the KV manager had none free, or answered late"
        began = f"it ran at {_worker(outcome)}, {lacks}"
    return f"{began}; {_holders_words(history.lacks[0], history.unit)}" if history.lacks else began


def _holders_words(shortfall: Shortfall, unit: str) -> str:
    """Return who held the pool when the wait began."""
    if not shortfall.tenants:
        return "who held them is not known"
    named = [_tenant_words(each, unit) for each in shortfall.tenants]
    greatest = listed([each.name for each in shortfall.requests])
    return (
        f"{listed(named)} held {'it' if shortfall.reason == ShortfallReason.PLACES else 'them'} (the most: {greatest})"
    )


def _tenant_words(holder: Holder, unit: str) -> str:
    owner = f" of tenant {holder.name}" if holder.name else ""
    return f"{count(holder.sequences, 'sequence')}{owner} with {count(holder.blocks, unit)}"


def _messages_words(history: RequestHistory, outcome: Outcome) -> str:
    waited = history.grants[0].lacked if history.grants else 0.0
    granted = f"after a wait of {duration(waited)}" if waited >= _LEAST_WAIT_S else "without a wait"
    late = f"the KV manager answered {_worker(outcome)} late: it stood still, or the messages between them were slow"
    return f"{late}; it granted the blocks {granted}"


def _reading_words(outcome: Outcome) -> str:
    return f"the router read the request and made it into {count(outcome.prompt_tokens, 'token')}"


def _ahead_words(outcome: Outcome) -> str:
    most = f", most of them for {outcome.ahead_of}" if outcome.ahead_of else ""
    words = f"{_worker(outcome)} computed {count(outcome.ahead_tokens, 'token')} of other requests first{most}"
    return f"it had its blocks, and {words}"


def fetch_words(history: RequestHistory, outcome: Outcome) -> str:
    """Return what a sequence waited for that was fetched, how long, and what became of it."""
    at = f"at {_worker(outcome)}"
    if not outcome.fetch_asked:  # it ended first
        asked = next((each for each in history.shortfalls if each.reason == ShortfallReason.FETCH), None)
        came = f"{count(asked.needed, 'block')} to come from {_source(asked.head)}" if asked else "blocks to be fetched"
        return f"it waited {at} for {came}"
    waited, source = f"it waited {duration(outcome.fetch_seconds)} {at}", _source(outcome.fetch_source)
    if outcome.unfetched_blocks:
        return f"{waited} for blocks from {source}; {unfetched_words(history, outcome)}"
    spared = f", in place of {duration(outcome.fetch_spared_s)} of prefill" if outcome.fetch_spared_s else ""
    return f"{waited} while {count(outcome.fetched_blocks, 'block')} came from {source}{spared}"


def unfetched_words(history: RequestHistory, outcome: Outcome) -> str:
    """Return how many of the blocks that a sequence waited for did not come, and why."""
    lost, asked = outcome.unfetched_blocks, count(outcome.fetch_asked, "block")
    why = next((each for grant in history.grants for each in grant.reasons if each.startswith(FETCH_REASON)), "")
    _, _, failed = why.partition("; ")
    reason = f" ({failed})" if failed else ""
    done = "was" if lost == 1 else "were"
    return f"{lost:,} of {asked} did not come from {_source(outcome.fetch_source)}{reason} and {done} computed"


def _source(name: str) -> str:
    return name or "elsewhere"


def loaded_words(outcome: Outcome) -> str:
    """Return what was loaded from host memory, in which time, and what computing it would have taken."""
    blocks = count(outcome.loaded_blocks, "block")
    tokens = count(outcome.loaded_blocks * outcome.block_size, "token")
    rate = f" (about {duration(outcome.spared_seconds)} at its rate)" if outcome.spared_seconds else ""
    took = duration(outcome.load_seconds) if outcome.load_seconds >= _LEAST_SHOWN_S else "under 0.1 ms"
    return f"{_worker(outcome)} loaded {blocks} from host memory in {took} instead of computing {tokens}{rate}"


def _elsewhere_words(outcome: Outcome) -> str:
    computing = outcome.prompt_worker or "another worker"
    if outcome.computed_elsewhere:
        tokens = count(outcome.computed_elsewhere, "token")
        return f"{computing} computed {tokens} of its prompt, for {_worker(outcome)} to fetch"
    why = outcome.prompt_end or "the request ended first"
    return f"its prompt was sent to {computing}, which did not compute it ({why})"


def _prefill_words(seconds: float, outcome: Outcome) -> str:
    computed = max(1, outcome.prompt_tokens - outcome.cached_tokens)
    each = duration(seconds / computed)
    return f"{_worker(outcome)} computed {count(computed, 'token')} of its prompt, {each} each"


def _decode_words(seconds: float, outcome: Outcome) -> str:
    sampled = max(1, outcome.output_tokens - 1)
    return f"{_worker(outcome)} sampled {count(sampled, 'further token')}, {duration(seconds / sampled)} each"


def _slow_decode_words(outcome: Outcome) -> str:
    sampled = f"{_worker(outcome)} sampled {count(outcome.output_tokens - max(1, outcome.sequences), 'further token')}"
    gaps = f"{duration(outcome.decode_gap)} from one to the next, where {duration(outcome.usual_gap)} is usual there"
    return f"{sampled} slowly, {gaps} (longest inter-token latency: {duration(outcome.longest_gap)})"


def _preempted_words(history: RequestHistory, outcome: Outcome) -> str:
    times = "" if outcome.preemptions < 2 else f" {outcome.preemptions} times"
    if not history.lost_to:
        return f"it was preempted{times}; for whom is not known, because the KV manager's record of it is not here"
    if len(history.lost_to) < 2:
        return f"it was preempted{times}: {preemption_words(history.lost_to[0], history.unit)}"
    most, seconds = _costliest(history)
    return (
        f"it was preempted{times}; what cost most, {duration(seconds)}, was that {preemption_words(most, history.unit)}"
    )


def _costliest(history: RequestHistory) -> tuple[Preemption, float]:
    """Return the preemption after which the request waited longest for its blocks, and these seconds."""
    waits = [(each, _seconds_without_blocks(each, history)) for each in history.lost_to]
    return max(waits, key=lambda wait: (wait[1], wait[0].tokens_lost))


def _seconds_without_blocks(preemption: Preemption, history: RequestHistory) -> float:
    """Return the seconds from a preemption to the next grant, or to the end of the request."""
    ended = (history.outcome.time_ns,) if history.outcome is not None else ()
    later = (
        time_ns for time_ns in (*(each.time_ns for each in history.grants), *ended) if time_ns > preemption.time_ns
    )
    return (min(later, default=preemption.time_ns) - preemption.time_ns) / 1e9


def preemption_words(preemption: Preemption, unit: str) -> str:
    freed = count(preemption.blocks_freed, unit)
    words = f"its {freed} went to {preemption.beneficiary or 'another request'} ({preemption.reason})"
    if not preemption.loadable_tokens:
        return words
    kept = count(preemption.loadable_tokens, "token")
    return f"{words}, and host memory takes what {kept} need, to be loaded again"


def _moved_words(history: RequestHistory) -> str:
    moves: list[Placement] = [each for each in history.placements if each.moved_because]
    if not moves:
        return "it lost its worker; which one and why is not known, because the router's record of it is gone"
    before = [each.worker for each in history.placements if each.time_ns < moves[0].time_ns]
    lost = before[-1] if before else "its worker"
    verb = "left" if moves[0].moved_because.startswith("drain:") else "lost"
    return f"it {verb} {lost} ({moves[0].moved_because}) and went on at {moves[0].worker}"


_PHRASES: Final[Mapping[Cause, Callable[[float, RequestHistory, Outcome], str]]] = {
    Cause.READING: lambda seconds, history, outcome: _reading_words(outcome),
    Cause.ROUTER_STILL: lambda seconds, history, outcome: (
        "the router stood still: its process was stopped, had no processor, or was held up by one long task"
    ),
    Cause.ON_THE_WAY: lambda seconds, history, outcome: (
        f"messages between the router and {_worker(outcome)} took so long: the network was slow, or one of the two "
        "did not read them"
    ),
    Cause.WORKER_STILL: lambda seconds, history, outcome: (
        f"{_worker(outcome)} stood still: its process was stopped or had no processor, or its steps took many times "
        "their usual"
    ),
    Cause.SENDING: lambda seconds, history, outcome: (
        f"{_worker(outcome)} had finished, and the router still wrote the output"
    ),
    Cause.WORKER_QUEUE: lambda seconds, history, outcome: _queued_words(history),
    Cause.ROUTER: lambda seconds, history, outcome: "the router's own work, before it chose a worker",
    Cause.INDEX_SLOW: lambda seconds, history, outcome: index_words(outcome),
    Cause.OUTRANKED: lambda seconds, history, outcome: _outranked_words(history, outcome),
    Cause.PREFILL_ELSEWHERE: lambda seconds, history, outcome: _elsewhere_words(outcome),
    Cause.ADAPTER: lambda seconds, history, outcome: (
        f"it waited for adapter {outcome.adapter or '?'} to load on {outcome.adapter_worker or 'its worker'}"
        + (f", which had no room: {outcome.adapter_wait}" if outcome.adapter_wait else "")
    ),
    Cause.CONSTRAINT: lambda seconds, history, outcome: (
        "its constraint (a schema, a regular expression or a grammar) was compiled before its first token"
    ),
    Cause.BLOCKS: lambda seconds, history, outcome: _blocks_words(history, outcome),
    Cause.FETCHING: lambda seconds, history, outcome: fetch_words(history, outcome),
    Cause.FETCH_FAILED: lambda seconds, history, outcome: fetch_words(history, outcome),
    Cause.MESSAGES: lambda seconds, history, outcome: _messages_words(history, outcome),
    Cause.MANAGER_AWAY: lambda seconds, history, outcome: (
        f"it lacked blocks at {_worker(outcome)}, whose KV manager did not answer for {duration(seconds)}"
    ),
    Cause.STALLED: lambda seconds, history, outcome: _stalled_words(history, outcome),
    Cause.HEAD_OF_LINE: lambda seconds, history, outcome: _ahead_words(outcome),
    Cause.LOADED: lambda seconds, history, outcome: loaded_words(outcome),
    Cause.PREFILL: lambda seconds, history, outcome: _prefill_words(seconds, outcome),
    Cause.DECODE: lambda seconds, history, outcome: _decode_words(seconds, outcome),
    Cause.SLOW_DECODE: lambda seconds, history, outcome: _slow_decode_words(outcome),
    Cause.PREEMPTED: lambda seconds, history, outcome: _preempted_words(history, outcome),
    Cause.WORKER_LOST: lambda seconds, history, outcome: _moved_words(history),
    Cause.SLOW_CLIENT: lambda seconds, history, outcome: (
        f"the client left output unread, for {duration(outcome.client_longest)} at a time"
    ),
}
