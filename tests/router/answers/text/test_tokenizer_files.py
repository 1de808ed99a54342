"""The tokenizer's files in pieces: whole, bounded, with a fingerprint that follows their content."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from common.contracts.errors import Overloaded, Unavailable
from router.answers.text.tokenizer_files import PIECE_BYTES, STREAMS, TokenizerFiles

LONG = bytes(range(256)) * (PIECE_BYTES // 256) * 2 + b"end"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_bytes(LONG)
    (tmp_path / "tokenizer_config.json").write_bytes(b"{}")
    (tmp_path / "vocab.txt").write_bytes(b"")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


async def gathered(files: TokenizerFiles) -> dict[str, bytes]:
    """Return the files; check the pieces on the way."""
    found: dict[str, bytes] = {}
    async for piece in files.pieces():
        assert len(piece.content) <= PIECE_BYTES
        found[piece.file] = found.get(piece.file, b"") + piece.content
        assert piece.sha256 in (b"", hashlib.sha256(found[piece.file]).digest())
    return found


async def test_the_tokenizers_files_come_whole_and_no_others(folder: Path) -> None:
    assert await gathered(TokenizerFiles(folder)) == {
        "tokenizer.json": LONG,
        "tokenizer_config.json": b"{}",
        "vocab.txt": b"",
    }


async def test_the_template_in_use_is_sent(folder: Path, tmp_path: Path) -> None:
    template = tmp_path / "mine.jinja"
    template.write_text("{{ messages }}")
    assert (await gathered(TokenizerFiles(folder, template)))["chat_template.jinja"] == b"{{ messages }}"


async def test_the_fingerprint_follows_every_file(folder: Path) -> None:
    first = await TokenizerFiles(folder).fingerprint()
    assert first == await TokenizerFiles(folder).fingerprint()
    (folder / "tokenizer_config.json").write_bytes(b"{ }")
    assert await TokenizerFiles(folder).fingerprint() != first


async def test_a_file_that_changes_meanwhile_ends_the_stream(folder: Path) -> None:
    files = TokenizerFiles(folder)
    await files.fingerprint()
    (folder / "tokenizer.json").write_bytes(LONG + b"!")
    with pytest.raises(Unavailable, match=r"tokenizer\.json has changed"):
        await gathered(files)


async def test_streams_are_bounded_and_places_come_back(folder: Path) -> None:
    files = TokenizerFiles(folder)
    streams = [files.pieces() for _ in range(STREAMS)]
    for each in streams:
        await anext(each)
    with pytest.raises(Overloaded, match="16 are being sent"):
        await anext(files.pieces())
    for each in streams:
        await each.aclose()
    assert len(await gathered(files)) == 3
