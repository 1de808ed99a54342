"""Two searches over worlds: every state of a tiny one, and long random walks through a larger one that end in peace."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from tests.suites.protocol.invariants import Violation, check, check_quiescence
from tests.suites.protocol.scenario import Scenario
from tests.suites.protocol.transfer_side import TRANSFERS
from tests.suites.protocol.world import FAULTS, Event, World

PEACE_ROUNDS = 400
"""Rounds, each of which moves every part once, within which a world without faults must come to rest."""


@dataclass(slots=True)
class Found:
    """The result of a search. `violation` is None when every invariant held; `trace` leads to the violation."""

    states: int = 0
    steps: int = 0
    complete: bool = False
    violation: Violation | None = None
    trace: tuple[Event, ...] = ()
    seed: int | None = None

    @property
    def killed_by(self) -> str:
        """The invariant that was violated, empty when none was."""
        return self.violation.invariant if self.violation else ""


def exhaust(scenario: Scenario, max_states: int = 1_000_000, seconds: float = 1e9, peace_every: int = 50) -> Found:
    """Visit every reachable state, breadth first, up to the given bounds.

    A state in which nothing but a fault can happen must be quiescent; from every `peace_every`-th state on the world is
    left in peace and must come to rest, so that a livelock is seen too.
    """
    found, deadline = Found(), time.monotonic() + seconds
    start = World(scenario)
    key = hash(start.state_key())
    came_from: dict[int, tuple[int, Event] | None] = {key: None}
    frontier = deque([(start, key)])
    while frontier:
        if len(came_from) >= max_states or time.monotonic() > deadline:
            break
        world, key = frontier.popleft()
        found.states += 1
        event: Event = ("peace", 0)
        try:
            moved = False
            for event in world.events() + world.faults():
                after = world.clone(event)
                after.occur(event)
                found.steps += 1
                key_after = hash(after.state_key())
                moved = moved or (key_after != key and event[0] not in FAULTS)
                if key_after not in came_from:
                    check(after)
                    came_from[key_after] = (key, event)
                    frontier.append((after, key_after))
            event = ("peace", 0)
            if not moved:
                check_quiescence(world)
            elif found.states % peace_every == 0:
                make_peace(world.clone())
        except Violation as violation:
            found.violation, found.trace = violation, (*_trace(came_from, key), event)
            return found
    found.complete = not frontier
    return found


def _trace(came_from: dict[int, tuple[int, Event] | None], key: int) -> tuple[Event, ...]:
    events, step = [], came_from[key]
    while step is not None:
        events.append(step[1])
        step = came_from[step[0]]
    return tuple(reversed(events))


def make_peace(world: World) -> None:
    """Let no more faults happen and move every part in turn until nothing moves. Raises Violation (I8, I10)."""
    for _ in range(PEACE_ROUNDS):
        moved = False
        for event in _round(world):
            moved = world.happen(event) or moved
        if not moved:
            check_quiescence(world)
            return
    raise Violation("I10", "the faults stopped, and the world does not come to rest")


def _round(world: World) -> Iterator[Event]:
    while world.unsubmitted:
        yield ("submit", 0)
    if world.link is None:
        newest = max(n for n, manager in enumerate(world.managers) if manager.alive)
        yield ("connect", newest)
    for name in ("to_manager", "further", "to_worker", *TRANSFERS, "plan", "complete", "report", "flush"):
        for event in world.events():
            while event[0] == name and event in world.events():
                yield event
                if name not in ("to_manager", "further", "to_worker"):
                    break


@dataclass(frozen=True, slots=True)
class Pace:
    """How likely faults are, per event, and how many events an episode has before its faults stop."""

    events: int = 150
    fault: float = 0.05


def walk(scenario: Scenario, seed: int, pace: Pace = Pace()) -> Found:
    """Take one random walk; it ends in peace."""
    rng = random.Random(seed)
    world, found, trace = World(scenario), Found(seed=seed), []
    try:
        for _ in range(pace.events):
            faults = world.faults() if rng.random() < pace.fault else []
            events = faults or world.events()
            event = events[rng.randrange(len(events))]
            trace.append(event)
            world.happen(event)
            found.steps += 1
        trace.append(("peace", 0))
        make_peace(world)
    except Violation as violation:
        found.violation, found.trace = violation, tuple(trace)
    found.states = found.steps
    return found


def replay(scenario: Scenario, trace: tuple[Event, ...]) -> World:
    """Return the world after a trace; a violation comes as itself. For looking at what a search found."""
    world = World(scenario)
    for event in trace:
        if event[0] == "peace":
            make_peace(world)
        else:
            world.happen(event)
    return world
