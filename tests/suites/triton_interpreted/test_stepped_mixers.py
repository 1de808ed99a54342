"""Mixers whose states kernels step: tokens are those of transformers, with drafts and checkpoints too."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING
from transformers.models.qwen3_next import modeling_qwen3_next

from gpuworker.kernels import triton_states
from gpuworker.models.hf.loader import ModelSource, load_model, random_module
from gpuworker.models.hf.mixers import MixerStates
from gpuworker.models.hf.model import TransformersModel
from gpuworker.models.hf.tiny import tiny_config
from gpuworker.models.self_test import self_test
from tests.gpuworker.runner import test_drafted_states as drafted
from tests.support.checkpoints import checkpoint
from tests.support.gpuworker.full_forward import greedy_tokens, random_prompt
from tests.support.gpuworker.runner_harness import CPU, Driver, runner_on

BOTH = frozenset({"conv", "recurrent"})
F, L = "full_attention", "linear_attention"
# Families, and the kinds of states that kernels step.
FAMILIES: dict[str, tuple[dict[str, Any], frozenset[str]]] = {
    "qwen3_next": (drafted.FAMILIES["qwen3_next"], BOTH),
    "olmo_hybrid": ({"num_hidden_layers": 3, "layer_types": [L, F, L]}, BOTH),
    "kimi_linear": ({"num_hidden_layers": 3, "layer_types": [L, F, L]}, BOTH),
    "bamba": (drafted.FAMILIES["bamba"], BOTH),
    "falcon_h1": (drafted.FAMILIES["falcon_h1"], BOTH),  # it hands its gate over as well
    "lfm2": (drafted.FAMILIES["lfm2"], frozenset({"conv"})),
    # State spaces of the first kind: their own states are gathered and put back.
    "jamba": (drafted.FAMILIES["jamba"], frozenset({"conv"})),
}


def module_of(family: str) -> Any:
    module = random_module(tiny_config(CONFIG_MAPPING[family](), **FAMILIES[family][0]), torch.float32, 0, CPU)
    return module.train(False)


def states_of(model: TransformersModel) -> MixerStates:
    assert model.states is not None
    return model.states


def stepped(model: TransformersModel) -> set[frozenset[str]]:
    return {mixer._stepped for mixer in states_of(model)._mixers}


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Count the rows that each kernel steps."""
    rows = dict.fromkeys(("step_convolution", "step_delta_rule", "step_state_space"), 0)

    def counting(name: str, step: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def called(*given: Any, **named: Any) -> torch.Tensor:
            rows[name] += len(given[0])
            return step(*given, **named)

        return called

    with monkeypatch.context() as patch:
        for name in rows:
            patch.setattr(triton_states, name, counting(name, getattr(triton_states, name)))
        yield rows


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_transformers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of prompts and single tokens side by side."""
    plain, kinds = module_of(family), FAMILIES[family][1]
    model = TransformersModel(copy.deepcopy(plain))
    runner = runner_on(model, 4, max_model_len=48)
    assert stepped(model) == {kinds}
    cases = [(random_prompt(length), chunk) for length, chunk in ((1, 1), (9, 4), (13, 13))]
    driver = Driver(runner, 4)
    try:
        with counted(monkeypatch) as rows:
            streams = [driver.add(prompt, 8, chunk) for prompt, chunk in cases]
            driver.run()
    finally:
        runner.close()
    assert [stream.output for stream in streams] == [greedy_tokens(plain, prompt, 8) for prompt, _ in cases]
    # Each stream has 7 decodes, and the last chunk of nine tokens is one. jamba's second chunk goes token by token.
    mixers, decodes = len(states_of(model)), 3 * 7 + 1 + (4 if family == "jamba" else 0)
    delta = decodes * mixers if family in ("qwen3_next", "olmo_hybrid", "kimi_linear") else 0
    space = decodes * mixers if family in ("bamba", "falcon_h1") else 0
    assert list(rows.values()) == [decodes * mixers, delta, space]


@pytest.mark.parametrize("family", ["qwen3_next", "bamba", "lfm2"])
def test_drafts_checkpoints_and_places_used_again_change_no_token(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, count = drafted.module_of(family), 16
    prompts = [random_prompt(length) for length in drafted.PROMPTS]
    texts = tuple((*prompt, *greedy_tokens(plain, prompt, count)) for prompt in prompts)
    monkeypatch.setattr(drafted, "texts", lambda _: texts)
    with drafted.walking(family, 0) as walk:
        assert all(mixer._stepped for mixer in walk.states._mixers)
        walk.run()
        assert walk.right > 5
        assert walk.wrong > 2


def test_the_log_says_what_kernels_step(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "gpuworker.models.hf.loader"):
        load_model(ModelSource(str(checkpoint("jamba")), dtype="float32"), CPU)
    assert (
        "jamba: JambaMambaMixer: kernels step conv states in place,"
        " and its recurrent states are gathered: no kernel has their step"
    ) in caplog.messages


def test_16_bits_are_tried_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that only takes floats is not taken for a model in bfloat16."""
    config = tiny_config(CONFIG_MAPPING["lfm2"](), **FAMILIES["lfm2"][0])
    assert states_of(TransformersModel(random_module(config, torch.bfloat16, 0, CPU))).stepped
    step = triton_states.step_convolution

    def of_floats(x: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        if x.dtype != torch.float32:
            raise ValueError("the kernel does not take such numbers")
        return step(x, *given, **named)

    monkeypatch.setattr(triton_states, "step_convolution", of_floats)
    states = states_of(TransformersModel(random_module(config, torch.bfloat16, 0, CPU)))
    assert not states.stepped
    assert states.kernels_in_words == [
        "Lfm2ShortConv: states are gathered and put back at each step: the kernel does not take such numbers"
    ]


# ---------------------------------------------------------------- kernels that are wrong, and what they do not take


def _other_result(step: Callable[..., torch.Tensor], *given: Any, **named: Any) -> torch.Tensor:
    return step(*given, **named) * 1.001


def _other_state(step: Callable[..., torch.Tensor], *given: Any, **named: Any) -> torch.Tensor:
    states, _, after = given[5:8]
    found = step(*given, **named)
    states[after[1:]] *= 1.001
    return found


def _other_place(step: Callable[..., torch.Tensor], *given: Any, **named: Any) -> torch.Tensor:
    states, _, after = given[5:8]
    found = step(*given, **named)
    states[4] = states[int(after[0])]
    return found


def _of_the_place_itself(step: Callable[..., torch.Tensor], *given: Any, **named: Any) -> torch.Tensor:
    """It reads the state where it writes: drafts would go on from nothing."""
    return step(*given[:6], given[7], given[7], **named)


def _failing(step: Callable[..., torch.Tensor], *given: Any, **named: Any) -> torch.Tensor:
    raise ValueError("the kernel does not take heads of such a size")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (_other_result, "results of kernels differ"),
        (_other_state, "states that kernels leave differ"),
        (_other_place, "kernels write to other places"),
        (_of_the_place_itself, "results of kernels differ"),
        (_failing, "the kernel does not take heads of such a size"),
    ],
)
def test_a_kernel_that_is_wrong_is_found_at_load_and_torch_runs(
    wrong: Callable[..., torch.Tensor], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = triton_states.step_delta_rule
    monkeypatch.setattr(triton_states, "step_delta_rule", lambda *given, **named: wrong(step, *given, **named))
    plain = module_of("qwen3_next")
    model = TransformersModel(copy.deepcopy(plain))
    said = states_of(model).kernels_in_words[0]
    assert said == f"Qwen3NextGatedDeltaNet: states are gathered and put back at each step: {words}"
    self_test(model, drafted.BACKEND)
    assert stepped(model) == {frozenset()}


def causal_conv1d_update(x: torch.Tensor, state: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Step a state [B, C, 3] with x [B, C, 1] and a weight [C, 3], as transformers' function does."""
    state.copy_(torch.cat((state, x), dim=-1)[..., 1:])
    return (state * weight).sum(-1, keepdim=True)


class Convolution(torch.nn.Module):
    """A mixer, of which a part of the code is another one in each case."""

    layer_idx = 0

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.weight = kind, torch.nn.Parameter(torch.randn(4, 3, generator=torch.Generator().manual_seed(0)))

    def forward(self, hidden: torch.Tensor, cache_params: Any = None) -> torch.Tensor:
        x, before = hidden.transpose(1, 2), cache_params and cache_params.get_conv_state(0)
        if before is not None and hidden.shape[1] == 1:
            if self.kind == "a copy":
                stepped = before.clone()
                made = causal_conv1d_update(x, stepped, self.weight)
                before.copy_(stepped)
                return made.transpose(1, 2)
            if self.kind == "by itself":
                made = (torch.cat((before, x), dim=-1)[..., 1:] * self.weight).sum(-1, keepdim=True)
                cache_params.update_conv_state(x, 0, conv_kernel_size=3)
                return made.transpose(1, 2)
            return causal_conv1d_update(x, before, self.weight).transpose(1, 2)
        columns = torch.nn.functional.pad(x, (2, 0)) if cache_params is None else x
        if cache_params is not None:
            columns = cache_params.update_conv_state(x, 0, conv_kernel_size=3)
            columns = torch.nn.functional.pad(columns, (2, 0))
        windows = columns.unfold(-1, 3, 1)[:, :, -x.shape[-1] :]
        return (windows * self.weight[:, None]).sum(-1).transpose(1, 2)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("as usual", "kernels step conv states in place"),
        ("a copy", "states are gathered and put back at each step: its code changes a state before it is stepped"),
        ("by itself", "states are gathered and put back at each step: its code reads conv states itself"),
    ],
)
def test_code_that_does_not_hand_its_states_to_a_function_runs_in_torch(kind: str, words: str) -> None:
    mixer = Convolution(kind)
    states, hidden = MixerStates(torch.nn.Sequential(mixer)), torch.randn(1, 12, 4)
    with torch.inference_mode():
        states.compare(lambda: mixer(hidden))
    assert states.kernels_in_words == [f"Convolution: {words}"]


