"""The promises of the Dockerfiles, as far as they show without a build; hadolint is part of `make lint`."""

from __future__ import annotations

import json
import runpy
import shlex
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from common.settings.options import ServiceSettings
from gpuworker.config import GpuWorkerSettings
from kvmanager.config import KvManagerSettings
from router.config import RouterSettings
from tests.suites.deployment.docker.dockerfile import REPOSITORY, Dockerfile

DISTRIBUTIONS = {
    folder: tomllib.loads((REPOSITORY / folder / "pyproject.toml").read_text()) for folder in (".", "protos")
}
PROJECT = DISTRIBUTIONS["."]["project"]
IMAGES: list[tuple[str, str | None, type[ServiceSettings]]] = [
    ("kvmanager", None, KvManagerSettings),
    ("router", None, RouterSettings),
    ("gpuworker", "cpu", GpuWorkerSettings),
    ("gpuworker", "cuda", GpuWorkerSettings),
]
FILES = ["kvmanager", "router", "gpuworker"]


# By its path: an installed package `docker` would be found in place of the folder.
_SCRIPT = runpy.run_path(str(REPOSITORY / "docker/requirements.py"))
requirements, needed, read_lock, name_of = (
    _SCRIPT[name] for name in ("requirements", "needed", "read_lock", "name_of")
)


def dockerfile(name: str, target: str | None = None) -> Dockerfile:
    return Dockerfile.read(f"docker/{name}.Dockerfile", target)


@pytest.mark.parametrize(("name", "target", "settings"), IMAGES)
def test_an_image_runs_its_service_as_nobody_in_particular(
    name: str, target: str | None, settings: type[ServiceSettings]
) -> None:
    image = dockerfile(name, target)
    assert image.of_image("USER")[-1] == "10001:10001"
    assert json.loads(image.of_image("ENTRYPOINT")[-1]) == [f"quire-{name}"]
    assert f"quire-{name}" in PROJECT["scripts"]
    assert image.of_image("STOPSIGNAL") == ["SIGTERM"]
    port = settings.model_fields["port"].default
    ports = [settings.model_fields["grpc_port"].default, port] if name == "router" else [port, port + 1000]
    assert image.of_image("EXPOSE") == [" ".join(map(str, ports))]


@pytest.mark.parametrize("name", FILES)
def test_an_image_says_what_it_is(name: str) -> None:
    image = dockerfile(name)
    labels = dict(word.split("=", 1) for rest in image.of_image("LABEL") for word in shlex.split(rest))
    assert labels["org.opencontainers.image.title"] == f"quire-{name}"
    assert {key.removeprefix("org.opencontainers.image.") for key in labels} == {
        "title",
        "description",
        "version",
        "revision",
    }
    assert f"VERSION={PROJECT['version']}" in image.of_image("ARG")


@pytest.mark.parametrize("name", FILES)
def test_the_last_stage_has_only_what_an_earlier_one_made(name: str) -> None:
    """No compiler, pip or cache: packages are installed in stages that are left behind."""
    image = dockerfile(name)
    assert not any("pip" in rest for rest in image.of_image("RUN"))
    assert any(rest.startswith("--from=") and "/opt/quire /opt/quire" in rest for rest in image.of_image("COPY"))


@pytest.mark.parametrize("name", FILES)
def test_nothing_needs_buildkit(name: str) -> None:
    text = (REPOSITORY / f"docker/{name}.Dockerfile").read_text()
    image = dockerfile(name)
    assert "# syntax" not in text
    assert "<<" not in text
    assert not any(rest.startswith("--") for rest in image.of_all("RUN"))
    flags = [word for rest in image.of_all("COPY") for word in rest.split() if word.startswith("--")]
    assert all(flag.startswith(("--from=", "--chown=")) for flag in flags)


@pytest.mark.parametrize("name", FILES)
def test_what_is_copied_exists_and_reaches_the_engine(name: str) -> None:
    for rest in dockerfile(name).of_all("COPY"):
        words = rest.split()
        if words[0].startswith("--from"):
            continue
        for source in words[:-1]:
            assert (REPOSITORY / source).exists(), source
            assert source == "." or sent_to_the_engine(source), source


