"""Other ways to choose a worker, for comparison: each sees the workers that the router's filters leave."""

from __future__ import annotations

from router.placement.routing import Router, WorkerCost


class RoundRobin(Router):
    """Takes the workers in turn, whatever they hold and have to do."""

    _last = ""

    def _pick(self, costs: list[WorkerCost], decision_id: str) -> tuple[WorkerCost, int]:
        ordered = sorted(costs, key=lambda cost: cost.worker.worker_id)
        best = next((cost for cost in ordered if cost.worker.worker_id > self._last), ordered[0])
        self._last = best.worker.worker_id
        return best, len(costs)


class LeastLoaded(Router):
    """Takes the worker with the fewest sequences, whatever it holds; of several the first by name."""

    def _pick(self, costs: list[WorkerCost], decision_id: str) -> tuple[WorkerCost, int]:
        best = min(costs, key=lambda cost: (cost.worker.sequences, cost.worker.worker_id))
        return best, sum(cost.worker.sequences == best.worker.sequences for cost in costs)


ROUTERS: dict[str, type[Router]] = {"cost": Router, "round-robin": RoundRobin, "least-loaded": LeastLoaded}
