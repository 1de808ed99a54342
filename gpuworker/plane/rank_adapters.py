"""LoRA adapters at several ranks: rank 0 has every rank read a folder, and steps name what was read by a number.

    rank 0, thread of loads      another rank, its thread of loads
    read and cut its part
           --- folder, number -->  read and cut its part, beside steps
           <-- fingerprint ------  or why not
    plans name the number from now on; a message behind the last plan that does says that it is forgotten

All ranks have the same content, or none has: a rank that reads another one, or none, is named in the refusal.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from gpuworker.checkpoints.lora import AdapterRefused, LoraAdapter
from gpuworker.models.adapters import StepAdapters
from gpuworker.models.llama.adapters import NativeAdapter
from gpuworker.plane.adapters import UnfitAdapter
from gpuworker.runner.rank_steps import AdapterLoad, AdapterLoaded, RankLinks, RankPlan, answer_load

log = logging.getLogger(__name__)


class SharedAdapters:
    """Rank 0's side: for the thread of loads."""

    def __init__(self, links: RankLinks) -> None:
        self._links, self._numbers = links, itertools.count(1)

    def share(self, folder: Path, fingerprint: str, own: NativeAdapter) -> None:
        """Have every other rank load the adapter that this one has read. Raises UnfitAdapter if one did not."""
        own.number = next(self._numbers)
        # Behind the last step that has it: steps hold their adapters.
        weakref.finalize(own, self._links.forgotten.append, own.number)
        try:
            answers = self._links.load_adapter(AdapterLoad(own.number, str(folder)))
        except (EOFError, OSError):
            raise UnfitAdapter("a rank of the worker has ended") from None
        for rank, answer in answers.items():
            if answer.failure:
                raise UnfitAdapter(f"rank {rank} cannot load it: {answer.failure}")
            if answer.fingerprint != fingerprint:
                what = f"rank {rank} read another content of {folder} than rank 0"
                raise UnfitAdapter(f"{what}; load it again once its files are written, and alike for all ranks")


class RankAdapters:
    """The side of another rank: `read` reads a folder, `prepare` makes this rank's part of it. Both are on a thread."""

    def __init__(
        self,
        connection: Connection,
        read: Callable[[Path], LoraAdapter],
        prepare: Callable[[LoraAdapter], NativeAdapter],
    ) -> None:
        self._connection, self._read, self._prepare = connection, read, prepare
        self._held: dict[int, NativeAdapter] = {}
        self._thread = ThreadPoolExecutor(1, "quire-adapters", initializer=lambda: torch.set_num_threads(1))

    def begin_load(self, load: AdapterLoad) -> None:
        """Load beside steps, and tell rank 0 what became of it."""
        self._forget(load.forgotten)
        self._thread.submit(self._load, load)

    def _load(self, load: AdapterLoad) -> None:
        try:
            read = self._read(Path(load.folder))
            self._held[load.number] = self._prepare(read)
            answer = AdapterLoaded(read.fingerprint)
        except AdapterRefused as refused:
            answer = AdapterLoaded("", str(refused))
        except Exception as error:
            log.exception("an adapter could not be loaded")
            answer = AdapterLoaded("", f"{type(error).__name__}: {error}")
        answer_load(self._connection, answer)

    def of_step(self, plan: RankPlan) -> StepAdapters | None:
        """Return the adapters of a step; those that it forgets are held no longer. Steps hold what they have."""
        rows, found = plan.rows, None
        if rows is not None and rows.adapter_of is not None:
            found = StepAdapters(tuple(self._held[number] for number in rows.adapters), rows.adapter_of)
        self._forget(plan.forgotten)
        return found

    def _forget(self, numbers: tuple[int, ...]) -> None:
        for number in numbers:
            self._held.pop(number, None)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
