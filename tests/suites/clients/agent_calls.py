"""Calls a server by agent frameworks of .clients/light, and prints what each got; reads {"url", "model"} in JSON."""

from __future__ import annotations

import json
import sys
from typing import Any, Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

QUESTION = "Where does Anna live?"
SETTINGS: dict[str, Any] = {"temperature": 1, "seed": 4, "max_tokens": 400}


class Town(BaseModel):
    """A town."""

    name: Literal["Lyon", "Basel"]
    big: bool


def find_town(name: Literal["Lyon", "Basel"], big: bool) -> str:
    """Find a town."""
    return name


def langchain_tools(url: str, model: str) -> Any:
    """Return the calls of a model with a bound tool, whole and streamed."""
    bound = _chat(url, model).bind_tools([tool(find_town)], tool_choice="find_town")
    whole = bound.invoke(QUESTION)
    chunks = list(bound.stream(QUESTION))
    together = chunks[0]
    for chunk in chunks[1:]:
        together += chunk
    return [[[call["name"], call["args"]] for call in each.tool_calls] for each in (whole, together)]


def langchain_structured(url: str, model: str) -> Any:
    """Return an object by a call of a function, and one by a JSON schema."""
    methods = ("function_calling", "json_schema")
    found = [_chat(url, model).with_structured_output(Town, method=each).invoke(QUESTION) for each in methods]
    return [town.model_dump() for town in found if isinstance(town, Town)]


def pydantic_ai_output(url: str, model: str) -> Any:
    """Return the object of an agent; by default it comes as the call of a tool."""
    provider = OpenAIProvider(base_url=url, api_key="none")
    agent = Agent(OpenAIChatModel(model, provider=provider), output_type=Town, retries=0)
    return agent.run_sync(QUESTION, model_settings=SETTINGS).output.model_dump()


def _chat(url: str, model: str) -> ChatOpenAI:
    return ChatOpenAI(base_url=url, api_key="none", model=model, max_retries=0, **SETTINGS)


CALLS = {each.__name__: each for each in (langchain_tools, langchain_structured, pydantic_ai_output)}


def main() -> None:
    given = json.load(sys.stdin)
    json.dump(CALLS[given["call"]](given["url"], given["model"]), sys.stdout)


main()
