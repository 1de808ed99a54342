"""Why no more of a prompt was cached: the first rule that applies names the cause.

The manager's reason is about one worker. The rules add what only the router knows: other workers with more of the
prompt, an index that was silent or stale, and other cache domains that sent the same prompt.
"""

from __future__ import annotations

from typing import Final

from common.contracts.lease import AHEAD_REASON, PARTIAL_REASON, RETENTION_REASON
from router.contracts.index_answer import IndexSaid
from router.observe.diagnosis.causes import Cause, advice_for
from router.observe.diagnosis.index_words import index_said, index_words
from router.observe.diagnosis.outcome import Outcome
from router.observe.diagnosis.phases import loaded_words, unfetched_words
from router.observe.diagnosis.request_history import Option, Placement, RequestHistory
from router.observe.diagnosis.verdict import Verdict
from router.observe.diagnosis.words import count, duration
from router.placement.routing import TOO_LATE

# As common.contracts.types.MissReason writes them.
_NO_MISS: Final = frozenset({"full_hit", "capped"})
_AT_ONCE: Final = {
    "disabled": Cause.CACHE_OFF,
    "windowed": Cause.WINDOW_MISSING,
    "unresumable": Cause.NO_CHECKPOINT,
    "unfetched": Cause.NOT_FETCHED,
    "below_block": Cause.BELOW_BLOCK,
}
# Causes of a miss where the index did not say which other worker has the prompt.
_SILENT: Final = {
    IndexSaid.LOST: Cause.INDEX_LOST,
    IndexSaid.CUT: Cause.INDEX_SLOW,
    IndexSaid.LATE: Cause.INDEX_SLOW,
    IndexSaid.FAILED: Cause.INDEX_UNREACHABLE,
    IndexSaid.SKIPPED: Cause.INDEX_SKIPPED,
    IndexSaid.OFF: Cause.NO_INDEX,
}
# This share of a prompt is worth a sentence.
_MUCH: Final = 0.25
_UNSEEN: Final = frozenset({"never_seen", "diverged_at"})
# Reasons of a miss behind the blocks of a fetch that did not come.
_UNFETCHED: Final = _UNSEEN | {"evicted", "unfetched"}


def prefix_verdict(history: RequestHistory) -> Verdict | None:
    """Return why no more was cached, and what was fetched and loaded from host memory.

    None where all that can be cached was in blocks, or where the request got no blocks.
    """
    outcome = history.outcome
    if outcome is None or not outcome.miss:
        return None
    whole = f"{outcome.cached_tokens:,} of {count(outcome.prompt_tokens, 'prompt token')} were cached"
    there = [loaded_words(outcome), *_ahead(history)] if outcome.loaded_blocks else []
    loaded = "; ".join([*_fetched(outcome), *there])
    if outcome.miss in _NO_MISS and not _ends_in_a_block(outcome):
        cause = Cause.FETCHING if outcome.fetched_blocks else Cause.LOADED
        verdict = Verdict(cause, 0.0, f"{whole}; {loaded}.", _evidence(history, outcome), advice_for(cause))
        return verdict if loaded else None
    cause = Cause.WHOLE_BLOCKS if outcome.miss in _NO_MISS else _cause(history, outcome)
    sentence = f"{whole}: {_words(cause, history, outcome)}." + (f" {loaded}." if loaded else "")
    return Verdict(cause, 0.0, sentence, _evidence(history, outcome), advice_for(cause))


def _fetched(outcome: Outcome) -> list[str]:
    """Return in words what was fetched for a request."""
    if not outcome.fetched_blocks:
        return []
    came = f"{count(outcome.fetched_blocks, 'block')} came from {outcome.fetch_source or 'elsewhere'}"
    return [f"{came} in {duration(outcome.fetch_seconds)}"]


def _ahead(history: RequestHistory) -> list[str]:
    """Return what the manager says of loaded blocks that came ahead of need."""
    said = (each for grant in history.grants for each in grant.reasons if each.startswith(AHEAD_REASON))
    return [each.removeprefix(AHEAD_REASON) for each in dict.fromkeys(said)]


