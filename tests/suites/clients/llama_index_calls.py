"""Calls a server by LlamaIndex, and prints what each call got; reads {"url", "model", "calls": [...]} in JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Literal

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

QUESTION = "Where does Anna live?"


class Town(BaseModel):
    """A town."""

    name: Literal["Lyon", "Basel"]
    big: bool


def find_town(name: Literal["Lyon", "Basel"], big: bool) -> str:
    """Find a town."""
    return f"{name} is {'big' if big else 'small'}."


class Calls:
    """All calls, with the URL of the API and the model's name."""

    def __init__(self, url: str, model: str) -> None:
        self._given: dict[str, Any] = {
            "api_base": url,
            "model": model,
            "api_key": "none",
            "context_window": 4096,
            "is_chat_model": True,
            "is_function_calling_model": True,
            "max_retries": 0,
        }
        self._tool = FunctionTool.from_defaults(find_town, fn_schema=Town)

    def chat(self) -> Any:
        """Return the text of a chat, whole and streamed."""
        model = self._model(temperature=0.0, max_tokens=16)
        asked = [ChatMessage(role="user", content=QUESTION)]
        *_, last = model.stream_chat(asked)
        return [model.chat(asked).message.content, last.message.content]

    def tools(self) -> Any:
        """Return the calls of a required tool, whole and streamed."""
        model = self._model()
        whole = model.chat_with_tools([self._tool], user_msg=QUESTION, tool_required=True)
        *_, last = model.stream_chat_with_tools([self._tool], user_msg=QUESTION, tool_required=True)
        found = [model.get_tool_calls_from_response(each) for each in (whole, last)]
        return [[[call.tool_name, call.tool_kwargs] for call in each] for each in found]

    def structured(self) -> Any:
        """Return an object by a call of a function, and one by a JSON schema."""
        models = [self._model(), self._model(should_use_structured_outputs=True)]
        prompt = PromptTemplate(QUESTION)
        return [each.structured_predict(Town, prompt).model_dump() for each in models]

    def agent(self) -> Any:
        """Return the answer of an agent that runs its tool itself."""
        made = FunctionAgent(tools=[self._tool], llm=self._model(), system_prompt="Be brief.")

        async def run() -> Any:
            return await made.run(QUESTION)

        return str(asyncio.run(run()))

    def _model(self, **given: Any) -> OpenAILike:
        settings = {"temperature": 1.0, "max_tokens": 400, "additional_kwargs": {"seed": 4}}
        return OpenAILike(**self._given, **(settings | given))


def main() -> None:
    given = json.load(sys.stdin)
    calls = Calls(given["url"], given["model"])
    json.dump([getattr(calls, name)() for name in given["calls"]], sys.stdout)


main()
