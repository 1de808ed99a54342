"""Runs the KV manager: `python -m kvmanager`, or `quire-kvmanager`."""

from __future__ import annotations

import sys

from common.process.garbage import lasting


def main() -> int:
    with lasting():
        from kvmanager.main import main as run
    return run()


if __name__ == "__main__":
    sys.exit(main())
