"""The `quire` command: runs one subcommand. Each subcommand is a module, imported only when it runs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "up": "run the whole suite in the foreground",
    "demo": "start a suite, ask the demo model a few things, show the cache and a trace, stop",
    "generate": "stream an answer",
    "status": "show the queue and the workers",
    "trace": "draw where a request's time went, and why",
    "debug": "print the stacks, tasks and state of running services",
    "advise-block-size": "which block size suits the requests of a log",
}

_EXTRAS = (
    "it is not installed. Install quire[cli] for the commands; `up` and `demo` need "
    "the extras router, kvmanager, gpuworker and local too"
)


def usage() -> str:
    """Return the text that `quire` without arguments prints."""
    width = max(map(len, COMMANDS))
    lines = [f"  quire {name:<{width}}  {what}" for name, what in COMMANDS.items()]
    services = "Services of their own: quire-router, quire-kvmanager, quire-gpuworker."
    head = "usage: quire COMMAND [...]   (quire COMMAND --help lists its options)"
    return "\n".join([head, "", *lines, "", services])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0
    if words[0] not in COMMANDS:
        print(f"quire: there is no command {words[0]!r}\n\n{usage()}", file=sys.stderr)
        return 2
    try:
        command = importlib.import_module(f"cli.commands.{words[0].replace('-', '_')}")
    except ModuleNotFoundError as missing:
        if (missing.name or "").startswith("cli."):
            raise
        print(f"quire: {words[0]} needs {missing.name}; {_EXTRAS}", file=sys.stderr)
        return 2
    return int(command.main(words[1:]))


if __name__ == "__main__":
    sys.exit(main())
