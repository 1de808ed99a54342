"""What refuses a draft model before torch is imported: options, files, kind, vocabulary and memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from common.checkpoint.files import read_config, weight_problems
from common.checkpoint.gguf.memory import weight_memory
from common.checkpoint.hub import checkpoint_directory
from common.checkpoint.tokenizer_checks import read_tokens
from common.checkpoint.tokenizer_file import tokenizer_json
from common.contracts.errors import FieldViolation, InvalidConfig
from gpuworker.config import GpuWorkerSettings
from gpuworker.memory.byte_plan import in_words
from gpuworker.models.kinds import known_kinds, why_not_served
from gpuworker.plane.checkpoint_facts import CheckpointFacts

FLAG: Final = "--draft-model"
_SAME: Final = "expected a smaller model of the same family, whose tokenizer is that of the model"


def draft_directory(settings: GpuWorkerSettings) -> Path:
    """Return the folder of the draft model. Raises InvalidConfig when there is no such model."""
    assert settings.draft_model is not None
    try:
        return checkpoint_directory(settings.draft_model, weights=settings.load_format != "dummy")
    except InvalidConfig as error:
        raise InvalidConfig(*of_draft(error)) from error


def of_draft(error: InvalidConfig) -> list[FieldViolation]:
    """Return the violations of a checkpoint as those of the draft model."""
    return [FieldViolation(FLAG, each.description) for each in error.violations]


def draft_problems(
    settings: GpuWorkerSettings, directory: Path, available_bytes: int, workers: int = 1
) -> list[FieldViolation]:
    """Return why the draft model of the options cannot guess for the checkpoint in `directory`."""
    if settings.draft_model is None:
        return []
    try:
        draft = draft_directory(settings)
        return list(_problems(settings, directory, draft, workers, available_bytes))
    except InvalidConfig as error:
        return of_draft(error)


def _problems(
    settings: GpuWorkerSettings, directory: Path, draft: Path, workers: int, available_bytes: int
) -> Iterator[FieldViolation]:
    if why := why_not_served(read_config(draft), known_kinds()):
        yield FieldViolation(FLAG, why)
        return
    if settings.load_format != "dummy" and not any(draft.glob("*.gguf")):
        for each in weight_problems(draft):
            yield FieldViolation(FLAG, each.description)
    if why := _other_vocabulary(settings.tokenizer or directory, draft, directory):
        yield FieldViolation(FLAG, f"{settings.draft_model} {why}; {_SAME}")
    weights = weight_memory(draft)
    if workers * weights > available_bytes:
        each_of = f" for each of {workers} workers" if workers > 1 else ""
        what = f"takes {in_words(weights)} of weights{each_of}, and {in_words(available_bytes)} of memory are free here"
        yield FieldViolation(FLAG, f"{what}; take a smaller one, or leave it out")


def _other_vocabulary(tokenizer: Path, draft: Path, model: Path) -> str | None:
    """Return how the vocabularies differ; None where each token that both have has one id.

    Ids behind the end of the shorter vocabulary may be in one alone: models of a family differ in what they append.
    """
    ours, theirs = tokenizer_json(tokenizer), tokenizer_json(draft)
    if ours is None or theirs is None:
        sizes = CheckpointFacts(model).vocab_size, CheckpointFacts(draft).vocab_size
        return None if sizes[0] == sizes[1] else f"has {sizes[1]} tokens, and the model has {sizes[0]}"
    if ours.read_bytes() == theirs.read_bytes():
        return None
    return why_not_same(tokens_of(ours), tokens_of(theirs))


def why_not_same(ours: Mapping[int, str], theirs: Mapping[int, str]) -> str | None:
    """Return the first id, below the end of both, that means different tokens, with how many there are."""
    both = range(1 + min(max(ours, default=-1), max(theirs, default=-1)))
    differing = [each for each in both if ours.get(each) != theirs.get(each)]
    if not both:
        return "has no tokens in its tokenizer.json, or the model has none"
    if not differing:
        return None
    first = differing[0]
    pair = f"token {first} is {theirs.get(first)!r} there and {ours.get(first)!r} in the model"
    return f"has another vocabulary: {pair}, and {len(differing)} of {len(both)} tokens differ"


def tokens_of(path: Path) -> dict[int, str]:
    """Return the tokens of a tokenizer.json by id. Raises InvalidConfig for one that is broken."""
    try:
        return {number: text for text, number in read_tokens(path)}
    except InvalidConfig as error:
        raise InvalidConfig(*of_draft(error)) from error
