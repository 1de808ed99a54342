"""A simpler rule, and the search that must notice it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol
from unittest import mock

from tests.suites.protocol.scenario import Scenario
from tests.suites.protocol.scenarios import AGES, ALL_FAULTS, LARGE, RESETS, ROTS, TINY
from tests.suites.protocol.search import Found, Pace, exhaust, walk

Patch = tuple[Any, str, Any]
STEADY, HASTY = Pace(150, 0.06), Pace(150, 0.1)
CALM = ("cancel",)


class Search(Protocol):
    """A search that is to notice a simpler rule."""

    def run(self) -> Found: ...

    def up_to(self, found: Found) -> Search:
        """Return the part of this search that was needed to find what it found, without what came before."""
        ...


@dataclass(frozen=True, slots=True)
class Exhaustive:
    """Every state of a tiny world, up to a number of them."""

    scenario: str
    max_states: int = 30_000

    def run(self) -> Found:
        return exhaust(TINY[self.scenario], self.max_states, peace_every=5)

    def up_to(self, found: Found) -> Exhaustive:
        return replace(self, max_states=found.states)

    def __str__(self) -> str:
        return f"exhaustive: {self.scenario}"


@dataclass(frozen=True, slots=True)
class Walks:
    """Random walks through a larger world, from one seed on: a mutant's search begins with the walk that kills it."""

    scenario: str
    first_seed: int = 0
    walks: int = 400
    faults: tuple[str, ...] = tuple(ALL_FAULTS)
    pace: Pace = STEADY

    def up_to(self, found: Found) -> Walks:
        return self if found.seed is None else replace(self, first_seed=found.seed, walks=1)

    @property
    def world(self) -> Scenario:
        world = LARGE[self.scenario]
        faults = {kind: limit for kind, limit in (ALL_FAULTS | RESETS).items() if kind in self.faults}
        further = (AGES if world.max_wait else {}) | (ROTS if world.disk and len(faults) > 1 else {})
        further |= world.faults if len(faults) > 1 else {}
        return replace(world, max_faults=12, faults=faults | further)

    def run(self) -> Found:
        steps, found = 0, Found()
        for seed in range(self.first_seed, self.first_seed + self.walks):
            found = walk(self.world, seed, self.pace)
            steps += found.steps
            if found.violation is not None:
                break
        found.steps = found.states = steps
        return found

    def __str__(self) -> str:
        return f"walks: {self.scenario}"


@dataclass(frozen=True, slots=True)
class Mutant:
    """One simpler rule: what it overrides, the search that kills it, and the invariants by which it may die."""

    name: str
    rule: str
    patches: tuple[Patch, ...]
    search: Search
    dies_by: tuple[str, ...]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Use the simpler rule during the block."""
        with ExitStack() as stack:
            for owner, attribute, value in self.patches:
                stack.enter_context(mock.patch.object(owner, attribute, value))
            yield

    def run(self) -> Found:
        """Search with the simpler rule."""
        with self.applied():
            return self.search.run()


def nothing(*_: Any) -> None:
    """The rule is left out."""


def never(*_: Any) -> bool:
    return False


def always(*_: Any) -> bool:
    return True


def zero(*_: Any) -> int:
    return 0