@pytest.mark.parametrize(
    "path",
    [
        ".git/config",
        ".venv/bin/python",
        ".env",
        "tests/conftest.py",
        "README.md",
        "gpuworker/native/built/lock",
        "common/__pycache__/errors.cpython-311.pyc",
        ".quire/epoch",
        "bench/split.py",
        "docker/observability/on.env",
    ],
)
def test_what_images_have_no_use_for_is_not_sent(path: str) -> None:
    assert not sent_to_the_engine(path)


@pytest.mark.parametrize("package", ["cli", "common", "gpuworker", "kvmanager", "router", "protos"])
def test_every_package_of_the_wheel_is_sent(package: str) -> None:
    wheels = {folder: each["tool"]["hatch"]["build"]["targets"]["wheel"] for folder, each in DISTRIBUTIONS.items()}
    installed = {(Path(folder) / name).parts[0] for folder, wheel in wheels.items() for name in wheel["packages"]}
    assert package in installed
    assert sent_to_the_engine(f"{package}/some/module.py")


@pytest.mark.parametrize("path", ["hatch_build.py", PROJECT["readme"]])
def test_what_builds_the_wheel_is_sent(path: str) -> None:
    assert (REPOSITORY / path).is_file()
    assert sent_to_the_engine(path)


def test_the_services_contain_the_client_and_what_it_needs() -> None:
    """So that neither distribution requires the other, whose name a stranger could have taken."""
    suite, client = (DISTRIBUTIONS[folder]["tool"]["hatch"]["build"]["targets"]["wheel"] for folder in (".", "protos"))
    assert client["packages"] == ["quire"]
    assert "protos/quire" in suite["packages"]
    alone = DISTRIBUTIONS["protos"]["project"]
    assert (alone["version"], alone["dependencies"]) == (PROJECT["version"], PROJECT["dependencies"])


@pytest.mark.parametrize("name", FILES)
def test_an_image_has_all_that_quire_needs_and_quire(name: str) -> None:
    (code,) = (rest for rest in dockerfile(name).of_all("RUN") if "pip wheel" in rest)
    assert "--no-deps" in code
    assert ("QUIRE_CPU_LEVELS=all" in code) == (name == "gpuworker"), "the control plane has no kernels"
    listed = installed_by(name)
    assert {name_of(each) for each in PROJECT["dependencies"]} < listed
    assert not any(each.startswith("quire") for each in listed)


def test_triton_is_an_extra_and_comes_with_the_image_for_gpus_alone() -> None:
    extras = PROJECT["optional-dependencies"]
    assert [name_of(each) for each in requirements([], extras, ["gpu"])] == ["triton"]
    assert "triton" not in map(name_of, requirements([], extras, ["serve"]))
    stages = {stage.name: " ".join(rest for _, rest in stage.instructions) for stage in dockerfile("gpuworker").stages}
    assert "requirements.py gpuworker >" in stages["packages-cpu"]
    assert "triton" not in stages["packages-cpu"]
    assert "requirements.py gpuworker gpu >" in stages["packages-cuda"]
    assert "torch triton" in stages["packages-cuda"]


def installed_by(*words: str) -> set[str]:
    """Return the names of the packages that an image with these arguments installs from the lock."""
    return {name_of(line) for line in printed(*words) if not line.startswith(" ")}


def printed(*words: str) -> list[str]:
    """Return the lines that docker/requirements.py prints."""
    run = subprocess.run(
        [sys.executable, "docker/requirements.py", *words], capture_output=True, text=True, check=True, cwd=REPOSITORY
    )
    return run.stdout.splitlines()


