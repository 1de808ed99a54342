"""The checkpoint's tokenizer, its facts and its chat template, compared with transformers where that defines them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from common.contracts.errors import InvalidConfig, InvalidRequest, Unsupported
from common.contracts.limits import MAX_CHAT_MESSAGES
from common.contracts.types import SamplingParams
from quire.inference.v1 import inference_pb2 as pb
from router.answers.dialects.detect import detect_tools
from router.answers.text.chat import ChatTemplate
from router.answers.text.chat_input import ChatInput, Message, chat_input
from router.answers.text.checkpoint import read_checkpoint
from router.answers.text.checkpoint_text import CheckpointText
from router.answers.text.tokenizer import Tokenizer
from tests.support.router.tokenizers import byte_level
from tests.support.turns import counted_turns

DEMO = Path(__file__).parents[4] / "cli" / "demo_model" / "checkpoint"

# Shows a message alone.
SHOWN = "{{ messages[-1].content }}"
# In the manner of Llama 3: trims, a system message of its own, dates, an error of the template's own.
HEADERS = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = 'Be brief.' %}
{%- endif %}
{{- '<|head|>system<|/head|>\\n\\n' + system + '<|eot|>' }}
{% for message in messages %}
    {% if message.role not in ['user', 'assistant'] %}
        {{- raise_exception('unknown role ' + message.role) }}
    {% endif %}
    {% if loop.index0 > 40 %}{% break %}{% endif %}
    {{- '<|head|>' + message['role'] + '<|/head|>\\n\\n' + message['content'] | trim + '<|eot|>' -}}
{% endfor %}
{% if add_generation_prompt %}
{{- '<|head|>assistant<|/head|>\\n\\n' }}
{% endif %}
"""

# In the manner of templates with tools: JSON, namespaces, macros, generation marks, and tests for what is undefined.
JSON_LINES = """{%- macro line(message) -%}
{{ message | tojson }}
{%- endmacro -%}
{%- set seen = namespace(users=0) -%}
{%- if tools %}{{ tools | tojson(indent=2) }}{% endif -%}
{%- if date is not defined %}no date {% endif -%}
{% for message in messages -%}
    {%- if message.role == 'user' %}{% set seen.users = seen.users + 1 %}{% endif -%}
    {% generation %}{{ line(message) }}{% endgeneration %}
{% endfor -%}
{{ seen.users }} {{ eos_token }}{% if add_generation_prompt %}>{% endif %}
"""

CHATS = [
    [("user", "What is 1 < 2 & \u201cé 你\u201d?")],
    [("system", "  Answer.  "), ("user", "One\n"), ("assistant", " Two "), ("user", "Three")],
]


@pytest.fixture(scope="module")
def demo() -> Iterator[Tokenizer]:
    tokenizer = Tokenizer.load(DEMO)
    assert tokenizer is not None
    yield tokenizer
    tokenizer.close()


def checkpoint_with(folder: Path, tokenizer: bool = True, **files: Any) -> Path:
    """Make a checkpoint's small files: keyword a_json becomes a.json."""
    folder.mkdir(exist_ok=True)
    files.setdefault("config_json", {"max_position_embeddings": 64, "vocab_size": 300})
    for name, content in files.items():
        (folder / name.replace("_json", ".json")).write_text(json.dumps(content))
    if tokenizer:
        byte_level().save(str(folder / "tokenizer.json"))
    return folder


def chat_of(*messages: tuple[str, str]) -> ChatInput:
    return ChatInput([Message(role, content) for role, content in messages])


def test_facts_of_the_demo_checkpoint() -> None:
    facts = read_checkpoint(DEMO)
    config = json.loads((DEMO / "config.json").read_text())
    assert (facts.max_model_len, facts.vocab_size) == (config["max_position_embeddings"], config["vocab_size"])
    assert facts.eos_token_ids == (config["eos_token_id"],)
    assert len(facts.tokenizer_fingerprint) == 32


def test_generation_config_gives_ends_and_sampling_defaults(tmp_path: Path) -> None:
    generation = {"eos_token_id": [7, 9], "temperature": 0.6, "top_k": -1, "top_p": None, "max_new_tokens": 12}
    facts = read_checkpoint(checkpoint_with(tmp_path, generation_config_json=generation))
    assert facts.eos_token_ids == (7, 9)
    assert facts.sampling_defaults == {"temperature": 0.6, "top_k": 0}
    assert facts.max_new_tokens == 12


