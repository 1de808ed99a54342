"""Numbers of config.json and generation_config.json that cannot be: each is named, with what was expected."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.checkpoint.completed import DEFAULTS, completed
from common.checkpoint.ends import named_ends
from common.checkpoint.files import read_config, read_generation
from common.checkpoint.fingerprint import model_fingerprint
from common.checkpoint.sizes import config_problems, generation_problems
from common.contracts.errors import InvalidConfig
from gpuworker.models.kinds import known_kinds, why_not_served
from gpuworker.plane.checkpoint_facts import CheckpointFacts
from router.answers.text.checkpoint import read_checkpoint

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 264,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
NAN = float("nan")


def test_what_models_have_is_right() -> None:
    assert config_problems(CONFIG) == []
    assert config_problems(CONFIG | dict.fromkeys(CONFIG)) == []  # null: the default of the kind
    defaults: dict[str, dict[str, Any]] = json.loads(DEFAULTS.read_text())
    found = {
        kind: config_problems({"model_type": kind, **entries, "text_config": None})
        for kind, entries in defaults.items()
    }
    assert {kind: problems for kind, problems in found.items() if problems} == {}


WHOLE = "expected a whole number from 1 to"


@pytest.mark.parametrize(
    ("entry", "value", "problem"),
    [
        ("head_dim", -64, f"head_dim is -64; {WHOLE} 65536"),
        ("head_dim", 0, f"head_dim is 0; {WHOLE} 65536"),
        ("hidden_size", "64", f"hidden_size is '64'; {WHOLE} 4194304"),
        ("num_hidden_layers", True, f"num_hidden_layers is True; {WHOLE} 4096"),
        ("num_hidden_layers", [3], f"num_hidden_layers is [3]; {WHOLE} 4096"),
        ("num_hidden_layers", 10**9, f"num_hidden_layers is 1000000000; {WHOLE} 4096"),
        ("num_attention_heads", 4.0, f"num_attention_heads is 4.0; {WHOLE} 65536"),
        ("num_attention_heads", [4, "4"], f"num_attention_heads is [4, '4']; {WHOLE} 65536"),
        ("vocab_size", 10**18, f"vocab_size is 1000000000000000000; {WHOLE} 16777216"),
        ("vocab_size", {}, f"vocab_size is an object; {WHOLE} 16777216"),
        (
            "max_position_embeddings",
            10**60,
            f"max_position_embeddings is a number of more than 38 digits; {WHOLE} 2147483647",
        ),
        ("rms_norm_eps", NAN, "rms_norm_eps is nan; expected a number from 0 to 1e+15"),
        ("rms_norm_eps", float("inf"), "rms_norm_eps is inf; expected a number from 0 to 1e+15"),
        ("rope_theta", -1.0, "rope_theta is -1.0; expected a number above 0 and at most 1e+15"),
        ("rope_parameters", [1], "rope_parameters is [1]; expected an object"),
        (
            "rope_parameters",
            {"rope_type": "yarn", "factor": "hot"},
            "rope_parameters.factor is 'hot'; expected a number above 0 and at most 1e+15",
        ),
        (
            "rope_parameters",
            {"full_attention": {"rope_type": "linear", "rope_theta": NAN}},
            "rope_parameters.full_attention.rope_theta is nan; expected a number above 0 and at most 1e+15",
        ),
        (
            "rope_scaling",
            {"rope_type": "linear", "factor": 1e14},
            "its positions, scaled by rope, end at 102400000000000000; expected at most 2147483647",
        ),
        ("text_config", [1], "text_config is [1]; expected an object"),
        ("text_config", {"head_dim": -1}, f"text_config.head_dim is -1; {WHOLE} 65536"),
        ("quantization_config", "gptq", "quantization_config is 'gptq'; expected an object"),
        ("model_type", ["llama"], "model_type is ['llama']; expected a text"),
        ("architectures", 5, "architectures is 5; expected a list of texts"),
        ("layer_types", [1], "layer_types is [1]; expected a list of texts"),
        ("eos_token_id", {"a": 1}, "eos_token_id is an object; expected the id of a token, or a list of ids"),
        ("eos_token_id", [[1]], "eos_token_id is a list; expected the id of a token, or a list of ids"),
        ("dtype", 7, "dtype is 7; expected the name of a type, such as bfloat16"),
        ("num_labels", 10**18, "num_labels is 1000000000000000000; expected a whole number from 0 to 1048576"),
        ("tie_word_embeddings", "no", "tie_word_embeddings is 'no'; expected true or false"),
        (
            "num_key_value_heads",
            3,
            "num_key_value_heads is 3, which does not divide the 4 of num_attention_heads",
        ),
    ],
)
def test_an_entry_that_cannot_be_is_named(entry: str, value: object, problem: str, tmp_path: Path) -> None:
    assert config_problems(CONFIG | {"rope_parameters": None, entry: value}) == [problem]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG | {"rope_parameters": None, entry: value}))
    for read in (read_config, model_fingerprint, CheckpointFacts, read_checkpoint, named_ends):
        with pytest.raises(InvalidConfig) as caught:
            read(tmp_path)
        assert [each.description for each in caught.value.violations] == [f"{path}: {problem}; correct it"]


def test_a_head_has_a_size() -> None:
    assert config_problems(CONFIG | {"hidden_size": 3, "head_dim": None}) == [
        "hidden_size is 3, less than the 4 of num_attention_heads, and head_dim is missing"
    ]


def test_what_a_family_fills_in_contradicts_nothing() -> None:
    """A configuration may leave out what readers of its other entries do not need; the worker's self-test decides."""
    small = {"model_type": "qwen2", "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 512}
    assert completed(small)["num_key_value_heads"] == 32
    assert config_problems(small) == []
    assert config_problems(small | {"num_key_value_heads": 32}) != []


def test_all_bad_entries_are_named_at_once() -> None:
    assert len(config_problems(CONFIG | {"head_dim": 0, "vocab_size": "many", "rms_norm_eps": NAN})) == 3


def test_latent_attention_has_sizes_of_other_names() -> None:
    assert config_problems(CONFIG | {"head_dim": 0, "qk_nope_head_dim": 128}) == []


@pytest.mark.parametrize(
    ("entry", "value", "problem"),
    [
        ("temperature", "hot", "temperature is 'hot'; expected a number from 0 to 1e+15"),
        ("temperature", NAN, "temperature is nan; expected a number from 0 to 1e+15"),
        ("top_k", True, "top_k is True; expected a whole number from -1 to 2147483647"),
        ("top_k", 10**30, f"top_k is {10**30}; expected a whole number from -1 to 2147483647"),
        ("top_p", [1], "top_p is [1]; expected a number above 0 and at most 1"),
        ("min_p", -0.5, "min_p is -0.5; expected a number from 0 to 1"),
        ("repetition_penalty", 0, "repetition_penalty is 0; expected a number above 0 and at most 1e+15"),
        ("max_new_tokens", "many", "max_new_tokens is 'many'; expected a whole number from 0 on"),
        ("eos_token_id", {"a": 1}, "eos_token_id is an object; expected the id of a token, or a list of ids"),
        ("eos_token_id", [[1]], "eos_token_id is a list; expected the id of a token, or a list of ids"),
        ("eos_token_id", 10**30, f"eos_token_id is {10**30}; expected the id of a token, or a list of ids"),
    ],
)
def test_advice_that_cannot_be_is_named(entry: str, value: object, problem: str, tmp_path: Path) -> None:
    assert generation_problems({entry: value}) == [problem]
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({entry: value}))
    for read in (read_generation, read_checkpoint, named_ends):
        with pytest.raises(InvalidConfig) as caught:
            read(tmp_path)
        assert [each.description for each in caught.value.violations] == [f"{path}: {problem}; correct it"]


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, -1, 1, 2**31, 2**63, 10**18, 10**400])
    | st.floats()
    | st.text(max_size=3)
    | st.sampled_from(["llama", "mistral3", "gemma3", "qwen2_vl", "yarn", "linear", "longrope", "\ud800"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*CONFIG, "factor", "rope_type", "type", "a"]), inner, max_size=3)
    ),
    max_leaves=6,
)
NAMES = [*CONFIG, "text_config", "rope_scaling", "rope_theta", "quantization_config", "dtype", "auto_map", "n_embd"]


@given(
    changes=st.dictionaries(st.sampled_from(NAMES), VALUES, min_size=1, max_size=3),
    generation=st.dictionaries(st.sampled_from(["eos_token_id", "temperature", "top_k", "max_new_tokens"]), VALUES),
    tokenizer=st.dictionaries(st.sampled_from(["eos_token", "added_tokens_decoder", "extra_special_tokens"]), VALUES),
)
def test_any_configuration_is_read_or_refused(
    changes: dict[str, Any],
    generation: dict[str, Any],
    tokenizer: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.getbasetemp()
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    (folder / "generation_config.json").write_text(json.dumps(generation))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    for read in (read_checkpoint, named_ends, model_fingerprint):
        with contextlib.suppress(InvalidConfig):
            read(folder)
    with contextlib.suppress(InvalidConfig):
        facts = CheckpointFacts(folder)
        assert facts.context > 0
        assert facts.kv_geometry("auto", "auto", 16).num_layers > 0
    with contextlib.suppress(InvalidConfig):
        why_not_served(read_config(folder), known_kinds())
