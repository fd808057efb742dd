"""Lets one agent library call a tool through a server; run by an interpreter that has the library.

python agent_libraries.py LIBRARY URL
"""

import asyncio
import os
import sys

QUESTION = "How is the weather in Ulm?"


def weather(city: str) -> str:
    """The weather in a city."""
    return f"sun in {city}"


def openai_agents(url):
    import agents

    agents.set_tracing_disabled(True)
    os.environ.update(OPENAI_BASE_URL=f"{url}/v1", OPENAI_API_KEY="none")
    agent = agents.Agent(name="a", model="model", tools=[agents.function_tool(weather)])

    async def both():  # in one event loop, because the library's connections belong to it
        result = agents.Runner.run_streamed(agent, QUESTION)
        kinds = [event.type async for event in result.stream_events()]
        assert "raw_response_event" in kinds
        assert result.final_output == (await agents.Runner.run(agent, QUESTION)).final_output
        return result.final_output

    return asyncio.run(both())


def _pydantic_ai(model):
    from pydantic_ai import Agent

    agent = Agent(model, tools=[weather])

    async def streamed():
        async with agent.run_stream(QUESTION) as result:
            return await result.get_output()

    said = asyncio.run(streamed())
    assert said == agent.run_sync(QUESTION).output
    return said


def pydantic_ai_responses(url):
    from pydantic_ai.models.openai import OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    return _pydantic_ai(OpenAIResponsesModel("model", provider=provider))


def pydantic_ai_messages(url):
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    provider = AnthropicProvider(base_url=url, api_key="none")
    return _pydantic_ai(AnthropicModel("model", provider=provider))


SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}


def _litellm(**target):
    import litellm

    function = {"name": "weather", "description": "of a city", "parameters": SCHEMA}
    tools = [{"type": "function", "function": function}]
    messages = [{"role": "user", "content": QUESTION}]
    for stream in (False, True):
        chunks = litellm.completion(messages=messages, tools=tools, stream=stream, **target)
        answer = litellm.stream_chunk_builder(list(chunks)) if stream else chunks
        message = answer.choices[0].message
        [call] = message.tool_calls
        assert call.function.name == "weather" and "Ulm" in call.function.arguments
    history = [
        *messages,
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": weather("Ulm")},
    ]
    return litellm.completion(messages=history, tools=tools, **target).choices[0].message.content


def litellm_responses(url):
    return _litellm(model="openai/responses/model", api_base=f"{url}/v1", api_key="none")


def litellm_messages(url):
    return _litellm(model="anthropic/model", api_base=url, api_key="none", max_tokens=200)


def _langchain(model):
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool

    bound = model.bind_tools([tool(weather)])
    asked = [HumanMessage(QUESTION)]
    whole, streamed = bound.invoke(asked), None
    for chunk in bound.stream(asked):
        streamed = chunk if streamed is None else streamed + chunk
    [call] = whole.tool_calls
    assert call["args"] == streamed.tool_calls[0]["args"] == {"city": "Ulm"}
    result = ToolMessage(weather(**call["args"]), tool_call_id=call["id"])
    return bound.invoke([*asked, whole, result]).text


def langchain_responses(url):
    from langchain_openai import ChatOpenAI

    target = {"base_url": f"{url}/v1", "api_key": "none", "model": "model"}
    return _langchain(ChatOpenAI(**target, use_responses_api=True))


def langchain_messages(url):
    from langchain_anthropic import ChatAnthropic

    return _langchain(ChatAnthropic(base_url=url, api_key="none", model="model", max_tokens=200))


if __name__ == "__main__":
    print(globals()[sys.argv[1]](sys.argv[2]))