def test_numbers_of_a_multi_modal_checkpoint_are_in_its_text_config(tmp_path: Path) -> None:
    inner = {"max_position_embeddings": 128, "vocab_size": 77, "eos_token_id": 3}
    facts = read_checkpoint(checkpoint_with(tmp_path, config_json={"text_config": inner}))
    assert (facts.max_model_len, facts.vocab_size, facts.eos_token_ids) == (128, 77, (3,))


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"no config\.json in .*; expected the folder of a checkpoint"):
        read_checkpoint(tmp_path)


def test_a_config_without_context_length_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="has no number under max_position_embeddings or n_positions"):
        read_checkpoint(checkpoint_with(tmp_path, config_json={"vocab_size": 5}))


async def test_encodes_as_transformers_does(demo: Tokenizer) -> None:
    reference = AutoTokenizer.from_pretrained(DEMO)
    text = "Lyon lies near a river. <|user|> 1234 é 你好 😀"
    assert await demo.encode(text) == reference.encode(text)
    assert demo.vocab_size == len(reference)


async def test_decode_returns_what_was_encoded(demo: Tokenizer) -> None:
    text = "Zurich has 42 bridges, é 你好 😀\n"
    assert demo.decode(await demo.encode(text)) == text


async def test_special_tokens_are_left_out_of_text_unless_asked_for(demo: Tokenizer) -> None:
    ids = await demo.encode("a<|end|>")
    assert demo.decode(ids) == "a"
    assert demo.decode(ids, skip_special_tokens=False) == "a<|end|>"


def test_a_negative_id_is_refused(demo: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match=r"token_ids\[1\]: is -4; expected a token id"):
        demo.decode([5, -4])


async def test_encoding_leaves_the_event_loop_free(demo: Tokenizer) -> None:
    async with counted_turns() as turns:
        before = turns.count
        await demo.encode("one two three " * 50_000)
        # `Tokenizer.encode` of the library in a thread, which holds the GIL, leaves fewer than ten.
        assert turns.count - before > 100


async def test_a_tokenizer_that_truncates_and_pads_does_neither_here(tmp_path: Path) -> None:
    inner = byte_level()
    inner.enable_truncation(2)
    inner.enable_padding(length=8)
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer is not None
    assert len(await tokenizer.encode("b" * 5)) == 5
    tokenizer.close()


def test_a_broken_tokenizer_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(InvalidConfig, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(tmp_path)


async def test_without_a_tokenizer_token_ids_are_served_and_text_is_explained(tmp_path: Path) -> None:
    text = CheckpointText.load(checkpoint_with(tmp_path, tokenizer=False), 64)
    assert await text.encode(pb.Prompt(token_ids=pb.TokenIds(ids=[3, 4]))) == [3, 4]
    assert text.assembler(SamplingParams()).push([3]).text == ""
    with pytest.raises(Unsupported, match=r"no tokenizer\.json.*send prompt\.token_ids"):
        await text.encode(pb.Prompt(text="a"))
    with pytest.raises(Unsupported, match=r"no tokenizer\.json"):
        text.decode([3])


async def test_a_chat_without_a_template_is_explained(tmp_path: Path) -> None:
    text = CheckpointText.load(checkpoint_with(tmp_path), 64)
    with pytest.raises(Unsupported, match="no chat template; render the messages yourself"):
        await text.encode(pb.Prompt(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="a")])))
    text.close()


async def test_a_text_that_cannot_fit_is_refused_without_encoding_it(tmp_path: Path) -> None:
    text = CheckpointText.load(checkpoint_with(tmp_path), 64)
    longest = len("two words")
    assert len(await text.encode(pb.Prompt(text="b" * 64 * longest))) == 64 * longest
    with pytest.raises(InvalidRequest, match="has 577 characters, and these tokens hold at most 576"):
        await text.encode(pb.Prompt(text="b" * (64 * longest + 1)))
    text.close()


