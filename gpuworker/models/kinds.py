"""Why a kind of model cannot be served, by its config.json alone. Known at once, without torch and transformers.

The kinds that transformers knows stand in tables in its source. The source is parsed and not run: its import takes
seconds. What these checks let pass, the self-test may still refuse (`self_test.py`).
"""

from __future__ import annotations

import ast
import difflib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from common.checkpoint.context import ATTENTION_FREE
from common.checkpoint.encoders import encoder_reason, scores_reason
from common.checkpoint.wrappers import language_model, why_not_alone

_ONLY: Final = "only decoder-only language models are served"
_CAUSAL: Final = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
_SEVERAL_MEDIA: Final = ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES")
_ENCODER_DECODERS: Final = ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES")
_OF_ENCODERS: Final = ("MODEL_FOR_MASKED_LM_MAPPING_NAMES", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES")
# Ends of names of architectures whose head gives scores in place of tokens, and one that encoders alone have.
_SCORES: Final = ("ForSequenceClassification", "ForTokenClassification", "RewardModel", "ForQuestionAnswering")
_MASKED: Final = "ForMaskedLM"
_FOLDERS: Final = "SPECIAL_MODEL_TYPE_TO_MODULE_NAME"
# Networks that read a text in both directions unless `is_decoder` is set.
_ENCODERS: Final = frozenset(
    {
        *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert"),
        *(
            "rembert",
            "roberta",
            "roberta-prelayernorm",
            "roc_bert",
            "roformer",
            "xlm-roberta",
            "xlm-roberta-xl",
            "xmod",
        ),
    }
)
_OWN_CACHE: Final = "its layers keep states in a cache of their own, and steps mix sequences"
_DRAFTS: Final = "it drafts for another model, and attends on the keys and values of that one"
# Kinds that do something else with attention than the paged cache can follow.
_PECULIAR: Final[Mapping[str, str]] = {
    **dict.fromkeys(("rwkv", "xlstm"), _OWN_CACHE),
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), _DRAFTS),
    "recurrent_gemma": "its modules keep the state of one batch, and steps mix sequences",
    "diffllama": "each of its layers attends twice (differential attention), and the paged cache has one call a layer",
    "hrm_text": "it runs the same layers several times for each token, and the paged cache holds one K and V a layer",
    "reformer": "it attends by hashing (LSH), and the paged cache compares each query with every key",
    "xlnet": "it predicts tokens in permuted order, and the paged cache needs tokens from left to right",
}


@dataclass(frozen=True, slots=True)
class KnownKinds:
    """The model types that the installed transformers knows. `folder` is where the code of all models lies."""

    version: str
    kinds: frozenset[str]
    causal: frozenset[str]
    several_media: frozenset[str]
    encoder_decoders: frozenset[str]
    encoders: frozenset[str]
    folder: Path
    folders: Mapping[str, str] = field(default_factory=dict)

    def replaceable(self, kind: str) -> bool:
        """Return whether a model's attention can be replaced, as far as its code shows that."""
        name = self.folders.get(kind, kind.replace("-", "_"))
        source = self.folder / name / f"modeling_{name}.py"
        if not source.is_file():
            return True
        text = source.read_text(encoding="utf-8")
        return "ALL_ATTENTION_FUNCTIONS" in text or "AutoModel" in text


