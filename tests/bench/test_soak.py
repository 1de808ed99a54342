"""The soak: some seconds of it by a plan, and a plan from a seed that is printed before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from bench.fault_injection.plan import Fault, Kind, read, written
from bench.lib.memory_watch import OPEN
from tests.support.bench_process import run_benchmark


def test_seconds_of_a_plan_break_no_stream_change_no_token_and_leave_no_block(tmp_path: Path) -> None:
    """The model has windows and states: what goes on behind a failure goes on from checkpoints."""
    plan = [
        Fault(Kind.WORKER_DRAINED, "worker-1", after_s=1.0),
        Fault(Kind.MANAGER_KILLED, "kvmanager", after_s=1.5),
        Fault(Kind.ROUTER_DRAINED, "router-0", after_s=2.0),
        Fault(Kind.REDIS_WIPED, "", after_s=2.5),
        Fault(Kind.WORKER_KILLED, "worker-0", after_s=3.0),
    ]
    (tmp_path / "plan.json").write_text(written(plan))
    words = ["--minutes", "0.35", "--calm-minutes", "0.05", "--plan", str(tmp_path / "plan.json")]
    sizes = ("--layers", "mixed", "--kv-blocks", "600", "--clients", "6", "--simulate", "base=8ms")
    figures, lines = run_benchmark("soak", *words, *sizes)
    _nothing_is_wrong(figures)
    assert figures["tokens_cached"] > 0
    assert read(next(line for line in lines if line.startswith("plan: ")).removeprefix("plan: ")) == plan
    kinds = {line.split()[0] for line in lines if line.startswith("  ") and ": " in line}
    assert {"good", "message", "message_streamed", "cancelled", "bad"} <= kinds
    for name in ("router-0", "router-1", "kvmanager", "worker-0", "worker-1", "redis"):
        assert figures[f"uss_mib_{name}"] > 1
        assert figures[f"fds_{name}"] > 0
    assert figures["memory_flat"] == OPEN, "seconds show nothing of memory"
    assert "uss_mib_per_hour_high" not in figures


def test_a_soak_with_tls_between_the_services_asks_every_service_as_its_operator(tmp_path: Path) -> None:
    """The manager gets large calls on its own port, and says who leads; the routers tell of their workers."""
    plan = [Fault(Kind.MANAGER_WITHOUT_MEMORY, "kvmanager", after_s=0.5)]
    (tmp_path / "plan.json").write_text(written(plan))
    words = ["--minutes", "0.1", "--calm-minutes", "0", "--plan", str(tmp_path / "plan.json")]
    figures, lines = run_benchmark("soak", "--tls", *words, "--clients", "6", "--simulate", "base=2ms")
    _nothing_is_wrong(figures)
    assert not any(line.startswith("  admin UNAVAILABLE") for line in lines)


@pytest.mark.rest
def test_real_workers_give_the_tokens_of_an_undisturbed_run_while_fetches_fail(tmp_path: Path) -> None:
    plan = [
        Fault(Kind.FETCH_TARGET_STOPPED, "worker-1", after_s=1.0),
        Fault(Kind.FETCH_SOURCE_KILLED, "worker-0", after_s=2.0),
    ]
    (tmp_path / "plan.json").write_text(written(plan))
    words = ["--tiny", "qwen3", "--minutes", "0.15", "--calm-minutes", "0.02", "--plan", str(tmp_path / "plan.json")]
    figures, _ = run_benchmark("soak", *words, "--kv-blocks", "400", "--clients", "6")
    _nothing_is_wrong(figures, messages=False)
    assert figures["faults_amid_fetches"] > 0
    assert figures["tokens_cached"] > 0


def _nothing_is_wrong(figures: Mapping[str, float], messages: bool = True) -> None:
    assert figures["streams"] > 0
    assert (figures["messages"] > 0) == messages
    assert figures["faults_injected"] >= 1
    for name in ("streams_broken", "tokens_differing", "blocks_leaked"):
        assert figures[name] == 0, name
