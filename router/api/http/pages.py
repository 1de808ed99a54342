"""JSON pages of the admin plane, under the paths that operators of other servers know.

/server_info   the served model, and the options that are neither secrets nor paths
/load          queue and workers
/tokenizer_info   tokenizer_config.json, with the chat template that is in use
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from google.protobuf.json_format import MessageToDict

from quire.inference.v1 import inference_pb2 as pb
from router.answers.text.checkpoint import read_json
from router.config import RouterSettings
from router.contracts.ports import ModelCard
from router.observe.status import RouterStatus

Json = dict[str, Any]
Page = Callable[[], object]

_OPTIONS: Final = (
    *("block_size", "load_format", "seed", "open_schemas", "max_queued_requests", "max_tokens_in_flight"),
    *("http_connections", "http_connections_per_peer", "trace_sample_ratio", "drain_timeout", "lease_ttl"),
)


def pages(settings: RouterSettings, tokenizer: Path, router: RouterStatus) -> Mapping[str, Page]:
    """Return what each path answers; `tokenizer` is the folder of the tokenizer in use."""
    return {
        "/server_info": lambda: _server_info(settings, router.model(), router.status()),
        "/load": lambda: _load(router.status()),
        "/tokenizer_info": lambda: _tokenizer_info(tokenizer, settings.chat_template, router.model()),
    }


def _server_info(settings: RouterSettings, model: ModelCard, status: pb.GetStatusResponse) -> Json:
    identity = model.identity
    return {
        "version": status.version,
        "model": model.name,
        "aliases": list(model.aliases),
        "max_model_len": model.max_model_len,
        "vocab_size": model.vocab_size,
        "eos_token_ids": list(model.eos_token_ids),
        "model_fingerprint": identity.model_fingerprint,
        "tokenizer_fingerprint": identity.tokenizer_fingerprint,
        "options": {name: getattr(settings, name) for name in _OPTIONS},
        "redis_connected": status.redis_connected,
        "draining": status.draining,
    }


def _load(status: pb.GetStatusResponse) -> Json:
    """Return the load; `server_load`, all requests inside, is the figure that vLLM gives."""
    workers = [
        MessageToDict(each, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
        for each in status.workers
    ]
    return {
        "server_load": status.queued_requests + status.running_requests,
        "queued_requests": status.queued_requests,
        "running_requests": status.running_requests,
        "workers": workers,
    }


def _tokenizer_info(folder: Path, chat_template: Path | None, model: ModelCard) -> Json:
    config = read_json(folder / "tokenizer_config.json")
    template = chat_template or folder / "chat_template.jinja"
    if template.is_file():
        config = {**config, "chat_template": template.read_text(encoding="utf-8")}
    return {**config, "vocab_size": model.vocab_size}
