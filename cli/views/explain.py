"""Draws what would happen to a request on one screen: the verdict, its prefix, and the costs of each worker.

worker-1 would get it at once: 480 of its 512 prompt tokens are cached there (93 %).
The first token is predicted in 42 ms.

  worker       predicted   wait   prompt   output   cached
▸ worker-1        120 ms   2 ms    40 ms    78 ms      480
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from quire.decision.v1 import decision_pb2 as pb
from router.observe.diagnosis.words import count, duration, listed, percent

_TERMS: Final = {"wait": "queue_delay", "fetch": "fetch", "prompt": "prefill", "output": "decode_pressure"}
_FAILS: Final = {
    "refused": "It would be refused",
    "too_large": "It would be refused for its size",
    "too_late": "It would be refused for its deadline",
    "no_worker": "No worker could take it",
}


class ExplainView:
    def __init__(self, answer: pb.ExplainResponse) -> None:
        self._answer = answer

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        found = self._answer
        yield Text(verdict_of(found), "bold" if found.outcome == "placed" else "bold yellow")
        yield from (Text(line) for line in _remarks(found))
        yield Text()
        if any(each.HasField("cost") for each in found.workers):
            yield _table(found)
        for each in found.workers:
            if each.rejected:
                yield Text.assemble(("  " + each.name, "bold"), f"  out: {each.rejected}", _cached(each, found))
        ages = f" The oldest signal is {duration(max(found.signal_ages.values()))} old." if found.signal_ages else ""
        what = "Nothing was reserved. The KV manager decides about blocks when a request comes."
        yield Text(f"{what}{ages}", "dim")


def verdict_of(found: pb.ExplainResponse) -> str:
    """Return the first line."""
    if found.outcome == "placed":
        names = " or ".join(listed(found.tied).rsplit(" and ", 1)) or found.worker_id
        tie = " (they cost the same, chance takes one)" if len(found.tied) > 1 else ""
        return f"{names} would get it at once{tie}: {_hits(found)}."
    if found.outcome == "queued":
        ahead = f", {count(found.requests_before, 'request')} before it" if found.requests_before else ""
        return f"It would wait for a worker{ahead}: {found.reason}."
    return f"{_FAILS.get(found.outcome, found.outcome)}: {found.reason}."


def _hits(found: pb.ExplainResponse) -> str:
    if not found.cached_tokens:
        return f"none of its {count(found.prompt_tokens, 'prompt token')} is cached there"
    share = percent(found.cached_tokens / found.prompt_tokens)
    return f"{found.cached_tokens:,} of its {found.prompt_tokens:,} prompt tokens are cached there ({share})"


def _remarks(found: pb.ExplainResponse) -> Iterator[str]:
    if found.HasField("first_token_seconds"):
        yield f"The first token is predicted in {duration(found.first_token_seconds)}."
    if found.block_size and not found.shareable_tokens:
        short = f"the prompt is shorter than a block of {found.block_size} tokens"
        yield f"No worker can have it cached: {short if _is_short(found) else 'the request does not use the cache'}."
    if not found.index_answered:
        yield "The router has no answer of the prefix index: hits are what this router remembers of its own requests."
    yield from _better_hit(found)


def _is_short(found: pb.ExplainResponse) -> bool:
    return found.prompt_tokens < found.block_size


def _better_hit(found: pb.ExplainResponse) -> Iterator[str]:
    """Yield why a worker with more of the prompt would not get it."""
    chosen = next((each for each in found.workers if each.name == found.worker_id), None)
    best = max(found.workers, key=_blocks, default=None)
    if chosen is None or best is None or _blocks(best) <= _blocks(chosen):
        return
    more = f"{best.name} has {_blocks(best) * found.block_size:,} prompt tokens cached"
    if fetched := int(chosen.figures.get("fetched_blocks", 0.0)):
        takes = f"fetches {fetched * found.block_size:,} of them in {duration(chosen.terms.get('fetch', 0.0))}"
        yield f"{more}, and {chosen.name}, which costs {duration(chosen.cost)}, {takes}."
    elif best.HasField("cost"):
        yield f"{more}, but costs {duration(best.cost)} against {duration(chosen.cost)}: its wait outweighs the hit."
    else:
        yield f"{more}, but is out."


def _blocks(worker: pb.Candidate) -> int:
    return int(worker.figures.get("hit_blocks", 0.0))


def _cached(worker: pb.Candidate, found: pb.ExplainResponse) -> str:
    blocks = _blocks(worker)
    return f"; {blocks * found.block_size:,} prompt tokens are cached there" if blocks else ""


def _table(found: pb.ExplainResponse) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    table.add_column("worker", no_wrap=True, overflow="ellipsis")
    fetches = any(each.terms.get("fetch") for each in found.workers)
    shown = {name: term for name, term in _TERMS.items() if fetches or name != "fetch"}
    for name in ("predicted", *shown, "cached"):
        table.add_column(name, justify="right", no_wrap=True)
    costs = sorted((each for each in found.workers if each.HasField("cost")), key=lambda each: (each.cost, each.name))
    for each in costs:
        terms = (duration(each.terms.get(term, 0.0)) for term in shown.values())
        mark = "▸" if each.name in (found.tied or (found.worker_id,)) else ""
        table.add_row(mark, each.name, duration(each.cost), *terms, f"{_blocks(each) * found.block_size:,}")
    return table
