"""OpenAI's own client on calls of tools: python scripts/judge_tools.py BASE_URL

The server at BASE_URL says what the last message to do so has between « and » (tests/serve/tools.rs), so that every
answer is known. Each check is one function.
"""

import json
import sys

import openai
from pydantic import BaseModel

client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0, timeout=60)
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'


class GetWeather(BaseModel):
    """The weather of a city."""

    city: str


def tool(name):
    parameters = GetWeather.model_json_schema()
    return {"type": "function", "function": {"name": name, "description": "Weather.", "parameters": parameters}}


TOOLS = [tool("get_weather"), tool("get_tide")]


def ask(say, **fields):
    fields = {"model": "tiny", "messages": [{"role": "user", "content": f"Say «{say}»"}], "tools": TOOLS} | fields
    return client.chat.completions.create(**fields)


def check_a_call():
    choice = ask(f"I look.\n{CALL}").choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "I look."
    [call] = choice.message.tool_calls
    assert call.type == "function" and call.id and call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Zürich"}
    assert GetWeather.model_validate_json(call.function.arguments).city == "Zürich"
    assert ask(CALL).choices[0].message.content is None


def check_the_whole_loop():
    messages = [{"role": "user", "content": f"Say «{CALL}\n{CALL.replace('weather', 'tide')}»"}]
    answer = ask("", messages=messages).choices[0].message
    assert [call.function.name for call in answer.tool_calls] == ["get_weather", "get_tide"]
    assert len({call.id for call in answer.tool_calls}) == 2
    messages.append(answer)
    messages += [{"role": "tool", "tool_call_id": call.id, "content": f"«{i} metres»"} for i, call in enumerate(answer.tool_calls)]
    answer = ask("", messages=messages).choices[0]
    assert answer.message.content == "1 metres" and answer.finish_reason == "stop" and answer.message.tool_calls is None


def check_streams():
    deltas = [chunk.choices[0].delta for chunk in ask(f"I look.\n{CALL}\n{CALL}", stream=True)]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == "I look."
    parts = [part for delta in deltas for part in delta.tool_calls or []]
    assert [part.index for part in parts] == [0, 0, 1, 1]
    assert parts[0].id and parts[0].function.name == "get_weather" and parts[1].id is None
    assert json.loads(parts[0].function.arguments + parts[1].function.arguments) == {"city": "Zürich"}


def check_the_clients_own_accumulator():
    fields = {"model": "tiny", "messages": [{"role": "user", "content": f"Say «I look. {CALL}»"}], "tools": TOOLS}
    with client.chat.completions.stream(**fields) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion().choices[0]
    assert "content.delta" in kinds and "tool_calls.function.arguments.done" in kinds, kinds
    assert final.finish_reason == "tool_calls" and final.message.content == "I look."
    assert json.loads(final.message.tool_calls[0].function.arguments) == {"city": "Zürich"}


def check_choice_and_parallel():
    assert ask(CALL, tool_choice="none").choices[0].message.content == CALL
    assert len(ask(CALL + CALL, parallel_tool_calls=False).choices[0].message.tool_calls) == 1
    assert len(ask(CALL + CALL, n=2).choices[1].message.tool_calls) == 2


def check_a_failure_is_text():
    choice = ask("<tool_call>get_weather(</tool_call>").choices[0]
    assert choice.message.content == "<tool_call>get_weather(</tool_call>" and choice.finish_reason == "stop"
    assert choice.model_extra["tandem"]["tool_parse_error"] is True


def check_refusals():
    strict = tool("f")
    strict["function"]["strict"] = True
    named = {"type": "function", "function": {"name": "get_weather"}}
    for param, fields in [
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tool_choice": named}),
        ("tools[0].function.strict", {"tools": [strict]}),
        ("messages[0].tool_call_id", {"messages": [{"role": "tool", "tool_call_id": "x", "content": "y"}]}),
    ]:
        try:
            ask("x", **fields)
        except openai.BadRequestError as error:
            assert error.param == param, error
        else:
            raise AssertionError(f"{fields} was not refused")


for name, check in list(globals().items()):
    if name.startswith("check_"):
        check()
        print("ok", name.removeprefix("check_"))