@pytest.mark.parametrize("name", FILES)
def test_every_package_but_torch_and_triton_has_hashes(name: str) -> None:
    commands = [each for rest in dockerfile(name).of_all("RUN") for each in rest.split("&&") if "pip" in each]
    unhashed = [each.strip() for each in commands if "install" in each and "--require-hashes" not in each]
    for command in unhashed:
        own = "--no-deps --no-index /wheel/" in command
        assert own or command.partition("constraints.txt ")[2] in ("torch", "torch triton"), command
    # An older pip would look beside it.
    assert all("--no-deps" in each for each in commands if "--require-hashes" in each)
    assert all("--no-build-isolation" in each for each in commands if "pip wheel" in each)


def test_what_builds_quire_is_locked() -> None:
    assert {"hatchling", "pluggy"} < installed_by("--build")
    assert "grpcio" not in installed_by("--build")


def sent_to_the_engine(path: str) -> bool:
    """Return what .dockerignore says: the last pattern decides that matches the path or a folder that it lies in."""
    sent = True
    parts = Path(path).parts
    prefixes = ["/".join(parts[: n + 1]) for n in range(len(parts))]
    for line in (REPOSITORY / ".dockerignore").read_text().splitlines():
        pattern = line.strip()
        if not pattern or pattern.startswith("#"):
            continue
        kept = pattern.startswith("!")
        if any(_matches(prefix, pattern.removeprefix("!")) for prefix in prefixes):
            sent = kept
    return sent


def _matches(path: str, pattern: str) -> bool:
    """Match as .dockerignore does: `*` stays within a folder, a leading `**/` is any number of folders."""
    if pattern.startswith("**/"):
        return fnmatch(path.rpartition("/")[2], pattern[3:])
    return path.count("/") == pattern.count("/") and fnmatch(path, pattern)


def test_requirements_follow_extras_of_our_own_and_come_once() -> None:
    optional = {
        "service": ["a>=1", "b"],
        "router": ["quire-llm[service]", "c; sys_platform == 'linux'", "b"],
        "cli": ["d"],
    }
    assert requirements(["a>=1", "z"], optional, ["router", "cli"]) == [
        "a>=1",
        "z",
        "b",
        "c; sys_platform == 'linux'",
        "d",
    ]


LOCK = """\
# a comment
a==1 \\
    --hash=sha256:aa
    # via torch
b-c==2 ; sys_platform == 'linux' \\
    --hash=sha256:bb \\
    --hash=sha256:cc
    # via
    #   -r -
    #   a
d==3 \\
    --hash=sha256:dd
    # via -r -
"""


def test_a_selection_has_what_its_packages_need_and_nothing_else() -> None:
    lock = read_lock(LOCK)
    assert list(needed(lock, ["torch"])) == LOCK.splitlines()[1:3] + LOCK.splitlines()[4:7]
    assert list(needed(lock, ["b-c"])) == LOCK.splitlines()[4:7]
    assert list(needed(lock, ["nothing"])) == []


@pytest.mark.parametrize("name", [*FILES])
def test_the_lock_has_all_that_a_service_needs_here(name: str) -> None:
    """Compared with the metadata of what is installed, for this system and Python."""
    wanted = requirements(PROJECT["dependencies"], PROJECT["optional-dependencies"], [name])
    here = closure([Requirement(each) for each in wanted])
    assert here - installed_by(name) - {"torch", "triton"} == set()


def closure(wanted: list[Requirement]) -> set[str]:
    """Return the names of all packages that requirements lead to here."""
    found: set[str] = set()
    while wanted:
        requirement = wanted.pop()
        name = name_of(requirement.name)
        if name in found or not (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        wanted += [Requirement(each) for each in distribution(name).requires or ()]
    return found


def test_an_unknown_extra_is_refused() -> None:
    with pytest.raises(KeyError, match="rooter"):
        requirements([], {"router": []}, ["rooter"])


@pytest.mark.parametrize("name", ["kvmanager", "router"])
def test_the_control_plane_has_no_torch(name: str) -> None:
    (command,) = (rest for rest in dockerfile(name).of_all("RUN") if "requirements.py" in rest)
    extras = command.rpartition("requirements.py ")[2].partition(" >")[0].split()
    assert name in extras
    assert not installed_by(*extras) & {"torch", "triton", "transformers", "safetensors", "sympy"}