def test_a_mixer_of_other_sizes_than_the_tried_one_runs_in_torch() -> None:
    model = TransformersModel(module_of("lfm2"))
    states = states_of(model)
    (tried,) = states.stepped.values()
    tried["conv", 0] = (torch.Size([64, 4]), torch.float32)
    self_test(model, drafted.BACKEND)
    assert stepped(model) == {frozenset()}


# ---------------------------------------------------------------- chunks of other packages


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], None]:
    """Let a function be that of fla-core for chunks of the gated delta rule."""

    def provide(chunk: Callable[..., Any]) -> None:
        names = ("fla", "fla.ops", "fla.ops.gated_delta_rule", "fla.ops.kda")
        made = {name: ModuleType(name) for name in names}
        setattr(made["fla.ops.gated_delta_rule"], "chunk_gated_delta_rule", chunk)  # noqa: B010
        setattr(made["fla.ops.kda"], "chunk_kda", chunk)  # noqa: B010
        for name, module in made.items():
            monkeypatch.setitem(sys.modules, name, module)

    return provide


def chunk_of_torch(
    query: Any,
    key: Any,
    value: Any,
    g: Any,
    beta: Any,
    initial_state: Any = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
) -> Any:
    chunk = modeling_qwen3_next.torch_chunk_gated_delta_rule
    state, last, normed = initial_state, output_final_state, use_qk_l2norm_in_kernel
    return chunk(
        query, key, value, g, beta, initial_state=state, output_final_state=last, use_qk_l2norm_in_kernel=normed
    )


