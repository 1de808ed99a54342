"""What an injection waits for and how it fails, with a suite and calls that a test makes up."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import psutil
import pytest
import redis

from bench import faults, soak
from bench.fault_injection import injection
from bench.fault_injection.failure import InjectionFailed, failing_alone
from bench.fault_injection.injection import Injector
from bench.fault_injection.plan import Fault, Kind, written
from bench.soak import disturb

FAULT = Fault(Kind.MANAGER_WITHOUT_MEMORY, "kvmanager", 1)
REFUSED, HAD = "RESOURCE_EXHAUSTED (-)", "NOT_FOUND (-)"


class Calls:
    """Large calls that end as a test says; `looks` counts how often the injection has looked at them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.became, self.looks, self.later = Counter[str](), 0, dict[int, str]()
        self.error: Exception | None = None
        self._suite = Mock(pids=self._pids)
        monkeypatch.setattr(injection, "without_memory", Mock(return_value=Mock(__enter__=Mock(), __exit__=Mock())))
        monkeypatch.setattr(injection, "feed", self._feed)
        monkeypatch.setattr(injection, "STOP_S", 0.0)
        monkeypatch.setattr(injection, "_POLL_S", 0.0)
        monkeypatch.setattr(Injector, "whole", AsyncMock())

    async def _feed(self, _: object, became: Counter[str]) -> None:
        self.became = became
        if self.error is not None:
            raise self.error
        await asyncio.Event().wait()

    def _pids(self) -> dict[str, int]:
        self.looks += 1
        if self.looks in self.later:
            self.became[self.later[self.looks]] += 1
        return {"kvmanager": 7}

    async def inject(self) -> None:
        suite: Any = self._suite
        await Injector(suite, Mock(), [], 1).inject(FAULT, AsyncMock())


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


