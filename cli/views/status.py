"""Draws a router's status: a line for each worker where the console is wide, else two.

worker    state      running  waiting  blocks  free  prefill/s     step
worker-0  connected        2        0    2048  1980       5432   4.2 ms
  127.0.0.1:50053, manager attached
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from cli.views.cutting import cut
from quire.client import Manager, Model, Status, Worker
from router.observe.pool_words import pages_words

_LEAST_ID: Final = 8
_ENDLESS: Final = 10_000  # columns
_ROLES: Final = {"prefill": "computes prompts for others", "decode": "decodes"}
_UNITS: Final = (("d", 86400.0), ("h", 3600.0), ("min", 60.0))


@dataclass(frozen=True, slots=True)
class Ledgers:
    """What the KV manager says: what stands still in the ledger of a worker, or why it says nothing.

    `held` are the blocks of each group of layers; it is empty where a pool counts blocks. `host` are those in host
    memory, by worker, and `disk` those on disk; they are empty where no worker has any.
    """

    stalled: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""
    held: str = ""
    host: str = ""
    disk: str = ""


class StatusView:
    def __init__(self, model: Model, status: Status, ledgers: Ledgers) -> None:
        self._model, self._status, self._ledgers = model, status, ledgers

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        status = self._status
        yield from self._heading()
        if status.discovery_problem:
            yield Text(f"Workers in Redis that are passed over: {status.discovery_problem}")
        groups = {manager.group for manager in status.managers if manager.group}
        for manager in status.managers:
            of_group = f" of group {manager.group}" if len(groups) > 1 and manager.group else ""
            yield Text(f"KV manager {manager.address}{of_group} {role_of(manager)}")
        if self._ledgers.problem:
            yield Text(f"The KV manager: {self._ledgers.problem}")
        for worker, why in self._ledgers.stalled.items():
            yield Text(f"The ledger of {worker} stands still: {why}")
        wide = wide_table(status)
        endless = options.update(width=_ENDLESS)
        if Measurement.get(console, endless, wide).maximum <= options.max_width:
            yield wide
        else:
            yield from narrow_lines(status, options.max_width)

    def _heading(self) -> Iterator[Text]:
        status, model = self._status, self._model
        redis = "connected" if status.redis_connected else "not connected"
        draining = ", draining" if status.draining else ""
        yield Text(
            f"Quire {status.version}: {model.name}, context {model.max_model_len}, "
            f"block size {model.identity.block_size}{_pooling(model)}; Redis {redis}{draining}"
        )
        yield Text(f"{status.queued_requests} requests queued, {status.running_requests} running")
        if pages := pages_words(model.identity.kv_geometry, model.identity.block_size):
            yield Text(pages)
        if self._ledgers.held:
            yield Text(f"Groups of layers: {self._ledgers.held}")
        if self._ledgers.host:
            yield Text(f"Host memory: {self._ledgers.host}")
        if self._ledgers.disk:
            yield Text(f"Disk: {self._ledgers.disk}")


def _pooling(model: Model) -> str:
    return f", embeds ({model.identity.pooling})" if model.identity.embeds else ""


def wide_table(status: Status) -> Table:
    """Return a table with all that is known of a worker on one line."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("worker", "address", "state", "manager"):
        table.add_column(name)
    for name in ("running", "waiting", "blocks", "free or cached", "prefill tokens/s", "decode step"):
        table.add_column(name, justify="right")
    table.add_column("note")
    for worker in status.workers:
        words = worker.worker_id or "?", worker.address, worker.state, _manager(worker)
        table.add_row(*map(Text, (*words, *_figures(worker), _note(worker))))
    return table


def narrow_lines(status: Status, width: int) -> Iterator[RenderableType]:
    """Yield a heading, and for each worker its figures, and its address and note below them."""
    rows: list[tuple[str, ...]] = [("state", "running", "waiting", "blocks", "free", "prefill/s", "step")]
    rows += [(worker.state, *_figures(worker)) for worker in status.workers]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    figures = ["".join(_placed(row, widths)) for row in rows]
    ids = ["worker", *(worker.worker_id or "?" for worker in status.workers)]
    room = min(max(map(len, ids)), max(_LEAST_ID, width - len(figures[0])))
    lines = [cut(name, room).ljust(room) + figure for name, figure in zip(ids, figures, strict=True)]
    yield Text(lines[0], "bold")
    for worker, line in zip(status.workers, lines[1:], strict=True):
        yield Text(line)
        note = f"; {_note(worker)}" if _note(worker) else ""
        yield Padding(Text(f"{worker.address}, manager {_manager(worker)}{note}", "dim"), (0, 0, 0, 2))


def _placed(row: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    """Yield the cells of a row: the state on the left of its column, figures on the right."""
    for place, (cell, width) in enumerate(zip(row, widths, strict=True)):
        yield "  " + (cell.rjust(width) if place else cell.ljust(width))


def role_of(manager: Manager) -> str:
    """Return in words whether a manager leads or stands by, and since when."""
    since = _age(manager.state_seconds)
    if not manager.reachable:
        return f"has not been reached for {since}"
    return f"has led for {since} (term {manager.term})" if manager.leads else f"has stood by for {since}"


def _age(seconds: float) -> str:
    """Return seconds in the largest unit of which there are two: 119 s, 2 min, 47 h, 2 d."""
    unit, size = next((each for each in _UNITS if seconds >= 2 * each[1]), ("s", 1.0))
    return f"{seconds // size:.0f} {unit}"


def _note(worker: Worker) -> str:
    """Return what a worker does of requests, where that is not all, and why the router does not use it."""
    return "; ".join(filter(None, (_ROLES.get(worker.disaggregation, worker.disaggregation), worker.reason)))


def _manager(worker: Worker) -> str:
    return "attached" if worker.manager_attached else "detached"


def _figures(worker: Worker) -> tuple[str, ...]:
    counts = worker.running_sequences, worker.waiting_sequences, worker.num_blocks, worker.unheld_blocks
    prefill, step = worker.prefill_tokens_per_second, worker.decode_step_seconds
    return (*map(str, counts), f"{prefill:.0f}" if prefill else "-", f"{1e3 * step:.1f} ms" if step else "-")
