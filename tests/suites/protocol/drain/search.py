"""Two searches over moves at drain: every state of a tiny world, and random walks through a larger one."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, replace

from tests.suites.protocol.drain.model import Drain, DrainWorld, Event
from tests.suites.protocol.invariants import Violation
from tests.suites.protocol.scenario import Request
from tests.suites.protocol.search import Found

_SHORT, _LONG = Request((0, 1, 0), 2), Request((0, 1, 0), 3)

DRAINS: dict[str, Drain] = {
    "alone": Drain((_LONG,), at_once=True),
    "stops": Drain((replace(_LONG, stop_at=2),), at_once=True),
    "unread": Drain((_SHORT,), late=True, at_once=True),
    "leave": Drain((_SHORT,), at_once=True, faults={"leave": 1}),
    "crash": Drain((_SHORT,), at_once=True, faults={"crash": 1}),
    "lose_manager": Drain((_SHORT,), at_once=True, faults={"lose_manager": 1}),
}
"""Worlds whose states a search visits all."""

_SEVERAL = (Request((0, 1, 0), 6), Request((0, 1, 0, 0, 1), 5, stop_at=3), Request((1, 1), 7), Request((0, 1), 1))

CROWDS: dict[str, Drain] = {
    "several": Drain(_SEVERAL, 12, 3, faults={"lose_manager": 2, "leave": 1, "crash": 1}),
    "narrow": Drain(_SEVERAL, 7, 2, faults={"lose_manager": 1, "leave": 1}),
    "unread": Drain(_SEVERAL, 12, 3, late=True, faults={"leave": 1, "crash": 1}),
    "full": Drain((_LONG, _LONG), max_num_seqs=1, faults={"lose_manager": 1}),
    "comes": Drain((_LONG, _LONG, _LONG), after=2, faults={"leave": 1}),
}
"""Worlds for random walks; in the narrow one sequences are preempted, and the other worker is full for a while."""


def exhaust(scenario: Drain, max_states: int = 1_000_000, seconds: float = 1e9, peace_every: int = 20) -> Found:
    """Visit every reachable state, depth first, up to the given bounds.

    From every `peace_every`-th state on the world is left in peace and must come to rest, and from each without a
    further event.
    """
    found, deadline = Found(), time.monotonic() + seconds
    known, traces = set[int](), list[tuple[Event, ...]]([()])
    while traces:
        if len(known) >= max_states or time.monotonic() > deadline:
            return found
        trace = traces.pop()
        world = _after(scenario, trace[:-1])
        try:
            fresh = True
            if trace:
                world.happen(trace[-1])
            while fresh:
                fresh = _enter(world, known)
                if not fresh:
                    break
                found.states += 1
                events = world.events() + world.faults()
                found.steps += len(events)
                if not events or found.states % peace_every == 0:
                    _peace_from(scenario, trace)
                traces += [(*trace, event) for event in events[1:]]
                if not events:
                    break
                trace = (*trace, events[0])
                world.happen(events[0])
        except Violation as violation:
            found.violation, found.trace = violation, trace
            return found
        finally:
            world.close()
    found.complete = True
    return found


def _enter(world: DrainWorld, known: set[int]) -> bool:
    """Return whether a world is in a state that was not known; now it is."""
    key = hash(world.state_key())
    if key in known:
        return False
    known.add(key)
    return True


def _after(scenario: Drain, trace: tuple[Event, ...]) -> DrainWorld:
    world = DrainWorld(scenario)
    for event in trace:
        world.occur(event)
    return world


def _peace_from(scenario: Drain, trace: tuple[Event, ...]) -> None:
    world = _after(scenario, trace)
    try:
        world.make_peace()
    finally:
        world.close()


def walk(scenario: Drain, seed: int, events: int = 120, fault: float = 0.03) -> Found:
    """Take one random walk; it ends in peace."""
    rng, found, trace = random.Random(seed), Found(seed=seed), []
    world = DrainWorld(scenario)
    try:
        for _ in range(events):
            choice = (world.faults() if rng.random() < fault else []) or world.events()
            if not choice:
                break
            trace.append(choice[rng.randrange(len(choice))])
            world.happen(trace[-1])
            found.steps += 1
        trace.append(("peace", 0))
        world.make_peace()
    except Violation as violation:
        found.violation, found.trace = violation, tuple(trace)
    finally:
        world.close()
    found.states = found.steps
    return found


@dataclass(frozen=True, slots=True)
class AllMoves:
    """Every state of a tiny world, up to a number of them."""

    scenario: str
    max_states: int = 2_000

    def run(self) -> Found:
        return exhaust(DRAINS[self.scenario], self.max_states)

    def up_to(self, found: Found) -> AllMoves:
        return replace(self, max_states=found.states)

    def __str__(self) -> str:
        return f"moves: {self.scenario}"


@dataclass(frozen=True, slots=True)
class MoveWalks:
    """Random walks through a larger world, from one seed on."""

    scenario: str
    walks: int = 100
    first_seed: int = 0

    def run(self) -> Found:
        steps, found = 0, Found()
        for seed in range(self.first_seed, self.first_seed + self.walks):
            found = walk(CROWDS[self.scenario], seed)
            steps += found.steps
            if found.violation is not None:
                break
        found.steps = found.states = steps
        return found

    def up_to(self, found: Found) -> MoveWalks:
        return self if found.seed is None else replace(self, first_seed=found.seed, walks=1)

    def __str__(self) -> str:
        return f"move walks: {self.scenario}"
