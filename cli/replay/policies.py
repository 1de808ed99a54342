"""Named policies, for comparison: each changes one choice of router, KV manager or worker."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, get_args

from cli.replay.links import USUAL, Moves
from cli.replay.simulation import ReplayOptions
from common.contracts.errors import FieldViolation, InvalidConfig
from common.contracts.turns import DEFAULT_MAX_WAIT
from kvmanager.contracts.ledger_config import DEFAULTS, EvictionName, Runway, VictimOrder
from router.placement.fetches import Held
from router.placement.placement_request import PlacementRequest
from router.placement.routing import Choice, Router, WorkerCost
from router.placement.worker_model import WorkerModel


# Other ways to choose a worker, for comparison: each sees the workers that the router's filters leave.
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


class UnpricedFetches(Router):
    """Prices a worker as if it had to compute what it lacks of a prompt, although it may fetch that."""

    def route(
        self,
        placement: PlacementRequest,
        workers: Sequence[WorkerModel],
        hits: Mapping[str, int],
        absent: Collection[tuple[str, str]] = (),
        decision_id: str = "",
        held: Held | None = None,
    ) -> Choice:
        return super().route(placement, workers, hits, absent, decision_id)


ROUTERS: dict[str, type[Router]] = {
    "cost": Router,
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "unpriced-fetches": UnpricedFetches,
}


Change = Callable[[ReplayOptions], ReplayOptions]


def _router(name: str) -> Change:
    return lambda options: replace(options, router=ROUTERS[name])


def _manager(**changes: Any) -> Change:
    return lambda options: replace(options, manager=replace(options.manager, **changes))


def _transfers(peers: bool) -> Change:
    """Return the change to host memory of twice the pool, with fetches between workers or without."""

    def change(options: ReplayOptions) -> ReplayOptions:
        if options.window:
            what = "is for host memory, which keeps nothing of models whose every layer has a window"
            raise InvalidConfig(FieldViolation("--policy", f"{what}; leave out tier-2x and transfers"))
        rates = USUAL if options.moves is None else options.moves.rates
        return replace(options, moves=Moves(2 * options.num_blocks, peers=peers, rates=rates))

    return change


# The policies of a group are for one choice.
_GROUPS: Final[tuple[Mapping[str, Change], ...]] = (
    {name: _router(name) for name in ROUTERS},
    {name: _manager(eviction=name) for name in get_args(EvictionName)},
    {f"runway-{name}": _manager(runway=name) for name in get_args(Runway)},
    {f"victims-{name}": _manager(preemption=name) for name in get_args(VictimOrder)},
    {
        "bounded-preemptions": _manager(max_preemptions=DEFAULTS.max_preemptions),
        "unbounded-preemptions": _manager(max_preemptions=0),
    },
    {"backfill": _manager(backfill=True), "no-backfill": _manager(backfill=False)},
    {"age": _manager(max_wait=DEFAULT_MAX_WAIT), "no-age": _manager(max_wait=0.0)},
    {
        "chunked-grants": _manager(chunked_grants=True),
        "no-chunked-grants": _manager(chunked_grants=False),
    },
    {
        "tier-2x": _transfers(peers=False),
        "transfers": _transfers(peers=True),
        "no-transfers": lambda options: replace(options, moves=None),
    },
    {
        "prefix-caching": lambda options: replace(options, prefix_caching=True),
        "no-prefix-caching": lambda options: replace(options, prefix_caching=False),
    },
)
POLICIES: Final[Mapping[str, Change]] = {name: change for group in _GROUPS for name, change in group.items()}


def with_policies(options: ReplayOptions, names: str) -> ReplayOptions:
    """Return the options with the policies that `names` joins by "+".

    Raises InvalidConfig for an unknown one, and for two that are for the same choice.
    """
    given = names.split("+")
    for name in given:
        if name not in POLICIES:
            what = f"is {name!r}; expected {', '.join(POLICIES)}, or several of them joined by +"
            raise InvalidConfig(FieldViolation("--policy", what))
    for group in _GROUPS:
        first, *others = [name for name in given if name in group] or [""]
        if others:
            what = f"is {names!r}, where {first} and {others[0]} are for the same choice; leave one of them out"
            raise InvalidConfig(FieldViolation("--policy", what))
    for name in given:
        options = POLICIES[name](options)
    return options
