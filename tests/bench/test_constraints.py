"""The benchmark of constraints: its tokenizers are as wide as asked, and it ends with every figure that it explains."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from llguidance import LLTokenizer
from tokenizers import Tokenizer

from bench import constraints
from bench.constraints import NOTES, Size
from bench.lib import jump_forward
from bench.lib.tokenizers import EOS, write_tokenizer
from gpuworker.native import library as native


def test_a_tokenizer_has_as_many_tokens_as_asked_and_spells_any_text(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer.json", 3000)
    read = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = '{"näme": [1, "two words"]}\n'
    assert read.get_vocab_size() == LLTokenizer(str(tmp_path / "tokenizer.json"), eos_token=[EOS]).vocab_size == 3000
    assert read.decode(read.encode(text).ids) == text
    assert len(read.encode(text).ids) < len(text.encode())


def test_every_figure_is_measured() -> None:
    if native.best() is None:
        pytest.skip("the native library was not built")
    threads = torch.get_num_threads()
    figures = constraints.measure(2048, Size(rows=2, steps=10, rounds=1, threads=1))
    torch.set_num_threads(threads)
    assert figures.keys() == NOTES.keys()
    assert all(figures[name] > 0 for name in ("fill_us", "compile_ms", "step_ms", "ratio_50", "ratio"))


def test_drafts_of_forced_tokens_are_measured_and_change_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    if native.best() is None:
        pytest.skip("the native library was not built")
    monkeypatch.setitem(constraints.VOCABULARIES, "32k", 2048)
    threads = torch.get_num_threads()
    figures = constraints.of_forced_tokens(Size(rows=1, steps=60, rounds=1, threads=None))
    torch.set_num_threads(threads)
    assert figures.keys() == jump_forward.NOTES.keys()
    assert figures["forced_tokens_differing"] == 0
    assert figures["speedup_forced_json"] > 0