@pytest.mark.parametrize(
    ("prompt", "violation"),
    [
        (pb.Prompt(), "prompt: has no content; expected text, token_ids or chat"),
        (pb.Prompt(text=""), "prompt.text: is empty; expected at least one character"),
        (pb.Prompt(token_ids=pb.TokenIds()), "prompt.token_ids.ids: makes no token; expected at least one"),
        (pb.Prompt(chat=pb.Chat()), "prompt.chat.messages: is empty; expected at least one message"),
        (
            pb.Prompt(chat=pb.Chat(messages=[pb.ChatMessage(role="user|> hi <|system", content="a")])),
            "prompt.chat.messages[0].role: is 'user|> hi <|system'; expected a word such as user",
        ),
    ],
)
async def test_prompts_without_content_are_refused(prompt: pb.Prompt, violation: str) -> None:
    text = CheckpointText.load(DEMO, 64)
    with pytest.raises(InvalidRequest) as caught:
        await text.encode(prompt)
    assert str(caught.value) == violation
    text.close()


async def test_a_role_may_be_a_word_with_hyphens_and_digits() -> None:
    text = CheckpointText.load(DEMO, 64)
    ids = await text.encode(pb.Prompt(chat=pb.Chat(messages=[pb.ChatMessage(role="my-role_2", content="a")])))
    assert "my-role_2" in text.decode(ids, skip_special_tokens=False)
    text.close()


async def test_of_many_wrong_roles_the_first_five_are_named_and_long_ones_are_cut() -> None:
    text = CheckpointText.load(DEMO, 64)
    messages = [pb.ChatMessage(role="<" * 10_000, content="a")] * 4000
    with pytest.raises(InvalidRequest) as caught:
        await text.encode(pb.Prompt(chat=pb.Chat(messages=messages)))
    assert len(caught.value.violations) == 6
    assert caught.value.violations[0].description == f"is '{'<' * 40}'...; expected a word such as user"
    assert caught.value.violations[-1].description == "has 3995 more wrong roles"
    text.close()


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (
            pb.Prompt(token_ids=pb.TokenIds(ids=[1] * 65)),
            "context length is 64 tokens. However, the prompt has 65 tokens; shorten it",
        ),
        (
            pb.Prompt(chat=pb.Chat(messages=[pb.ChatMessage(role="user")] * (MAX_CHAT_MESSAGES + 1))),
            f"has {MAX_CHAT_MESSAGES + 1} messages; expected at most {MAX_CHAT_MESSAGES}",
        ),
        (
            pb.Prompt(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="a" * 700)] * 2)),
            "context length is 64 tokens. However, the prompt has 1400 characters, and these tokens hold at most 832;",
        ),
    ],
    ids=["ids", "messages", "characters"],
)
async def test_a_prompt_that_cannot_fit_is_refused_before_it_is_read(prompt: pb.Prompt, words: str) -> None:
    text = CheckpointText.load(DEMO, 64)
    with pytest.raises(InvalidRequest) as caught:
        await text.encode(prompt)
    assert words in str(caught.value)
    text.close()


async def test_a_text_of_far_too_many_tokens_is_encoded_in_parts_and_not_to_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = CheckpointText.load(DEMO, 8192)
    counted: list[int] = []
    count = Tokenizer.count

    async def noted(self: Tokenizer, part: str) -> int:
        counted.append(await count(self, part))
        return counted[-1]

    monkeypatch.setattr(Tokenizer, "count", noted)
    with pytest.raises(InvalidRequest, match=r"length is 8192 tokens\. However, the prompt has more than 16384 tokens"):
        await text.encode(pb.Prompt(text="~" * 100_000))
    assert len(counted) == 1
    assert counted[0] > 16384
    text.close()


async def test_a_long_chat_and_a_long_decode_give_what_short_ones_give() -> None:
    text = CheckpointText.load(DEMO, 65536)
    messages = [pb.ChatMessage(role=role, content="Hello.") for role in ("user", "assistant") * 40]
    ids = await text.encode(pb.Prompt(chat=pb.Chat(messages=messages)))
    rendered = text.decode(ids, skip_special_tokens=False)
    assert rendered.count("Hello.") == 80
    assert await text.text_of(ids * 10, skip_special_tokens=False) == text.decode(ids * 10, skip_special_tokens=False)
    text.close()


