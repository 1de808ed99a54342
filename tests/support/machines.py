"""Machines whose files of /sys and /proc were written down: tests/common/process/machines/."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from common.cpu_list import cpus_of
from common.process.topology import Topology, topology_of

FOLDER: Final = Path(__file__).parents[1] / "common" / "process" / "machines"
CPU: Final = "sys/devices/system/cpu"


def recorded(name: str) -> tuple[dict[str, str], frozenset[int]]:
    """Return the files of a machine by path, and the cpus that the process may use there.

    Each line of a recording is "PATH: LINE", or "allowed: CPUS".
    """
    files: dict[str, list[str]] = {}
    for line in (FOLDER / f"{name}.txt").read_text().splitlines():
        if not line.startswith("#"):
            path, _, text = line.partition(":")
            files.setdefault(path, []).append(text.strip())
    allowed = cpus_of(files.pop("allowed")[0])
    return {path: "\n".join(lines) for path, lines in files.items()}, allowed


def machine(name: str, changed: Mapping[str, str] | None = None, allowed: str | None = None) -> Topology:
    """Return a recorded machine, with other files or other allowed cpus where they are given."""
    files, cpus = recorded(name)
    return topology_of(files | dict(changed or {}), cpus if allowed is None else cpus_of(allowed))
