"""One row of the matrix: a tiny random checkpoint, run by transformers, and served by a worker's data plane."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel

from common.contracts.errors import QuireError, Unsupported
from gpuworker.config import GpuWorkerSettings
from gpuworker.models.hf.loader import refuse_unsupported
from gpuworker.models.hf.mixers import correct_mixers
from gpuworker.models.llama.cpu_model import LlamaCpuModel
from gpuworker.plane.assembly import ModelPlane, assemble
from router.answers.text.checkpoint import read_checkpoint
from tests.suites.models.families import Entry
from tests.support.gpuworker.runner_harness import SLOTS, Driver

NATIVE, HOSTED, REFUSED = "native", "transformers", "refused"
DIFFERS, CRASHES, NOT_BUILT = "differs", "crashes", "not built"
_BLOCK_SIZE: Final = 16
_TOKENS: Final = 24
# Prompts before, around and beyond each threshold of a tiny configuration, and the chunks of their prefills.
_PROMPTS: Final = ((3, 99), (41, 7), (70, 13), (17, 1))
_DEVIATION: Final = 0.3
# A logit that is nearer to the largest one than this share of all logits' deviation is as good as that one.
_TIE: Final = 1e-3
_SHORT: Final = 160


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a row is served: one of the words above, and the reason where there is one."""

    name: str
    way: str
    words: str = ""


def run(entry: Entry, directory: Path) -> Outcome:
    """Make the checkpoint in a folder, run it both ways, and compare the tokens."""
    with _quiet():
        try:
            config = entry.config()
            model = _make(config, directory)
        except Exception as error:  # noqa: BLE001 - transformers raises anything for a family that it cannot build
            return _unbuilt(entry, repr(error))
        try:
            plane = _served(directory)
        except QuireError as error:
            return Outcome(entry.name, REFUSED, _short(str(error).replace(str(directory), "DIR")))
        except Exception as error:  # noqa: BLE001 - whatever it is, that it is not a QuireError is the finding
            return Outcome(entry.name, CRASHES, _short(repr(error)))
        try:
            return _compared(entry, model, plane, directory)
        except Exception as error:  # noqa: BLE001
            return Outcome(entry.name, CRASHES, _short(repr(error)))
        finally:
            plane.runner.close()


def _unbuilt(entry: Entry, why: str) -> Outcome:
    """Return that a family was not built, unless its configuration alone is a reason to refuse it."""
    for made in (entry.config, entry.whole):
        try:
            refuse_unsupported(made())
        except Unsupported as error:
            return Outcome(entry.name, REFUSED, _short(str(error)))
        except Exception:  # noqa: BLE001, S112 - there is no such configuration either
            continue
    return Outcome(entry.name, NOT_BUILT, _short(why))


def _make(config: PretrainedConfig, directory: Path) -> PreTrainedModel:
    """Save a checkpoint with random weights, and return it as transformers loads it again."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        module: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        )
        with torch.no_grad():
            for weight in module.parameters():
                if weight.dim() > 1:
                    weight.normal_(0.0, _DEVIATION)
                else:
                    weight.add_(0.1 * torch.randn(weight.shape))
    module.save_pretrained(directory)
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    correct_mixers(loaded)
    loaded.eval()
    return loaded


def _served(directory: Path) -> ModelPlane:
    """Return a worker's data plane. The router must be able to read the same folder."""
    plane = assemble(
        GpuWorkerSettings(
            model=str(directory), dtype="float32", block_size=_BLOCK_SIZE, kv_blocks=SLOTS // _BLOCK_SIZE, threads=1
        )
    )
    try:
        read_checkpoint(directory)
    except QuireError:
        plane.runner.close()
        raise
    return plane


def _compared(entry: Entry, model: PreTrainedModel, plane: ModelPlane, directory: Path) -> Outcome:
    way = NATIVE if isinstance(plane.model, LlamaCpuModel) else HOSTED
    limit, vocab = plane.memory.max_model_len, plane.facts.vocab_size
    count = min(_TOKENS, limit // 4)
    prompts = [
        [6 + (31 * n + 7 * i) % (vocab - 16) for i in range(min(length, limit - count))]
        for n, (length, _) in enumerate(_PROMPTS)
    ]
    driver = Driver(plane.runner, _BLOCK_SIZE, groups=plane.memory.groups)
    streams = [driver.add(prompt, count, chunk) for prompt, (_, chunk) in zip(prompts, _PROMPTS, strict=True)]
    driver.run()
    for prompt, stream in zip(prompts, streams, strict=True):
        wanted = _greedy(model, prompt, count)
        if (place := _first_difference(model, prompt, wanted, stream.output)) is not None:
            what = f"a prompt of {len(prompt)} tokens: {stream.output[place]} instead of {wanted[place]} at {place}"
            return Outcome(entry.name, DIFFERS, what)
    return Outcome(entry.name, way)


@torch.inference_mode()
def _greedy(model: PreTrainedModel, prompt: Sequence[int], count: int) -> list[int]:
    """Return what `generate` appends greedily; for a family whose `generate` fails, token by token without a cache."""
    ids = torch.tensor([prompt])
    plain = GenerationConfig(max_new_tokens=count, do_sample=False, pad_token_id=0)
    caller: Any = model
    caller.generation_config = plain  # its own may name ends
    try:
        out = caller.generate(ids, attention_mask=torch.ones_like(ids))
        return [int(token) for token in out[0, len(prompt) :]]
    except Exception:  # noqa: BLE001 - each family fails in its own way
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(_logits(model, tokens).argmax()))
        return tokens[len(prompt) :]


@torch.inference_mode()
def _logits(model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    """Return the logits after a sequence, [vocab], without a cache."""
    caller: Any = model
    logits: torch.Tensor = caller(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
    return logits


def _first_difference(
    model: PreTrainedModel, prompt: Sequence[int], wanted: Sequence[int], found: Sequence[int]
) -> int | None:
    """Return the place of the first token that differs, unless the model is as fond of the one as of the other."""
    place = next((at for at, (one, other) in enumerate(zip(wanted, found, strict=True)) if one != other), None)
    if place is None:
        return None
    logits = _logits(model, [*prompt, *wanted[:place]])
    near = float(logits.max() - logits[found[place]]) < _TIE * float(logits.std())
    return None if near else place


def _short(words: str) -> str:
    plain = " ".join(words.split())
    return plain if len(plain) <= _SHORT else f"{plain[:_SHORT].rsplit(' ', 1)[0]} ..."


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep away what transformers prints of each family."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.disable(before)
