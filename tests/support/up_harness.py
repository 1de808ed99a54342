"""`quire serve` as a process of its own, and its output."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path

import psutil

from cli.suite.stack import free_ports
from common.process.python import module_command
from tests.support.checkpoints import checkpoint

READY_SECONDS = 180.0


def quire(
    *words: str, timeout: float = 240.0, environ: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    command = module_command("cli.main", *words)
    env = {**os.environ, **(environ or {})}
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, env=env, cwd=cwd)


class Up:
    """A running `quire serve` on free ports, of one worker on a tiny random checkpoint."""

    def __init__(
        self, folder: Path, *words: str, environ: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> None:
        self.state_dir = folder
        grpc_port, self.port, admin_port, admin_http_port, manager_port, worker_port = free_ports(6)
        flags = {
            "model": checkpoint("llama"),
            "port": self.port,
            "grpc-port": grpc_port,
            "admin-port": admin_port,
            "admin-http-port": admin_http_port,
            "manager-port": manager_port,
            "worker-port": worker_port,
            "state-dir": folder,
        }
        given = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        self.lines: list[str] = []
        self._more = threading.Condition()
        command = module_command("cli.main", "serve", *given, *words)
        env = {**os.environ, **(environ or {})}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, cwd=cwd
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.address, self.admin_address = f"127.0.0.1:{grpc_port}", f"127.0.0.1:{admin_port}"
        # The flags with which commands reach the admin plane.
        self.admin = ("--admin-address", self.admin_address, "--state-dir", str(folder.resolve()))

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                with self._more:
                    self.lines.append(line)
                    self._more.notify_all()

    def until(self, words: str) -> None:
        """Wait until the output has these words; fail with the whole output when they never come."""
        with self._more:
            said = self._more.wait_for(lambda: any(words in line for line in self.lines), READY_SECONDS)
        assert said, "".join(self.lines)

    def close(self) -> None:
        """End the process, if it still runs."""
        self.process.kill()
        self.process.wait()
        self._reader.join()

    def children(self) -> list[psutil.Process]:
        """Return every descendant process."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def child(self, word: str) -> psutil.Process:
        """Return the descendant process whose command has this word."""
        return next(each for each in self.children() if word in " ".join(each.cmdline()))
