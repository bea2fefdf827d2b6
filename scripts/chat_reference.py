"""Make the chat-template references.

    python scripts/chat_reference.py fixtures
    python scripts/chat_reference.py OUT FOLDER    of the templates FOLDER/*.jinja, with the conversations of the styles

Needs `transformers` (5.24 or later) and `jinja2`. Each template below is written for this repository in a style that
real models use; the renderings are made by transformers' own `render_jinja_template`. OUT/chat/NAME.json holds
    template   the template's text; null where each case has its own
    special    variables that the tokenizer's special tokens fill (bos_token, eos_token)
    cases      each with `messages`, and where used `tools`, `documents`, `variables` and `now` (the local time that
               strftime_now must see), `add_generation_prompt`; and what must come out: `expected`, or `error` (the
               text given to raise_exception), or `fails` (true: rendering must fail, in words of its own)
"""

import json
import sys
from datetime import datetime
from pathlib import Path

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from chat_styles import STYLES, cases

NOW = "2025-03-09T14:05:06"

USER = {"role": "user", "content": "Hello, <world> & \"friends\"!"}
SHORT = [USER]
TURNS = [
    {"role": "system", "content": "  Be brief.\n"},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": " Hello! \n"},
    {"role": "user", "content": "Où est l'été ? 日本 🙂"},
]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather <now> at a place, in °C",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "description": "Town & country"},
                "days": {"type": "integer", "default": 1, "enum": [1, 3, 7]},
                "exact": {"type": ["boolean", "null"], "default": None},
            },
            "required": ["place"],
        },
    },
}
CALLS = [
    {"role": "user", "content": "Weather in Zürich?"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "I need the tool.",
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": {"place": "Zürich", "days": 3, "exact": None}},
            },
            {
                "id": "call_2",
                "type": "function",
                "function": {"name": "get_weather", "arguments": {"place": "Bern", "exact": True, "days": 1}},
            },
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "21.5 and \"sunny\""},
    {"role": "tool", "tool_call_id": "call_2", "content": "19"},
    {"role": "user", "content": "Thanks"},
]
PARTS = [
    {"role": "user", "content": [
        {"type": "text", "text": " First part. "},
        {"type": "image"},
        {"type": "text", "text": "Second part."},
    ]},
]