def test_chunks_run_in_fla_core_where_it_computes_the_same(fla: Callable[[Callable[..., Any]], None]) -> None:
    calls: list[int] = []

    @functools.wraps(chunk_of_torch)
    def counted_chunk(query: torch.Tensor, *given: Any, **named: Any) -> Any:
        calls.append(query.shape[1])
        return chunk_of_torch(query, *given, **named)

    fla(counted_chunk)
    plain = module_of("qwen3_next")
    model = TransformersModel(copy.deepcopy(plain))
    runner = runner_on(model, 4, max_model_len=48)
    assert states_of(model).kernels_in_words[1] == "Qwen3NextGatedDeltaNet: prefills run in kernels of fla-core"
    calls.clear()
    prompt, driver = random_prompt(11), Driver(runner, 4)
    try:
        stream = driver.add(prompt, 5, 4)
        driver.run()
    finally:
        runner.close()
    assert stream.output == greedy_tokens(plain, prompt, 5)
    assert calls == [4, 4, 4, 4, 4, 4, 3, 3, 3]  # in three layers


def _forgetting(*given: Any, **named: Any) -> Any:
    """It forgets the state that a chunk begins with."""
    return chunk_of_torch(*given, **named | {"initial_state": None})


def _of_64_tokens(*given: Any, **named: Any) -> Any:
    """It computes something else behind 64 tokens."""
    out, state = chunk_of_torch(*given, **named)
    return torch.cat((out[:, :64], 1.01 * out[:, 64:]), dim=1), state


def _of_states(*given: Any, **named: Any) -> Any:
    """It leaves another state."""
    out, state = chunk_of_torch(*given, **named)
    return out, 1.01 * state


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (_forgetting, "results of fla-core differ"),
        (_of_64_tokens, "results of fla-core differ"),
        (_of_states, "states that fla-core leaves differ"),
    ],
)
def test_chunks_run_in_torch_where_fla_core_computes_something_else(
    wrong: Callable[..., Any], words: str, fla: Callable[[Callable[..., Any]], None]
) -> None:
    fla(functools.wraps(chunk_of_torch)(wrong))
    states = states_of(TransformersModel(module_of("qwen3_next")))
    assert states.kernels_in_words[1] == f"Qwen3NextGatedDeltaNet: prefills run in torch: {words}"
    assert not states.chunked


def test_chunks_run_in_torch_where_fla_core_fails(fla: Callable[[Callable[..., Any]], None]) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        raise AssertionError("heads of 16 are not taken")

    fla(failing)
    states = states_of(TransformersModel(module_of("qwen3_next")))
    assert states.kernels_in_words[1] == "Qwen3NextGatedDeltaNet: prefills run in torch: heads of 16 are not taken"
