"""Both wheels, each installed where nothing of a clone can be imported: what is in them, and that they answer."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Callable, Iterator
from email import message_from_bytes
from email.message import Message
from pathlib import Path
from zipfile import ZipFile

import psutil
import pytest

from gpuworker.native.build import LEVELS, library
from gpuworker.native.levels import levels_here

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = {"cli", "common", "gpuworker", "kvmanager", "quire", "router"}
PATIENCE_S = 240.0
_COMPILED = any(map(shutil.which, ("c++", "g++", "clang++")))
_HOOK = runpy.run_path(str(ROOT / "hatch_build.py"))
platform_of, this_platform = _HOOK["platform_of"], _HOOK["this_platform"]
needs_kernels = pytest.mark.skipif(not _COMPILED, reason="no C++ compiler")


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment without what leads to the clone, or configures Quire."""
    left_out = ("PYTHON", "QUIRE_", "VIRTUAL_ENV", "REDIS_URL")
    return {name: value for name, value in os.environ.items() if not name.startswith(left_out)} | more


def output(*command: str | Path, cwd: Path, **more: str) -> str:
    """Return what a command prints; fail with all of it where it fails."""
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def built(folder: Path, *sources: Path, levels: str) -> dict[str, Path]:
    """Return the wheels of these folders by the name of their distribution."""
    pip = ("-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation")
    output(sys.executable, *pip, "--wheel-dir", folder, *sources, cwd=folder.parent, QUIRE_CPU_LEVELS=levels)
    return {path.name.partition("-")[0]: path for path in folder.glob("*.whl")}


def names_in(wheel: Path) -> set[str]:
    with ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def metadata(wheel: Path) -> Message:
    with ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        return message_from_bytes(archive.read(name))


def fresh(folder: Path, wheel: Path, visible: Callable[[str], bool]) -> Path:
    """Return the programs of an environment that has a wheel, and sees some of the packages that run the tests.

    Of those no distribution of Quire is seen. A folder that a .pth file names has none of its own .pth files read.
    """
    output(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    (packages := folder / "packages").mkdir()
    for each in Path(sysconfig.get_path("purelib")).iterdir():
        if visible(each.name) and not each.name.lower().startswith(("quire", "_editable_impl_quire")):
            (packages / each.name).symlink_to(each)
    (site,) = folder.glob("lib/python3.*/site-packages")
    (site / "packages.pth").write_text(f"{packages}\n")
    pip = ("-m", "pip", "--python", folder / "bin/python", "install", "--quiet", "--disable-pip-version-check")
    output(sys.executable, *pip, "--no-deps", "--no-index", wheel, cwd=folder)
    return folder / "bin"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("wheels")


@pytest.fixture(scope="session")
def wheels(folder: Path) -> dict[str, Path]:
    """Both wheels as `make dist` builds them; kernels that are built already are not compiled again."""
    return built(folder / "dist", ROOT, ROOT / "protos", levels="all")


@pytest.fixture(scope="session")
def services(folder: Path, wheels: dict[str, Path]) -> Path:
    """The programs of an environment with the services' wheel."""
    return fresh(folder / "services", wheels["quire_llm"], lambda name: True)


@pytest.fixture(scope="session")
def client(folder: Path, wheels: dict[str, Path]) -> Path:
    """The programs of an environment with the client's wheel, and with no package that it does not ask for."""
    asked = ("google", "grpc", "protobuf", "typing_extensions")
    return fresh(folder / "client", wheels["quire_llm_client"], lambda name: name.startswith(asked))


# ------------------------------------------------------------ what is in them


@needs_kernels
@pytest.mark.rest
def test_the_wheel_has_the_kernels_of_all_levels_and_is_for_the_systems_that_run_them(wheels: dict[str, Path]) -> None:
    wheel = wheels["quire_llm"]
    found = {name for name in names_in(wheel) if "/built/" in name}
    assert found == {f"gpuworker/native/built/{library(level).name}" for level in LEVELS}
    with ZipFile(wheel) as archive:
        assert wheel.name.endswith(f"-py3-none-{platform_of(map(archive.read, sorted(found)))}.whl")
    assert wheels["quire_llm_client"].name.endswith("-py3-none-any.whl")


@needs_kernels
@pytest.mark.rest
def test_each_wheel_has_its_packages_and_the_demo_model(wheels: dict[str, Path]) -> None:
    services, client = names_in(wheels["quire_llm"]), names_in(wheels["quire_llm_client"])
    assert {name.partition("/")[0] for name in services} == PACKAGES
    assert {name.partition("/")[0] for name in client} == {"quire"}
    assert client <= services, "the services contain the client"
    assert "cli/demo_model/checkpoint/model.safetensors" in services
    assert "router/api/page/runbook.md" in services
    assert not [name for name in services if name.endswith((".o", ".stamp", "/lock", ".pyc"))]


@needs_kernels
@pytest.mark.rest
def test_what_a_wheel_says_needs_no_clone_and_requires_no_other_quire(wheels: dict[str, Path]) -> None:
    for wheel in wheels.values():
        said = metadata(wheel)
        assert not [each for each in said.get_all("Requires-Dist", []) if each.startswith("quire")]
        assert said["License-Expression"] == "Apache-2.0"
        assert said.get_all("Classifier", []) == []
        text = str(said.get_payload())
        assert f"pip install {said['Name']}" in text.replace("'", "")
        assert [
            link for link in re.findall(r"\]\(([^)]*)\)", text) if "://" not in link and not link.startswith("#")
        ] == []


@pytest.mark.rest
def test_without_a_word_nothing_is_compiled_and_sources_give_the_same_wheel(tmp_path: Path) -> None:
    wheel = built(tmp_path / "here", ROOT, levels="none")["quire_llm"]
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in names_in(wheel) if name.endswith(".so")]
    script = "import sys; from hatchling.build import build_sdist; print(build_sdist(sys.argv[1]))"
    name = output(sys.executable, "-c", script, tmp_path, cwd=ROOT).split()[-1]
    with tarfile.open(tmp_path / name) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    assert names_in(built(tmp_path / "again", source, levels="none")["quire_llm"]) == names_in(wheel)


