"""Environments and settings of a suite that a test lets `quire serve` check."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cli.suite.preflight import suite_options
from cli.suite.programs import Program, StackOptions, service_programs
from cli.suite.stack import free_ports
from common.contracts.errors import InvalidConfig
from common.process.redis_users import RedisUrls


def programs(options: StackOptions) -> dict[str, Program]:
    control, rest = service_programs(options, RedisUrls.same("redis://127.0.0.1:1"))
    return {program.name: program for program in (*control, *rest)}


def refusals(argv: tuple[str, ...], environ: dict[str, str]) -> dict[str, str]:
    with pytest.raises(InvalidConfig) as caught:
        suite_options(argv, environ)
    return {each.field: each.description for each in caught.value.violations}


def file_with(tmp_path: Path, text: str) -> tuple[str, str]:
    path = tmp_path / "quire.toml"
    path.write_text(text)
    return "--config", str(path)


def resolve(model: str, tmp_path: Path, then: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    """Print what `up` would serve, in a process of its own: the hub's client reads its environment only once."""
    script = "import os, sys; from cli.suite.preflight import *; o = suite_options(sys.argv[1:], os.environ)"
    script += f"; print(o.model); print(*o.router_flags); {then}"
    flags = ("--grpc-port", "--port", "--admin-port", "--admin-http-port", "--manager-port", "--worker-port")
    ports = free_ports(len(flags))
    words = [word for flag, port in zip(flags, ports, strict=True) for word in (flag, str(port))]
    env = {**os.environ, "HF_HOME": str(tmp_path), **environ}
    command = [sys.executable, "-c", script, "--model", model, *words]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=240.0, check=False)