# The oldest and commonest: a default system prompt, string concatenation, everything on one line.
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Headers, a bos token, trimmed contents, a date and tool definitions in the first user turn.
HEADERS = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "01 Jan 2025" %}
    {%- endif %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{#- The system message is always there, for the date. #}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- if tools is not none %}
    {%- if messages | length == 0 %}
        {{- raise_exception("Tools need a first user message.") }}
    {%- endif %}
    {%- set first = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\nFunctions:\\n\\n' }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
    {{- first + "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or message.role == 'ipython' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception("Only one tool call at a time.") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

# [INST] turns that must alternate; namespace, loop arithmetic, the system text folded into the last user turn.
INST = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system = messages[0]["content"] %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set turns = messages %}
{%- endif %}
{%- set ns = namespace(index=0, last_user=-1) %}
{%- for message in turns %}
    {%- if message.role in ["user", "assistant"] and not message.get("tool_calls") %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("After the optional system message, roles must alternate user/assistant/user/assistant/...") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
    {%- if message.role == "user" %}
        {%- set ns.last_user = loop.index0 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in turns %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and loop.index0 == ns.last_user %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val|tojson }}
                    {%- endif %}
                    {%- if not loop.last %}
                        {{- ", " }}
                    {%- endif %}
                {%- endfor %}
                {{- "}}" }}
                {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system is defined %}
            {{- "[INST] " + system + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}
            {{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id|length < 6 %}
                {{- raise_exception("Tool call IDs should be at least 6 characters long.") }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id[-6:] + '"}' }}
            {%- if not loop.last %}
                {{- ", " }}
            {%- else %}
                {{- "]" + eos_token }}
            {%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token }}
    {%- elif message["role"] in ["tool_results", "tool"] %}
        {%- set content = message.content if message.content is string else message.content.text %}
        {{- '[TOOL_RESULTS] {"content": ' + content|string + ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception("Unknown role: " ~ message.role) }}
    {%- endif %}
{%- endfor %}
"""

# Turns of user and model; the system text before the first user text; contents that are lists of parts.
TURN = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '

' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '

' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '
' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}
                {{ '<start_of_image>' }}
            {%- elif item['type'] == 'text' -%}
                {{ item['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>
' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model
'}}
{%- endif -%}
"""

# Thinking that is kept only after the last question, tools as JSON lines, results grouped into one user turn.
THINK = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n\\nFunction signatures:\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools>\\n\\nAnswer with {\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}<|im_end|>\\n" }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
            {%- endif %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}
                    {{- '\\n' }}
                {%- endif %}
                {%- if tool_call.function %}
                    {%- set tool_call = tool_call.function %}
                {%- endif %}
                {{- '<tool_call>\\n{"name": "' }}
                {{- tool_call.name }}
                {{- '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}
        {{- content }}
        {{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

# Macros with defaults, dictionary iteration, tests, filters with arguments, the generation tag, break and continue.
MACROS = """\
{% macro render_type(spec, depth=0) -%}
    {%- if spec.type is string -%}
        {{ spec.type }}
    {%- elif spec.type is sequence -%}
        {{ spec.type | join(" | ") }}
    {%- else -%}
        any
    {%- endif -%}
    {%- if spec.enum is defined %} ({{ spec.enum | map("string") | join(", ") }}){% endif -%}
    {%- if "default" in spec %} = {{ spec.default | tojson }}{% endif -%}
    {%- if depth > 0 %} @{{ depth }}{% endif -%}
{%- endmacro %}
{% if tools %}
namespace functions {
    {% for tool in tools | selectattr("type", "equalto", "function") | map(attribute="function") %}
// {{ tool.description | replace("<", "(") | replace(">", ")") }}
type {{ tool.name | title | replace("_", "") }} = (_: {
        {% for name, spec in tool.parameters.properties | dictsort %}
{{ name }}{{ "" if name in tool.parameters.required else "?" }}: {{ render_type(spec, depth=loop.index0) }},
        {% endfor %}
}) => any;
    {% endfor %}
}
{% endif %}
{% for message in messages %}
    {% if message.role == "tool" %}{% continue %}{% endif %}
    {% if message.content == "Thanks" %}{% break %}{% endif %}
<|{{ message.role | upper }}|>
    {% if message.role == "assistant" %}
{% generation %}{{ message.content | default("nothing", true) }}{{ eos_token }}{% endgeneration %}

    {% else %}
{{ message.content | trim | indent(2) }}
    {% endif %}
{% else %}
(empty)
{% endfor %}
{% if add_generation_prompt %}<|ASSISTANT|>{% endif %}"""

# What Python's strings, slices, numbers and dictionaries do, in places where engines differ: each line is a template.
PYTHON = r"""
{{ text[0] }}|{{ text[-3:] }}|{{ text[::2] }}
{{ text.upper() }}|{{ text.split() }}|{{ text.split(",", 1)[1].strip() }}
{{ 7 // 2 }}|{{ -7 // 2 }}|{{ 7 % 3 }}|{{ -7 % 3 }}|{{ 2 ** 10 }}
{{ 7 / 2 }}|{{ 10 / 5 }}|{{ 1.0 }}|{{ 3 ~ 4 }}
{{ 1e3 }}|{{ 1e20 }}|{{ 2.5e-7 }}
{{ true }}|{{ false }}|{{ none }}|{{ undefined_name }}
{{ [1, "a", none, true] }}|{{ {"k": "v", "n": 1.0} }}|{{ ["it's"] }}
{{ first.get("name", "anonymous") }}|{{ first.get("name") }}|{{ first.name is defined }}|{{ first["role"] }}
{{ first.keys() | list }}|{{ first.values() | list }}|{{ first.items() | list | length }}
{{ "yes" if text and not first.missing else "no" }}|{{ "" or "other" }}|{{ "a" if false }}
{{ (messages | last).role }}|{{ messages | map(attribute="role") | unique | list }}|{{ messages[1:] | length }}
{{ range(1, 6, 2) | list }}|{{ [3, 1, 2] | sort | reverse | list }}|{{ [1, 2, 3] | sum }}
{{ "One" in text }}|{{ "one" not in text }}|{{ "role" in first }}|{{ 2 in [1, 2] }}
{{ "a-b-c".replace("-", "+", 1) }}|{{ "a-b" | replace("-", "") }}|{{ "x".join(["1", "2"]) }}|{{ ["1", "2"] | join(", ") }}
{{ "tITLE case" | capitalize }}|{{ "tITLE case" | title }}|{{ "tITLE case".title() }}|{{ "  x " | trim | length }}
{{ "abcabc".find("c") }}|{{ "abcabc".rfind("c") }}|{{ "abcabc".count("b") }}|{{ "a,b".rsplit(",", 1) }}|{{ "a b".partition(" ") | list }}
{{ "xxaxx".strip("x") }}|{{ "xxaxx".lstrip("x") }}|{{ "\n a \n".rstrip() | length }}|{{ "abc".startswith(("x", "a")) }}
{{ "%s=%d" | format("n", 3) }}|{{ "%05.1f" % 3.14159 }}|{{ "{}-{}".format(1, "b") }}
{{ first | tojson }}
{{ {"b": [1, 2.5, -3e-7, 1e20, 100.0], "a": {"é": "</s>\u2028\t'\""}, "e": [], "o": {}, "n": none, "t": true} | tojson }}
{{ {"b": [1, {"x": []}], "a": {}} | tojson(indent=2) }}
{{ {"b": 1, "a": [1, 2]} | tojson(separators=(",", ":"), sort_keys=true) }}
{{ "é" | tojson(ensure_ascii=true) }}|{{ "<a href='x'>&" | tojson }}
{% for m in messages if m.role == "user" %}{{ loop.cycle("odd", "even") }}{{ loop.revindex }}{{ loop.previtem is defined }};{% endfor %}
{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + loop.length %}{% set lost = 1 %}{% endfor %}{{ ns.n }}|{{ lost is defined }}
{% for key, value in first.items() %}{{ key }}={{ value }}{{ ", " if not loop.last }}{% endfor %}
{% for a, b in [[1, 2], [3, 4]] %}{{ a + b }};{% endfor %}|{% for m in messages recursive %}{{ loop.depth }}{% endfor %}
{% filter upper %}shout {{ first.role }}{% endfilter %}|{% raw %}{{ raw }}{% endraw %}|{% set block %}[{{ first.role }}]{% endset %}{{ block }}
{{ messages | selectattr("role", "equalto", "assistant") | map(attribute="content") | first | trim }}|{{ messages | rejectattr("role", "eq", "user") | list | length }}
{{ text is string }}|{{ first is mapping }}|{{ messages is sequence }}|{{ messages is iterable }}|{{ 3 is odd }}|{{ none is none }}|{{ 1.5 is number }}|{{ true is boolean }}
{{ documents[0].text | truncate(20) }}|{{ documents | map(attribute="title") | join("/") }}|{{ documents | length }}
{{ strftime_now("%Y-%m-%d %H:%M:%S %j %A %a %B %b %y %I %p %%") }}|{{ strftime_now("%-d/%-m") }}
{{ [1, 2] + [3] }}|{{ "ab" * 3 }}|{{ 3 > 2 > 1 }}|{{ 1 == 1.0 }}|{{ "a" < "b" }}|{{ not [] }}
{{ dict(a=1, b="x") | tojson }}|{{ "a\\b" }}
{{ messages[0].content.missing_method() }}
{{ undefined_name.attribute }}
{{ raise_exception("No: " ~ text) }}
{{ ''.__class__.__mro__ }}
"""
# More of them, found by trying; ¶ and ␍ are a newline and a carriage return.
PROBES = (Path(__file__).parent / "chat_probes.txt").read_text(encoding="utf-8").splitlines()
PREAMBLE = "{% set first = messages[0] %}{% set text = first.content %}"
PYTHON_CASE = dict(
    messages=[{"role": "user", "content": "One, two, thrée"}, *TURNS[2:]],
    documents=[
        {"title": "Doc", "text": "A text that is rather longer than twenty letters."},
        {"title": "Kurz", "text": "short"},
    ],
    now=NOW,
)

# Whitespace: what trim_blocks, lstrip_blocks, explicit - and + and a final newline each do.
WHITESPACE = """\
  {% if true %}
    kept indent
  {% endif %}
a {%- if true %} b {% endif -%} c
  {%+ if true %}plus keeps the indent{% endif +%}

	{# a comment on its own line #}
text {# inline #} text
{{ "expression keeps its newline" }}
  {{- "eats before" -}}
  after
{% for m in messages %}
- {{ m.content }}
{% endfor %}

end
"""


def case(messages, **more) -> dict:
    return {"messages": messages, "add_generation_prompt": True} | more


BOS_EOS = {"bos_token": "<s>", "eos_token": "</s>"}

TEMPLATES = {
    "chatml": (CHATML, {}, [
        case(SHORT), case(TURNS), case(TURNS[:3], add_generation_prompt=False),
        # A template that adds strings must not accept parts, nor a message without content.
        case(PARTS), case([{"role": "user"}]),
    ]),
    "headers": (HEADERS, BOS_EOS, [
        case(TURNS, variables={"date_string": "26 Jul 2024"}), case(SHORT, now=NOW), case(CALLS, now=NOW),
        case([CALLS[0], CALLS[1] | {"tool_calls": CALLS[1]["tool_calls"][:1]}, *CALLS[2:3]], tools=[WEATHER], now=NOW),
        case([{"role": "system", "content": "x"}], tools=[WEATHER], now=NOW),
    ]),
    "inst": (INST, BOS_EOS, [
        case(SHORT), case(TURNS), case(CALLS[:4], tools=[WEATHER]), case(SHORT + SHORT),
        case([{"role": "critic", "content": "x"}]),
        case([CALLS[0], {"role": "assistant", "content": "", "tool_calls": [{"id": "x", "function": {"name": "f", "arguments": {}}}]}]),
    ]),
    "turn": (TURN, BOS_EOS, [
        case(SHORT), case(TURNS), case(PARTS), case(SHORT + SHORT),
        case([{"role": "system", "content": [{"type": "text", "text": "Parts too."}]}, USER]),
        case([{"role": "user", "content": 3}]),
    ]),
    "think": (THINK, {}, [
        case(SHORT), case(SHORT, variables={"enable_thinking": False}), case(SHORT, variables={"enable_thinking": True}),
        case(TURNS), case(CALLS, tools=[WEATHER]), case(CALLS[:4], tools=[WEATHER]),
        case([
            USER,
            {"role": "assistant", "content": "<think>\nold thoughts\n</think>\n\nAnswer."},
            {"role": "user", "content": "Again"},
            {"role": "assistant", "content": "<think>\nnew thoughts\n</think>\n\nOther answer."},
        ], add_generation_prompt=False),
    ]),
    "macros": (MACROS, BOS_EOS, [
        case(CALLS, tools=[WEATHER]), case(TURNS), case([]),
        case(TURNS[:3], add_generation_prompt=False),
    ]),
    # `first` and `text` stand in front of each line, as in the templates that use them.
    "python": (None, BOS_EOS, [
        case(template=PREAMBLE + line, **PYTHON_CASE)
        for line in PYTHON.strip().splitlines()
    ]),
    "probes": (None, BOS_EOS, [
        case(template=PREAMBLE + line.replace("¶", "\n").replace("␍", "\r"), **PYTHON_CASE) for line in PROBES
    ]),
    "whitespace": (WHITESPACE, {}, [case(SHORT), case(TURNS, add_generation_prompt=False)]),
}


def render(template: str, special: dict, case: dict) -> dict:
    """What must come out, as the keys that the case gains."""
    variables = special | case.get("variables", {})
    if "now" in case:
        # transformers turns its arguments into plain data, so the clock is set where it is read.
        import transformers.utils.chat_template_utils as utils

        class Clock(datetime):
            @classmethod
            def now(cls):
                return datetime.fromisoformat(case["now"])

        utils.datetime = Clock
    try:
        out, _ = render_jinja_template(
            [case["messages"]],
            chat_template=template,
            tools=case.get("tools"),
            documents=case.get("documents"),
            add_generation_prompt=case["add_generation_prompt"],
            **variables,
        )
    except jinja2.exceptions.TemplateError as error:
        # Exactly this class comes from raise_exception alone; jinja2's own errors are its subclasses.
        return {"error": str(error)} if type(error) is jinja2.exceptions.TemplateError else {"fails": True}
    except (TypeError, RecursionError, ZeroDivisionError):
        return {"fails": True}
    return {"expected": out[0]}


STYLE_CASES = cases(case, SHORT, TURNS, CALLS, PARTS, WEATHER, NOW)


def main() -> None:
    templates, out = TEMPLATES, Path(sys.argv[1])
    if len(sys.argv) > 2:
        files = sorted(Path(sys.argv[2]).glob("*.jinja"))
        templates = {file.stem: (file.read_text(encoding="utf-8"), BOS_EOS, STYLE_CASES) for file in files}
    else:
        out = out / "chat"
        templates |= {f"style-{name}": (template, BOS_EOS, STYLE_CASES) for name, template in STYLES.items()}
    out.mkdir(parents=True, exist_ok=True)
    for name, (template, special, cases) in templates.items():
        cases = [c | render(template or c["template"], special, c) for c in cases]
        value = {"template": template, "special": special, "cases": cases}
        text = json.dumps(value, ensure_ascii=False, indent=1)
        (out / f"{name}.json").write_text(text + "\n", encoding="utf-8")
        print(name, *(next(k for k in c if k in ("expected", "error", "fails")) for c in cases))


if __name__ == "__main__":
    main()
