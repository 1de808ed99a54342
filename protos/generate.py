"""Generates the Python code of every .proto beside it, or says (`--check`) which committed file is out of date."""

from __future__ import annotations

import argparse
import filecmp
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")


def sources() -> list[str]:
    """Return every .proto below protos/, as protoc names them: relative to the source root."""
    return sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("quire/**/*.proto"))


def generated(root: Path) -> set[str]:
    """Return the generated files below `root`, relative to it."""
    return {p.relative_to(root).as_posix() for p in root.glob("quire/**/*") if p.name.endswith(SUFFIXES)}


def generate(out: Path) -> None:
    """Write the messages, services and type stubs (asyncio only) of every .proto below `out`."""
    plugins = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    outputs = [
        f"--python_out={out}",
        f"--grpc_python_out={out}",
        f"--mypy_out=quiet:{out}",
        f"--mypy_grpc_out=quiet,only_async:{out}",
    ]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT}", *outputs, *sources()]
    subprocess.run(command, check=True, env={**os.environ, "PATH": plugins})


def drift() -> list[str]:
    """Return the generated files that are missing, left over or different from a fresh generation."""
    with tempfile.TemporaryDirectory() as scratch:
        fresh = Path(scratch)
        generate(fresh)
        names = generated(fresh) | generated(ROOT)
        _, different, unreadable = filecmp.cmpfiles(fresh, ROOT, sorted(names), shallow=False)
        return sorted(different + unreadable)


def main() -> int:
    """Generate, or check when asked to; the exit status is 1 on drift."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a committed file is out of date")
    if not parser.parse_args().check:
        generate(ROOT)
        return 0
    stale = drift()
    for name in stale:
        print(f"protos/{name} is out of date: run `make protos`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
