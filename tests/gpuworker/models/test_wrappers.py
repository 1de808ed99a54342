"""Models of several media: their language model alone computes what transformers computes of the whole for text."""

from __future__ import annotations

import functools
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
)

from common.checkpoint.wrappers import WRAPPERS
from common.contracts.errors import InvalidConfig
from common.settings.options import ModelImpl
from gpuworker.attention.backends import make_backend
from gpuworker.models.choose import open_native
from gpuworker.models.hf.loader import ModelSource, context_limit, load_model, unwrapped
from gpuworker.models.hf.tiny import tiny_config
from gpuworker.models.kinds import known_kinds, why_not_served
from gpuworker.models.llama.cpu_model import LlamaCpuModel
from gpuworker.models.self_test import self_test
from gpuworker.native import library as native
from gpuworker.plane.checkpoint_facts import CheckpointFacts
from tests.gpuworker.checkpoints.test_quantised import GPTQ
from tests.gpuworker.models.test_quantised_models import packed_by
from tests.support.gpuworker import packers

CPU = torch.device("cpu")
OFTEN = ("internvl", "llava", "mistral3", "qwen2_5_vl", "qwen3_vl", "voxtral")
TOKENS = torch.arange(10, 74)[None]
ROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
# The language models whose rope has sections that tiny_config does not find.
_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 160,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "rope_parameters": ROPE,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
CHANGES = {
    "qwen2_vl": _TEXT,
    "qwen2_5_vl": _TEXT,
    "qwen3_vl": _TEXT | {"head_dim": 16},
    "qwen3_vl_moe": _TEXT | _EXPERTS | {"head_dim": 16, "num_experts": 4},
    "glm4v": _TEXT | {"rope_parameters": ROPE | {"mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}},
    "glm4v_moe": _TEXT
    | _EXPERTS
    | {
        "n_routed_experts": 4,
        "rope_parameters": ROPE | {"mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5},
    },
}
# How checkpoints name the parts, in older and newer versions of transformers.
LAYOUTS = {
    "before 4.52": (("model.language_model.", "language_model.model."), ("lm_head.", "language_model.lm_head.")),
    "since 4.52": (),
    "of qwen2_vl": (("model.language_model.", "model."), ("model.visual.", "visual.")),
    "of idefics3": (("model.language_model.", "model.text_model."),),
}


def config_of(kind: str) -> Any:
    whole: Any = tiny_config(CONFIG_MAPPING[kind]())
    if kind not in CHANGES:
        return whole
    return type(whole)(text_config=CHANGES[kind], vision_config=whole.vision_config)


@functools.cache
def whole_model(kind: str) -> Any:
    """Return a tiny wrapper with random weights, norms and biases among them."""
    config = config_of(kind)
    sees = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    auto: Any = AutoModelForImageTextToText if sees else AutoModelForMultimodalLM
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = auto.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
        with torch.no_grad():
            for tensor in model.parameters():
                if tensor.dim() == 1:
                    tensor.add_(0.3 * torch.randn(tensor.shape))
    return model


def logits_of(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=TOKENS).logits[0]
    return logits


def saved(kind: str, folder: Path) -> Path:
    whole_model(kind).save_pretrained(folder)
    return folder


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert torch.allclose(found.view(wanted.shape), wanted, atol=1e-4 * float(wanted.abs().max()), rtol=1e-4)


@pytest.mark.parametrize(
    "kind", [kind if kind in OFTEN else pytest.param(kind, marks=pytest.mark.rest) for kind in sorted(WRAPPERS)]
)
def test_the_language_model_computes_what_the_whole_model_computes_for_text(kind: str, tmp_path: Path) -> None:
    folder = saved(kind, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    assert why_not_served(config, known_kinds()) is None
    facts, text = CheckpointFacts(folder), unwrapped(whole_model(kind).config, folder)
    assert (facts.vocab_size, facts.context) == (text.vocab_size, context_limit(text))
    model = load_model(ModelSource(str(folder), dtype="float32"), CPU)
    assert_close(model.reference_logits(TOKENS), logits_of(whole_model(kind)))
    self_test(model, functools.partial(make_backend, "auto"))


def renamed(kind: str, layout: str, folder: Path, *, without: str = "") -> Path:
    """Write a wrapper with the names of a layout, and without the tensors that begin with `without`."""
    model = whole_model(kind)
    tensors = {}
    for name, tensor in model.state_dict().items():
        names = (new + name.removeprefix(old) for old, new in LAYOUTS[layout] if name.startswith(old))
        if not without or not name.startswith(without):
            tensors[next(names, name)] = tensor.clone()
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    model.config.save_pretrained(folder)
    return folder


@pytest.mark.skipif(native.best() is None, reason="the native library was not built")
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        *((kind, layout) for kind in ("mistral3", "llava", "qwen2_5_vl", "qwen3_vl") for layout in LAYOUTS),
        ("gemma4", "since 4.52"),
    ],
)
def test_it_runs_natively_however_the_checkpoint_names_its_parts(
    kind: str, layout: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = ModelSource(str(renamed(kind, layout, tmp_path)), dtype="float32")
    with caplog.at_level(logging.INFO):
        opened = open_native(source, CPU, "native", functools.partial(make_backend, "auto"))
    assert opened is not None
    assert isinstance(opened[0], LlamaCpuModel)
    plain = opened[0].config.model_type
    assert f"of {kind} its language model, a {plain}, is served: pictures and sound are refused" in caplog.text
    assert "nothing reads" not in caplog.text
    model = load_model(source, CPU)
    assert_close(model.reference_logits(TOKENS), logits_of(whole_model(kind)))


@pytest.mark.parametrize("inner", [32, 64])
@pytest.mark.parametrize("layout", ["of today", "of the files"])
@pytest.mark.parametrize("impl", ["transformers", *(["native"] if native.best() is not None else [])])
def test_experts_are_read_whichever_axis_comes_first(
    impl: ModelImpl, layout: str, inner: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of qwen3_vl_moe have the inputs first. Of an inner size of 32 gate and up are square, of 64 down is."""
    whole_model.cache_clear()
    monkeypatch.setitem(CHANGES, "qwen3_vl_moe", CHANGES["qwen3_vl_moe"] | {"moe_intermediate_size": inner})
    folder = saved("qwen3_vl_moe", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    if layout == "of the files":
        tensors = {
            name: tensor.mT.contiguous() if ".mlp.experts." in name else tensor for name, tensor in tensors.items()
        }
        save_file(tensors, folder / "model.safetensors")
    source = ModelSource(str(folder), dtype="float32")
    opened = open_native(source, CPU, impl, functools.partial(make_backend, "auto"))
    assert (opened is None) == (impl == "transformers")
    model = load_model(source, CPU)
    assert_close(model.reference_logits(TOKENS), logits_of(whole_model("qwen3_vl_moe")))


def test_a_wrapper_without_a_last_linear_takes_the_embedding(tmp_path: Path) -> None:
    model = load_model(
        ModelSource(str(renamed("mistral3", "since 4.52", tmp_path, without="lm_head.")), "float32"), CPU
    )
    assert model.config.tie_word_embeddings
    assert_close(model.reference_logits(TOKENS), logits_of(whole_model("mistral3")))


def test_a_missing_weight_of_the_language_model_is_named(tmp_path: Path) -> None:
    folder = renamed("llava", "since 4.52", tmp_path, without="model.language_model.layers.1.mlp.")
    with pytest.raises(InvalidConfig, match=r"weights are missing .* model\.layers\.1\.mlp"):
        load_model(ModelSource(str(folder), "float32"), CPU)


def test_random_weights_need_no_files(tmp_path: Path) -> None:
    config_of("mistral3").save_pretrained(tmp_path)
    model = load_model(ModelSource(str(tmp_path), "float32", load_format="dummy"), CPU)
    assert model.config.model_type == "mistral"


def test_an_entry_of_the_language_model_that_nothing_reads_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = renamed("llava", "since 4.52", tmp_path) / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["residual_multiplier"] = 0.5
    path.write_text(json.dumps(config))
    open_native(ModelSource(str(tmp_path), "float32"), CPU, "auto", functools.partial(make_backend, "auto"))
    assert "may change the model's numbers: residual_multiplier" in caplog.text


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl"])
def test_an_older_configuration_without_a_part_for_text_is_read(kind: str, tmp_path: Path) -> None:
    folder = renamed(kind, "of qwen2_vl", tmp_path)
    whole = json.loads((folder / "config.json").read_text())
    rope = {"rope_theta": ROPE["rope_theta"], "rope_scaling": {"type": "mrope", "mrope_section": ROPE["mrope_section"]}}
    flat = {name: value for name, value in _TEXT.items() if name != "rope_parameters"} | rope
    kept = {name: whole[name] for name in ("model_type", "vision_config")}
    config = {**kept, **flat, "hidden_act": "silu", "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    assert why_not_served(config, known_kinds()) is None
    assert CheckpointFacts(folder).context == _TEXT["max_position_embeddings"]
    model = load_model(ModelSource(str(folder), "float32"), CPU)
    assert_close(model.reference_logits(TOKENS), logits_of(whole_model(kind)))


@pytest.mark.parametrize("layout", ["before 4.52", "since 4.52"])
def test_a_language_model_in_integers_keeps_them(layout: str, tmp_path: Path) -> None:
    pack = packed_by(packers.gptq, group_size=32, asymmetric=True)
    source, target = renamed("llava", layout, tmp_path / "source"), tmp_path / "packed"

    def language_alone(layer: str, weight: torch.Tensor) -> tuple[packers.Parts, torch.Tensor] | None:
        return pack(layer, weight) if "language_model" in layer else None

    plain = packers.rewrite(source, target, language_alone, GPTQ | {"group_size": 32})
    opened = open_native(ModelSource(str(target), "float32"), CPU, "native", functools.partial(make_backend, "auto"))
    assert opened is not None
    assert isinstance(opened[0], LlamaCpuModel)
    assert "qkv I4_F32" in opened[0].packed.kinds_in_words
    found, wanted = (
        load_model(ModelSource(str(each), "float32"), CPU).reference_logits(TOKENS) for each in (target, plain)
    )
    assert_close(found, wanted)
