"""What an injection waits for, with a suite and calls that a test makes up."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from bench.fault_injection import injection
from bench.fault_injection.injection import Injector
from bench.fault_injection.plan import Fault, Kind

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
    with pytest.raises(RuntimeError, match=f"kvmanager lacked no memory: {words} within 120 s"):
        await calls.inject()


async def test_calls_that_fail_by_themselves_end_the_injection(calls: Calls) -> None:
    calls.error = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        await calls.inject()