@pytest.mark.rest
@pytest.mark.parametrize(
    ("levels", "compiler", "said"),
    [
        ("al", "c++", "QUIRE_CPU_LEVELS is 'al'; expected none, native, all"),
        ("all", "false", "QUIRE_CPU_LEVELS is all, and the kernels cannot be built: false"),
    ],
)
def test_kernels_that_are_asked_for_and_cannot_be_built_end_the_build(
    levels: str, compiler: str, said: str, tmp_path: Path
) -> None:
    native = tmp_path / "clone" / "gpuworker" / "native"
    shutil.copytree(ROOT / "gpuworker/native", native, ignore=shutil.ignore_patterns("built*", "__pycache__"))
    for name in ("pyproject.toml", "hatch_build.py", "docs/install.md"):
        (native.parents[1] / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, native.parents[1] / name)
    command = [sys.executable, "-c", "from hatchling.build import build_wheel; build_wheel('.')"]
    env = environment(QUIRE_CPU_LEVELS=levels, CXX=compiler)
    done = subprocess.run(command, cwd=native.parents[1], env=env, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert said in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_a_platform_is_that_of_the_newest_symbol_and_this_one_where_a_library_takes_more() -> None:
    machine = this_platform().removeprefix("linux_")
    old, new = b"\0GLIBC_2.2.5\0GLIBC_2.14\0", b"\0GLIBC_2.34\0GLIBC_2.9\0GCC_3.0\0GCC_4.2.0\0"
    assert platform_of([old]) == f"manylinux_2_14_{machine}"
    assert platform_of([new, old]) == f"manylinux_2_34_{machine}"
    for more in (b"\0GLIBCXX_3.4.30\0", b"\0CXXABI_1.3\0", b"\0GCC_12.0.0\0"):
        assert platform_of([new, old + more]) == this_platform()
    assert platform_of([b"no symbols"]) == this_platform()


# ------------------------------------------------------------ that they serve and ask


# Of the demo model, to "Who are you?" (cli/demo_model/world.py).
ANSWER = "I am a small model. I answer questions about the text."
IMPORTED = "import json, {}; print(json.dumps([{}]))"


@needs_kernels
@pytest.mark.rest
def test_nothing_of_a_clone_can_be_imported(services: Path, client: Path, tmp_path: Path) -> None:
    """Otherwise the tests below would say nothing."""
    for programs, names in ((services, sorted(PACKAGES)), (client, ["quire"])):
        script = IMPORTED.format(", ".join(names), ", ".join(f"*{name}.__path__" for name in names))
        found = json.loads(output(programs / "python", "-c", script, cwd=tmp_path))
        assert len(found) == len(names), "a namespace package may have several folders"
        assert all(Path(each).is_relative_to(programs.parent) for each in found)
    script = (
        "import importlib.metadata as m; print(*sorted(d.name for d in m.distributions() if 'quire' in d.name.lower()))"
    )
    assert output(services / "python", "-c", script, cwd=tmp_path).split() == ["quire-llm"]


@needs_kernels
@pytest.mark.rest
def test_where_there_is_no_makefile_a_command_is_named_that_builds_kernels(services: Path, tmp_path: Path) -> None:
    script = "from gpuworker.native import build, levels; build.BUILT = build.SOURCE / 'none'; "
    script += "print(levels.why_missing('scalar'))"
    said = output(services / "python", "-c", script, cwd=tmp_path)
    assert f"run `{services / 'python'} -m gpuworker.native.levels`" in said


@pytest.fixture(scope="session")
def suite(services: Path, folder: Path) -> Iterator[tuple[psutil.Process, str]]:
    """A suite of the services' wheel on the demo model, started in an empty folder; its process and gRPC address."""
    (empty := folder / "empty").mkdir()
    names = ("port", "grpc-port", "admin-port", "admin-http-port", "manager-port", "worker-port")
    command = [str(services / "quire"), "serve", *(word for name in names for word in (f"--{name}", "0"))]
    with (
        (folder / "log").open("w+") as log,
        subprocess.Popen(
            command, cwd=empty, env=environment(), stdout=subprocess.PIPE, stderr=log, text=True
        ) as process,
    ):
        try:
            assert process.stdout is not None
            said: list[str] = []
            while not said or (ready := re.search(r" ready: gRPC (\S+), ", said[-1])) is None:
                said.append(process.stdout.readline())
                assert said[-1], f"{''.join(said)}{(folder / 'log').read_text()}"
            yield psutil.Process(process.pid), ready[1]
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=PATIENCE_S)


@needs_kernels
@pytest.mark.rest
def test_the_services_wheel_answers_with_the_kernels_of_this_processor(
    suite: tuple[psutil.Process, str], services: Path, tmp_path: Path
) -> None:
    process, address = suite
    asked = ("generate", "Who are you?", "--temperature", "0", "--quiet", "--address", address)
    assert ANSWER in output(services / "quire", *asked, cwd=tmp_path)
    (worker,) = (each for each in process.children(recursive=True) if "gpuworker" in each.cmdline())
    mapped = {Path(each.path) for each in worker.memory_maps()}
    (kernels,) = (each for each in mapped if each.name.startswith("libquire_cpu."))
    assert kernels.name == library(levels_here()[-1]).name
    assert kernels.is_relative_to(services.parent.resolve())


CALL = """
import sys
from quire.client import Client, Message
with Client(sys.argv[1]) as client:
    print(client.generate([Message(role="user", content="Who are you?")], temperature=0.0).text)
"""


@needs_kernels
@pytest.mark.rest
def test_the_clients_wheel_gets_the_same_answer(
    suite: tuple[psutil.Process, str], client: Path, tmp_path: Path
) -> None:
    assert ANSWER in output(client / "python", "-c", CALL, suite[1], cwd=tmp_path)
