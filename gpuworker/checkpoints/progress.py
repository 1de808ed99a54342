"""Reports the progress of loading a model: a bar on a terminal, elsewhere a line every two seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from transformers.utils.logging import disable_progress_bar, set_tqdm_hook

EVERY_S: Final = 2.0


@contextmanager
def telling_progress(
    directory: Path, every: float = EVERY_S, say: Callable[[str], None] | None = None
) -> Iterator[None]:
    """Report the progress of the load while the block runs; on a terminal transformers draws its own bar."""
    if sys.stderr.isatty():
        yield
        return
    disable_progress_bar()
    count, done = _Count(), threading.Event()
    before = set_tqdm_hook(count.watch)
    size = sum(path.stat().st_size for kind in ("*.safetensors", "*.gguf") for path in directory.glob(kind))
    teller = threading.Thread(target=_tell, args=(count, size, every, say or _print, done), daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()
        set_tqdm_hook(before)


class _Count:
    """Counts loaded tensors: replaces the progress bar in which transformers iterates over them."""

    def __init__(self) -> None:
        self.loaded, self.total = 0, 0

    def watch(self, factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the bar, or for the loading itself something that counts in its place."""
        if kwargs.get("desc") != "Loading weights" or not args:
            return factory(*args, **kwargs)
        self.total = len(args[0])
        return self._counted(args[0])

    def _counted(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            yield item
            self.loaded += 1


def _tell(count: _Count, size: int, every: float, say: Callable[[str], None], done: threading.Event) -> None:
    began = time.monotonic()
    while not done.wait(every):
        seconds = f"{time.monotonic() - began:.0f} s"
        of_file = f" ({size / 2**30:.1f} GiB)" if size else ""
        if count.total:
            say(f"loading weights: {count.loaded} of {count.total} tensors{of_file}, {seconds}")
        else:
            say(f"making the model: {seconds}")


def _print(line: str) -> None:
    print(line, flush=True)  # noqa: T201