def _ends_in_a_block(outcome: Outcome) -> bool:
    """Return whether much of a prompt was sent before and was not cached, because it is not a whole block."""
    beyond = min(outcome.shared_tokens, outcome.prompt_tokens) - outcome.cached_tokens
    return beyond > _MUCH * outcome.prompt_tokens


def _cause(history: RequestHistory, outcome: Outcome) -> Cause:
    if outcome.unfetched_blocks and outcome.miss in _UNFETCHED:
        return Cause.FETCH_FAILED
    if outcome.miss in _AT_ONCE:
        return _AT_ONCE[outcome.miss]
    if outcome.miss in _UNSEEN and outcome.other_domain_tokens > outcome.cached_tokens:
        return Cause.OTHER_DOMAIN
    placement = _placement(history, outcome)
    if placement is None:
        return Cause.NOT_KNOWN
    return _cause_at(placement, outcome)


def _cause_at(placement: Placement, outcome: Outcome) -> Cause:
    """Return the cause of a miss whose placement is known."""
    hit = _hit_blocks(outcome)
    holder = _holder(placement, hit)
    if holder is not None:
        return Cause.LATE_WORKER if holder.rejected.startswith(TOO_LATE) else Cause.HOT_WORKER
    if outcome.miss == "evicted":
        return Cause.EVICTED
    if placement.chosen is not None and placement.chosen.hit_blocks > hit:
        return Cause.STALE_INDEX
    if len(placement.options) > 1:
        silent = _SILENT.get(index_said(outcome)[0]) if outcome.index or outcome.index_answered else Cause.NOT_KNOWN
        if silent is not None:
            return silent
    return Cause.DIVERGED if outcome.miss == "diverged_at" else Cause.NEVER_SEEN


def _placement(history: RequestHistory, outcome: Outcome) -> Placement | None:
    """Return the first choice of a worker, whose hits the client got; None unless all choices are here."""
    return history.placements[0] if history.placements and len(history.placements) >= outcome.placements else None


def _hit_blocks(outcome: Outcome) -> int:
    return outcome.cached_tokens // max(1, outcome.block_size)


def _holder(placement: Placement, hit: int) -> Option | None:
    """Return the worker that held the most of the prompt, if it is another one and held more than was hit."""
    others = [each for each in placement.options if each.worker != placement.worker and each.hit_blocks > hit]
    return max(others, key=lambda each: (each.hit_blocks, each.worker), default=None)


# ------------------------------------------------------------ in words


def _words(cause: Cause, history: RequestHistory, outcome: Outcome) -> str:
    placement = _placement(history, outcome)
    if placement is not None and cause in (Cause.HOT_WORKER, Cause.LATE_WORKER):
        return _holder_words(placement, outcome)
    if placement is not None and placement.chosen is not None and cause is Cause.STALE_INDEX:
        promised = count(placement.chosen.hit_blocks * outcome.block_size, "token")
        return f"{placement.worker} was expected to hold {promised} and did not, because the index was stale"
    if cause is Cause.EVICTED:
        return f"{outcome.worker} had more of it, and evicted that{_evicted_for(history)}{_retention(history)}"
    if cause is Cause.FETCH_FAILED:
        return unfetched_words(history, outcome)
    if cause in _SILENT.values():
        return f"{index_words(outcome)}, so the router could not know who holds it; {outcome.worker} does not"
    return _plain_words(cause, outcome) + _partial(history)


