"""The faults benchmark: a plan that can be replayed, and a few failures under a few streams."""

from __future__ import annotations

import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import cast

import pytest

from bench import faults, soak
from bench.fault_injection.clocks import compiler, shiftable_clocks
from bench.fault_injection.failure import InjectionFailed
from bench.fault_injection.injection import without_memory
from bench.fault_injection.plan import (
    AMID_FETCHES,
    FREEZE_S,
    FROZEN,
    JUMP_S,
    VICTIMS,
    Fault,
    Kind,
    planned,
    read,
    scattered,
    written,
)
from bench.fault_injection.streams import RecordedReference, Stream
from quire.client import AsyncClient
from tests.support.bench_process import run_benchmark


def test_a_seed_determines_the_plan_and_a_printed_plan_is_read_again() -> None:
    kinds = list(Kind)
    plan = planned(3, kinds, rounds=2, most_tokens=50)
    assert plan == planned(3, kinds, rounds=2, most_tokens=50) != planned(4, kinds, rounds=2, most_tokens=50)
    assert sorted(fault.kind for fault in plan) == sorted([*kinds, *kinds])
    assert all(fault.victim in VICTIMS.get(fault.kind, ("",)) for fault in plan)
    assert all((0 if fault.kind in AMID_FETCHES else 1) <= fault.after_tokens < 50 for fault in plan)
    assert read(written(plan)) == plan


def test_a_soak_has_every_kind_before_any_comes_again_and_can_be_replayed() -> None:
    kinds = [kind for kind in Kind if kind is not Kind.NONE]
    plan = scattered(3, kinds, seconds=400.0, pause=5.0)
    assert plan == scattered(3, kinds, 400.0, 5.0) != scattered(4, kinds, 400.0, 5.0)
    assert sorted(fault.kind for fault in plan[: len(kinds)]) == sorted(kinds)
    times = [fault.after_s for fault in plan]
    assert times == sorted(times)
    assert times[-1] < 400.0
    for fault, then in pairwise(plan):
        assert then.after_s - fault.after_s > (FREEZE_S if fault.kind in FROZEN else 2.0)
    assert read(written(plan)) == plan


async def test_tokens_are_compared_with_those_of_the_same_prompt_in_an_undisturbed_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each client runs a part of the prompts; a stream that ends early is no record."""
    given = 3

    async def run(self: Stream, client: object, count: int) -> None:
        self.tokens = [self.prompt[0] + place for place in range(min(count, given))]

    monkeypatch.setattr(Stream, "run", run)
    clients = cast("list[AsyncClient]", [object(), object()])
    recorded = RecordedReference([[10], [20], [30]], 3)
    await recorded.record(clients)
    right, wrong, short = (Stream(seed, [20]) for seed in range(3))
    right.tokens, wrong.tokens, short.tokens = [20, 21], [20, 22], [20]
    assert [each.differing(recorded, 2) for each in (right, wrong, short)] == [0, 1, 1]
    given = 2
    with pytest.raises(InjectionFailed, match="expected 3 tokens of an undisturbed stream, came: 2 tokens"):
        await recorded.record(clients)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[1]",
        '[{"kind": "rain", "victim": "", "after_tokens": 1}]',
        '[{"kind": "worker_killed", "victim": "redis"}]',
        '[{"kind": "none", "victim": "", "when": 1}]',
    ],
)
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="this is not a plan"):
        read(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1]", "this is not a plan"),
        (None, "No such file"),
        (written([Fault(Kind.REDIS_CLOCK, "redis"), Fault(Kind.LEADER_KILLED, "")]), "has leader_killed, redis_clock"),
    ],
    ids=["no plan", "no file", "other kinds"],
)
def test_a_plan_that_a_soak_cannot_inject_is_refused_before_anything_starts(
    tmp_path: Path, text: str | None, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A soak has one KV manager, and the clocks of its processes are the machine's."""
    plan = tmp_path / "plan.json"
    if text is not None:
        plan.write_text(text)
    with pytest.raises(SystemExit, match="2"):
        soak.flags().parse_args(["--plan", str(plan)])
    said = capsys.readouterr().err.splitlines()[-1]
    assert "argument --plan: " in said
    assert words in said


def test_a_plan_without_faults_has_no_figures_and_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan.json").write_text("[]")
    monkeypatch.setattr("sys.argv", ["bench.faults", "--replay", str(tmp_path / "plan.json")])
    with pytest.raises(SystemExit, match="2"):
        faults.main()
    assert "the plan has no fault; expected one at least" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        # test_soak.py has the same failures of simulated workers with such layers.
        pytest.param(("--layers", "mixed"), id="simulated", marks=pytest.mark.exhaustive),
        pytest.param(("--tiny", "qwen3_next"), id="real"),
    ],
)
def test_streams_that_go_on_from_checkpoints_outlast_failures(tmp_path: Path, words: tuple[str, str]) -> None:
    plan = [
        Fault(Kind.WORKER_KILLED, "worker-1", 3),
        Fault(Kind.MANAGER_KILLED, "kvmanager", 3),
        Fault(Kind.NONE, "", 2),
    ]
    (tmp_path / "plan.json").write_text(written(plan))
    sizes = ["--streams", "8", "--tokens", "60", "--kv-blocks", "300"]
    figures, _ = run_benchmark("faults", "--replay", str(tmp_path / "plan.json"), *sizes, *words)
    assert figures["streams"] == 24
    assert figures["tokens_cached"] > 0
    for name in ("streams_broken", "tokens_differing", "blocks_leaked"):
        assert figures[name] == 0, name


