"""Runs the router: `python -m router`, or `quire-router`."""

from __future__ import annotations

import sys

from common.process.garbage import lasting


def main() -> int:
    with lasting():
        from router.main import main as run
    return run()


if __name__ == "__main__":
    sys.exit(main())