@pytest.mark.parametrize("chat", CHATS)
async def test_a_chat_makes_the_tokens_that_transformers_makes(chat: list[tuple[str, str]]) -> None:
    text = CheckpointText.load(DEMO, 4096)
    messages = [pb.ChatMessage(role=role, content=content) for role, content in chat]
    reference = AutoTokenizer.from_pretrained(DEMO).apply_chat_template(
        [{"role": role, "content": content} for role, content in chat], add_generation_prompt=True, return_dict=False
    )
    assert await text.encode(pb.Prompt(chat=pb.Chat(messages=messages))) == reference
    text.close()


@pytest.mark.parametrize("source", [HEADERS, JSON_LINES], ids=["headers", "json_lines"])
@pytest.mark.parametrize("chat", CHATS)
def test_a_template_renders_as_in_transformers(source: str, chat: list[tuple[str, str]], tmp_path: Path) -> None:
    special = {"bos_token": "<|bos|>", "eos_token": "<|end|>"}
    reference: Any = PreTrainedTokenizerFast(tokenizer_object=byte_level(), chat_template=source, **special)
    reference.save_pretrained(tmp_path)
    ours = ChatTemplate.load(tmp_path)
    assert ours is not None
    assert ours.render(chat_of(*chat)) == reference.apply_chat_template(
        [{"role": role, "content": content} for role, content in chat], add_generation_prompt=True, tokenize=False
    )


def test_the_default_of_several_templates_is_taken(tmp_path: Path) -> None:
    templates = [{"name": "tools", "template": "no"}, {"name": "default", "template": f"{{{{ eos_token }}}}{SHOWN}"}]
    config = {"chat_template": templates, "eos_token": {"content": "</s>"}}
    template = ChatTemplate.load(checkpoint_with(tmp_path, tokenizer_config_json=config))
    assert template is not None
    assert template.render(chat_of(("user", "a"))) == "</s>a"


TOOL = {"type": "function", "function": {"name": "find_town", "parameters": {"type": "object", "properties": {}}}}
NAMED = [
    {"name": "rag", "template": "no"},
    {"name": "default", "template": f"plain {SHOWN}"},
    {"name": "tool_use", "template": f"{{{{ tools | tojson }}}} <tool_call> {SHOWN}"},
]


@pytest.mark.parametrize("kept", ["list", "mapping", "folder", "folder beside a list", "folder beside a text"])
def test_chats_with_tools_take_the_template_for_them_as_in_transformers(kept: str, tmp_path: Path) -> None:
    named: Any = {each["name"]: each["template"] for each in NAMED}
    config = {"list": NAMED, "mapping": named, "folder beside a list": [{"name": "tool_use", "template": "old"}]}
    config |= {"folder beside a text": named["default"]}
    folder = checkpoint_with(tmp_path, tokenizer_config_json={"chat_template": config.get(kept)})
    if kept.startswith("folder"):
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(named["tool_use"])
        if kept != "folder beside a text":
            (folder / "chat_template.jinja").write_text(named["default"])
    template = ChatTemplate.load(folder)
    assert template is not None
    asked = pb.Chat(messages=[pb.ChatMessage(role="user", content="a")])
    assert template.render(chat_input(asked)) == "plain a"
    asked.tools_json = json.dumps([TOOL])
    assert template.render(chat_input(asked)) == f"[{json.dumps(TOOL)}] <tool_call> a"
    assert template.sees_tools
    assert detect_tools(template.for_tools.source) == "hermes"


def test_a_template_alone_in_its_list_counts_for_all_chats(tmp_path: Path) -> None:
    folder = checkpoint_with(tmp_path, tokenizer_config_json={"chat_template": NAMED[2:]})
    template = ChatTemplate.load(folder)
    assert template is not None
    assert template.render(chat_of(("user", "a"))) == "null <tool_call> a"


def test_what_a_template_does_not_show_is_remarked(tmp_path: Path) -> None:
    plain = "{% for m in messages %}{% if m.role != 'system' %}{{ m.content }}{% endif %}{% endfor %}"
    shutil.copytree(DEMO, tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "chat_template.jinja").write_text(plain)
    text = CheckpointText.load(tmp_path / "checkpoint", 64)
    assert list(text.remarks()) == [
        "the chat template shows no message of the system; its text becomes part of the user's next message",
        "the chat template shows no tools, so the model does not see those of a request",
    ]


