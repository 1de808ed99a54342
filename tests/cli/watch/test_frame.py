"""One screen of `quire status --watch` at 80x24 against a golden one, and what keys and sizes change of it.

A screen that is meant to change: `GOLDEN=write pytest tests/cli/watch/test_frame.py` writes the file again.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from cli.watch.frame import KEYS, REQUEST_SORTS, WORKER_SORTS, Choice, frame, settled
from cli.watch.keys import DOWN, ENTER, ESCAPE, UP, keys_of
from cli.watch.snapshot import Ended, Snapshot, WorkerRow
from router.observe.diagnosis.outcome import Outcome

GOLDEN = Path(__file__).parents[1] / "golden" / "top_80.txt"


def ended(name: str, first: float, decode: float, hit: int, miss: str, **fields: object) -> Ended:
    outcome = Outcome(
        ended="stop", before=(("blocks", first),), after=(("decode", decode),), has_first_token=True, admissions=1,
        prompt_tokens=1000, cached_tokens=hit, miss=miss, output_tokens=64,
    )  # fmt: skip
    return Ended(name, replace(outcome, **fields))  # type: ignore[arg-type]


SNAPSHOT = Snapshot(
    clock="12:00:01", version="0.9.0", queued=3, running=14,
    workers=(
        WorkerRow("worker-0", "connected", 8, 2, 812.4, 2048, 1600, 64, 300, 84),
        WorkerRow("worker-1", "connected", 6, 0, 640.0, 2048, 1200, 64, 700, 84),
        WorkerRow("gpuworker-5f7d9c6b8-x2x7q", "hung", 0, 0, 0.0, 1024),
    ),
    ended=(
        ended("chat-1", 0.12, 1.5, 900, "full_hit", tenant="red", time_ns=1),
        ended("chat-2", 1.9, 0.4, 250, "evicted", tenant="blue", preemptions=2, time_ns=2),
        ended("a-request-id-that-is-longer-than-its-column", 0.03, 4.0, 0, "never_seen", time_ns=3),
        ended("gone-1", 0.5, 0.0, 500, "full_hit", has_first_token=False, ended="CANCELLED", failure="left", time_ns=4),
    ),
    troubles=("gpuworker-5f7d9c6b8-x2x7q: no heartbeat for 7.1 s",),
)  # fmt: skip


def lines(snapshot: Snapshot = SNAPSHOT, choice: Choice | None = None, width: int = 80, height: int = 24) -> list[str]:
    return [line.plain for line in frame(snapshot, choice or Choice(), width, height)]


def test_the_screen_is_the_golden_one() -> None:
    shown = [line.rstrip() for line in lines()]
    if os.environ.get("GOLDEN") == "write":
        GOLDEN.write_text("".join(f"{line}\n" for line in shown))
    assert shown == GOLDEN.read_text().splitlines()


def test_a_pool_of_pages_says_what_they_are() -> None:
    words = "Blocks are counted in pages: 16 tokens take 1 in full layers"
    shown = lines(replace(SNAPSHOT, pages=words, held="full: 3 blocks in use, 0 cached"))
    assert shown.index(words) == lines().index("! gpuworker-5f7d9c6b8-x2x7q: no heartbeat for 7.1 s")
    assert shown[shown.index(words) + 1] == "groups of layers: full: 3 blocks in use, 0 cached"


def test_host_memory_is_a_line_of_its_own() -> None:
    shown = lines(replace(SNAPSHOT, host="worker-0 7 of 512 blocks"))
    at = lines().index("! gpuworker-5f7d9c6b8-x2x7q: no heartbeat for 7.1 s")
    assert shown[at : at + 2] == ["host memory: worker-0 7 of 512 blocks", lines()[at]]


def test_the_disk_is_a_line_behind_host_memory() -> None:
    shown = lines(replace(SNAPSHOT, host="worker-0 7 of 512 blocks", disk="worker-0 9 of 900 blocks"))
    at = lines().index("! gpuworker-5f7d9c6b8-x2x7q: no heartbeat for 7.1 s")
    assert shown[at : at + 2] == ["host memory: worker-0 7 of 512 blocks", "disk: worker-0 9 of 900 blocks"]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 10), (200, 60), (20, 8)])
@pytest.mark.parametrize("count", [0, 1, 500])
def test_a_frame_fits_its_screen(width: int, height: int, count: int) -> None:
    many = replace(
        SNAPSHOT,
        workers=tuple(replace(SNAPSHOT.workers[0], worker_id=f"w{number}") for number in range(count)),
        ended=tuple(replace(SNAPSHOT.ended[0], request_id=f"r{number}") for number in range(count)),
    )
    shown = frame(many, Choice(), width, height)
    assert len(shown) == height
    assert max(line.cell_len for line in shown) <= width
    assert shown[-1].plain[:10] == KEYS[:10]


def names(shown: list[str], heading: str, count: int) -> list[str]:
    (place,) = [number for number, line in enumerate(shown) if line.startswith(heading)]
    return [line.split()[0] for line in shown[place + 1 : place + 1 + count]]


@pytest.mark.parametrize(
    ("sort", "first"), [("worker", "gpuworker-5f7…"), ("running", "worker-0"), ("in use", "worker-0")]
)
def test_workers_are_sorted(sort: str, first: str) -> None:
    assert names(lines(choice=Choice(workers=sort)), "worker ", 1) == [first]
    assert sort in WORKER_SORTS


@pytest.mark.parametrize(
    ("sort", "order"),
    [("first token", ["chat-2", "gone-1", "chat-1"]), ("took", ["a-request-", "chat-2", "chat-1"]),
     ("newest", ["gone-1", "a-request-", "chat-2"])],
)  # fmt: skip
def test_requests_are_sorted_and_the_selected_one_is_that_of_enter(sort: str, order: list[str]) -> None:
    choice = settled(SNAPSHOT, Choice(requests=sort), 1)
    shown = frame(SNAPSHOT, choice, 80, 24)
    assert [each[:10] for each in names([line.plain for line in shown], f"request by {sort}", 3)] == order
    (selected,) = [line.plain for line in shown if any(span.style == "reverse" for span in line.spans)]
    assert choice.selected[:10] == selected.split()[0][:10] == order[1]
    assert sort in REQUEST_SORTS


def reversed_rows(snapshot: Snapshot, choice: Choice, height: int = 24) -> list[str]:
    shown = frame(snapshot, choice, 80, height)
    return [line.plain.split()[0] for line in shown if any(span.style == "reverse" for span in line.spans)]


def test_the_selection_stays_on_its_request_when_rows_move() -> None:
    choice = settled(SNAPSHOT, Choice(), 1)
    assert reversed_rows(SNAPSHOT, choice) == ["gone-1"]
    slower = ended("chat-9", 7.0, 0.1, 0, "never_seen")
    moved = replace(SNAPSHOT, ended=(slower, *SNAPSHOT.ended))
    choice = settled(moved, choice)
    assert (choice.selected, choice.place, reversed_rows(moved, choice)) == ("gone-1", 2, ["gone-1"])
    choice = settled(moved, replace(choice, requests="newest"))
    assert (choice.selected, choice.place, reversed_rows(moved, choice)) == ("gone-1", 0, ["gone-1"])


def test_the_row_of_a_selected_request_that_is_gone_is_selected() -> None:
    choice = settled(SNAPSHOT, Choice(), 1)
    without = replace(SNAPSHOT, ended=tuple(each for each in SNAPSHOT.ended if each.request_id != "gone-1"))
    choice = settled(without, choice)
    assert (choice.selected, choice.place) == ("chat-1", 1)
    nothing = replace(SNAPSHOT, ended=())
    assert settled(nothing, choice, 1) == choice
    one = replace(SNAPSHOT, ended=SNAPSHOT.ended[:1])
    assert (settled(one, replace(choice, selected="", place=3)).selected, reversed_rows(one, settled(one, choice))) == (
        "chat-1",
        ["chat-1"],
    )


def test_the_selected_row_is_on_the_screen_and_none_is_selected_without_keys() -> None:
    many = replace(
        SNAPSHOT, ended=tuple(replace(SNAPSHOT.ended[0], request_id=f"r{number:03}") for number in range(100))
    )
    for height in (12, 24):
        for steps in (0, 5, 57, 1000):
            choice = settled(many, Choice(), steps)
            assert reversed_rows(many, choice, height) == [f"r{min(steps, 99):03}"]
    assert reversed_rows(many, Choice(place=-1)) == []


def test_nothing_has_ended_yet() -> None:
    shown = lines(replace(SNAPSHOT, ended=(), troubles=()))
    assert shown[1] == "last 60 s: hit rate -"
    assert shown[2] == "0 requests ended, 0 failed; no first token; 0 preemptions"


def test_keys_have_names() -> None:
    assert keys_of("s\x1b[Bj\x1bOA\r\x1bq") == ["s", DOWN, DOWN, UP, ENTER, ESCAPE, "q"]
