"""The load that the router counts for sequences at a worker, from their placement until they leave."""

from __future__ import annotations

from collections.abc import Callable

from common.contracts.clock import Clock
from router.placement.fair_queue import Flow
from router.placement.place_shares import PlaceShares
from router.placement.placement import PlacementRequest
from router.placement.worker_model import WorkerModel


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


class Reserver:
    """Reserves load at workers, and counts the places of each tenant there.

    `on_release` is called for each sequence that leaves.
    """

    def __init__(self, clock: Clock, on_release: Callable[[], None]) -> None:
        self._clock, self._on_release = clock, on_release
        self.in_use = PlaceShares()

    def reserve(
        self, worker: WorkerModel, request: PlacementRequest, hit_blocks: int, flow: Flow
    ) -> tuple[LoadReservation, ...]:
        """Count the sequences of a request at a worker that has so many blocks of its prompt."""
        capacity = worker.capacity
        uncached = request.prompt_tokens - hit_blocks * capacity.block_size
        blocks = capacity.fresh_blocks(request.prompt_tokens, hit_blocks)
        fork = capacity.fork_load(request.prompt_tokens, hit_blocks)
        loads = [(uncached, blocks), *[fork] * (request.sequences - 1)]
        most, released = request.max_tokens, self._taken(flow, len(loads))
        return tuple([LoadReservation(worker, *load, self._clock, released, most_output=most) for load in loads])

    def adopt(self, worker: WorkerModel, flow: Flow) -> LoadReservation:
        """Count a sequence that runs at a worker already, whose heartbeats show its load."""
        return LoadReservation(worker, 0, 0, self._clock, self._taken(flow, 1), measured=False)

    def _taken(self, flow: Flow, places: int) -> Callable[[], None]:
        """Count places of a tenant; return what takes back one of them."""

        def released() -> None:
            self.in_use.release(flow)
            self._on_release()

        for _ in range(places):
            self.in_use.take(flow)
        return released