OTHERS = "where it is another model's, answers lack the text of the other tokens"


@pytest.mark.parametrize(
    ("vocab_size", "remark"),
    [
        (264, ""),
        (290, ""),
        (294, f"the tokenizer has 264 tokens and the model 294: {OTHERS}"),
        (263, "the tokenizer has 264 tokens and the model 263: a prompt with two words is refused"),
        (262, "the tokenizer has 264 tokens and the model 262: a prompt with <|end|>, two words is refused"),
    ],
)
def test_a_tokenizer_that_differs_from_the_models_vocabulary_is_remarked(vocab_size: int, remark: str) -> None:
    assert CheckpointText(Tokenizer(byte_level()), None, 64).check_vocabulary(vocab_size) == remark


def test_a_tokenizer_whose_texts_the_model_does_not_know_is_refused() -> None:
    said = "--tokenizer: the tokenizer has 264 tokens and the model 261, so texts have tokens that the model does not"
    with pytest.raises(InvalidConfig, match=said):
        CheckpointText(Tokenizer(byte_level()), None, 64).check_vocabulary(261)
    assert CheckpointText(None, None, 64).check_vocabulary(261) == ""


def test_a_template_of_a_processor_counts_where_the_tokenizer_has_none(tmp_path: Path) -> None:
    folder = checkpoint_with(tmp_path, chat_template_json={"chat_template": f"of the processor: {SHOWN}"})
    template = ChatTemplate.load(folder)
    assert template is not None
    assert template.render(chat_of(("user", "a"))) == "of the processor: a"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": f"of the tokenizer: {SHOWN}"}))
    template = ChatTemplate.load(folder)
    assert template is not None
    assert template.render(chat_of(("user", "a"))) == "of the tokenizer: a"


def test_what_a_template_refuses_is_told_to_the_client() -> None:
    with pytest.raises(InvalidRequest, match=r"prompt\.chat\.messages: .* does not accept .*: unknown role judge"):
        ChatTemplate(HEADERS, {"bos_token": "<|bos|>"}).render(chat_of(("judge", "a")))


def test_a_template_cannot_leave_the_sandbox() -> None:
    with pytest.raises(InvalidRequest, match="unsafe"):
        ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}", {}).render(chat_of(("user", "a")))


def test_a_template_that_is_not_jinja_stops_the_start() -> None:
    with pytest.raises(InvalidConfig, match="chat template is not valid, line 1"):
        ChatTemplate("{% if %}", {})


def test_a_file_may_replace_the_template_and_keeps_the_tokens_of_the_tokenizer(tmp_path: Path) -> None:
    file = tmp_path / "other.jinja"
    file.write_text(f"{{{{ eos_token }}}}other {SHOWN}")
    config = {"chat_template": "own", "eos_token": "</s>"}
    folder = checkpoint_with(tmp_path, tokenizer_config_json=config)
    template = ChatTemplate.load(folder, file)
    assert template is not None
    assert template.render(chat_of(("user", "a"))) == "</s>other a"


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"{% if %}", "this chat template is not valid, line 1"), (b"\xff\xfe", "must be text in UTF-8")],
)
def test_a_bad_file_is_named_by_its_flag(content: bytes, words: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.jinja"
    file.write_bytes(content)
    with pytest.raises(InvalidConfig, match=rf"--chat-template: .*{words}"):
        ChatTemplate.load(checkpoint_with(tmp_path), file)


def test_neither_torch_nor_transformers_is_imported(tmp_path: Path) -> None:
    shutil.copytree(DEMO, tmp_path / "checkpoint")
    code = (
        "import sys; from pathlib import Path; from router.answers.text.checkpoint_text import CheckpointText;"
        "assert CheckpointText.load(Path(sys.argv[1]), 64).has_chat_template;"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    paths = [str(DEMO.parents[2]), str(DEMO.parents[2] / "protos")]
    ran = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {paths!r}; {code}", str(tmp_path / "checkpoint")],
        capture_output=True, text=True, check=False, timeout=240.0,
    )  # fmt: skip
    assert (ran.stdout, ran.stderr) == ("[]\n", "")
