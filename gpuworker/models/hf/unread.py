"""Entries of config.json that change a model's numbers and that no code reads: another model is served then.

What a class of transformers does not declare is kept on its configuration as it is. Whether the model reads it shows in
the source of its module: by its name or not at all.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from common.checkpoint.wrappers import language_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_ROPE: Final = ("rope_parameters", "rope_scaling")
# Entries about training, text, files, and what is asked of a model: no logit of a served model depends on them.
_IDLE: Final = re.compile(
    r"_.*|.*(drop|_p?dropout|init(ializer)?_|_loss|loss_|token_(id|index)|version|label|tokenizer|train|checkpointing"
    r"|unsloth).*|(output|return|pruned|tie|torch|is|task|finetuning|use_cache|gradient|quantization|compression)_?.*"
    r"|auto_map|architectures|model_type|dtype|use_cache|problem_type|bad_words_ids|base_model.*|name_or_path"
    r"|rope_theta|partial_rotary_factor|max_(length|new_tokens|sequence_length|seq_len)|model_max_length|min_length"
    r"|do_sample|num_(beams|beam_groups|return_sequences)|early_stopping|prefix|pretraining_tp|seq(_length|len)|n_ctx"
    r"|original_max_position_embeddings|[etpd]p_size|(attn|_attn)_implementation|use_flash_attn.*|flash_attn.*"
)


def unread_entries(directory: Path, config: PretrainedConfig) -> list[str]:
    """Return the entries of a folder's config.json that `config`, which transformers made of it, leaves without effect.

    Entries that say nothing, such as null and false, are left out.
    """
    entries: dict[str, Any] = json.loads((directory / "config.json").read_bytes())
    return sorted(_unread(language_model(entries) or entries, config))


def _unread(entries: Mapping[str, Any], config: PretrainedConfig, prefix: str = "") -> Iterator[str]:
    parts, source = getattr(config, "sub_configs", {}), _source(config)
    known = {each.name for each in fields(config)} if is_dataclass(config) else set()
    known |= {*config.attribute_map, *config.attribute_map.values(), *parts}
    for name, value in entries.items():
        part = getattr(config, name, None) if name in parts else None  # some fields are those of a layer alone
        if name in _ROPE and isinstance(value, Mapping):
            yield from (f"{prefix}{name}.{each}" for each in _unread_of_rope(value, source))
        elif name == "text_config" and name in parts and isinstance(value, Mapping) and part is not None:
            yield from _unread(value, part, f"{prefix}{name}.")
        elif name not in known and name in vars(config) and _counts(name, value) and not _names(source, name):
            yield prefix + name


def _unread_of_rope(rope: Mapping[str, Any], source: str) -> Iterator[str]:
    """Yield the entries of a rope, or of one for each kind of layer, that neither module of transformers names."""
    source += inspect.getsource(importlib.import_module("transformers.modeling_rope_utils"))
    for name, value in rope.items():
        if isinstance(value, Mapping):
            yield from (f"{name}.{each}" for each in _unread_of_rope(value, source))
        elif name != "type" and _counts(name, value) and not _names(source, name):
            yield name


def _counts(name: str, value: Any) -> bool:
    """Return whether an entry says something about numbers."""
    if value in (None, False, "") or value in ([], {}) or _IDLE.fullmatch(name):
        return False
    return not (value == 1.0 and re.search(r"multiplier|scal|factor", name))


def _names(source: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", source) is not None


def _source(config: PretrainedConfig) -> str:
    """Return the source of the modules of a configuration's class and of its model; "" where there is none."""
    own = type(config).__module__
    model = own.replace(".configuration_", ".modeling_")
    return "".join(_source_of(name) for name in dict.fromkeys((own, model)))


def _source_of(module: str) -> str:
    try:
        return inspect.getsource(sys.modules.get(module) or importlib.import_module(module))
    except (ImportError, OSError, TypeError):
        return ""
