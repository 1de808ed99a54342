"""Reads LoRA adapters in PEFT's format: a folder with adapter_config.json and adapter_model.safetensors.

A linear W of the base becomes W + scale · B · A, where A is [r, inputs] and B is [outputs, r]. The scale is alpha / r,
or alpha / sqrt(r) with rslora (arXiv 2106.09685, 2312.03732). Everything else that a configuration may ask for is
refused by its name: a step would compute something else than what was trained.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import safetensors.torch
import torch
from safetensors import SafetensorError

from common.checkpoint.bounded_json import parse, shown
from common.contracts.limits import MAX_ADAPTER_CONFIG_BYTES
from common.untrusted.json_shape import Shape

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PICKLES: Final = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
_PREFIX: Final = "base_model.model."
_SIDES: Final = (".lora_A.weight", ".lora_B.weight")
_SHAPE: Final = Shape(values=65_536, members=4_096, containers=4_096, depth=16)
_HEADER_BYTES: Final = 64 << 20
_MOST_SHOWN: Final = 160
_DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)
# What changes how an adapter is trained, or where, and not what it computes.
_OF_TRAINING: Final = frozenset(
    "auto_mapping base_model_name_or_path corda_config eva_config exclude_modules inference_mode init_lora_weights"
    " layers_pattern layers_to_transform loftq_config lora_alpha lora_dropout lora_ga_config megatron_config"
    " megatron_core peft_type peft_version qalora_group_size r revision runtime_config target_modules task_type"
    " use_rslora bias".split()
)
# What PEFT's own names mean, for the refusal.
_MEANINGS: Final = {
    "use_dora": "DoRA scales the columns of each weight",
    "modules_to_save": "whole modules are saved beside the adapter",
    "trainable_token_indices": "rows of the embedding are trained",
    "layer_replication": "layers of the base are repeated",
    "rank_pattern": "linears have ranks of their own",
    "alpha_pattern": "linears have scales of their own",
    "lora_bias": "B has a bias",
    "fan_in_fan_out": "weights of the base are transposed",
    "alora_invocation_tokens": "the adapter is active behind certain tokens alone",
    "target_parameters": "parameters are adapted that belong to no linear",
}
# Initialisations after which an adapter fits a changed base alone, unless PEFT has converted it.
_OF_CHANGED_BASE: Final = ("pissa", "olora", "corda")
_EMBEDDINGS: Final = ("embed_tokens", "lm_head", "wte", "embed_in", "embed_out")
Targets = Mapping[str, tuple[int, int]]
"""The linears of a base that an adapter may change, by their names in a checkpoint: (outputs, inputs)."""


class AdapterRefused(ValueError):
    """An adapter that cannot be served, with the reason and what to do."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """What an adapter adds to one linear: A [r, inputs], and B [outputs, r] times the scale; float32."""

    a: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """An adapter that was read whole. `fingerprint` is the SHA-256 of its weights and of what scales them.

    `parts` are by the name of the linear that each changes. `base` is what the folder calls its base; "": nothing.
    """

    fingerprint: str
    rank: int
    parts: Mapping[str, LowRank]
    base: str = ""

    @property
    def num_bytes(self) -> int:
        return sum(part.a.nbytes + part.b.nbytes for part in self.parts.values())


@dataclass(frozen=True, slots=True)
class _Config:
    rank: int
    scale: float
    base: str


def read_adapter(folder: Path, targets: Targets, max_rank: int) -> LoraAdapter:
    """Return an adapter for a base that has these linears.

    The file of weights is read once: what is checked and hashed is what is used. Raises AdapterRefused.
    """
    try:
        config = _config(_read_config(folder), targets, max_rank)
        raw = _read_weights(folder, targets, config.rank)
    except OSError as error:
        raise AdapterRefused(f"its folder {folder} cannot be read: {error.strerror or error}") from None
    try:
        tensors = safetensors.torch.load(raw)
    except (SafetensorError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise AdapterRefused(f"{WEIGHTS} cannot be read: {error}; save the adapter again") from None
    _check_tensors(tensors, targets, config.rank)
    if wrong := next((name for name, each in tensors.items() if not torch.isfinite(each.float()).all()), None):
        raise AdapterRefused(f"{WEIGHTS} has numbers in {_quoted(wrong)} that are not finite; train or save it again")
    digest = hashlib.sha256(f"quire-lora-v1 {config.rank} {config.scale.hex()} ".encode())
    digest.update(raw)
    parts = {}
    for name in sorted({_linear_of(key)[0] for key in tensors}):
        a, b = (tensors[f"{_PREFIX}{name}{side}"].float() for side in _SIDES)
        parts[name] = LowRank(a.contiguous(), (b * config.scale).contiguous())
    return LoraAdapter(digest.hexdigest(), config.rank, parts, config.base)


def _read_config(folder: Path) -> Mapping[str, Any]:
    path = folder / CONFIG
    if not path.is_file():
        what = f"{folder} has no {CONFIG}; expected a folder that PEFT's save_pretrained wrote"
        raise AdapterRefused(what)
    if (size := path.stat().st_size) > MAX_ADAPTER_CONFIG_BYTES:
        raise AdapterRefused(f"{CONFIG} has {size} bytes; expected at most {MAX_ADAPTER_CONFIG_BYTES}")
    try:
        found = parse(path.read_bytes()[: MAX_ADAPTER_CONFIG_BYTES + 1], _SHAPE)
    except ValueError as error:
        raise AdapterRefused(f"{CONFIG} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise AdapterRefused(f"{CONFIG} is {shown(found)}; expected an object")
    return found


def _config(found: Mapping[str, Any], targets: Targets, max_rank: int) -> _Config:
    """Check a configuration, and return what of it counts."""
    if (kind := found.get("peft_type")) != "LORA":
        raise AdapterRefused(f"peft_type is {shown(kind)}; expected LORA: no other kind of adapter is served")
    if (bias := found.get("bias", "none")) != "none":
        raise AdapterRefused(f"bias is {shown(bias)}; expected none: biases of the base cannot change")
    for name in sorted(set(found) - _OF_TRAINING):
        if found[name]:
            why = _MEANINGS.get(name, "it may change what the adapter computes")
            raise AdapterRefused(f"{name} is {shown(found[name])}, which is not served: {why}")
    _refuse_changed_base(found.get("init_lora_weights"))
    rank, alpha, rslora = found.get("r"), found.get("lora_alpha"), found.get("use_rslora") or False
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise AdapterRefused(f"r is {shown(rank)}; expected a whole number from 1 on")
    if rank > max_rank:
        raise AdapterRefused(f"r is {shown(rank)}; expected at most {max_rank}: raise --max-lora-rank")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not _is_finite(alpha):
        raise AdapterRefused(f"lora_alpha is {shown(alpha)}; expected a finite number")
    if not isinstance(rslora, bool):
        raise AdapterRefused(f"use_rslora is {shown(rslora)}; expected true or false")
    _refuse_unknown_targets(found.get("target_modules"), targets)
    base = found.get("base_model_name_or_path")
    scale = float(alpha) / (math.sqrt(rank) if rslora else rank)
    return _Config(rank, scale, base if isinstance(base, str) else "")


def _is_finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:
        return False


def _refuse_changed_base(init: object) -> None:
    if isinstance(init, str) and init.lower().startswith(_OF_CHANGED_BASE):
        what = f"init_lora_weights is {shown(init)}, whose training changed the base too"
        raise AdapterRefused(
            f"{what}; save it with path_initial_model_for_weight_conversion, which makes it plain LoRA"
        )


def _refuse_unknown_targets(modules: object, targets: Targets) -> None:
    """Refuse names of modules that the base does not have. The tensors say what an expression found."""
    if not isinstance(modules, list):
        return
    for name in modules:
        if not isinstance(name, str):
            raise AdapterRefused(f"target_modules has {shown(name)}; expected names of modules")
        if name.rpartition(".")[2] in _EMBEDDINGS:
            what = f"target_modules has {shown(name)}: embeddings and the last linear cannot be adapted"
            raise AdapterRefused(f"{what}; train without it")
        if not any(each == name or each.endswith(f".{name}") for each in targets):
            raise AdapterRefused(f"target_modules has {shown(name)}; {_expected(targets)}")


def _expected(targets: Targets) -> str:
    kinds = ", ".join(sorted({name.rpartition(".")[2] for name in targets}))
    return f"this base can be adapted in {kinds}: the adapter is of another base, or adapts what cannot be"


def _read_weights(folder: Path, targets: Targets, rank: int) -> bytes:
    """Return the file of weights, which has at most the bytes of an adapter of this rank for the whole base."""
    path = folder / WEIGHTS
    if not path.is_file():
        if pickles := [name for name in _PICKLES if (folder / name).exists()]:
            what = f"has its weights in {pickles[0]}, a pickle, which may run any code when it is read"
            raise AdapterRefused(f"{what}; save it with safe_serialization=True")
        raise AdapterRefused(f"{folder} has no {WEIGHTS}; expected a folder that PEFT's save_pretrained wrote")
    most = _HEADER_BYTES + 4 * sum(rank * (outputs + inputs) for outputs, inputs in targets.values())
    if (size := path.stat().st_size) > most:
        what = f"{WEIGHTS} has {size} bytes; an adapter of rank {rank} for this base has at most {most}"
        raise AdapterRefused(f"{what}: it is of another base, or has more than an adapter")
    with path.open("rb") as file:
        raw = file.read(most + 1)
    if len(raw) != size:
        raise AdapterRefused(f"{WEIGHTS} changed while it was read; load it again once it is written")
    return raw


def _check_tensors(tensors: Mapping[str, torch.Tensor], targets: Targets, rank: int) -> None:
    if not tensors:
        raise AdapterRefused(f"{WEIGHTS} has no tensors; save the adapter again")
    for key, tensor in sorted(tensors.items()):
        linear, side = _linear_of(key)
        if linear not in targets:
            raise AdapterRefused(f"{WEIGHTS} has {_quoted(key)}; {_expected(targets)}")
        if tensor.dtype not in _DTYPES:
            raise AdapterRefused(f"{_quoted(key)} is in {tensor.dtype}; expected float32, float16 or bfloat16")
        outputs, inputs = targets[linear]
        shape = (rank, inputs) if side == _SIDES[0] else (outputs, rank)
        if tensor.shape != shape:
            what = f"{_quoted(key)} is {list(tensor.shape)}; this base and r = {rank} take {list(shape)}"
            raise AdapterRefused(f"{what}: the adapter is of another base, or its configuration is of another adapter")
        other = f"{_PREFIX}{linear}{_SIDES[side == _SIDES[0]]}"
        if other not in tensors:
            raise AdapterRefused(f"{WEIGHTS} has {_quoted(key)} without {_quoted(other)}; save the adapter again")


def _linear_of(key: str) -> tuple[str, str]:
    """Return the linear that a tensor belongs to, and which side of it."""
    side = next((each for each in _SIDES if key.endswith(each)), "")
    if not key.startswith(_PREFIX) or not side:
        kind = "an embedding" if "lora_embedding" in key else "DoRA" if "magnitude" in key else "no part of plain LoRA"
        what = f"{WEIGHTS} has {_quoted(key)}, which is {kind}; expected tensors lora_A.weight and lora_B.weight alone"
        raise AdapterRefused(what)
    return key.removeprefix(_PREFIX).removesuffix(side), side


def _quoted(name: str) -> str:
    """Return the name of a tensor as a message has it, cut where it is long."""
    return repr(name if len(name) <= _MOST_SHOWN else f"{name[:_MOST_SHOWN]}...")
