"""Each decision on a request in a sentence, in the order of their times."""

from __future__ import annotations

from collections.abc import Iterator

from common.contracts.types import ShortfallReason
from router.observe.diagnosis.outcome import Outcome
from router.observe.diagnosis.phases import preemption_words
from router.observe.diagnosis.story import Grant, Option, Placement, Queued, Shortfall, Story
from router.observe.diagnosis.verdict import Step
from router.observe.diagnosis.words import count, duration, listed

ROUTER, MANAGER = "router", "kvmanager"


def steps_of(story: Story) -> tuple[Step, ...]:
    """Return the decisions in sentences; offsets are from the first record of the request."""
    told = sorted(_told(story), key=lambda each: (each[0], each[1], each[2]))
    return tuple([Step((time_ns - story.began_ns) / 1e9, service, sentence) for time_ns, service, sentence in told])


def _told(story: Story) -> Iterator[tuple[int, str, str]]:
    for note in story.notes:
        yield note.time_ns, ROUTER, f"tells the client: {note.words}"
    for refusal in story.refusals:
        yield refusal.time_ns, ROUTER, f"refused by {refusal.subject}: {refusal.words}"
    for queued in story.queued:
        yield queued.time_ns, ROUTER, _queued(queued)
    for placement in story.placements:
        yield placement.time_ns, ROUTER, _placed(placement)
    for shortfall in story.shortfalls:
        yield shortfall.time_ns, MANAGER, _short(shortfall)
    for grant in story.grants:
        yield grant.time_ns, MANAGER, _granted(grant)
    for lost in story.lost_to:
        yield lost.time_ns, MANAGER, f"preempted: {preemption_words(lost)}; {count(lost.tokens_lost, 'token')} lost"
    for gained in story.gained_from:
        taken = count(gained.blocks_freed, "block")
        yield gained.time_ns, MANAGER, f"{gained.victim or 'another request'} gave {taken} ({gained.reason})"
    if story.outcome is not None:
        yield story.outcome.time_ns, ROUTER, _ended(story.outcome)


def _queued(queued: Queued) -> str:
    reasons = listed([f"{name}: {reason}" for name, reason in queued.workers])
    return f"waits, no worker can take it ({reasons}); {count(queued.ahead, 'request')} before it"


def _placed(placement: Placement) -> str:
    why = f"moved, because {placement.moved_because}; " if placement.moved_because else ""
    chosen = placement.chosen
    if chosen is None or chosen.cost is None:
        return f"{why}no worker was chosen: {placement.worker}"
    others = sorted(
        (each for each in placement.options if each is not chosen),
        key=lambda each: (each.cost if each.cost is not None else float("inf"), each.worker),
    )
    against = f"; {listed([_option(each) for each in others])}" if others else ""
    return f"{why}goes to {placement.worker}, the least predicted: {_option(chosen)}{against}"


def _option(option: Option) -> str:
    if option.cost is None:
        return f"{option.worker} out ({option.rejected})"
    hits = f", {count(option.hit_blocks, 'hit block')}" if option.hit_blocks else ""
    return f"{option.worker} {duration(option.cost)}{hits}"


def _short(shortfall: Shortfall) -> str:
    behind = f" behind {shortfall.head}" if shortfall.reason == ShortfallReason.BEHIND and shortfall.head else ""
    room = (
        f"needs {count(shortfall.needed, 'block')}, {shortfall.available} of {shortfall.num_blocks} are free or cached"
    )
    return f"waits{behind} ({shortfall.reason}): it {room}"


def _granted(grant: Grant) -> str:
    waited = f" after {duration(grant.waited)}" if grant.waited else ""
    evicted = f", {grant.evicted} of them evicted for it" if grant.evicted else ""
    miss, *others = grant.reasons or ("not recorded",)
    return f"gets {grant.chosen}{waited}{evicted} ({'; '.join([f'its prefix: {miss}', *others])})"


def _ended(outcome: Outcome) -> str:
    words = outcome.failure or outcome.ended
    kept = f" (kept: {outcome.kept})" if outcome.kept else ""
    return f"ends with {count(outcome.output_tokens, 'token')} after {duration(outcome.total_s)}: {words}{kept}"