# A router without memory may end streams that need some, with that reason: no test depends on how many.
ROWS = [
    Fault(Kind.NONE, "", 1),
    Fault(Kind.MANAGER_KILLED, "kvmanager", 3),
    Fault(Kind.CLIENTS_GONE, "", 2),
    Fault(Kind.REDIS_OVERWRITTEN, "", 2),
    Fault(Kind.REQUESTS_ABORTED, "", 2),
    Fault(Kind.ROUTER_WITHOUT_FILES, "router-0", 2),
    Fault(Kind.MANAGER_WITHOUT_FILES, "kvmanager", 2),
    Fault(Kind.WORKER_WITHOUT_FILES, "worker-0", 2),
    Fault(Kind.ROUTER_WITHOUT_DISK, "router-1", 2),
    Fault(Kind.MANAGER_WITHOUT_DISK, "kvmanager", 2),
    Fault(Kind.MANAGER_WITHOUT_MEMORY, "kvmanager", 2),
    Fault(Kind.WORKER_WITHOUT_MEMORY, "worker-1", 2),
    Fault(Kind.ALL_DRAINED, "", 2),
]
JUMPS = [
    Fault(Kind.ROUTER_CLOCK, "router-0", 2),
    Fault(Kind.MANAGER_CLOCK, "kvmanager", 2),
    Fault(Kind.WORKER_CLOCK, "worker-1", 2),
    Fault(Kind.REDIS_CLOCK, "redis", 2),
]
FETCHES = [Fault(Kind.FETCH_SOURCE_KILLED, "worker-0"), Fault(Kind.FETCH_TARGET_KILLED, "worker-2")]
LED = [Fault(Kind.LEADER_KILLED, "", 2), Fault(Kind.LEADER_FENCED, "", 2)]


@pytest.mark.parametrize("plan", [ROWS, JUMPS, LED, FETCHES], ids=["one manager", "clocks", "two managers", "fetches"])
def test_failures_break_no_stream_and_change_no_token(tmp_path: Path, plan: list[Fault]) -> None:
    if plan is JUMPS and compiler() is None:
        pytest.skip("a clock that jumps needs a C compiler: none of cc, gcc and clang is on PATH, or this is not Linux")
    (tmp_path / "plan.json").write_text(written(plan))
    # Streams that take 3.2 s, and so outlast the failure, which lasts for 2 s and some more.
    words = ["--replay", str(tmp_path / "plan.json"), "--streams", "6", "--tokens", "400"]
    figures, lines = run_benchmark("faults", *words)
    assert f"plan: {written(plan)}" in lines
    assert figures["streams"] == 6 * len(plan)
    assert figures["faults_injected"] == sum(fault.kind is not Kind.NONE for fault in plan)
    for name in ("streams_broken", "tokens_differing", "blocks_leaked"):
        assert figures[name] == 0, name
    assert figures["gap_p99_s"] >= figures["gap_p50_s"] > 0


@pytest.mark.rest
def test_streams_without_a_manager_end_with_their_tokens_or_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(written([Fault(Kind.MANAGER_GONE, "kvmanager", 2)]))
    figures, _ = run_benchmark(
        "faults", "--replay", str(tmp_path / "plan.json"), "--streams", "4", "--tokens", "400", "--simulate", "base=4ms"
    )
    assert (figures["streams"], figures["faults_injected"]) == (4, 1)
    assert figures["streams_given_up"] > 0
    for name in ("streams_broken", "tokens_differing", "blocks_leaked"):
        assert figures[name] == 0, name


WANTS = """
import sys
for _ in sys.stdin:
    try:
        print("some" if bytearray(1 << 26) else "", flush=True)
    except MemoryError:
        print("none", flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of another process can be set on Linux alone")
def test_a_process_without_memory_gets_none_and_gets_some_afterwards() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WANTS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as it:
        assert it.stdin is not None
        assert it.stdout is not None

        def asked() -> str:
            it.stdin.write("\n")  # type: ignore[union-attr]
            it.stdin.flush()  # type: ignore[union-attr]
            return it.stdout.readline().strip()  # type: ignore[union-attr]

        assert asked() == "some"
        with without_memory(it.pid):
            assert asked() == "none"
        assert asked() == "some"


@pytest.mark.skipif(compiler() is None, reason="a clock that jumps needs Linux and a C compiler")
def test_a_clock_jumps_for_one_process_and_its_monotonic_one_does_not() -> None:
    tell = "import sys, time\nfor _ in sys.stdin: print(time.time(), time.monotonic(), flush=True)"
    with shiftable_clocks() as clocks:
        process = subprocess.Popen(
            [sys.executable, "-c", tell], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        assert process.stdin is not None
        assert process.stdout is not None
        ahead: list[float] = []
        for seconds in (0, JUMP_S, -JUMP_S):
            process.stdin.write("\n")
            before = process.stdout.readline()
            clocks.shift(process.pid, seconds)
            process.stdin.write("\n")
            wall, steady = (float(each) for each in process.stdout.readline().split())
            assert float(before.split()[1]) <= steady <= time.monotonic()
            ahead.append(wall - time.time())
        process.stdin.close()
        assert process.wait() == 0
        process.stdout.close()
        with pytest.raises(FileNotFoundError):
            clocks.shift(1, 5)
    # Half of a jump allows for a machine that stands still between two readings.
    assert [round(each / JUMP_S) for each in ahead] == [0, 1, -1]
