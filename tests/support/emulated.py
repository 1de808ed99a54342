"""Runs the tests of native code on an emulated aarch64 processor: `make test-arm`.

Needs root on Debian. Unpacks a Debian for arm64 into a folder, with the packages that these tests import, builds every
level for it with a cross compiler, and runs pytest there in qemu's user mode. ARM_ROOT names the folder (1.4 GB), which
stays.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from gpuworker.native import build

REPOSITORY = Path(__file__).parents[2]
ROOT = Path(os.environ.get("ARM_ROOT", "/var/tmp/quire-arm"))
HOME, SITE = "opt/quire", "opt/site"
DEBIAN, PYTHON = "bookworm", "3.11"
TOOLS = {
    "debootstrap": "debootstrap",
    "qemu-aarch64-static": "qemu-user-static",
    "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu",
}
# Of constraints.txt; torch is the last one that PyPI has for CPUs of ARM.
TORCH = "torch==2.10.0"
PACKAGES = """
    annotated-types anyio async-timeout cryptography execnet filelock fsspec googleapis-common-protos grpcio h11
    httpcore2 httpx2 huggingface-hub hypothesis idna iniconfig jinja2 markupsafe mpmath networkx numpy opentelemetry-api
    opentelemetry-exporter-otlp-common opentelemetry-exporter-otlp-proto-common opentelemetry-exporter-otlp-proto-grpc
    opentelemetry-proto opentelemetry-sdk opentelemetry-semantic-conventions packaging pluggy prometheus-client protobuf
    psutil pydantic pydantic-core pygments pytest pytest-asyncio pytest-timeout pytest-xdist pyyaml redis regex
    safetensors setuptools sortedcontainers sympy tokenizers tqdm transformers truststore typing-extensions
    typing-inspection
"""
TESTS = (
    "tests/gpuworker/native/test_linear.py",
    "tests/gpuworker/native/test_step_queue.py",
    "tests/gpuworker/attention/test_native_backend.py",
    "tests/gpuworker/native/test_hostile.py",
    "tests/gpuworker/sampling/test_sampler.py",
    "tests/gpuworker/models/llama/test_cpu_model.py",
)


def run(*command: str | Path, **environ: str) -> None:
    subprocess.run(command, env=os.environ | environ, check=True)


def make_root() -> None:
    """Unpack Debian's packages. They stay as they are: their scripts would run for minutes under emulation."""
    included = f"--include=python{PYTHON},libgomp1,ca-certificates"
    run("debootstrap", "--foreign", "--arch=arm64", "--variant=minbase", included, DEBIAN, ROOT)
    for package in sorted((ROOT / "var/cache/apt/archives").glob("*.deb")):
        run("dpkg-deb", "-x", package, ROOT)
    shutil.copy(shutil.which("qemu-aarch64-static") or "", ROOT / "usr/bin")
    wanted = PACKAGES.split()
    pins = [line.split(" ;")[0] for line in (REPOSITORY / "constraints.txt").read_text().splitlines()]
    pins = [pin for pin in pins if pin.partition("==")[0] in wanted]
    tags = [f"--platform=manylinux_2_{minor}_aarch64" for minor in range(36, 16, -1)]
    flags = ["--quiet", "--no-deps", "--only-binary=:all:", f"--python-version={PYTHON}", *tags]
    run(sys.executable, "-m", "pip", "install", *flags, "--target", ROOT / SITE, *pins, TORCH, PIP_CONSTRAINT="")


def copy_tree() -> None:
    """Copy what git knows, and build the libraries of every level beside it."""
    for name in subprocess.check_output(["git", "ls-files"], cwd=REPOSITORY, text=True).splitlines():
        to = ROOT / HOME / name
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, to)
    build.LEVELS, build.BUILT = build.levels_for("aarch64"), ROOT / HOME / "gpuworker/native/built"
    os.environ["CXX"] = "aarch64-linux-gnu-g++"
    build.build(progress=True)


def main(words: list[str]) -> int:
    if missing := [package for tool, package in TOOLS.items() if not shutil.which(tool)]:
        raise SystemExit(f"this needs more: apt-get install {' '.join(missing)}")
    if not (ROOT / SITE / "torch").is_dir():
        make_root()
    copy_tree()
    # The mounts end with the process. No shell of the folder runs: its programs need the emulator by name.
    mounts = f"mount --rbind /dev {ROOT}/dev && mount -t proc proc {ROOT}/proc"
    emulator = f"/usr/bin/qemu-aarch64-static /usr/bin/python{PYTHON}"
    start = (
        f"import os, runpy, sys; os.chdir('/{HOME}'); sys.path[0] = ''; runpy.run_module('pytest', run_name='__main__')"
    )
    script = f'{mounts} && exec chroot {ROOT} {emulator} -c "{start}" -n 0 --timeout 3000 "$@"'
    command = ["unshare", "--mount", "sh", "-c", script, "sh", *(words or TESTS)]
    # The folder knows no users.
    environ = os.environ | {"PYTHONPATH": f"/{HOME}:/{HOME}/protos:/{SITE}", "HOME": "/root", "LOGNAME": "root"}
    return subprocess.run(command, env=environ, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
