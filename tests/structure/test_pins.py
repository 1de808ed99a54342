"""The pins: constraints.txt and requirements.lock say the same, and the lock names no place."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOCK = (ROOT / "requirements.lock").read_text()
FUZZ_LOCK = (ROOT / "tests" / "fuzz" / "requirements.lock").read_text()
PROTOS_LOCK = (ROOT / "protos" / "requirements.lock").read_text()
OPTIONAL_LOCK = (ROOT / "docker" / "optional.lock").read_text()
each_lock = pytest.mark.parametrize(
    "lock", [LOCK, FUZZ_LOCK, PROTOS_LOCK, OPTIONAL_LOCK], ids=["all", "fuzz", "protos", "optional"]
)
UNHASHED = {"torch", "triton"}
_PINS = runpy.run_path(str(ROOT / "docker" / "pins.py"))
_REQUIREMENTS = runpy.run_path(str(ROOT / "docker" / "requirements.py"))
name_of, read_lock = _REQUIREMENTS["name_of"], _REQUIREMENTS["read_lock"]


def pins() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [line for line in lines if not line.startswith("#")]


def test_both_files_have_the_same_versions() -> None:
    unhashed = {pin for pin in pins() if name_of(pin) in UNHASHED}
    assert {name_of(pin) for pin in unhashed} == UNHASHED
    assert sorted(set(pins()) - unhashed) == sorted(_PINS["versions"](LOCK))


@pytest.mark.parametrize("lock", [FUZZ_LOCK, OPTIONAL_LOCK], ids=["fuzz", "optional"])
def test_a_lock_of_further_packages_adds_to_the_other(lock: str) -> None:
    versions = dict(line.split("==", 1) for line in _PINS["versions"](LOCK))
    assert len(versions) > 100
    for line in _PINS["versions"](lock):
        name, version = line.split("==", 1)
        assert versions.get(name, version).split()[0] == version.split()[0]


@each_lock
def test_every_package_of_a_lock_has_hashes(lock: str) -> None:
    for name, package in read_lock(lock).items():
        hashes = [line for line in package.lines if re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}( \\)?", line)]
        assert len(hashes) == len(package.lines) - sum("==" in line for line in package.lines) > 0, name


@each_lock
def test_a_lock_names_no_place(lock: str) -> None:
    assert not re.findall(r"^.*(?:://|--index|--find-links|file:|/tmp|@ ).*$", lock, re.MULTILINE)


def ranges_of(*words: str) -> set[str]:
    """Return the packages that pyproject.toml names with these extras."""
    command = [sys.executable, "docker/requirements.py", "--ranges", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return {name_of(line) for line in done.stdout.splitlines()}


def test_everything_that_pyproject_names_is_locked() -> None:
    assert ranges_of("--build", *_PINS["EXTRAS"]) - set(read_lock(LOCK)) == UNHASHED
    assert ranges_of(*_PINS["OPTIONAL"]) <= set(read_lock(OPTIONAL_LOCK))


def test_every_extra_is_in_a_lock() -> None:
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    made_of_others = {"service", "serve"}
    assert extras - made_of_others == {*_PINS["EXTRAS"], *_PINS["OPTIONAL"], "fuzz", "protos"}


def test_ranges_begin_at_what_the_generated_code_demands() -> None:
    """protobuf promises that generated code runs on its own major version and on the next one."""
    generated = "\n".join(path.read_text() for path in sorted((ROOT / "protos/quire").glob("**/*_pb2*.py")))
    (protobuf,) = set(re.findall(r"^# Protobuf Python Version: (\d+\.\d+\.\d+)$", generated, re.MULTILINE))
    (grpcio,) = set(re.findall(r"^GRPC_GENERATED_VERSION = '(\d+\.\d+\.\d+)'$", generated, re.MULTILINE))
    ranges = [tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"] for folder in (".", "protos")]
    assert ranges[0]["dependencies"] == ranges[1]["dependencies"]
    assert f"grpcio>={grpcio}" in ranges[0]["dependencies"]
    assert f"protobuf>={protobuf},<{int(protobuf.partition('.')[0]) + 2}" in ranges[0]["dependencies"]
