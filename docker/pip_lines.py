"""Reads what pip prints, and prints one line for every 20 packages, for large files, and after 15 s of silence.

Errors and warnings come through, and so does what the build of the CPU kernels prints. Where the network ended pip, a
last line says so: pip's own errors speak of a missing version, or of hashes. (awk is not the tool for this: mawk,
which is Debian's, holds a pipe's lines back until it has 4096 bytes of them.)
"""

from __future__ import annotations

import queue
import re
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Final

_EVERY: Final = 20
_SILENCE_SECONDS: Final = 15.0
_FOUND: Final = re.compile(r"Collecting|Processing|Requirement already satisfied")
_LARGE: Final = re.compile(r"\s*(Downloading .*\((?:[\d.]+ GB|\d{2,}\.\d MB)\))")
_INSTALLING: Final = re.compile(r"Installing collected packages: (.*)")
_CHATTER: Final = re.compile(
    r"WARNING: Location .* is ignored|Ignoring .*: markers |\s*━|\s*$"
    r"|\s*(Downloading|Using cached|Created wheel|Stored in|Attempting uninstall|Found existing|Uninstalling"
    r"|Successfully|Preparing|Building|Getting|Installing|Checking|Obtaining|Looking)([ :]|$)"
)
# Words of pip, requests, urllib3 and the system. Before version 25 pip takes half a file for a whole one, which is bad.
_NETWORK: Final = re.compile(
    r"connection (broken|reset|refused|aborted)|(Connection|Protocol|Timeout)Error|timed out|Max retries exceeded"
    r"|name resolution|Network is unreachable|IncompleteRead|incomplete-download|Wheel '.*' located at .* is invalid",
    re.IGNORECASE,
)
_OTHER_FILE: Final = re.compile("THESE PACKAGES DO NOT MATCH THE HASHES")
_AGAIN: Final = "run the same make again; pip keeps what it has, and make goes on where it stopped"


def shown(lines: Iterable[str]) -> Iterator[str]:
    """Yield what is shown of pip's lines."""
    found, failed, network, other_file = 0, False, False, False
    for line in lines:
        failed |= line.lower().startswith("error:")
        network |= bool(_NETWORK.search(line))
        other_file |= bool(_OTHER_FILE.search(line))
        if _FOUND.match(line):
            found += 1
            if found % _EVERY == 0:
                yield f"    {found} packages found"
        elif large := _LARGE.match(line):
            yield f"    {large[1]}"
        elif installing := _INSTALLING.match(line):
            yield f"    installing {len(installing[1].split(','))} packages"
        elif not _CHATTER.match(line):
            yield line.rstrip("\n")
    if other_file:
        yield f"the network ended within a file, or the index has another one: {_AGAIN}; trust no second such end"
    elif failed and network:
        yield f"the network ended: {_AGAIN}"


def main() -> None:
    """Print each line at once; while there is none, print how long pip has been at work."""
    waiting: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in shown(sys.stdin):
            waiting.put(line)
        waiting.put(None)

    threading.Thread(target=read, daemon=True).start()
    began = time.monotonic()
    while True:
        try:
            line = waiting.get(timeout=_SILENCE_SECONDS)
        except queue.Empty:
            line = f"    still at it after {time.monotonic() - began:.0f} s"
        if line is None:
            return
        print(line, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
