"""The `quire` command as a person uses it: up, status, generate, trace, Ctrl-C; and the demonstration."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cli.stack import free_ports
from tests.checkpoints import checkpoint

READY_SECONDS = 60.0


def quire(*words: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    command = [sys.executable, "-m", "cli.main", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


class Up:
    """A running `quire up`."""

    def __init__(self, folder: Path) -> None:
        self.port, http_port, manager_port, worker_port = free_ports(4)
        flags = {
            "model": checkpoint("llama"),
            "port": self.port,
            "http-port": http_port,
            "manager-port": manager_port,
            "worker-port": worker_port,
            "kv-blocks": 64,
            "max-model-len": 256,
            "dtype": "float32",
            "state-dir": folder,
        }
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        self.lines: list[str] = []
        self._more = threading.Condition()
        command = [sys.executable, "-m", "cli.main", "up", *words]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.address = f"127.0.0.1:{self.port}"

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                with self._more:
                    self.lines.append(line)
                    self._more.notify_all()

    def until(self, words: str) -> None:
        """Wait until it says these words; fail with all that it said when it never does."""
        with self._more:
            said = self._more.wait_for(lambda: any(words in line for line in self.lines), READY_SECONDS)
        assert said, "".join(self.lines)

    def close(self) -> None:
        """End it, if it still runs."""
        self.process.kill()
        self.process.wait()
        self._reader.join()

    def children(self) -> list[psutil.Process]:
        """Return every process below it."""
        return psutil.Process(self.process.pid).children(recursive=True)


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """A suite of one worker on a tiny random checkpoint."""
    running = Up(tmp_path_factory.mktemp("up"))
    try:
        running.until("quire     ready")
        yield running
    finally:
        running.close()


def test_status_shows_the_worker(up: Up) -> None:
    shown = quire("status", "--address", up.address)
    assert shown.returncode == 0, shown.stderr
    assert re.search(r"worker-0\s+127\.0\.0\.1:\d+\s+connected\s+attached\s+0\s+0\s+64\s+64", shown.stdout)


def test_generate_streams_and_trace_draws_what_it_names(up: Up) -> None:
    shown = quire("generate", "ab", "--raw", "--max-tokens", "4", "--temperature", "0", "--address", up.address)
    assert shown.returncode == 0, shown.stderr
    found = re.search(r"(\d+) output tokens .* quire trace ([0-9a-f]{32})", shown.stdout)
    assert found is not None, shown.stdout
    drawn = quire("trace", found[2], "--address", up.address)
    assert drawn.returncode == 0, drawn.stderr
    assert "routing: worker-0" in drawn.stdout


def test_errors_are_one_line_and_say_what_to_do(up: Up) -> None:
    too_long = quire("generate", "ab", "--raw", "--max-tokens", "4000", "--address", up.address)
    assert too_long.returncode == 1
    assert "sampling.max_tokens" in too_long.stderr
    assert len(too_long.stderr.splitlines()) == 1
    nobody = quire("status", "--address", f"127.0.0.1:{free_ports(1)[0]}")
    assert nobody.returncode == 1
    assert "quire up --model DIR" in nobody.stderr


def test_a_killed_worker_is_started_again(up: Up) -> None:
    worker = next(child for child in up.children() if "gpuworker.main" in " ".join(child.cmdline()))
    worker.kill()
    up.until("worker-0  killed by SIGKILL; starting it again")
    deadline = time.monotonic() + READY_SECONDS
    while quire("generate", "ab", "--raw", "--max-tokens", "2", "--address", up.address).returncode:
        assert time.monotonic() < deadline, "".join(up.lines)


def test_ctrl_c_drains_and_leaves_nothing_behind(up: Up) -> None:
    below = up.children()
    assert len(below) >= 4
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(timeout=30.0) == 0
    up.until("quire     stopped")
    _, alive = psutil.wait_procs(below, timeout=5.0)
    assert not alive


def test_bad_options_are_all_reported_before_anything_starts() -> None:
    refused = quire("up", "--block-size", "17", "--workers", "0", "--wrokers", "2")
    assert refused.returncode == 2
    for words in (
        "--block-size",
        "power of two",
        "--workers",
        "did you mean --workers",
        "--model",
        "nothing was started",
    ):
        assert words in refused.stderr


def test_the_demonstration_shows_a_cache_hit_and_a_trace() -> None:
    shown = quire("demo", timeout=100.0)
    assert shown.returncode == 0, shown.stderr
    first, second = re.findall(r"^ +(?:first|second) +\d+ +(\d+) +[\d.]+ ms +worker-\d", shown.stdout, re.MULTILINE)
    assert int(first) == 0
    assert int(second) > 200
    for words in ("kvmanager.reserve", "prefill chunk", "routing: worker-", "Everything is stopped and removed"):
        assert words in shown.stdout
