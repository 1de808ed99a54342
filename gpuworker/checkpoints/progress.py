"""Reports the progress of loading a model: a bar on a terminal, elsewhere lines, each after twice the time."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Final, TypeVar

from common.checkpoint.files import weight_bytes

FIRST_S: Final = 2.0
_AT_MOST: Final = 32.0  # times the first pause
_LOADING: Final = "Loading weights"  # what transformers calls it, too
_Item = TypeVar("_Item")


@contextmanager
def telling_progress(
    directory: Path, first: float = FIRST_S, say: Callable[[str], None] | None = None
) -> Iterator[None]:
    """Report the progress of the load while the block runs: of `counted`, and of transformers if it is loaded.

    On a terminal both draw a bar.
    """
    if sys.stderr.isatty():
        yield
        return
    count, done = _Count(), threading.Event()
    size = weight_bytes(directory)
    teller = threading.Thread(target=_tell, args=(count, size, first, say or _print, done), daemon=True)
    teller.start()
    counting = _counting.set(count)
    try:
        with _instead_of_bars(count):
            yield
    finally:
        _counting.reset(counting)
        done.set()
        teller.join()


def counted(items: Sequence[_Item]) -> Iterable[_Item]:
    """Return the items; their number, and how many were taken, is the progress of the load."""
    if (count := _counting.get()) is not None:
        return count.counted(items)
    if not sys.stderr.isatty():
        return items
    from tqdm import tqdm  # type: ignore[import-untyped]

    bar: Iterable[_Item] = tqdm(items, desc=_LOADING)
    return bar


@contextmanager
def _instead_of_bars(count: _Count) -> Iterator[None]:
    """Count what transformers loads, and let it draw no bar. A model that needs no transformers does not import it."""
    if "transformers" not in sys.modules:
        yield
        return
    from transformers.utils.logging import disable_progress_bar, set_tqdm_hook

    disable_progress_bar()
    before = set_tqdm_hook(count.watch)
    try:
        yield
    finally:
        set_tqdm_hook(before)


class _Count:
    """Counts loaded tensors; `watch` replaces the progress bar in which transformers iterates over them."""

    def __init__(self) -> None:
        self.loaded, self.total = 0, 0

    def watch(self, factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the bar, or for the loading itself something that counts in its place."""
        return self.counted(args[0]) if kwargs.get("desc") == _LOADING and args else factory(*args, **kwargs)

    def counted(self, items: Collection[_Item]) -> Iterator[_Item]:
        self.total = len(items)
        for item in items:
            yield item
            self.loaded += 1


_counting: ContextVar[_Count | None] = ContextVar("quire_loaded_tensors", default=None)


def pauses_from(first: float) -> Iterator[float]:
    """Yield seconds between two lines, each time twice as many, up to a bound."""
    pause = first
    while True:
        yield pause
        pause = min(2 * pause, _AT_MOST * first)


def _tell(count: _Count, size: int, first: float, say: Callable[[str], None], done: threading.Event) -> None:
    began, pauses = time.monotonic(), pauses_from(first)
    while not done.wait(next(pauses)):
        seconds = f"{time.monotonic() - began:.0f} s"
        of_file = f" ({size / 2**30:.1f} GiB)" if size else ""
        if count.total:
            say(f"loading weights: {count.loaded} of {count.total} tensors{of_file}, {seconds}")
        else:
            say(f"making the model: {seconds}")


def _print(line: str) -> None:
    print(line, flush=True)  # noqa: T201
