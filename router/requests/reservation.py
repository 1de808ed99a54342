"""The load that the router counts for one sequence at a worker, from its placement until it leaves."""

from __future__ import annotations

from collections.abc import Callable

from common.clock import Clock
from router.core.worker_model import WorkerModel


class LoadReservation:
    """One sequence, its prefill tokens and its blocks, counted in a worker's model until `release`."""

    __slots__ = (
        "_blocks", "_clock", "_held", "_measured", "_model", "_most_output", "_on_release", "_placed_at",
        "_prefill_tokens",
    )  # fmt: skip

    def __init__(
        self,
        model: WorkerModel,
        prefill_tokens: int,
        blocks: int,
        clock: Clock,
        on_release: Callable[[], None],
        measured: bool = True,
        most_output: int = 0,
    ) -> None:
        """Count the load at once. `on_release` is called when the load no longer counts.

        A sequence that began elsewhere is not `measured`: its duration here tells nothing. `most_output` is how many
        tokens it may sample; 0: that is not known.
        """
        self._model, self._clock, self._on_release = model, clock, on_release
        self._prefill_tokens, self._blocks, self._measured = prefill_tokens, blocks, measured
        self._placed_at, self._held, self._most_output = clock.monotonic(), True, most_output
        model.placed(1, prefill_tokens, blocks, most_output)

    @property
    def model(self) -> WorkerModel:
        """The worker at which the load counts, as of the connection of that time."""
        return self._model

    def prefilled(self) -> None:
        """Stop counting the prefill tokens: the prompt is computed. Idempotent."""
        if self._held and self._prefill_tokens:
            self._model.placed(0, -self._prefill_tokens, 0)
            self._prefill_tokens = 0

    def complete(self, output_tokens: int) -> None:
        """Release the load of a sequence that ran to its end; its duration and length enter the worker's rates."""
        if self._held and self._measured:
            now = self._clock.monotonic()
            self._model.rates.finished(now - self._placed_at, output_tokens, now)
        self.release()

    def release(self) -> None:
        """Stop counting the load: the sequence has left the worker. Idempotent."""
        if self._held:
            self._held = False
            self._model.placed(-1, -self._prefill_tokens, -self._blocks, -self._most_output)
            self._on_release()
