"""The change of a measure in words: what happened, which cause explains most of it, and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from router.observe.diagnosis.causes import Advice, Cause, advice_for
from router.observe.diagnosis.change import FEW, HIT_RATE, Change, Division, Part
from router.observe.diagnosis.outcome import Phase
from router.observe.diagnosis.phases import LABELS
from router.observe.diagnosis.words import count, duration, listed, percent

# Less than this is not a change: percentage points of the hit rate, or a share of the time.
_NO_POINTS: Final = 0.005
_NO_SHARE: Final = 0.02
# Causes are named until they explain so much of a change.
_ENOUGH: Final = 0.75
_REASONS: Final[Mapping[str, str]] = {
    "never_seen": "prompts that no worker had seen",
    "diverged_at": "prompts that differ from earlier ones",
    "evicted": "prefixes that were evicted",
    "below_block": "prompts shorter than a block",
    "disabled": "requests that do not use the cache",
    "windowed": "prompts whose windows were being computed, or evicted",
    "unresumable": "prompts of which K and V were there, and no checkpoint of states",
    "unfetched": "prompts of which more was on disk, and not fetched",
    "fetch_failed": "blocks that did not come from disk, or from another worker, in a fetch",
    "full_hit": "last tokens, which are always computed",
    "capped": "last tokens, which are always computed",
    "rest": "tokens without a reason",
}
_MISS_CAUSES: Final[Mapping[str, Cause]] = {
    "never_seen": Cause.NEVER_SEEN,
    "diverged_at": Cause.DIVERGED,
    "evicted": Cause.EVICTED,
    "below_block": Cause.BELOW_BLOCK,
    "disabled": Cause.CACHE_OFF,
    "windowed": Cause.WINDOW_MISSING,
    "unresumable": Cause.NO_CHECKPOINT,
    "unfetched": Cause.NOT_FETCHED,
    "fetch_failed": Cause.FETCH_FAILED,
}
_PHASE_CAUSES: Final[Mapping[str, Cause]] = {
    Phase.READING: Cause.READING,
    Phase.QUEUE: Cause.WORKER_QUEUE,
    Phase.LOOKUP: Cause.INDEX_SLOW,
    Phase.PREFILL_ELSEWHERE: Cause.PREFILL_ELSEWHERE,
    Phase.ADAPTER: Cause.ADAPTER,
    Phase.CONSTRAINT: Cause.CONSTRAINT,
    Phase.ROUTER_STILL: Cause.ROUTER_STILL,
    Phase.ON_THE_WAY: Cause.ON_THE_WAY,
    Phase.WORKER_STILL: Cause.WORKER_STILL,
    Phase.BLOCKS: Cause.BLOCKS,
    Phase.FETCH: Cause.FETCHING,
    Phase.MANAGER_AWAY: Cause.MANAGER_AWAY,
    Phase.PREFILL_WAIT: Cause.HEAD_OF_LINE,
    Phase.LOADING: Cause.LOADED,
    Phase.PREFILL: Cause.PREFILL,
    Phase.STALLED: Cause.STALLED,
    Phase.DECODE: Cause.DECODE,
    Phase.PREEMPTED: Cause.PREEMPTED,
    Phase.MOVED: Cause.WORKER_LOST,
    Phase.SENDING: Cause.SENDING,
    Phase.CLIENT: Cause.SLOW_CLIENT,
}


def head_of(found: Change) -> str:
    """Return the first line: what happened, and the causes of most of it."""
    name, before, after = _NAMES[found.measure], found.before, found.after
    if found.change is None or before.value is None or after.value is None:
        which = "either span" if not before.requests and not after.requests else _which_is_empty(found)
        return f"Nothing to compare: no request that counts ended in {which}."
    values = f"from {value_words(found, before.value)} to {value_words(found, after.value)}"
    if is_steady(found):
        return f"{name} hardly changed: {values}."
    what = f"{name} {'rose' if found.change > 0 else 'fell'} {values}"
    return f"{what}, by {change_words(found, abs(found.change))}: {_explained(found)}."


def caution_of(found: Change) -> str:
    """Return why the comparison is weak; "" if it is not."""
    fewest = min(found.before.requests, found.after.requests)
    if found.change is None or fewest >= FEW:
        return ""
    return f"Only {count(fewest, 'request')} ended in one of the spans: chance alone may explain the change."


def advice_of(found: Change) -> Advice | None:
    """Return what to do about a change for the worse, by the cause that explains most of it."""
    if found.change is None or is_steady(found) or (found.change > 0) == (found.measure == HIT_RATE):
        return None
    causes = _MISS_CAUSES if found.measure == HIT_RATE else _PHASE_CAUSES
    worst = _pushing(found)[0]
    return advice_for(causes[worst.name]) if worst.name in causes else None


def is_steady(found: Change) -> bool:
    assert found.change is not None
    if found.measure == HIT_RATE:
        return abs(found.change) < _NO_POINTS
    return abs(found.change) < _NO_SHARE * max(found.before.value or 0.0, found.after.value or 0.0)


def value_words(found: Change, value: float) -> str:
    return percent(value) if found.measure == HIT_RATE else duration(value)


def change_words(found: Change, change: float) -> str:
    """Return the size of a change, without its sign."""
    return f"{abs(change) * 100:.1f} points" if found.measure == HIT_RATE else duration(abs(change))


def part_name(division: Division, part: Part) -> str:
    """Return the name of a part in words."""
    if division.by == "phase":
        return LABELS.get(Phase(part.name), part.name) if part.name in set(Phase) else part.name
    if division.by == "miss reason":
        return _REASONS.get(part.name, part.name)
    return part.name or ("without a key" if division.by == "tenant" else "none")


_NAMES: Final = {HIT_RATE: "The hit rate", "first_token": "The mean time to the first token"}


def _which_is_empty(found: Change) -> str:
    return "the span before" if not found.before.requests else "this span"


def _pushing(found: Change) -> list[Part]:
    """Return the parts of the first division that point in the direction of the change."""
    assert found.change is not None
    sign = 1 if found.change > 0 else -1
    return [each for each in found.divisions[0].parts if sign * each.change > 0]


def _explained(found: Change) -> str:
    assert found.change is not None
    pushing, named, left = _pushing(found), list[str](), _ENOUGH * abs(found.change)
    for part in pushing:
        named.append(f"{part_name(found.divisions[0], part)} ({change_words(found, part.change)})")
        left -= abs(part.change)
        if left <= 0 or len(named) == 3:
            break
    return f"mostly from {listed(named)}"
