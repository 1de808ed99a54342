"""Tests wait for states: none counts turns of the event loop, and none sleeps instead of looking."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[1]
# Where `take_turn` may be called, and why a turn is the subject there. Elsewhere tests wait for a state:
# tests/support/waiting.py, and `until_blocked` and `until_idle` of tests/support/turns.py.
TAKE_TURNS = {
    "attacks/test_worker_streams.py": "steps come until the stream is closed, and its writer runs between two of them",
    "common/group/test_leader_watch.py": "the second change comes at each moment of an attempt",
    "common/test_decision_pages.py": "a page is made in steps between which others run",
    "common/test_listener.py": "the end comes at each moment of an accept",
    "common/test_waiting.py": "the waiting itself",
    "kvmanager/sessions/test_cleanup.py": "a cancellation comes at each moment of a handler's end",
    "kvmanager/sessions/test_pins.py": "long pins leave the loop to others; a fake index answers later",
    "router/api/page/test_loop_share.py": "the share of the loop",
    "router/requests/test_inbox.py": "so many streams wake in a turn",
    "support/listener.py": "a server may close once what it has accepted has had its turn",
    "support/turns.py": "the helpers themselves",
}
# Where a sleep is not the pause between two looks at a state.
SLEEP = {
    "attacks/test_slow_readers.py": "the pace of a flood",
    "cli/replay/test_virtual_time.py": "virtual time passes at once",
    "common/group/test_lookups.py": "its timer is behind any that a lookup of the minute before has",
    "common/process/test_loop_turns.py": "its timer is behind that of the figures",
    "common/process/test_watchdog.py": "what blocks the loop",
    "router/workers/test_client.py": "what replaces `asyncio.sleep`",
    "support/screenshots.py": "pictures for people",
    "support/turns.py": "one turn",
}
_NO_TIME = re.compile(r"\bsleep\(0(\.0*)?\)")
_WITHOUT_TIME = {"router/workers/test_client.py", "support/turns.py"}


@cache
def sources() -> dict[str, str]:
    return {path.relative_to(TESTS).as_posix(): path.read_text() for path in sorted(TESTS.rglob("*.py"))}


def calls(source: str, name: str) -> Iterator[tuple[int, bool]]:
    """Yield the line of each call of a function or method, and whether it is within a `while` of its own function."""

    def visit(node: ast.AST, within_while: bool) -> Iterator[tuple[int, bool]]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            within_while = False
        within_while = within_while or isinstance(node, ast.While)
        if isinstance(node, ast.Call) and name in {getattr(node.func, "attr", ""), getattr(node.func, "id", "")}:
            yield node.lineno, within_while
        for child in ast.iter_child_nodes(node):
            yield from visit(child, within_while)

    if name in source:
        yield from visit(ast.parse(source), within_while=False)


def test_no_sleep_of_no_time_counts_turns() -> None:
    found = [
        f"tests/{file}:{number}"
        for file, source in sources().items()
        if file not in _WITHOUT_TIME
        for number, line in enumerate(source.splitlines(), 1)
        if _NO_TIME.search(line)
    ]
    assert found == []


def test_only_those_whose_subject_are_turns_take_them() -> None:
    users = {file for file, source in sources().items() if any(calls(source, "take_turn"))}
    assert users == TAKE_TURNS.keys()


def test_every_sleep_is_the_pause_between_two_looks() -> None:
    found = {
        file: [number for number, within_while in calls(source, "sleep") if not within_while]
        for file, source in sources().items()
    }
    users = {file: lines for file, lines in found.items() if lines}
    assert {file: lines for file, lines in users.items() if file not in SLEEP} == {}
    assert users.keys() == SLEEP.keys()


def test_loops_that_look_are_told_from_sleeps() -> None:
    source = """
async def looks():
    while not found():
        await asyncio.sleep(0.1)
        def inner():
            time.sleep(1)
    sleep(2)
"""
    assert list(calls(source, "sleep")) == [(4, True), (6, False), (7, False)]
    assert [bool(_NO_TIME.search(f"sleep({each})")) for each in ("0", "0.0", "0.1")] == [True, True, False]
