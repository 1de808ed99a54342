"""`make install`: what it says on a pipe while pip works, without a compiler, and after; `make test-stress`."""

from __future__ import annotations

import hashlib
import os
import runpy
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from zipfile import ZipFile

import pytest

from gpuworker.native.levels import levels_here
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[3]
TOOLS = ("sh", "make", "grep", "touch", "test", "rm", "echo", "mkdir")
COMPILERS = ("c++", "g++", "clang++")
NEEDED = ("pyproject.toml", "requirements.lock", "constraints.txt", "hatch_build.py")
COPIED = ("Makefile", "docker/pip_lines.py", "gpuworker/native/build.py", "gpuworker/native/levels.py")
shown = runpy.run_path(str(ROOT / "docker/pip_lines.py"))["shown"]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The Makefile over one C++ file of a line, and an environment whose packages are installed already."""
    folder = tmp_path / "clone"
    native = folder / "gpuworker" / "native"
    native.mkdir(parents=True)
    (native / "tiny.cpp").write_text('extern "C" int tiny() { return 1; }\n')
    for name in COPIED:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    for name in NEEDED:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    (folder / ".venv/bin").mkdir(parents=True)
    (folder / ".venv/bin/python").symlink_to(sys.executable)
    for stamp in (".serving", ".packages"):  # in this order
        (folder / ".venv" / stamp).touch()
    return folder


def install(folder: Path, path: str) -> str:
    """Return what `make install` prints, with these folders on PATH and no CXX."""
    make = shutil.which("make")
    assert make is not None, "the Makefile needs make"
    env = {key: value for key, value in os.environ.items() if key not in {"CXX", "MAKEFLAGS", "MAKELEVEL"}}
    command = [make, "--no-print-directory", "install", f"PYTHON={sys.executable}", "JOBS=1"]
    done = subprocess.run(
        command, cwd=folder, env=env | {"PATH": path}, capture_output=True, text=True, timeout=240.0, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="no C++ compiler")
def test_what_serves_needs_the_kernels_of_this_processor_alone(clone: Path) -> None:
    """`make up` on the way to its command, which this clone lacks, builds one library; `make install` the others."""
    levels = runpy.run_path(str(clone / "gpuworker/native/build.py"))["LEVELS"]
    (clone / "gpuworker/__init__.py").touch()
    (clone / "gpuworker/native/__init__.py").touch()
    env = {key: value for key, value in os.environ.items() if key not in {"CXX", "MAKEFLAGS", "MAKELEVEL"}}
    command = ["make", ".venv/.kernels", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=clone, env=env, capture_output=True, text=True, timeout=240.0, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [each.name for each in libraries(clone)] == [f"libquire_cpu.{best_level()}.so"]
    install(clone, os.environ["PATH"])
    assert len(libraries(clone)) > 1 or len(levels) == 1


def best_level() -> str:
    """Return the best level of this processor, where the kernels of all levels are built."""
    return levels_here()[-1]


def libraries(folder: Path) -> list[Path]:
    return sorted((folder / "gpuworker/native/built").glob("*.so"))


@pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="no C++ compiler, which the second half needs")
def test_without_a_compiler_make_says_so_and_builds_once_there_is_one(clone: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bin"
    bare.mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        if found is not None:
            (bare / tool).symlink_to(found)
    for _ in range(2):  # it is said each time
        assert "no C++ compiler: slower torch kernels run on the CPU; install one" in install(clone, str(bare))
    assert libraries(clone) == []
    built = install(clone, os.environ["PATH"])
    assert "building the CPU kernels of all processors" in built
    assert "no C++ compiler" not in built
    assert len(libraries(clone)) >= 1
    assert "building" not in install(clone, os.environ["PATH"])


def test_a_compiler_that_fails_is_quoted_and_make_fails(clone: Path) -> None:
    (clone / "gpuworker/native/tiny.cpp").write_text("this is not C++\n")
    env = os.environ | {"CXX": "false --really"}
    done = subprocess.run(
        ["make", "install", f"PYTHON={sys.executable}"], cwd=clone, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "false --really" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_a_build_that_is_silent_is_seen_to_go_on(clone: Path, tmp_path: Path) -> None:
    """A compiler that stands still goes on once `make` has said so."""
    lines = clone / "docker/pip_lines.py"
    lines.write_text(lines.read_text().replace("_SILENCE_SECONDS: Final = 15.0", "_SILENCE_SECONDS: Final = 0.05"))
    compiler, seen, output = tmp_path / "c++", tmp_path / "seen", tmp_path / "output"
    compiler.write_text(f"#!/bin/sh\nuntil test -e {seen}; do sleep 0.05; done\necho cannot go on >&2\nexit 1\n")
    compiler.chmod(0o755)
    env = os.environ | {"CXX": str(compiler)}
    command = ["make", "install", f"PYTHON={sys.executable}"]
    with (
        output.open("w") as written,
        subprocess.Popen(command, cwd=clone, env=env, stdout=written, stderr=subprocess.STDOUT) as process,
    ):
        try:
            wait_until(lambda: "still at it after" in output.read_text())
        finally:
            seen.touch()
        assert process.wait(240.0) != 0
    assert "cannot go on" in output.read_text()
    assert not (clone / ".venv/.installed").exists()


def test_stress_takes_a_folder_and_a_number_of_runs(clone: Path) -> None:
    def made(*words: str) -> list[str]:
        env = {key: value for key, value in os.environ.items() if key not in {"MAKEFLAGS", "MAKELEVEL"}}
        command = ["make", "--no-print-directory", *words, f"PYTHON={sys.executable}", "JOBS=1"]
        done = subprocess.run(command, cwd=clone, env=env, capture_output=True, text=True, timeout=60.0, check=True)
        return done.stdout.splitlines()

    asked = ("-n", "test-stress", "TESTS=tests/router/requests")
    assert made(*asked)[-1] == ".venv/bin/python -m tests.support.stress 5 tests/router/requests"
    assert made(*asked, "TIMES=2")[-1] == ".venv/bin/python -m tests.support.stress 2 tests/router/requests"


def test_pips_lines_are_counted_by_the_twenty_and_its_errors_are_whole() -> None:
    said = [f"Collecting package-{number}\n" for number in range(41)]
    said += [
        "  Using cached a.whl (3 kB)\n",
        "  Downloading torch-2.whl (190.2 MB)\n",
        "  Downloading b.whl (9.1 MB)\n",
    ]
    said += ["WARNING: Location 'x' is ignored: y\n", "WARNING: the index is slow\n", "\n", "   ━━━━ 1/3\n"]
    said += ["  Attempting uninstall: setuptools\n", "    Found existing installation: setuptools 65.5.0\n"]
    said += ["Installing collected packages: a, b, c\n", "Successfully installed a-1 b-1 c-1\n", "ERROR: no space\n"]
    assert list(shown(said)) == [
        "    20 packages found",
        "    40 packages found",
        "    Downloading torch-2.whl (190.2 MB)",
        "WARNING: the index is slow",
        "    installing 3 packages",
        "ERROR: no space",
    ]


def test_a_line_is_shown_before_the_next_one_comes() -> None:
    """mawk, which did this before, showed nothing until pip had ended."""
    command = [sys.executable, str(ROOT / "docker/pip_lines.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("ERROR: first\n")
        process.stdin.flush()
        assert process.stdout.readline() == "ERROR: first\n"  # and pip has not ended
        process.stdin.close()
        assert process.stdout.read() == ""
        assert process.wait(60.0) == 0


def test_silence_is_broken(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    script = runpy.run_path(str(ROOT / "docker/pip_lines.py"))
    main = script["main"]
    main.__globals__["_SILENCE_SECONDS"] = 0.05

    class Slow:
        def __iter__(self) -> Slow:
            return self

        def __next__(self) -> str:
            wait_until(lambda: "still at it" in capsys_text())
            raise StopIteration

    seen: list[str] = []

    def capsys_text() -> str:
        seen.append(capsys.readouterr().out)
        return "".join(seen)

    monkeypatch.setattr(sys, "stdin", Slow())
    main()
    assert "    still at it after 0 s\n" in "".join(seen)


# ------------------------------------------------------------ where .venv cannot be made whole


def test_an_old_python_is_named_with_what_to_do(clone: Path, tmp_path: Path) -> None:
    (clone / ".venv/.serving").unlink()
    old = tmp_path / "python3.10"
    script = 'import sys; sys.version_info = (3, 10, 4, "final", 0); exec(sys.argv[1])'
    old.write_text(f"""#!/bin/sh\nexec {sys.executable} -c '{script}' "$2"\n""")
    old.chmod(0o755)
    done = make(clone, ".venv/.serving", PYTHON=str(old))
    assert done.returncode != 0
    assert "Quire needs Python 3.11 or newer, and this one is 3.10: make PYTHON=python3.12" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_a_clone_that_cannot_be_written_is_named_with_what_to_do(clone: Path) -> None:
    """A link that leads nowhere stops root too, whom no permission stops."""
    shutil.rmtree(clone / ".venv")
    (clone / ".venv").symlink_to(clone / "nowhere" / "at" / "all")
    done = make(clone, ".venv/.serving")
    assert done.returncode != 0
    said = f"{clone}/.venv cannot be made: make the clone writable, or copy it to a folder of yours and run make there"
    assert said in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_an_environment_that_was_not_made_whole_is_removed(clone: Path, tmp_path: Path) -> None:
    """Debian's python3 without python3-venv makes one without pip, and says what to install."""
    shutil.rmtree(clone / ".venv")
    python = tmp_path / "python3"
    python.write_text(
        f"""#!/bin/sh
if [ "$2" = venv ]; then mkdir -p "$3/bin"; touch "$3/bin/python"; chmod +x "$3/bin/python"; echo install it; exit 1; fi
exec {sys.executable} "$@"
"""
    )
    python.chmod(0o755)
    done = make(clone, ".venv/.serving", PYTHON=str(python))
    assert done.returncode != 0
    assert "install it" in done.stdout
    assert not (clone / ".venv").exists()