def why_not_served(config: Mapping[str, Any], known: KnownKinds | None) -> str | None:
    """Return why the model of a configuration cannot be served, and what could be; None when nothing speaks against it.

    `known` is None where transformers is not installed.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or not kind:
        return 'config.json names no "model_type"; expected a checkpoint in Hugging Face format'
    if (reason := _encoder(kind, config, known)) is not None:
        return reason
    if known is not None and kind not in known.kinds:
        return _unknown(kind, config, known)
    return _no_decoder(kind, config, known) or _peculiar(kind, known)


def _encoder(kind: str, config: Mapping[str, Any], known: KnownKinds | None) -> str | None:
    """Return the reason for a model that makes vectors or scores of texts, and which server takes it."""
    encodes = kind in _ENCODERS and not config.get("is_decoder")
    if encodes or (known is not None and kind in known.encoders) or _is_foreign_encoder(kind, config, known):
        return encoder_reason(kind)
    named = _architectures(config)
    if named and all(name.endswith(_SCORES) for name in named):
        return scores_reason(named[0])
    return None


def _is_foreign_encoder(kind: str, config: Mapping[str, Any], known: KnownKinds | None) -> bool:
    """Return whether a model with its own code says that it is an encoder."""
    if known is None or kind in known.kinds:
        return False
    own = config.get("auto_map")
    classes = [*_architectures(config), *map(str, own if isinstance(own, dict) else ())]
    return any(name.endswith(_MASKED) for name in classes)


def _architectures(config: Mapping[str, Any]) -> list[str]:
    named = config.get("architectures")
    return [name for name in named if isinstance(name, str)] if isinstance(named, list) else []


def _unknown(kind: str, config: Mapping[str, Any], known: KnownKinds) -> str:
    if "auto_map" in config:
        return (
            f"{kind} brings its own code (auto_map), which is never run; {_ONLY} whose code transformers"
            f" {known.version} has"
        )
    close = difflib.get_close_matches(kind, known.kinds, n=1)
    hint = f"did you mean {close[0]}?" if close else "a newer transformers may know it"
    return f"{kind!r} is not a model type of transformers {known.version}; {hint}"


def _no_decoder(kind: str, config: Mapping[str, Any], known: KnownKinds | None) -> str | None:
    if known is None:
        return None
    causal, several = kind in known.causal, kind in known.several_media or _has_other_media(config)
    if several and (reason := why_not_alone(config)) is not None:
        return f"{kind} takes images or sound beside text, and its language model cannot be served alone: {reason}"
    if several and (text := language_model(config)) is not None:
        reason = why_not_served(text, known) if "model_type" in text else None
        return None if reason is None else f"the language model of {kind} cannot be served: {reason}"
    if several and not causal:
        return f"{kind} takes images or sound beside text; {_ONLY}{_its_text(config)}"
    encodes = config.get("is_encoder_decoder", kind in known.encoder_decoders and not several)
    if encodes:
        return f"{kind} is an encoder-decoder; {_ONLY}"
    return None if causal else f"{kind} is not a language model that continues text; {_ONLY}"


def _has_other_media(config: Mapping[str, Any]) -> bool:
    return any(config.get(part) for part in ("vision_config", "audio_config"))


def _its_text(config: Mapping[str, Any]) -> str:
    text = config.get("text_config")
    kind = text.get("model_type") if isinstance(text, dict) else None
    return f". Its language model is a {kind}: save that as a checkpoint of its own" if kind else ""


def _peculiar(kind: str, known: KnownKinds | None) -> str | None:
    if kind in _PECULIAR:
        return f"{kind} cannot be served: {_PECULIAR[kind]}"
    if known is not None and kind not in ATTENTION_FREE and not known.replaceable(kind):
        return (
            f"{kind} cannot be served: its code in transformers {known.version} computes attention itself, and the"
            " paged cache cannot take part"
        )
    return None


# ------------------------------------------------------------ the tables of transformers


@functools.cache
def known_kinds() -> KnownKinds | None:
    """Return the kinds of the installed transformers; None when it is not installed, or keeps them elsewhere."""
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        return None
    models = Path(spec.origin).parent / "models"
    tables: dict[str, dict[str, str]] = {}
    for name in ("auto_mappings.py", "configuration_auto.py", "modeling_auto.py"):
        path = models / "auto" / name
        for table, entries in _tables(path) if path.is_file() else ():
            tables.setdefault(table, {}).update(entries)
    if "CONFIG_MAPPING_NAMES" not in tables or _CAUSAL not in tables:
        return None
    causal, media, both = frozenset(tables[_CAUSAL]), _of(tables, _SEVERAL_MEDIA), _of(tables, _ENCODER_DECODERS)
    return KnownKinds(
        version=version("transformers"),
        kinds=frozenset(tables["CONFIG_MAPPING_NAMES"]) | causal,
        causal=causal,
        several_media=media,
        encoder_decoders=both,
        encoders=_of(tables, _OF_ENCODERS) - causal - media - both,
        folder=models,
        folders=tables.get(_FOLDERS, {}),
    )


def _of(tables: Mapping[str, Mapping[str, str]], names: tuple[str, ...]) -> frozenset[str]:
    return frozenset(kind for name in names for kind in tables.get(name, ()))


def _tables(path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each `NAME = OrderedDict([(key, value), ...])`, and each `NAME.update({key: value, ...})`, of a file."""
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(args=[ast.List(elts=elements)])):
                yield name, _pairs(elements)
            case ast.Expr(
                value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="update"), args=[ast.Dict() as entries])
            ):
                yield name, ast.literal_eval(entries)


def _pairs(elements: list[ast.expr]) -> dict[str, str]:
    """Return the pairs whose key is a text; a value that depends on what is installed counts as ""."""
    found = {}
    for each in elements:
        match each:
            case ast.Tuple(elts=[ast.Constant(value=str(key)), ast.Constant(value=str(value))]):
                found[key] = value
            case ast.Tuple(elts=[ast.Constant(value=str(key)), _]):
                found[key] = ""
    return found