async def test_a_process_lacks_memory_until_a_call_was_refused(
    calls: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a slow machine no call has ended at first. Then the process still has some memory in reserve."""
    calls.later = {20: HAD, 40: REFUSED}
    await calls.inject()
    assert calls.looks > 40
    assert f"large calls: 1 {HAD}, 1 {REFUSED}" in capsys.readouterr().out


@pytest.mark.parametrize(("later", "words"), [({}, "no large call ended"), ({3: HAD}, "no large call was refused")])
async def test_an_injection_without_effect_is_an_error(
    calls: Calls, later: dict[int, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls.later = later
    monkeypatch.setattr(injection, "time", Mock(monotonic=Mock(side_effect=range(1_000))))
    wanted = f"expected kvmanager to refuse a large call within 120 s, came: {words}"
    with pytest.raises(InjectionFailed, match=wanted):
        await calls.inject()


async def test_calls_that_fail_by_themselves_end_the_injection(calls: Calls) -> None:
    calls.error = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        await calls.inject()


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Injector:
    """Return an injector whose patience is over at once, and whose suite stays as it is."""
    monkeypatch.setattr(injection, "_PATIENCE_S", 0.01)
    monkeypatch.setattr(injection, "_POLL_S", 0.0)
    monkeypatch.setattr("os.kill", Mock())
    monkeypatch.setattr(Injector, "_seen", AsyncMock(return_value="1 of 2 workers"))
    monkeypatch.setattr(Injector, "_leads", AsyncMock(return_value=False))
    suite: Any = Mock(routers=["router-0", "router-1"], managers=["kvmanager"], pids=lambda: {"worker-0": 7})
    return Injector(suite, Mock(), [], 2)


@pytest.mark.parametrize(
    ("kind", "victim", "expected", "came"),
    [
        (Kind.NONE, "", "each router to use 2 of 2 workers", "router-0: 1 of 2 workers, router-1: no answer"),
        (Kind.WORKER_KILLED, "worker-0", "to end by SIGKILL and to be started again", "process 7 runs still"),
        (Kind.WORKER_KILLED, "worker-1", "worker-1 to run", "worker-0 alone runs"),
        (Kind.LEADER_KILLED, "", "kvmanager to lead", "none says that it does"),
    ],
)
async def test_what_does_not_come_is_named_with_what_came(
    stuck: Injector, kind: Kind, victim: str, expected: str, came: str
) -> None:
    injected = stuck.whole() if kind is Kind.NONE else stuck.inject(Fault(kind, victim), AsyncMock())
    with pytest.raises(InjectionFailed) as failed:
        await injected
    assert expected in failed.value.expected
    assert failed.value.came == came


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (InjectionFailed("rain within 1 s", "sun"), "expected rain within 1 s, came: sun"),
        (ConnectionRefusedError(111, "Connect\ncall failed"), "came: ConnectionRefusedError [Errno 111] Connect call"),
    ],
)
async def test_a_fault_of_a_soak_that_fails_ends_it_with_its_name_second_and_seed(error: Exception, words: str) -> None:
    injector = Mock(inject=AsyncMock(), whole=AsyncMock(side_effect=[None, error]))
    plan = [Fault(Kind.REDIS_WIPED, ""), Fault(Kind.WORKER_KILLED, "worker-1"), Fault(Kind.REDIS_WIPED, "")]
    now = time.monotonic()
    with pytest.raises(InjectionFailed) as failed:
        await disturb(injector, plan, now, now + 600, seed=7)
    line = failed.value.line("soak")
    assert line.startswith("bench.soak: fault 2 of 3, worker_killed of worker-1 at ")
    assert "s (seed 7), failed: expected " in line
    assert words in line
    assert "\n" not in line
    assert injector.inject.await_count == 2


async def test_a_mistake_of_the_benchmark_is_no_failed_injection() -> None:
    injector = Mock(inject=AsyncMock(side_effect=ZeroDivisionError), whole=AsyncMock())
    now = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        await disturb(injector, [Fault(Kind.REDIS_WIPED, "")], now, now + 600, seed=7)


def test_a_failed_injection_beside_another_error_hides_nothing() -> None:
    failed = InjectionFailed("rain", "sun")
    with pytest.raises(InjectionFailed) as alone, failing_alone():
        raise ExceptionGroup("tasks", [failed])
    assert alone.value is failed
    with pytest.raises(ExceptionGroup) as both, failing_alone():
        raise ExceptionGroup("tasks", [failed, ZeroDivisionError()])
    assert len(both.value.exceptions) == 2


@pytest.mark.parametrize("bench", ["faults", "soak"])
def test_a_run_whose_injection_fails_ends_with_one_line_and_leaves_no_process(
    bench: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second of two faults fails; the first one's figures do not count for the plan."""
    plan = [Fault(Kind.CLIENTS_GONE, "", 1, 0.1), Fault(Kind.REDIS_WIPED, "", 1, 0.2)]
    (tmp_path / "plan.json").write_text(written(plan))
    which = {
        "faults": (faults, ["--replay", "--streams", "4", "--tokens", "40"], "round 2 of the plan, redis_wiped"),
        "soak": (soak, ["--plan", "--minutes", "5", "--calm-minutes", "0", "--clients", "2"], "fault 2 of 2, redis_"),
    }
    module, (option, *words), begins = which[bench]
    monkeypatch.setattr(soak, "_SMALL_RINGS", {})
    monkeypatch.setattr(Injector, "_wipe", AsyncMock(side_effect=redis.exceptions.ConnectionError("it is away")))
    monkeypatch.setattr("sys.argv", ["bench", "--json", "--seed", "5", option, str(tmp_path / "plan.json"), *words])
    before = set(psutil.Process().children(recursive=True))
    assert module.main() == 1
    said = capsys.readouterr()
    assert said.err.startswith(f"bench.{bench}: {begins}")
    assert "(seed 5), failed: expected no error, came: ConnectionError it is away; the run ends" in said.err
    assert said.err.count("\n") == 1
    assert "tokens_differing" not in said.out
    assert '"figures"' not in said.out
    assert set(psutil.Process().children(recursive=True)) <= before
