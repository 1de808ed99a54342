"""The decision log of a real suite: its services are killed and restarted, and commands answer when none runs."""

from __future__ import annotations

import asyncio
import json
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli.demo_model import CHECKPOINT
from cli.suite.stack import StackOptions
from common.contracts.errors import InvalidConfig
from common.decisions.log_folder import numbers_in
from common.decisions.log_reader import LogReader
from common.process.python import module_command
from quire.decision.v1 import decision_pb2 as pb
from tests.support.load import kill
from tests.support.suite import PATIENCE, Suite, greedy, running_suite
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

OPTIONS = StackOptions(model=CHECKPOINT, worker_flags=("--kv-blocks", "1024", "--dtype", "float32"))


async def quire(*words: str) -> tuple[int, str, str]:
    """Return the exit status, the output and the errors of a command."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*module_command("cli.main", *words), stdout=pipe, stderr=pipe)
    async with asyncio.timeout(PATIENCE):
        out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


async def printed(*words: str) -> dict[str, Any]:
    status, out, err = await quire(*words, "--json")
    assert (status, err) == (0, "")
    found: dict[str, Any] = json.loads(out)
    return found


def kinds(log: Path, service: str, request_id: str) -> list[str]:
    """Return the kinds of the records of a request on disk; none while there is no log yet."""
    try:
        found = LogReader([log]).page(service, pb.ListDecisionsRequest(request_id=request_id))
    except InvalidConfig:
        return []
    return [each.kind for each in found.decisions]


async def served(suite: Suite, log: Path, name: str) -> None:
    """Serve a request, and wait until its last record is on disk."""
    request = greedy(list(range(100, 140)), 2)
    request.request_id = name
    assert (await suite.generate(request)).finished is not None
    await until(
        lambda: "outcome" in kinds(log, "router", name) and "grant" in kinds(log, "kvmanager", name),
        every=0.05,
        seconds=PATIENCE,
    )


async def killed_and_back(suite: Suite, *services: str) -> None:
    restarts = {name: suite.stack.children[name].restarts for name in services}
    for name in services:
        kill(suite, name)
    await until(
        lambda: all(suite.stack.children[name].restarts > restarts[name] for name in services), seconds=PATIENCE
    )
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                return await suite.until_connected(1)
            except Exception:  # noqa: BLE001 the router is not there yet
                await asyncio.sleep(0.1)


async def test_a_suite_that_is_gone_is_asked_about_requests_of_both_lives(tmp_path: Path) -> None:
    log = tmp_path / "log"
    flags = ("--decision-log", str(log))
    options = replace(OPTIONS, router_flags=flags, manager_flags=flags)
    async with running_suite(tmp_path / "state", options) as suite:
        await served(suite, log, "before")
        await killed_and_back(suite, "router", "kvmanager")
        await served(suite, log, "after")
    assert sorted(each.name for each in log.iterdir()) == ["kvmanager-0", "router-0"]
    assert [numbers_in(log / each) for each in ("kvmanager-0", "router-0")] == [[1], [1]]
    assert {stat.S_IMODE(each.stat().st_mode) for each in log.glob("*/*")} == {0o600}

    where = ("--log", str(log))
    for name in ("before", "after"):
        (found,) = (await printed("why", name, *where))["requests"]
        assert found["request_id"] == name
        assert not [each for each in found["missing"] if "record" in each]
        assert found["verdict"] is not None
        records = (await printed("decisions", "--request", name, "--since", "1d", *where))["decisions"]
        assert {(each["service"], each["kind"]) for each in records} == {
            ("router", "admission"), ("router", "routing"), ("manager", "grant"), ("router", "outcome")
        }  # fmt: skip
    slowest = (await printed("why", "--slowest", "5", "--since", "1h", *where))["requests"]
    assert {each["request_id"] for each in slowest} == {"before", "after"}
    (change,) = (await printed("why", "--hit-rate", "--since", "1h", *where))["changes"]
    assert change["after"]["requests"] == 2

    calibration = await printed("calibration", *where)
    assert [each["request_id"] for each in calibration["requests"]] == ["before", "after"]
    assert {each["measure"] for each in calibration["measures"]} == {"wait", "hit_tokens", "prefill", "first_token"}
    assert calibration["missing"] == []

    routers = await printed("why", "after", "--log", str(log / "router-0"))
    (missing,) = (each for each in routers["requests"][0]["missing"] if "KV manager" in each and "no log" in each)
    advice = "no log of one is in the folders; name its --decision-log too, by another --log DIR"
    assert missing == f"records of the KV manager: {advice}"
    status, out, err = await quire("decisions", "--until", "1d", *where)
    assert (status, err) == (0, "")
    assert out == "no decision here matches; the newest are kept (--decision-log-size, --decision-log-age)\n"
    for words, ends, line in (
        (("why", "nobody", *where), 1, "no record of request nobody"),
        (("decisions", "--log", str(tmp_path / "nowhere")), 2, "is not a folder; name the one that the services have"),
        (("why", "before", "--log", str(tmp_path / "state")), 2, "has no decision log; name a folder"),
        (("decisions", "--follow", *where), 2, "--log: has no new records; expected it without --follow"),
    ):
        status, _, err = await quire(*words)
        assert status == ends
        assert line in err
        assert err.count("\n") == 1