def make(
    folder: Path, target: str, environ: dict[str, str] | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Return how `make` ended, with these variables; PYTHON is this one unless they name another."""
    env = {
        key: value for key, value in os.environ.items() if key not in {"CXX", "MAKEFLAGS", "MAKELEVEL", "PYTHONPATH"}
    }
    given = [f"{name}={value}" for name, value in ({"PYTHON": sys.executable} | variables).items()]
    command = ["make", "--no-print-directory", target, *given]
    return subprocess.run(
        command, cwd=folder, env=env | (environ or {}), capture_output=True, text=True, timeout=240.0, check=False
    )


class Index:
    """A package index on loopback. It breaks off within the files named in `broken`; `sent` names whole ones."""

    def __init__(self, wheels: dict[str, bytes]) -> None:
        self.broken: set[str] = set()
        self.sent: list[str] = []
        index = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name = self.path.rstrip("/").rpartition("/")[2]
                page = f'<a href="/files/{name}-1-py3-none-any.whl">{name}-1-py3-none-any.whl</a>'.encode()
                body = wheels[name] if self.path.startswith("/files/") else page
                self.send_response(200)
                self.send_header("Content-Type", "text/html" if body is page else "application/octet-stream")
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Cache-Control", "no-cache" if body is page else "max-age=365000000, immutable")
                self.end_headers()
                is_broken = name in index.broken
                self.wfile.write(body[: len(body) // 2] if is_broken else body)
                if body is not page and not is_broken:
                    index.sent.append(name.partition("-")[0])
                self.close_connection = True

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/simple"


BACKEND = """
from pathlib import Path
from zipfile import ZipFile

def build_editable(folder, settings=None, metadata=None):
    info = "tiny-1.dist-info"
    with ZipFile(Path(folder) / "tiny-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\\nName: tiny\\nVersion: 1\\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(f"{info}/RECORD", "")
    return "tiny-1-py3-none-any.whl"
"""
PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "tiny"
version = "1"
dependencies = ["one", "two"]
[project.optional-dependencies]
serve = []
"""


def tiny_wheel(folder: Path, name: str) -> bytes:
    path, info = folder / f"{name}.whl", f"{name}-1.dist-info"
    with ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", "#" * 100_000)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path.read_bytes()


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    names = ("one", "two", "torch")
    found = Index({f"{name}-1-py3-none-any.whl": tiny_wheel(tmp_path, name) for name in names})
    thread = threading.Thread(target=found.server.serve_forever)
    thread.start()
    yield found
    found.server.shutdown()
    thread.join()
    found.server.server_close()


@pytest.mark.rest
def test_where_the_network_ends_make_says_so_and_goes_on_the_next_time(
    clone: Path, index: Index, tmp_path: Path
) -> None:
    """What was whole is not fetched again: pip keeps it."""
    shutil.rmtree(clone / ".venv")
    (clone / "docker/requirements.py").write_bytes((ROOT / "docker/requirements.py").read_bytes())
    (clone / "pyproject.toml").write_text(PROJECT)
    (clone / "backend.py").write_text(BACKEND)
    hashes = {name: hashlib.sha256((tmp_path / f"{name}.whl").read_bytes()).hexdigest() for name in ("one", "two")}
    lock = [f"{name}==1 \\\n    --hash=sha256:{digest}\n" for name, digest in hashes.items()]
    (clone / "requirements.lock").write_text("".join(lock))
    (clone / "constraints.txt").write_text("torch==1\n")
    pip = {name: "" for name in os.environ if name.startswith("PIP_")}
    pip |= {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": index.url, "PIP_RETRIES": "0", "PIP_TIMEOUT": "60"}
    pip |= {"PIP_CACHE_DIR": str(tmp_path / "cache"), "PIP_TRUSTED_HOST": "127.0.0.1"}  # it keeps files of no other
    for breaks, said, fetched in (("two", OTHER_FILE, ["one"]), ("torch", NETWORK, ["one", "two"])):
        index.broken = {f"{breaks}-1-py3-none-any.whl"}
        ended = make(clone, ".venv/.serving", pip)
        assert ended.returncode != 0
        assert said in ended.stdout, ended.stdout + ended.stderr
        assert not (clone / ".venv/.serving").exists()
        assert index.sent == fetched
    index.broken = set()
    ended = make(clone, ".venv/.serving", pip)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert AGAIN not in ended.stdout
    assert index.sent == ["one", "two", "torch"]


AGAIN = "run the same make again; pip keeps what it has, and make goes on where it stopped"
NETWORK = f"the network ended: {AGAIN}"
# Before version 25 pip does not see that a file is not whole.
OTHER_FILE = f": {AGAIN}"


def test_the_networks_end_is_told_from_other_errors() -> None:
    broken = "WARNING: Retrying (Retry(total=4)) after connection broken by 'NewConnectionError': /simple/two/\n"
    error = "ERROR: Could not find a version that satisfies the requirement two==1 (from versions: none)\n"
    assert list(shown([broken, error]))[-1] == NETWORK
    assert list(shown([broken, "Successfully installed two-1\n"])) == [broken.rstrip()], "a later try came through"
    assert list(shown([error])) == [error.rstrip()]
    hashes = "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.\n"
    assert "another one" in list(shown([broken, hashes]))[-1], "which may be an attack"
    assert list(shown(["ERROR: Could not install packages: [Errno 28] No space left on device\n"]))[1:] == []
