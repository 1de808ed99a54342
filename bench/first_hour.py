"""Times a stranger's first hour on this machine: a clone to its first answer, and wheels to theirs.

    python -m bench.first_hour                       everything, minutes; each part in a folder of its own
    python -m bench.first_hour clone wheel --json

    clone         git clone, then `make demo`
    no-compiler   the same with a PATH that has no C or C++ compiler
    wheel         pip installs the services' wheel into a fresh environment; then `quire serve` in an empty folder
    serve         `quire serve` of this environment, the best of several starts; then the suite at rest (Linux)

The working tree must be committed: the clone has what git has. Downloads go through pip as it is configured, so their
share depends on the index and on pip's cache; --no-cache empties the latter.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from bench.lib.at_rest import rest
from bench.lib.harness import parser, report_columns

ROOT: Final = Path(__file__).resolve().parents[1]
PYTHON: Final = str(Path(sys.base_prefix) / "bin" / "python3")
PARTS: Final = ("clone", "no-compiler", "wheel", "serve")
STARTS: Final = 3
REST_S: Final = 60.0
# What a line of `make demo` begins with, and what has happened by then.
MADE: Final = {
    "1/3": "clone",
    "2/3": "environment",
    "3/3": "packages",
    "The suite is up": "kernels and start",
    "  Hello!": "first answer",
}
NOTES: Final = {
    "clone": "seconds of git clone",
    "wheels": "seconds in which pip builds the wheel with the kernels of all levels",
    "environment": "seconds of a fresh virtual environment",
    "packages": "seconds in which pip installs",
    "kernels and start": "seconds from the packages to a suite that serves",
    "start": "seconds of `quire serve` until it is ready",
    "first answer": "seconds from there to the first words of an answer",
    "in all": "seconds",
    "install_bytes": "bytes of the virtual environment",
    "demo_first_answer_s": "seconds from git clone to the first words of `make demo`",
    "serve_ready_s": f"seconds of `quire serve` until it is ready, the best of {STARTS}",
    "idle_cpu_percent": "of a core, all processes of a suite without requests",
    "idle_wakeups_per_s": "of all threads of these processes",
}
# Figures of one part alone.
SINGLE: Final = {
    "clone": ("install_bytes", "demo_first_answer_s"),
    "serve": ("serve_ready_s", "idle_cpu_percent", "idle_wakeups_per_s"),
}
_COMPILER: Final = re.compile(r"(.*-)?(c\+\+|g\+\+|clang\+\+|cc|gcc|clang|c89|c99)(-[\d.]+)?")
_OWN: Final = ("QUIRE_", "PYTHON", "VIRTUAL_ENV", "OMP_", "REDIS_URL", "CXX", "MAKE", "MFLAGS")

Times = dict[str, float]


class Failed(Exception):
    """A part ended without an answer; the message has its last lines."""


def environment(path: str) -> dict[str, str]:
    """Return this process's environment without what belongs to Quire, to Python or to make, and with this PATH."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_OWN)} | {"PATH": path}


def bare_path() -> str:
    """Return the PATH without environments of Python."""
    folders = os.environ["PATH"].split(os.pathsep)
    return os.pathsep.join(each for each in folders if not (Path(each).parent / "pyvenv.cfg").exists())


def without_compilers(folder: Path, path: str) -> str:
    """Return a PATH of one folder, filled with links to what is on `path`, without compilers and Pythons."""
    folder.mkdir()
    for where in path.split(os.pathsep):
        for program in Path(where).glob("*"):
            link = folder / program.name
            hidden = _COMPILER.fullmatch(program.name) or program.name.startswith("python")
            if not hidden and not link.is_symlink():
                link.symlink_to(program)
    return str(folder)


class Watch:
    """Counts seconds from one moment to the next, by name."""

    def __init__(self) -> None:
        self.times: Times = {}
        self._began = self._last = time.monotonic()

    def mark(self, name: str) -> None:
        now = time.monotonic()
        self.times[name] = now - self._last
        self._last = now

    def whole(self) -> Times:
        return self.times | {"in all": self._last - self._began}


