"""Writes requirements.lock, which has the hashes of all files of each package, and constraints.txt, the versions alone.

What is installed keeps its version; what pyproject.toml has named since then gets the newest one. The lock is
universal: it is written once for every system and Python that Quire runs on. uv resolves it, from an environment of its
own that is thrown away. torch and triton have no hashes: each host takes the build that fits. What torch needs besides
its CUDA packages is in the lock. What `make fuzz` needs besides has a lock of its own, and so have what generates code
and the extras that neither an image nor `make install` has. All keep their versions too. Run this beside
pyproject.toml, in Quire's environment.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from importlib.metadata import requires, version
from pathlib import Path
from typing import Final

UV: Final = "uv==0.13.9"
EXTRAS: Final = ("router", "kvmanager", "gpuworker", "gpu", "cli", "local", "bench", "dev")
OPTIONAL: Final = ("events", "linear", "nixl")
"""Extras that no image has: for routers of others, and for hosts with a GPU or RDMA, which need torch."""
UNHASHED: Final = ("torch", "triton")
PYTHON, BEFORE = "3.11", "3.15"  # the oldest Python that Quire runs on, and the first one without a build of torch
CONSTRAINTS, LOCK = Path("constraints.txt"), Path("requirements.lock")
FUZZ_LOCK, PROTOS_LOCK = Path("tests/fuzz/requirements.lock"), Path("protos/requirements.lock")
OPTIONAL_LOCK = Path("docker/optional.lock")
# What uv writes behind every package that is not for some systems alone.
_EVERYWHERE: Final = f" ; python_full_version < '{BEFORE}' and (sys_platform == 'darwin' or sys_platform == 'linux')"
_HEADER: Final = """\
# What `make install` and the images install, with the hashes of all files, for every system and Python; all of
# constraints.txt but torch and triton. docker/pins.py writes it: run `make pins` after a change.
"""
_FUZZ_HEADER: Final = """\
# What `make fuzz` installs besides; docker/pins.py writes it.
"""
_OPTIONAL_HEADER: Final = """\
# What the extras `events`, `linear` and `nixl` need besides, torch and triton left out; docker/pins.py writes it.
"""
_PROTOS_HEADER: Final = """\
# What generates the code of the .proto files, in an environment of its own; docker/pins.py writes it.
"""


def main() -> None:
    """Write the files, where they change."""
    with tempfile.TemporaryDirectory(prefix="quire-pins-") as name:
        folder = Path(name)
        uv = _uv(folder)
        installed = folder / "installed.txt"
        installed.write_text("".join(f"{line}\n" for line in _installed()))
        lock = _resolved(uv, _ranges("--build", *EXTRAS), installed)
        comments = [line for line in CONSTRAINTS.read_text().splitlines() if line.startswith("#")]
        pins = [f"{name}=={_release(name)}" for name in UNHASHED] + list(versions(lock))
        _write(CONSTRAINTS, "".join(f"{line}\n" for line in [*comments, *sorted(pins, key=str.lower)]))
        _write(LOCK, _HEADER + lock)
        _write(FUZZ_LOCK, _FUZZ_HEADER + _resolved(uv, _ranges("fuzz"), CONSTRAINTS, FUZZ_LOCK))
        _write(OPTIONAL_LOCK, _OPTIONAL_HEADER + _resolved(uv, _ranges(*OPTIONAL), CONSTRAINTS, OPTIONAL_LOCK))
        _write(PROTOS_LOCK, _PROTOS_HEADER + _resolved(uv, _ranges("protos"), Path(os.devnull), PROTOS_LOCK))


def versions(lock: str) -> Iterator[str]:
    """Yield the packages of a lock with version and marker, without hashes."""
    for line in lock.splitlines():
        if re.match(r"[\w.-]+==", line):
            yield line.removesuffix(" \\")


def plain(lock: str) -> str:
    """Return a lock as uv writes it without what says nothing: its markers of everywhere, the names of its inputs."""
    lines = lock.replace(_EVERYWHERE, "").splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("    #   -c ") and line.strip())


def _write(path: Path, text: str) -> None:
    """Write a file that `make install` depends on; an unchanged one keeps its time."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def _uv(folder: Path) -> list[str]:
    """Return the command of a uv of its own."""
    venv.create(folder, with_pip=True)
    pip = (str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    _output(*pip, UV)
    (folder / "pyproject.toml").write_text(_settings())
    return [str(folder / "bin" / "uv"), "--quiet", "--directory", str(folder)]


def _resolved(uv: list[str], ranges: str, constraint: Path, before: Path | None = None) -> str:
    """Return a lock as uv writes it; the versions in `before` stay where they can."""
    left_out = [word for name in UNHASHED for word in ("--no-emit-package", name)]
    command = [*uv, "pip", "compile", "-", "--constraint", str(constraint.resolve()), "--no-header", "--no-annotate"]
    command += ["--universal", "--python-version", PYTHON, "--python", sys.executable, "--generate-hashes", *left_out]
    if before is None:
        command.remove("--no-annotate")  # of this lock an image takes a part
        return plain(_output(*command, given=ranges))
    with tempfile.NamedTemporaryFile("w+", prefix="quire-pins-", suffix=".txt") as file:
        file.write(before.read_text() if before.exists() else "")
        file.flush()
        _output(*command, "--output-file", file.name, given=ranges)
        return plain(Path(file.name).read_text())


def _ranges(*words: str) -> str:
    return _output(sys.executable, "docker/requirements.py", "--ranges", *words)


def _installed() -> Iterator[str]:
    """Yield what is installed, without local versions such as +cpu; `--all` for setuptools, which torch needs."""
    pip = (sys.executable, "-m", "pip", "freeze", "--all", "--exclude-editable", "--exclude", "pip")
    for line in _output(*pip).splitlines():
        yield line.partition("+")[0]


def _settings() -> str:
    """Return uv's settings: the systems that Quire runs on, and what torch needs on any of them, CUDA left out."""
    cuda = ("nvidia", "cuda", *UNHASHED)
    listed = [each for each in requires("torch") or () if "extra ==" not in each and not each.startswith(cuda)]
    systems = [f"sys_platform == '{each}' and python_version < '{BEFORE}'" for each in ("linux", "darwin")]
    return (
        f"[tool.uv]\nenvironments = {json.dumps(systems)}\n"
        f'[[tool.uv.dependency-metadata]]\nname = "torch"\nversion = "{_release("torch")}"\n'
        f"requires-dist = {json.dumps(listed)}\n"
    )


def _release(name: str) -> str:
    return version(name).partition("+")[0]


def _output(*command: str, given: str = "") -> str:
    return subprocess.run(command, input=given, stdout=subprocess.PIPE, text=True, check=True).stdout


if __name__ == "__main__":
    main()
