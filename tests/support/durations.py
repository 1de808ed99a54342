"""How long the parts of a run took: a table at its end, and the file by which the next run hands out its tests.

`python -m tests.support.durations FOLDER` reads what the parts of a run left there: `PART.xml`, the report of a run of
pytest (`--junitxml`), and `PART.seconds`, its seconds of wall time. With `--write` the seconds of each file of tests go
to tests/durations.json. tests/conftest.py begins with the files that take longest.
"""

from __future__ import annotations

import argparse
import json
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

FILE = Path(__file__).resolve().parents[1] / "durations.json"
SLOWEST = 20
# A file that takes less than this is left out of tests/durations.json: the order of short files decides nothing.
LEAST_S = 0.5


@dataclass
class Part:
    """One part of a run: how many of its tests ended how, its seconds, and those of each file that it tested."""

    name: str
    ran: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    files: Counter[str] = field(default_factory=Counter)


def read_part(folder: Path, name: str) -> Part:
    """Return what a part left in a folder; its seconds are those of its tests where nobody took them from outside."""
    part = Part(name)
    report, taken = folder / f"{name}.xml", folder / f"{name}.seconds"
    if report.is_file():
        for suite in ET.parse(report).getroot().iter("testsuite"):
            _add_suite(part, suite)
    if taken.is_file():
        part.seconds = float(taken.read_text())
    return part


def _add_suite(part: Part, suite: ET.Element) -> None:
    skipped, failed = int(suite.get("skipped", 0)), int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    part.skipped += skipped
    part.failed += failed
    part.ran += int(suite.get("tests", 0)) - skipped
    part.seconds += float(suite.get("time", 0))
    for case in suite.iter("testcase"):
        part.files[case.get("file", "?")] += float(case.get("time", 0))  # type: ignore[assignment]  # seconds


def table(parts: Sequence[Part]) -> str:
    """Return the parts with their tests and seconds, then the files that took longest in all parts together."""
    lines = [f"{'part':<12}{'tests':>8}{'failed':>8}{'skipped':>8}{'seconds':>9}"]
    lines += [f"{each.name:<12}{each.ran:>8}{each.failed:>8}{each.skipped:>8}{each.seconds:>9.0f}" for each in parts]
    files = sum((each.files for each in parts), Counter[str]())
    lines += ["", f"{'seconds':>9}  slowest files"]
    lines += [f"{seconds:>9.1f}  {name}" for name, seconds in files.most_common(SLOWEST)]
    return "\n".join(lines)


def parts_of(folder: Path) -> Iterator[Part]:
    """Yield the parts that left a report or their seconds in a folder, by name."""
    for name in sorted({path.stem for path in folder.iterdir() if path.suffix in (".xml", ".seconds")}):
        yield read_part(folder, name)


def write_durations(parts: Sequence[Part], file: Path) -> None:
    """Write the seconds of each file of tests; a file that did not run keeps its seconds while it exists."""
    known = {name: seconds for name, seconds in read_durations(file).items() if (file.parents[1] / name).is_file()}
    for name, seconds in sum((each.files for each in parts), Counter[str]()).items():
        known[name] = round(seconds, 1)
    kept = {name: seconds for name, seconds in sorted(known.items()) if seconds >= LEAST_S}
    file.write_text(json.dumps(kept, indent=0) + "\n")


def read_durations(file: Path = FILE) -> dict[str, float]:
    """Return the seconds of each file of tests, by its path from the root of the repository; {} without the file."""
    return json.loads(file.read_text()) if file.is_file() else {}


def main() -> None:
    """Print the table of a folder of reports; with `--write`, keep the seconds of the files."""
    flags = argparse.ArgumentParser(description="print how long the parts of a run took")
    flags.add_argument("folder", type=Path, help="where PART.xml and PART.seconds are")
    flags.add_argument("--write", action="store_true", help=f"write {FILE.name}")
    asked = flags.parse_args()
    parts = list(parts_of(asked.folder))
    if asked.write:
        write_durations(parts, FILE)
    print(table(parts))  # noqa: T201


if __name__ == "__main__":
    main()