def run(command: Sequence[str], cwd: Path, env: Mapping[str, str]) -> str:
    """Return what a command prints. Raises Failed when it fails."""
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failed(f"{shlex.join(command)}\n{(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


@contextmanager
def lines_of(command: Sequence[str], cwd: Path, env: Mapping[str, str]) -> Iterator[Iterator[str]]:
    """Run a command and yield its lines; afterwards it gets Ctrl-C, if it still runs."""
    with started(command, cwd, env) as process:
        assert process.stdout is not None
        yield iter(process.stdout)


@contextmanager
def started(command: Sequence[str], cwd: Path, env: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Run a command; afterwards it gets Ctrl-C, if it still runs."""
    with subprocess.Popen(
        command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
            process.communicate()


def until(lines: Iterator[str], seen: Callable[[str], bool]) -> None:
    """Read lines until one of them is `seen`. Raises Failed with the last ones where none is."""
    last: list[str] = []
    for line in lines:
        if seen(line):
            return
        last = [*last[-20:], line]
    raise Failed("".join(last) or "no line at all")


def begins_with(words: str) -> Callable[[str], bool]:
    return lambda line: line.startswith(words)


def clone(folder: Path, env: Mapping[str, str]) -> Times:
    """Clone, and run what the README says first."""
    watch = Watch()
    run(["git", "clone", "--quiet", str(ROOT), "quire"], folder, env)
    with lines_of(["make", "demo", f"PYTHON={PYTHON}"], folder / "quire", env) as lines:
        for begins, name in MADE.items():
            until(lines, begins_with(begins))
            watch.mark(name)
        found = watch.whole()
        until(lines, lambda line: "stopped and removed" in line)
    installed = bytes_of(folder / "quire" / ".venv")
    return found | {"install_bytes": installed, "demo_first_answer_s": found["in all"]}


def wheel(folder: Path, env: Mapping[str, str], serve: Sequence[str]) -> Times:
    """Build the wheels, install them, and serve in an empty folder."""
    watch = Watch()
    run(["git", "clone", "--quiet", str(ROOT), "quire"], folder, env)
    watch.mark("clone")
    source = folder / "quire"
    pip = ["-m", "pip", "--quiet", "--disable-pip-version-check"]
    building = {**env, "QUIRE_CPU_LEVELS": "all"}
    run([PYTHON, *pip, "wheel", "--no-deps", "-w", "wheels", str(source)], folder, building)
    watch.mark("wheels")
    run([PYTHON, "-m", "venv", "venv"], folder, env)
    watch.mark("environment")
    (suite,) = folder.glob("wheels/quire_llm-*")
    fresh = folder / "venv" / "bin"
    run([str(fresh / "python"), *pip, "install", "-c", str(source / "constraints.txt"), f"{suite}[serve]"], folder, env)
    watch.mark("packages")
    (empty := folder / "empty").mkdir()
    with lines_of([str(fresh / "quire"), *serve], empty, env) as lines:
        until(lines, lambda line: " ready: " in line)
        watch.mark("start")
        run([str(fresh / "quire"), "generate", "Hello!", "--quiet"], empty, env)
        watch.mark("first answer")
    return watch.whole()


def bytes_of(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def serve(folder: Path, env: Mapping[str, str], words: Sequence[str], rest_s: float) -> Times:
    """Start a suite of this environment several times in an empty folder; look at the last one while it rests."""
    command = [sys.executable, "-m", "cli.main", *words]
    ready, found = list[float](), Times()
    for left in reversed(range(STARTS)):
        began = time.monotonic()
        with started(command, folder, env) as process:
            assert process.stdout is not None
            until(iter(process.stdout), lambda line: " ready: " in line)
            ready.append(time.monotonic() - began)
            if not left:
                time.sleep(rest_s / 6)  # what a start leaves to do
                found = rest(process.pid, rest_s)
    return {"serve_ready_s": min(ready), **found}


def measure(part: str, env: dict[str, str], words: Sequence[str], rest_s: float = REST_S) -> Times:
    """Return the seconds of a part's steps; its folder is removed."""
    with tempfile.TemporaryDirectory(prefix="quire-first-hour-") as name:
        folder = Path(name)
        if part == "wheel":
            return wheel(folder, env, words)
        if part == "serve":
            return serve(folder, env | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'protos'}"}, words, rest_s)
        if part == "no-compiler":
            env = env | {"PATH": without_compilers(folder / "bin", env["PATH"])}
        return clone(folder, env)


def main() -> int:
    flags = parser(__doc__)
    flags.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(PARTS)} (default: all)")
    flags.add_argument("--serve", default="serve", help="words after `quire` that start a suite (default %(default)s)")
    flags.add_argument("--rest", type=float, default=REST_S, help="seconds of rest that are measured")
    flags.add_argument("--no-cache", action="store_true", help="let pip keep no cache")
    args = flags.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        flags.error(f"no part is called {', '.join(sorted(unknown))}; expected {', '.join(PARTS)}")
    env = environment(bare_path()) | ({"PIP_NO_CACHE_DIR": "1"} if args.no_cache else {})
    found: dict[str, Times] = {}
    for part in args.parts or PARTS:
        try:
            found[part] = measure(part, env, shlex.split(args.serve), args.rest)
        except Failed as error:
            print(f"{part} failed:\n{error}", file=sys.stderr)
            return 1
    single = {name: found[part].pop(name) for part in found for name in SINGLE.get(part, ())}
    report_columns("first_hour", found, NOTES, args.json, single)
    return 0


if __name__ == "__main__":
    sys.exit(main())
