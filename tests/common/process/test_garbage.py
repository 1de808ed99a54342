"""How many objects the garbage collector of a service walks over at a time. In a process of its own: it is set once."""

from __future__ import annotations

import subprocess
import sys

import pytest

WALKS = """
import gc, sys
from common.process.garbage import collect_rarely

class Record: ...

young, made, walked = int(sys.argv[1]), int(sys.argv[2]), []
collect_rarely(young)
gc.callbacks.append(lambda phase, info: phase == "start" and walked.append(len(gc.get_objects(info["generation"]))))
kept = [Record() for _ in range(made)]
print(len(walked), max(walked))
"""


@pytest.mark.parametrize("young", [1_000, 20_000])
def test_new_objects_are_walked_over_in_portions(young: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WALKS, str(young), str(30 * young)], capture_output=True, text=True, check=True
    )
    walks, largest = map(int, done.stdout.split())
    assert walks >= 25
    # The larger ones are five portions, and what was made since.
    assert young <= largest <= 8 * young


def test_what_is_there_at_the_call_is_never_walked_over_again() -> None:
    code = (
        "import gc; from common.process.garbage import collect_rarely; collect_rarely(); print(gc.get_freeze_count())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 1_000