def _plain_words(cause: Cause, outcome: Outcome) -> str:
    """Return the words of a cause that the outcome alone explains."""
    size, worker = outcome.block_size, outcome.worker
    same = count(outcome.other_domain_tokens, "token")
    return {
        Cause.CACHE_OFF: "the prefix cache was not used for it",
        Cause.WINDOW_MISSING: f"{worker} had no more of what the model's windows or chunks read before a later token; "
        "another request was computing that, or it was evicted",
        Cause.NO_CHECKPOINT: f"{worker} had K and V of its first {count(outcome.diverged_at * size, 'token')}, and no "
        "checkpoint of the states of the model's layers behind them",
        Cause.NOT_FETCHED: f"{worker} had its first {count(outcome.diverged_at * size, 'token')}, some of them on disk "
        "alone, and did not fetch these: it was not expected to pay, or host memory had no room for them",
        Cause.BELOW_BLOCK: f"it is shorter than a block, which has {count(size, 'token')}",
        Cause.OTHER_DOMAIN: f"its first {same} were sent in another cache domain ({outcome.other_domain}), "
        "and not in its own",
        Cause.WHOLE_BLOCKS: _shared_words(outcome),
        Cause.DIVERGED: _diverged_words(outcome),
        Cause.NEVER_SEEN: f"no worker had its first {count(size, 'token')}; {worker} has not seen them since its start",
    }.get(cause, "why is not known, because the router's record of its routing, or of its look-up, is gone")


def _shared_words(outcome: Outcome) -> str:
    """Return why fewer tokens count than an earlier prompt shares."""
    shared = f"of the {outcome.shared_tokens:,} tokens that it shares with an earlier prompt"
    return f"{shared} {outcome.cached_tokens:,} count, because only whole blocks of {outcome.block_size} do"


def _diverged_words(outcome: Outcome) -> str:
    """Return where the prompt differs from those before it: at a token where the router knows that, else at a block."""
    begins = outcome.diverged_at * outcome.block_size
    words = f"{outcome.worker} has seen no prompt that is the same from"
    if 0 < outcome.shared_tokens - begins < outcome.block_size and outcome.cached_tokens == begins:
        return f"{words} token {outcome.shared_tokens} on, and {_shared_words(outcome)}"
    return f"{words} token {begins} on"


def _holder_words(placement: Placement, outcome: Outcome) -> str:
    holder, chosen = _holder(placement, _hit_blocks(outcome)), placement.chosen
    assert holder is not None
    held = f"{holder.worker} holds {count(holder.hit_blocks * outcome.block_size, 'token')} of it"
    if holder.rejected:
        return f"{held} and was left out ({holder.rejected}), so it went to {placement.worker}"
    if holder.cost is None or chosen is None or chosen.cost is None:
        return f"{held}, and the router chose {placement.worker}"
    return f"{held} and was busy: {_cost_words(holder)} there, {_cost_words(chosen)} at {placement.worker}"


def _cost_words(option: Option) -> str:
    term, seconds = max(option.terms, key=lambda each: each[1], default=("", 0.0))
    most = f", {duration(seconds)} of it {term.replace('_', ' ')}" if term else ""
    return f"predicted {duration(option.cost or 0.0)}{most}"


def _evicted_for(history: RequestHistory) -> str:
    """Return who needed the room. A grant without a name means the runway: the blocks leased ahead of need."""
    if not history.grants:
        return "; for whom is not known"
    name = history.grants[0].evicted_for
    return f" to make room for {name}" if name else " to lease blocks ahead of need"


def _retention(history: RequestHistory) -> str:
    """Return what had become of the retention of the first block that was evicted; "" if it had none."""
    reasons = history.grants[0].reasons if history.grants else ()
    found = (each.removeprefix(RETENTION_REASON) for each in reasons if each.startswith(RETENTION_REASON))
    return "".join(f" ({each})" for each in found)


def _partial(history: RequestHistory) -> str:
    """Return how much of a cached block was copied; "" where nothing was."""
    reasons = history.grants[0].reasons if history.grants else ()
    found = (each.removeprefix(PARTIAL_REASON) for each in reasons if each.startswith(PARTIAL_REASON))
    return "".join(f" (partial block: {each})" for each in found)


def _evidence(history: RequestHistory, outcome: Outcome) -> tuple[str, ...]:
    placement = _placement(history, outcome)
    said = [f"the manager says {outcome.miss}"]
    if placement is not None:
        said += [
            f"{each.worker}: {each.hit_blocks} hit blocks expected" for each in placement.options if each.hit_blocks
        ]
    if outcome.index:
        said.append(f"the prefix index: {outcome.index}")
    return tuple(said)
