"""The rules: from the records of one request to its diagnosis.

All durations come from the record that ends the request; each phase has one cause, or a cause that is not known. The
verdict names a cause only if no other one could be greater, even if it had all the time whose cause is not known. A
record that is lost can therefore turn a verdict into "not known", and never into another cause.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

from common.contracts.types import ShortfallReason
from router.observe.diagnosis.causes import NOTHING, Cause, advice_for
from router.observe.diagnosis.ends import end_cause, end_words, refusal_verdict
from router.observe.diagnosis.outcome import Outcome, Phase
from router.observe.diagnosis.phases import LABELS, WORK, cause_of, parts_of, phrase, preemption_words, unknown_words
from router.observe.diagnosis.prefix import prefix_verdict
from router.observe.diagnosis.request_history import Grant, Option, Placement, Queued, RequestHistory, Shortfall
from router.observe.diagnosis.verdict import Diagnosis, PhaseSpan, Step, Verdict
from router.observe.diagnosis.words import count, duration, listed, percent

ROUTER, MANAGER = "router", "kvmanager"


# Each decision on a request in a sentence, in the order of their times.
def steps_of(history: RequestHistory) -> tuple[Step, ...]:
    """Return the decisions in sentences; offsets are from the first record of the request."""
    told = sorted(_told(history), key=lambda each: (each[0], each[1], each[2]))
    return tuple([Step((time_ns - history.began_ns) / 1e9, service, sentence) for time_ns, service, sentence in told])


def _told(history: RequestHistory) -> Iterator[tuple[int, str, str]]:
    for note in history.notes:
        yield note.time_ns, ROUTER, f"tells the client: {note.words}"
    for refusal in history.refusals:
        yield refusal.time_ns, ROUTER, f"refused by {refusal.subject}: {refusal.words}"
    for queued in history.queued:
        yield queued.time_ns, ROUTER, _queued(queued)
    for placement in history.placements:
        yield placement.time_ns, ROUTER, _placed(placement)
    for shortfall in history.shortfalls:
        yield shortfall.time_ns, MANAGER, _short(shortfall, history.unit)
    for grant in history.grants:
        yield grant.time_ns, MANAGER, _granted(grant, history.unit)
    for lost in history.lost_to:
        yield (
            lost.time_ns,
            MANAGER,
            f"preempted: {preemption_words(lost, history.unit)}; {count(lost.tokens_lost, 'token')} lost",
        )
    for gained in history.gained_from:
        taken = count(gained.blocks_freed, history.unit)
        yield gained.time_ns, MANAGER, f"{gained.victim or 'another request'} gave {taken} ({gained.reason})"
    if history.outcome is not None:
        yield history.outcome.time_ns, ROUTER, _ended(history.outcome)


def _queued(queued: Queued) -> str:
    reasons = listed([f"{name}: {reason}" for name, reason in queued.workers])
    return f"waits, no worker can take it ({reasons}); {count(queued.ahead, 'request')} before it"


def _placed(placement: Placement) -> str:
    why = f"moved, because {placement.moved_because}; " if placement.moved_because else ""
    chosen = placement.chosen
    if chosen is None or chosen.cost is None:
        return f"{why}no worker was chosen: {placement.worker}"
    rest = sorted(
        (each for each in placement.options if each is not chosen),
        key=lambda each: (each.cost if each.cost is not None else float("inf"), each.worker),
    )
    against = f"; {listed([_option(each) for each in rest])}" if rest else ""
    others = f"; {placement.by_others}" if placement.by_others else ""
    return f"{why}goes to {placement.worker}, the least predicted: {_option(chosen)}{against}{others}"


def _option(option: Option) -> str:
    if option.cost is None:
        return f"{option.worker} out ({option.rejected})"
    hits = f", {count(option.hit_blocks, 'hit block')}" if option.hit_blocks else ""
    fetch = dict(option.terms).get("fetch", 0.0)
    fetched = f", {count(option.fetched_blocks, 'block')} to fetch in {duration(fetch)}" if fetch else ""
    return f"{option.worker} {duration(option.cost)}{hits}{fetched}"


def _short(shortfall: Shortfall, unit: str) -> str:
    if shortfall.reason == ShortfallReason.FETCH:
        return f"waits while {count(shortfall.needed, 'block')} come from {shortfall.head or 'elsewhere'}"
    others = (ShortfallReason.BEHIND, ShortfallReason.CHECKPOINT)
    behind = f" behind {shortfall.head}" if shortfall.reason in others and shortfall.head else ""
    room = f"needs {count(shortfall.needed, unit)}, {shortfall.available} of {shortfall.num_blocks} are free or cached"
    return f"waits{behind} ({shortfall.reason}): it {room}"


def _granted(grant: Grant, unit: str) -> str:
    waited = f" after {duration(grant.waited)}" if grant.waited else ""
    evicted = f", {grant.evicted} of them evicted for it" if grant.evicted else ""
    if grant.evicted and unit == "page":
        evicted = f", {count(grant.evicted, 'cached block')} evicted for it"
    miss, *others = grant.reasons or ("not recorded",)
    return f"gets {grant.chosen}{waited}{evicted} ({'; '.join([f'its prefix: {miss}', *others])})"


def _ended(outcome: Outcome) -> str:
    words = outcome.failure or outcome.ended
    kept = f" (kept: {outcome.kept})" if outcome.kept else ""
    return f"ends with {count(outcome.output_tokens, 'token')} after {duration(outcome.total_s)}: {words}{kept}"


# Causes closer than this part of the time tie.
TIE: Final = 0.02
# Below this part of the time, waits did not hold a request up.
NEGLIGIBLE: Final = 0.2
# A wait beside work that is greater is told from so many seconds on.
WORTH_SAYING_S: Final = 0.1


def diagnose(history: RequestHistory) -> Diagnosis:
    """Return why a request took its time or ended early, and why no more of its prompt was cached."""
    outcome = history.outcome
    phases = _phases(history, outcome) if outcome is not None else ()
    prefix = prefix_verdict(history)
    return Diagnosis(
        request_id=history.request_id,
        tenant=history.tenant,
        verdict=_verdict(history, outcome, phases),
        prefix=prefix,
        phases=phases,
        steps=steps_of(history),
        missing=_missing(history, phases),
        total_s=outcome.total_s if outcome is not None else None,
        first_token_s=outcome.first_token_s if outcome is not None and outcome.has_first_token else None,
    )


def _phases(history: RequestHistory, outcome: Outcome) -> tuple[PhaseSpan, ...]:
    total = outcome.total_s
    if total <= 0.0:
        return ()
    parts = ((False, outcome.before), (True, outcome.after))
    return tuple(
        [
            PhaseSpan(phase, after, seconds, seconds / total, cause_of(phase, history, outcome))
            for after, part in parts
            for name, whole in part
            for phase, seconds in parts_of(Phase(name), whole, history, outcome)
        ]
    )


def _verdict(history: RequestHistory, outcome: Outcome | None, phases: tuple[PhaseSpan, ...]) -> Verdict:
    if outcome is None:
        return refusal_verdict(history) or _unfinished(history)
    ended = end_cause(outcome)
    args = history, outcome, phases
    found = _time_verdict(*args) if ended is None else _end_verdict(ended, *args)
    if outcome.unread_before < max(NEGLIGIBLE * outcome.total_s, WORTH_SAYING_S):
        return found
    return replace(found, sentence=f"{found.sentence} {_unread_words(outcome)}")


def _unread_words(outcome: Outcome) -> str:
    """Return what no phase has: nobody knows when a request came to a router that stood still."""
    still = f"The router had stood still for up to {duration(outcome.unread_before)} when the request came"
    return f"{still}: before these {duration(outcome.total_s)} it may have lain unread for as long."


def _unfinished(history: RequestHistory) -> Verdict:
    steps = steps_of(history)
    last = f"; the last record: {steps[-1].sentence}" if steps else ""
    sentence = f"Not known: the request has not ended yet, or the record of its end is gone{last}."
    return Verdict(Cause.NOT_KNOWN, 0.0, sentence, (), NOTHING)


# ------------------------------------------------------------ the time


def _time_verdict(history: RequestHistory, outcome: Outcome, phases: tuple[PhaseSpan, ...]) -> Verdict:
    """Return what took the time to the first token, or of the whole request where that was the better question."""
    before = [each for each in phases if not each.after_first_token]
    if outcome.has_first_token and _asks_for_the_first_token(phases, outcome):
        return _greatest(history, outcome, before, f"the {duration(outcome.first_token_s)} to the first token")
    return _greatest(history, outcome, phases, f"its {duration(outcome.total_s)}")


def _asks_for_the_first_token(phases: Iterable[PhaseSpan], outcome: Outcome) -> bool:
    waits = {False: 0.0, True: 0.0}
    for each in phases:
        if each.cause is Cause.SLOW_DECODE:
            waits[True] += each.seconds * (1.0 - outcome.usual_gap / outcome.decode_gap)
        elif each.phase not in WORK:
            waits[each.after_first_token] += each.seconds
    return waits[False] >= max(waits[True], NEGLIGIBLE * outcome.first_token_s)


def _greatest(history: RequestHistory, outcome: Outcome, phases: Iterable[PhaseSpan], whole: str) -> Verdict:
    """Return the cause of the greatest part of the time; "not known" if another one could be as great."""
    seconds = _by_cause(phases)
    total = sum(seconds.values())
    unknown = seconds.pop(Cause.NOT_KNOWN, 0.0)
    ordered = sorted(seconds.items(), key=lambda each: (-each[1], each[0]))
    evidence = tuple([_part(history, outcome, cause, part, total) for cause, part in ordered if part >= TIE * total])
    if ordered and ordered[0][1] > _second(ordered) + unknown + TIE * total:
        cause, part = ordered[0]
        least = max(NEGLIGIBLE * total, WORTH_SAYING_S)
        wait = next((each for each in ordered if not _is_work(each[0]) and each[1] >= least), None)
        lead = "Nothing held it up: " if _is_work(cause) and part > (1 - NEGLIGIBLE) * total else ""
        words = f"{lead}{percent(part / total)} of {whole}: {phrase(cause, part, history, outcome)}"
        if not _is_work(cause) or wait is None:
            return Verdict(cause, part / total, f"{words}.", evidence, advice_for(cause))
        words = f"{words}; {_part(history, outcome, *wait, total)}."
        return Verdict(cause, part / total, words, evidence, advice_for(wait[0]))
    return Verdict(Cause.NOT_KNOWN, unknown / total if total else 0.0,
                   _unknown_sentence(history, outcome, phases, ordered, unknown, whole), evidence, NOTHING)  # fmt: skip


def _by_cause(phases: Iterable[PhaseSpan]) -> dict[Cause, float]:
    found: dict[Cause, float] = {}
    for each in phases:
        found[each.cause] = found.get(each.cause, 0.0) + each.seconds
    return found


def _second(ordered: list[tuple[Cause, float]]) -> float:
    return ordered[1][1] if len(ordered) > 1 else 0.0


def _is_work(cause: Cause) -> bool:
    return cause in (Cause.PREFILL_ELSEWHERE, Cause.LOADED, Cause.PREFILL, Cause.DECODE)


def _part(history: RequestHistory, outcome: Outcome, cause: Cause, seconds: float, total: float) -> str:
    return f"{percent(seconds / total)} ({duration(seconds)}): {phrase(cause, seconds, history, outcome)}"


def _unknown_sentence(
    history: RequestHistory,
    outcome: Outcome,
    phases: Iterable[PhaseSpan],
    ordered: list[tuple[Cause, float]],
    unknown: float,
    whole: str,
) -> str:
    hidden = [each for each in phases if each.cause is Cause.NOT_KNOWN]
    total = unknown + sum(part for _, part in ordered)
    if hidden and unknown >= TIE * total:
        greatest = max(hidden, key=lambda each: each.seconds)
        return (
            f"Not known for {percent(unknown / total)} of {whole}: {unknown_words(greatest.phase, history, outcome)}."
        )
    if len(ordered) < 2:
        return f"Not known: the records of {whole} say nothing of where the time went."
    (one, first), (other, second) = ordered[:2]
    words = [f"{percent(part / total)} ({phrase(cause, part, history, outcome)})" for cause, part in
             ((one, first), (other, second))]  # fmt: skip
    return f"Not known which of two causes counts more in {whole}: {words[0]}, and {words[1]}."


# ------------------------------------------------------------ an early end


def _end_verdict(ended: Cause, history: RequestHistory, outcome: Outcome, phases: tuple[PhaseSpan, ...]) -> Verdict:
    """Return why a request ended early, and where its time went until then."""
    words = f"{end_words(ended, outcome)} after {duration(outcome.total_s)}"
    if ended in (
        Cause.REFUSED,
        Cause.RATE_LIMITED,
        Cause.TOO_LARGE,
        Cause.WRONG_REQUEST,
        Cause.HOPELESS_DEADLINE,
        Cause.NO_WORKER,
        Cause.FAILED,
    ):
        sentence = f"{words}: {outcome.failure}."
        return Verdict(ended, 0.0, sentence, _worth_saying(history, outcome, phases), advice_for(ended))
    time = _greatest(history, outcome, phases, "them")
    sentence = f"{words}. {time.sentence}"
    advice = time.advice if time.cause is not Cause.NOT_KNOWN and not _is_work(time.cause) else advice_for(ended)
    return Verdict(ended, time.share, sentence, time.evidence, advice)


def _worth_saying(history: RequestHistory, outcome: Outcome, phases: tuple[PhaseSpan, ...]) -> tuple[str, ...]:
    return _greatest(history, outcome, phases, "them").evidence if phases else ()


# ------------------------------------------------------------ what is missing


def _missing(history: RequestHistory, phases: tuple[PhaseSpan, ...]) -> tuple[str, ...]:
    """Return what the records do not say, in words."""
    found = [f"records of {each}" for each in history.unread]
    outcome = history.outcome
    if outcome is None:
        return tuple(found)
    found += [f"the cause of {duration(each.seconds)} {LABELS[each.phase]}" for each in phases
              if each.cause is Cause.NOT_KNOWN and each.share >= TIE]  # fmt: skip
    if len(history.placements) < outcome.placements:
        found.append("a choice of worker: the router's record of it is gone")
    if len(history.lost_to) < outcome.preemptions:
        found.append("for whom it was preempted: the KV manager's record of it is gone")
    if outcome.admissions and len(history.grants) < outcome.admissions:
        found.append("a grant of blocks: the KV manager's record of it is gone")
    if history.runs > 1:
        found.append(f"which of {history.runs} requests with this id is meant: this is the last one")
    return tuple(found)
