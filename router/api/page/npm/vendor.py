"""Copies the packages of package-lock.json that the page serves, or says (`--check`) which committed file differs."""

from __future__ import annotations

import argparse
import filecmp
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
VENDOR = HERE.parent / "static" / "vendor"
# What is copied: from node_modules, to the folder of the page. The licence goes with the code.
FILES = {
    "uplot/dist/uPlot.iife.min.js": "uPlot.iife.min.js",
    "uplot/dist/uPlot.min.css": "uPlot.min.css",
    "uplot/LICENSE": "uPlot.LICENSE.txt",
}


def main() -> int:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--check", action="store_true", help="change nothing; fail when a committed file differs")
    check = flags.parse_args().check
    if shutil.which("npm") is None:
        print("npm is not installed; on Debian: apt-get install npm", file=sys.stderr)  # noqa: T201
        return 1
    command = ["npm", "ci", "--silent", "--ignore-scripts", "--no-audit", "--no-fund"]
    subprocess.run(command, cwd=HERE, check=True)
    differing = [name for source, name in FILES.items() if not _is_same(HERE / "node_modules" / source, VENDOR / name)]
    extra = sorted({path.name for path in VENDOR.glob("*")} - {*FILES.values()})
    if check:
        for name in (*differing, *extra):
            path = (VENDOR / name).relative_to(HERE.parents[3])
            print(f"{path} is not what package-lock.json has; run make page")  # noqa: T201
        return int(bool(differing or extra))
    VENDOR.mkdir(exist_ok=True)
    for source, name in FILES.items():
        shutil.copyfile(HERE / "node_modules" / source, VENDOR / name)
    for name in extra:
        (VENDOR / name).unlink()
    return 0


def _is_same(source: Path, copy: Path) -> bool:
    return copy.is_file() and filecmp.cmp(source, copy, shallow=False)


if __name__ == "__main__":
    sys.exit(main())
