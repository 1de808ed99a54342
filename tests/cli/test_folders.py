"""Every command and service in a folder of hostile names, and in the folder above a clone that is called `quire`.

The installed programs are called, as a person calls them. `quire serve` and `quire demo` run in such a folder in
test_commands.py, the client library in tests/suites/clients.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cli.main import COMMANDS
from cli.suite.stack import free_ports
from tests.support.hostile import hostile_folder

BIN = Path(sys.executable).parent
ROOT = Path(__file__).resolve().parents[2]
LOG = '{"prompt_tokens": 40, "output_tokens": 8}\n'
NOBODY = "no router answers at"
SERVICES = ("quire-router", "quire-kvmanager", "quire-gpuworker")

pytestmark = pytest.mark.skipif(not (BIN / "quire").is_file(), reason="quire is not installed beside this Python")


def calls(nobody: str) -> dict[str, tuple[list[str], int, str]]:
    """Each call with its exit status and words that it prints; no suite runs at `nobody`."""
    admin = ["--admin-address", nobody]
    return {
        "serve": (["quire", "serve", "--workers", "0"], 2, "--workers: is '0'"),
        "demo": (["quire", "demo", "--help"], 0, "--svg"),
        "generate": (["quire", "generate", "Hello", "--address", nobody], 1, NOBODY),
        "chat": (["quire", "chat", "--address", nobody], 1, NOBODY),
        "status": (["quire", "status", *admin], 1, NOBODY),
        "reset-cache": (["quire", "reset-cache", *admin], 1, NOBODY),
        "pin": (["quire", "pin", "--text", "Hello", *admin], 1, NOBODY),
        "pins": (["quire", "pins", *admin], 1, NOBODY),
        "unpin": (["quire", "unpin", "greeting", *admin], 1, NOBODY),
        "batch": (["quire", "batch", "none.jsonl", "out.jsonl"], 2, "none.jsonl cannot be read"),
        "bench": (["quire", "bench", "nowhere"], 2, "nothing was started"),
        "doctor": (["quire", "doctor"], 0, "Quire "),
        "trace": (["quire", "trace", "r1", *admin], 1, NOBODY),
        "why": (["quire", "why", "r1", *admin], 1, NOBODY),
        "explain": (["quire", "explain", "Why?", *admin], 1, NOBODY),
        "decisions": (["quire", "decisions", *admin], 1, NOBODY),
        "calibration": (["quire", "calibration", *admin], 1, NOBODY),
        "status --watch": (["quire", "status", "--watch", *admin], 1, NOBODY),
        "prefetch": (["quire", "prefetch", "--text", "Why?", "--worker", "w", *admin], 1, NOBODY),
        "adapters": (["quire", "adapters", *admin], 1, NOBODY),
        "record": (["quire", "record", "log.jsonl", *admin], 1, NOBODY),
        "replay": (["quire", "replay", "nowhere"], 2, "cannot be read"),
        "keys": (["quire", "keys", "acme"], 0, "shown once"),
        "debug": (["quire", "debug", "dump"], 1, "no service has an entry in"),
        "certs": (["quire", "certs", "made"], 0, "until"),
        "advise-block-size": (["quire", "advise-block-size", "-"], 0, "take --block-size"),
        "waste": (["quire", "waste", "800"], 0, "1 sequence with 800 tokens"),
        **{name: ([name, "--max-wrokers", "3", "--config", "none.toml"], 2, "none.toml") for name in SERVICES},
        "nothing like it": (["quire", "sevre"], 2, "did you mean serve?"),
        "version": (["quire", "--version"], 0, "quire "),
        **{f"{name} version": ([name, "--version"], 0, f"{name} ") for name in SERVICES},
    }


def test_each_command_imports_nothing_of_a_folder_of_hostile_names(tmp_path: Path) -> None:
    wanted = calls(f"127.0.0.1:{free_ports(1)[0]}")
    assert set(COMMANDS) <= set(wanted), "every command is tried"
    check(wanted, hostile_folder(tmp_path / "hostile"))


@pytest.mark.rest
def test_programs_import_nothing_of_the_folder_above_a_clone(tmp_path: Path) -> None:
    """There `quire` is a folder. What imports it is the start of a program, whatever the command is."""
    (tmp_path / "quire").symlink_to(ROOT)
    names = ("generate", "bench", "doctor", "version", *SERVICES)
    check({name: call for name, call in calls(f"127.0.0.1:{free_ports(1)[0]}").items() if name in names}, tmp_path)


def check(wanted: dict[str, tuple[list[str], int, str]], folder: Path) -> None:
    """Make calls in a folder, two at once; each ends with its status and its words."""
    ports = ("PORT", "GRPC_PORT", "ADMIN_PORT", "ADMIN_HTTP_PORT", "MANAGER_PORT", "WORKER_PORT")
    free = {f"QUIRE_SERVE_{name}": str(port) for name, port in zip(ports, free_ports(len(ports)), strict=True)}

    def run(name: str) -> tuple[int, str]:
        program, *words = wanted[name][0]
        environ = os.environ | (free if name == "doctor" else {})
        done = subprocess.run(
            [str(BIN / program), *words], cwd=folder, env=environ, input=LOG, capture_output=True, text=True,
            timeout=240.0, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    with ThreadPoolExecutor(2) as pool:
        for name, (status, said) in zip(wanted, pool.map(run, wanted), strict=True):
            assert "Traceback" not in said, (name, said)
            assert (status, wanted[name][2] in said) == (wanted[name][1], True), (name, status, said)
