"""`quire why --session`: the requests of one session in order, with think times, from a live router and from a log."""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from cli.commands.why import list_session, main, parser
from common.contracts.errors import InvalidConfig, NotFound
from common.contracts.types import Decision, DecisionKind
from common.decisions.log_files import Bounds, member_of
from common.decisions.log_folder import LogFolder
from common.wire.decision_json import line_of
from router.contracts.session_ids import session_name
from router.observe.diagnosis.outcome import Outcome, figures_of, texts_of
from router.observe.diagnosis.session_requests import requests_of_session

SECOND = 10**9
TALK = session_name("", "talk")
BEFORE = (("queue", 1.5), ("prefill", 0.5))


def ended(name: str, at_s: int, session: str = TALK, **fields: object) -> Decision:
    """Return the end of a request that waited 1.5 s, and took 2 s to its first token and as much after it."""
    outcome = Outcome(ended="length", before=BEFORE, after=(("decode", 2.0),), has_first_token=True, prompt_tokens=100)
    outcome = replace(outcome, **fields)  # type: ignore[arg-type]
    return Decision(
        f"end-{name}",
        DecisionKind.OUTCOME,
        at_s * SECOND,
        "length",
        name,
        reasons=texts_of(outcome),
        figures=figures_of(outcome),
        session=session,
    )


def refused(name: str, at_s: int, session: str = TALK) -> Decision:
    return Decision(f"no-{name}", DecisionKind.REJECTION, at_s * SECOND, "router.queue", name, session=session)


def written(root: Path, made: Sequence[Decision]) -> list[str]:
    """Write a router's log, and return the flags that read it."""
    times = [each.time_ns for each in made]
    folder = LogFolder.claimed(root, "router", Bounds(1 << 24, 10**18), max(times))
    lines = [(each.time_ns, line_of(number, each)) for number, each in enumerate(made, 1)]
    folder.append(member_of(lines), min(times), max(times), max(times))
    folder.close()
    return ["--log", str(root)]


async def shown(flags: Sequence[str], width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width, record=True)
    await list_session(parser().parse_args(flags), console)
    return console.export_text()


def test_requests_are_in_the_order_in_which_they_came_with_their_think_times() -> None:
    """A request that comes while another runs has no think time, and the longest of both ends the talk so far."""
    made = [ended("long", 30), ended("a", 10), ended("within", 29), ended("next", 44), refused("no", 46)]
    made[0] = ended("long", 30, after=(("decode", 10.0),))
    found = requests_of_session(made)
    assert [(each.request_id, each.think_s) for each in found] == [
        ("a", None),
        ("long", 8.0),
        ("within", None),
        ("next", 10.0),
        ("no", 2.0),
    ]
    assert (found[0].waited_s, found[0].began_ns) == (1.5, 6 * SECOND)
    assert (found[4].outcome, found[4].waited_s) == (None, 0.0)


def test_records_that_end_no_request_are_none_of_it() -> None:
    assert (
        requests_of_session(
            [replace(ended("a", 10), kind=DecisionKind.ADMISSION), replace(ended("b", 11), request_id="")]
        )
        == []
    )


async def test_the_table_has_a_line_for_each_request_of_the_session(tmp_path: Path) -> None:
    other = session_name("", "other")
    log = written(tmp_path, [ended("r1", 10), ended("r2", 20, cached_tokens=64), ended("x", 21, other)])
    text = await shown([*log, "--session", "talk"])
    first, second = [line for line in text.splitlines() if " r1 " in line or " r2 " in line]
    assert "x" not in [word for line in text.splitlines()[1:] for word in line.split()[1:2]]
    for line, words in ((first, "-  1.5 s  2.0 s  4.0 s  0 of 100"), (second, "6.0 s  1.5 s  2.0 s  4.0 s  64 of 100")):
        assert words.split() == line.split()[2 : 2 + len(words.split())]
    assert "75 % of the 2.0 s to the first token" in first


async def test_a_session_is_found_by_its_name_in_records_and_by_its_tenant(tmp_path: Path) -> None:
    of_blue = replace(ended("r2", 20, session_name("blue", "talk")), tenant="blue")
    log = written(tmp_path, [ended("r1", 10), of_blue])
    assert "r1" in await shown([*log, "--session", TALK])
    assert "r2" not in await shown([*log, "--session", "talk"])
    assert "r2" in await shown([*log, "--session", "talk", "--tenant", "blue"])
    with pytest.raises(NotFound, match=r"no request of session talk ended here.*--tenant NAME"):
        await shown([*log, "--session", "talk", "--tenant", "red"])


async def test_a_long_session_shows_its_last_requests(tmp_path: Path) -> None:
    log = written(tmp_path, [ended(f"r{number}", 10 * number) for number in range(1, 24)])
    text = await shown([*log, "--session", "talk"])
    assert "3 earlier requests are left out" in text
    assert [f" r{number} " in text for number in (3, 4, 23)] == [False, True, True]


def test_json_has_figures_and_diagnosis(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = written(tmp_path, [ended("r1", 10, cached_tokens=64), refused("r2", 12)])
    assert main([*log, "--session", "talk", "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    first, second = whole["requests"]
    assert (first["cached_tokens"], first["prompt_tokens"], first["waited_s"], first["think_s"]) == (64, 100, 1.5, None)
    assert first["diagnosis"]["request_id"] == "r1"
    assert (second["request_id"], second["think_s"], whole["earlier"]) == ("r2", 2.0, 0)


@pytest.mark.parametrize("flags", [["r1"], ["--last"], ["--slowest"], ["--misses"]])
async def test_flags_that_choose_other_requests_are_refused(flags: list[str]) -> None:
    args: argparse.Namespace = parser().parse_args([*flags, "--session", "talk"])
    with pytest.raises(InvalidConfig, match="chooses all requests of a session"):
        await list_session(args, Console(file=io.StringIO()))
