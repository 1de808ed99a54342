"""Writes docs/models.md: how each family of causal language models is served, tried on tiny random checkpoints.

Results are kept row by row in .quire/models-matrix.jsonl, so a run that was stopped goes on where it was. Rows run in a
process of their own; one that dies or hangs counts as a crash.

    python -m tests.suites.models.matrix [--anew] [NAME ...]
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import multiprocessing
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path
from typing import Final

import transformers

from common.checkpoint.wrappers import WRAPPERS
from tests.suites.models import trial
from tests.suites.models.defaults import write as write_defaults
from tests.suites.models.families import Entry, entries
from tests.suites.models.trial import Outcome

ROOT: Final = Path(__file__).resolve().parents[3]
DOCUMENT: Final = ROOT / "docs" / "models.md"
RESULTS: Final = ROOT / ".quire" / "models-matrix.jsonl"
_SECONDS: Final = 300
_ROWS_A_PROCESS: Final = 40
_COLUMNS: Final = 100

_HEAD: Final = """# Models

How each family of causal language models in transformers {version} is served. `make models-matrix`
writes this page: it makes a tiny random checkpoint of each family, and compares greedy tokens of a
worker, in float32, with those of transformers. Prompts run beyond every window and threshold that
the configuration names. A window is tried where a family may have one.

A checkpoint of a served family can still be refused: each start runs a self-test, and a test
beyond the thresholds of its configuration (`gpuworker/models/self_test.py`, `threshold_test.py`).
"""
_WRAPPED: Final = """Of models of several media the language model is served, where it alone computes what the whole \
computes for text. Pictures and sound are refused. That holds for {kinds}, with a language model of a family below; \
`tests/gpuworker/models/test_wrappers.py` compares each with transformers. A language model that scales its logits, \
as granite may, is refused in them.
"""
SECTIONS: Final = (
    (
        trial.NATIVE,
        "Served natively",
        "Quire's own forward pass, in C++ on a CPU, in one process or several (`--tensor-parallel-size`).",
    ),
    (trial.HOSTED, "Served through transformers", "transformers' code, with Quire's paged attention in it."),
    (trial.REFUSED, "Refused", "A worker ends at its start, with this reason."),
    (trial.DIFFERS, "Wrong", "Served with other tokens than transformers has. This section must be empty."),
    (trial.CRASHES, "Crashing", "Neither served nor refused. This section must be empty."),
    (trial.NOT_BUILT, "Not tried", "transformers itself builds or loads no tiny model of the family."),
)


def rendered(outcomes: Iterable[Outcome]) -> str:
    """Return the document."""
    found = list(outcomes)
    parts = [_HEAD.format(version=transformers.__version__), wrapped(), _counts(found)]
    for way, title, words in SECTIONS:
        rows = [outcome for outcome in found if outcome.way == way]
        if rows:
            parts.append(f"## {title}\n\n{words}\n\n{''.join(map(line, rows))}")
    return "\n".join(parts)


def wrapped() -> str:
    """Return the paragraph about models of several media."""
    kinds = ", ".join(f"`{kind}`" for kind in sorted(WRAPPERS))
    filled = textwrap.fill(_WRAPPED.format(kinds=kinds), _COLUMNS, break_long_words=False, break_on_hyphens=False)
    return f"{filled}\n"


def line(outcome: Outcome) -> str:
    """Return the row of the document about one entry."""
    reason = f": {_plain(outcome.words)}" if outcome.words else ""
    filled = textwrap.fill(
        f"* `{outcome.name}`{reason}", _COLUMNS, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    return f"{filled}\n"


def _plain(words: str) -> str:
    """Return words without what Markdown would read as marks."""
    return "".join(f"\\{each}" if each in "*_<>[]|`" else each for each in words)


def _counts(outcomes: Sequence[Outcome]) -> str:
    rows = [f"| {title} | {sum(each.way == way for each in outcomes)} |" for way, title, _ in SECTIONS]
    return "\n".join([f"| of {len(outcomes)} | |", "|---|---|", *rows, ""])


def _tried(entry: Entry) -> Outcome:
    faulthandler.dump_traceback_later(_SECONDS, exit=True)
    try:
        with tempfile.TemporaryDirectory() as folder:
            return trial.run(entry, Path(folder))
    finally:
        faulthandler.cancel_dump_traceback_later()


def _run(wanted: Sequence[Entry], kept: dict[str, Outcome]) -> None:
    """Run the entries that have no outcome yet, and keep each as soon as it is there."""
    missing = [entry for entry in wanted if entry.name not in kept]
    while missing:
        some, missing = missing[:_ROWS_A_PROCESS], missing[_ROWS_A_PROCESS:]
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            for place, entry in enumerate(some):
                try:
                    kept[entry.name] = _keep(pool.submit(_tried, entry).result())
                except BrokenProcessPool:
                    died = Outcome(entry.name, trial.CRASHES, f"the process died, or hung for {_SECONDS} s")
                    kept[entry.name], missing = _keep(died), some[place + 1 :] + missing
                    break


def _keep(outcome: Outcome) -> Outcome:
    with RESULTS.open("a") as file:
        file.write(json.dumps(asdict(outcome)) + "\n")
    sys.stdout.write(f"{outcome.way:<13}{outcome.name}  {outcome.words}\n")
    sys.stdout.flush()
    return outcome


def _read_results() -> dict[str, Outcome]:
    if not RESULTS.is_file():
        return {}
    found = (Outcome(**json.loads(row)) for row in RESULTS.read_text().splitlines())
    return {outcome.name: outcome for outcome in found}


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing and write the document. Return 1 when a family differs or crashes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--anew", action="store_true", help="forget kept results: all, or those of the named families")
    parser.add_argument("names", nargs="*", metavar="NAME", help="families to run; default: all")
    options = parser.parse_args(argv)
    all_entries = entries()
    wanted = [entry for entry in all_entries if not options.names or entry.family in options.names]
    RESULTS.parent.mkdir(exist_ok=True)
    kept = _read_results()
    if options.anew:
        for entry in wanted:
            kept.pop(entry.name, None)
    _run(wanted, kept)
    outcomes = [kept[entry.name] for entry in all_entries if entry.name in kept]
    if len(outcomes) == len(all_entries):
        DOCUMENT.write_text(rendered(outcomes))
        write_defaults()
    return int(any(outcome.way in (trial.DIFFERS, trial.CRASHES) for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
