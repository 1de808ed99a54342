"""Draws a snapshot as the lines of one screen, whatever its size; pure, so that a test compares whole screens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from rich.text import Text

from cli.views.cutting import cut, cut_line
from cli.watch.snapshot import WINDOW_S, Ended, Snapshot, WorkerRow
from router.observe.diagnosis.words import count, duration, listed, percent

KEYS: Final = "q quit   s sort workers   r sort requests   up/down select   enter why"
_USABLE: Final = "connected"
_KEPT: Final = frozenset({"", "full_hit", "capped"})
WORKER_SORTS: Final[Mapping[str, Callable[[WorkerRow], tuple[float, str]]]] = {
    "worker": lambda row: (0.0, row.worker_id),
    "running": lambda row: (-row.running - row.waiting, row.worker_id),
    "tokens/s": lambda row: (-row.tokens_per_s, row.worker_id),
    "in use": lambda row: (-_share(row), row.worker_id),
}
REQUEST_SORTS: Final[Mapping[str, Callable[[Ended], float]]] = {
    "first token": lambda each: -each.outcome.first_token_s,
    "took": lambda each: -each.outcome.total_s,
    "newest": lambda each: -each.outcome.time_ns,
}
_WORKER_HEAD: Final = ("state", "run", "wait", "tokens/s", "blocks", "in use", "runway", "cached", "free")
_LEAST_NAME: Final = 8
_REQUEST_HEAD: Final = ("tenant", "first token", "took", "tokens", "cached", "ended")


@dataclass(frozen=True, slots=True)
class Choice:
    """How the tables are sorted, and which request is selected.

    `selected` is its id: the selection stays on the request when rows move. `place` is the row where it was last, and
    is selected when the request is no longer there; -1 selects none.
    """

    workers: str = "worker"
    requests: str = "first token"
    selected: str = ""
    place: int = 0


def frame(snapshot: Snapshot, choice: Choice, width: int, height: int) -> list[Text]:
    """Return at most `height` lines of at most `width` columns; the last one has the keys."""
    head = [
        *_head(snapshot),
        *map(Text, _managers(snapshot)),
        *([Text(snapshot.pages)] if snapshot.pages else []),
        *([Text(f"groups of layers: {snapshot.held}")] if snapshot.held else []),
        *([Text(f"host memory: {snapshot.host}")] if snapshot.host else []),
        *([Text(f"disk: {snapshot.disk}")] if snapshot.disk else []),
        *(Text(f"! {each}", "yellow") for each in snapshot.troubles[:3]),
        Text(),
    ]
    room = max(2, height - len(head) - 2)
    workers = list(_workers(snapshot, choice, width, max(2, min(len(snapshot.workers) + 1, room // 2))))
    requests = list(_requests(snapshot, choice, width, max(1, room - len(workers))))
    body = [*head, *workers, Text(), *requests]
    body = [*body[: height - 1], *[Text()] * (height - 1 - len(body)), Text(KEYS, "dim")]
    for line in body:
        cut_line(line, width)
    return body


def sorted_requests(snapshot: Snapshot, choice: Choice) -> list[Ended]:
    return sorted(snapshot.ended, key=lambda each: (REQUEST_SORTS[choice.requests](each), each.request_id))


def settled(snapshot: Snapshot, choice: Choice, step: int = 0) -> Choice:
    """Return the choice with the selection on a request that is there, and `step` rows further down."""
    found = [each.request_id for each in sorted_requests(snapshot, choice)]
    if not found or choice.place < 0:
        return choice
    place = found.index(choice.selected) if choice.selected in found else choice.place
    place = max(0, min(len(found) - 1, place + step))
    return replace(choice, selected=found[place], place=place)


def _head(snapshot: Snapshot) -> Iterator[Text]:
    rate = sum(row.tokens_per_s for row in snapshot.workers)
    line = Text.assemble((f"quire {snapshot.version}", "bold"), f"  {snapshot.clock}  ")
    yield line.append(f"{snapshot.queued:,} queued, {snapshot.running:,} running, {rate:,.0f} tokens/s")
    outcomes = [each.outcome for each in snapshot.ended]
    served = [each for each in outcomes if each.admissions and each.prompt_tokens]
    prompt = sum(each.prompt_tokens for each in served)
    missed: Counter[str] = Counter()
    for each in served:
        if each.miss not in _KEPT:
            missed[each.miss] += each.prompt_tokens - each.cached_tokens
    hits = (
        f"{percent(sum(each.cached_tokens for each in served) / prompt)} of {prompt:,} prompt tokens" if prompt else "-"
    )
    reasons = listed([f"{name} {percent(tokens / prompt)}" for name, tokens in missed.most_common() if tokens])
    yield Text(f"last {WINDOW_S:.0f} s: hit rate {hits}" + (f"; missed: {reasons}" if reasons else ""))
    first = sorted(each.first_token_s for each in outcomes if each.has_first_token)
    times = f"first token p50 {_at(first, 0.5)}, p95 {_at(first, 0.95)}" if first else "no first token"
    failed, preempted = sum(bool(each.failure) for each in outcomes), sum(each.preemptions for each in outcomes)
    yield Text(f"{count(len(outcomes), 'request')} ended, {failed} failed; {times}; {count(preempted, 'preemption')}")


def _managers(snapshot: Snapshot) -> Iterator[str]:
    """Yield a line about the KV managers where there is a group of them."""
    if snapshot.managers:
        yield f"KV managers: {'; '.join(snapshot.managers)}"


def _at(ordered: Sequence[float], share: float) -> str:
    return duration(ordered[max(0, -(-len(ordered) * round(100 * share) // 100) - 1)])


def _share(row: WorkerRow) -> float:
    return (row.in_use or 0) / row.blocks if row.blocks else 0.0


def _workers(snapshot: Snapshot, choice: Choice, width: int, most: int) -> Iterator[Text]:
    rows = sorted(snapshot.workers, key=WORKER_SORTS[choice.workers])
    left = len(rows) - len(rows[: most - 1])
    title = "worker" if not left else f"worker +{left}"
    figures = [_figures(row) for row in rows[: most - 1]]
    room = width - sum(2 + max(map(len, column)) for column in zip(_WORKER_HEAD, *figures, strict=True))
    names = [cut(row.worker_id, max(_LEAST_NAME, room)) for row in rows[: most - 1]]
    cells = [(name, *each) for name, each in zip(names, figures, strict=True)]
    yield from _table((title, *_WORKER_HEAD), cells, choice.workers)


def _figures(row: WorkerRow) -> tuple[str, ...]:
    blocks = (row.in_use, row.runway, row.cached, row.free)
    counts = ("-" if each is None else f"{each}" for each in blocks)
    state = "ok" if row.state == _USABLE else row.state
    return (state, f"{row.running}", f"{row.waiting}", f"{row.tokens_per_s:.0f}", f"{row.blocks}", *counts)


def _requests(snapshot: Snapshot, choice: Choice, width: int, most: int) -> Iterator[Text]:
    first = max(0, choice.place - max(0, most - 2))  # the selected row is on the screen
    found = sorted_requests(snapshot, choice)[first : first + most - 1]
    cells = [(cut(each.request_id, max(12, width - 58)), *_told(each)) for each in found]
    lines = _table((f"request by {choice.requests}", *_REQUEST_HEAD), cells, "")
    for place, line in enumerate(lines, first - 1):
        if place == choice.place >= 0:
            line.stylize("reverse")
        yield line


def _told(each: Ended) -> tuple[str, ...]:
    found = each.outcome
    share = percent(found.cached_tokens / found.prompt_tokens) if found.prompt_tokens else "-"
    first = duration(found.first_token_s) if found.has_first_token else "-"
    return (found.tenant or "-", first, duration(found.total_s), f"{found.output_tokens}", share, found.ended)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], sorted_by: str) -> Iterator[Text]:
    """Yield a heading and the rows: words on the left of their column, figures on the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    words = {0, 1, len(head) - 1} if head[-1] == "ended" else {0, 1}
    for number, row in enumerate((head, *rows)):
        line = Text(style="bold" if not number else "")
        for place, (cell, width) in enumerate(zip(row, widths, strict=True)):
            aligned = cell.ljust(width) if place in words else cell.rjust(width)
            line.append(aligned, "underline" if not number and cell == sorted_by else "").append("  ")
        line.rstrip()
        yield line
