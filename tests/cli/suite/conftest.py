"""A folder that `quire serve` may be asked to serve, and an environment that names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.suite.stack import free_ports
from tests.support.stranger_files import safetensors


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like a checkpoint from outside."""
    from tests.support.checkpoints import config_of  # needs torch, which most tests here do without

    path = tmp_path_factory.mktemp("checkpoint")
    config_of("llama").save_pretrained(path)
    safetensors(path / "model.safetensors")
    return path


@pytest.fixture
def base(folder: Path, tmp_path: Path) -> dict[str, str]:
    """An environment that names a checkpoint, ports that are free, and a folder for state."""
    # The defaults are among the ports that the system gives to clients: any of them may be in use.
    names = ("PORT", "GRPC_PORT", "ADMIN_PORT", "ADMIN_HTTP_PORT", "MANAGER_PORT", "STANDBY_PORT", "WORKER_PORT")
    ports = {f"QUIRE_SERVE_{name}": str(port) for name, port in zip(names, free_ports(len(names)), strict=True)}
    return {"QUIRE_MODEL": str(folder), "QUIRE_STATE_DIR": str(tmp_path / "state"), **ports}
