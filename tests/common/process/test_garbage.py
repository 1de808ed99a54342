"""How many objects the garbage collector of a service walks over at a time. In a process of its own: it is set once."""

from __future__ import annotations

import subprocess
import sys

import pytest

from common.process.garbage import WALKS, YOUNG

SETTLED = "import gc, sys; from common.process.garbage import collect_rarely; collect_rarely(int(sys.argv[1]))\n"

KEPT = """
class Record: ...

walked = []
gc.callbacks.append(lambda phase, info: phase == "start" and walked.append(len(gc.get_objects(info["generation"]))))
kept = [Record() for _ in range(int(sys.argv[2]))]
print(len(walked), max(walked))
"""

DROPPED = """
import weakref

class Cycle: ...

alive = weakref.WeakSet()
most = 0
for _ in range(int(sys.argv[2])):
    made = Cycle()
    made.itself = made
    alive.add(made)
    most = max(most, len(alive))
print(most, len(alive))
"""


def run(code: str, walks: int, made: int) -> tuple[int, int]:
    """Run code that prints two numbers, in a service that has set its collector."""
    done = subprocess.run(
        [sys.executable, "-c", SETTLED + code, str(walks), str(made)], capture_output=True, text=True, check=True
    )
    one, other = map(int, done.stdout.split())
    return one, other


@pytest.mark.parametrize("walks", [5, WALKS])
def test_new_objects_are_walked_over_in_portions(walks: int) -> None:
    count, largest = run(KEPT, walks, 3 * walks * YOUNG)
    assert count >= 2.5 * walks
    # The larger ones are so many portions, and what was made since.
    assert walks * YOUNG <= largest <= (walks + 3) * YOUNG


def test_few_cycles_wait_for_a_walk() -> None:
    """gRPC makes a cycle for each call; 20,000 objects of them were 3 MiB of a router."""
    most, _ = run(DROPPED, WALKS, 50 * YOUNG)
    assert most <= 2 * YOUNG


def test_what_is_there_at_the_call_is_never_walked_over_again() -> None:
    frozen, _ = run("print(gc.get_freeze_count(), 0)", WALKS, 0)
    assert frozen > 1_000


def test_what_lasts_is_walked_over_neither_while_it_is_made_nor_later() -> None:
    code = """
from common.process.garbage import lasting
walks = []
gc.callbacks.append(lambda phase, info: walks.append(phase))
before = gc.get_freeze_count()
with lasting():
    made = [[] for _ in range(100_000)]
print(len(walks), gc.isenabled() and gc.get_freeze_count() - before)
"""
    walks, frozen = run(code, WALKS, 0)
    assert walks == 0
    assert frozen >= 100_000
