"""The `quire` command: runs one subcommand. Each subcommand is a module, imported only when it runs."""

from __future__ import annotations

import codecs
import difflib
import importlib
import io
import sys
from collections.abc import Sequence

from common.version import quire_version

_ALIASES = {"up": "serve"}
COMMANDS = {
    "serve": "run the whole suite in the foreground: quire serve [MODEL]; also called up",
    "demo": "start a suite, ask the demo model a few things, show the cache and a trace, stop",
    "generate": "stream an answer",
    "chat": "talk with the served model",
    "batch": "answer a file of requests in OpenAI's batch form",
    "status": "show the queue and the workers; --watch: blocks, hit rate and slow requests, drawn anew",
    "reset-cache": "drop the cached blocks that no request uses, on all workers",
    "pin": "keep the beginning of prompts cached, such as a system prompt",
    "prefetch": "bring the beginning of prompts into a worker's host memory before it is asked for them",
    "pins": "list what is pinned, and how much of it each worker has",
    "adapters": "list, load and unload LoRA adapters",
    "unpin": "let a pinned beginning be evicted as all others",
    "doctor": "check what Quire needs on this machine, and say what to do",
    "why": "say why a request was slow, refused or not cached, and what to do",
    "decisions": "list what the services decided, or follow it: admissions, routes, grants, ...",
    "calibration": "compare what the router predicted with what happened: waits, hits, first tokens",
    "explain": "say what would happen to a prompt now: worker, cached tokens, first token",
    "trace": "draw where a request's time went, and why",
    "keys": "make an API key for a tenant",
    "debug": "print the stacks, tasks and state of running services",
    "certs": "make certificates for TLS between services, for development",
    "bench": "measure what this machine gets with a model, and which options to change",
    "record": "write a log of the requests that arrive: lengths, times and keyed names of blocks, no text",
    "replay": "replay such a log on simulated workers: what would other sizes or policies do?",
    "advise-block-size": "which block size suits the requests of a log",
    "waste": "count the slots that sequences waste: contiguous reservations beside blocks",
}

# Of what the commands draw, each as wide as it was.
_PLAIN = dict(zip("━─╸╺╱│└├┤·∘●◆▸↪✗…±", "----/|`||.oo*>>x~~", strict=True))
_EXTRAS = "it is not installed. Install quire-llm[cli] for the commands; `serve` and `demo` need quire-llm[serve]"


def usage() -> str:
    """Return the text that `quire` without arguments prints."""
    width = max(map(len, COMMANDS))
    lines = [f"  quire {name:<{width}}  {what}" for name, what in COMMANDS.items()]
    services = "Services of their own: quire-router, quire-kvmanager, quire-gpuworker."
    head = "usage: quire COMMAND [...]   (quire COMMAND --help lists its options)"
    return "\n".join([head, "", *lines, "", services])


def _nearest(word: str) -> str:
    close = difflib.get_close_matches(word, [*COMMANDS, *_ALIASES], n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _is_text(word: str) -> bool:
    """Return whether a word of the command line was UTF-8; Python keeps other bytes as lone surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in word)


def _plain(error: UnicodeError) -> tuple[str, int]:
    """Return what stands for characters that a terminal's encoding lacks: lines and marks in ASCII, else `?`."""
    assert isinstance(error, UnicodeEncodeError)
    return "".join(_PLAIN.get(each, "?") for each in error.object[error.start : error.end]), error.end


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    codecs.register_error("plain", _plain)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and codecs.lookup(stream.encoding).name != "utf-8":
            stream.reconfigure(errors="plain")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="strict")  # in the locale C, Python lets through bytes that are not text
    wrong = next((place for place, word in enumerate(words, 1) if not _is_text(word)), None)
    if wrong is not None:
        print(f"quire: argument {wrong} is {words[wrong - 1]!a}; expected text in UTF-8", file=sys.stderr)
        return 2
    words[:1] = [_ALIASES.get(word, word) for word in words[:1]]
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0
    if words[0] in ("-V", "--version"):
        print(f"quire {quire_version()}")
        return 0
    if words[0] not in COMMANDS:
        print(f"quire: there is no command {words[0]!r}{_nearest(words[0])}\n\n{usage()}", file=sys.stderr)
        return 2
    try:
        return _run(words[0], words[1:])
    except KeyboardInterrupt:  # before the command itself takes Ctrl-C, as while it imports
        print("\nquire: stopped by Ctrl-C", file=sys.stderr)
        return 130


def _run(name: str, arguments: Sequence[str]) -> int:
    try:
        command = importlib.import_module(f"cli.commands.{name.replace('-', '_')}")
    except ModuleNotFoundError as missing:
        if (missing.name or "").startswith("cli."):
            raise
        print(f"quire: {name} needs {missing.name}; {_EXTRAS}", file=sys.stderr)
        return 2
    return int(command.main(arguments))


if __name__ == "__main__":
    sys.exit(main())
