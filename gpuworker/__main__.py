"""Runs a GPU worker: `python -m gpuworker`, or `quire-gpuworker`."""

from __future__ import annotations

import sys

from common.process.garbage import lasting


def main() -> int:
    with lasting():
        from gpuworker.main import main as run
    return run()


if __name__ == "__main__":
    sys.exit(main())
