"""A benchmark in a process of its own, as `make bench` runs it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from common.process.python import module_command

_ROOT = Path(__file__).parents[2]
# Below the bound of a test (pyproject.toml), so that what a benchmark printed is shown.
_PATIENCE_S = 540.0


def run_benchmark(name: str, *flags: str) -> tuple[dict[str, float], list[str]]:
    """Run `python -m bench.NAME FLAGS --json`; return its figures, and the lines that it printed."""
    done = subprocess.run(
        module_command(f"bench.{name}", *flags, "--json"),
        capture_output=True,
        text=True,
        timeout=_PATIENCE_S,
        check=False,
        cwd=_ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{_ROOT}:{_ROOT / 'protos'}"},
    )
    # Its last lines say what was wrong.
    assert done.returncode == 0, "\n".join(done.stderr.splitlines()[-12:])
    *lines, last = done.stdout.splitlines()
    report = json.loads(last)
    assert report["bench"] == name
    return report["figures"], lines
