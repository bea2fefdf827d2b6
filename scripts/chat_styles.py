"""Chat templates in the styles of popular model families, in this repository's own words.

chat_reference.py renders each with the conversations of `cases`. They follow the public descriptions of the formats
(which tokens stand where, who may speak, where tools and thoughts go), not any model's own file, and each uses some
part of the language that templates of its family use.
"""

STYLES: dict[str, str] = {}

# ChatML without a default system prompt.
STYLES["chatml-plain"] = """\
{% for message in messages %}
{{ '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{%- endif %}"""

# Llama 2: the system text inside the first [INST], bos and eos around each exchange.
STYLES["llama2"] = """\
{% if messages[0]['role'] == 'system' %}{% set system, turns = messages[0]['content'], messages[1:] %}\
{% else %}{% set system, turns = false, messages %}{% endif %}\
{% for m in turns %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate user/assistant.') }}{% endif %}\
{% if loop.first and system %}{% set text = '<<SYS>>\\n' + system.strip() + '\\n<</SYS>>\\n\\n' + m['content'].strip() %}\
{% else %}{% set text = m['content'].strip() %}{% endif %}\
{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + text + ' [/INST]' }}{% else %}{{ ' ' + text + ' ' + eos_token }}{% endif %}{% endfor %}"""

# Llama 3: a header for each message, bos before the first.
STYLES["llama3"] = """\
{% set loop_messages = messages %}{% for message in loop_messages %}\
{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' %}\
{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

# Llama 3.2: tools in the system message, calls as Python-like or JSON text.
STYLES["llama3-tools"] = """\
{{- bos_token }}
{%- set date = strftime_now("%d %b %Y") if strftime_now is defined else "26 Jul 2024" %}
{%- set system = "" %}
{%- if messages and messages[0].role == "system" %}
    {%- set system = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{% endif %}
{{- "Today Date: " ~ date ~ "\\n\\n" }}
{%- if tools is not none %}
    {{- "Functions, as JSON:\\n\\n" }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) ~ "\\n\\n" }}{%- endfor %}
{%- endif %}
{{- system ~ "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.tool_calls is defined and message.tool_calls %}
        {{- "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}
        {%- for call in message.tool_calls %}
            {%- if builtin_tools is defined and call.function.name in builtin_tools %}
                {{- "<|python_tag|>" ~ call.function.name ~ ".call(" }}
                {%- for name, value in call.function.arguments | items %}
                    {{- name ~ '="' ~ value ~ '"' }}{{ ", " if not loop.last }}
                {%- endfor %}
                {{- ")" }}
            {%- else %}
                {{- '{"name": "' ~ call.function.name ~ '", "parameters": ' ~ (call.function.arguments | tojson) ~ "}" }}
            {%- endif %}
        {%- endfor %}
        {{- "<|eom_id|>" if builtin_tools is defined else "<|eot_id|>" }}
    {%- elif message.role in ["tool", "ipython"] %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" ~ ({"output": message.content} | tojson) ~ "<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>" ~ message.role ~ "<|end_header_id|>\\n\\n" ~ message.content | trim ~ "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}{%- endif %}
"""

# Mistral's first: no system message at all.
STYLES["mistral-v1"] = """\
{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}\
{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token + ' ' }}\
{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"""

# Mistral's third: tools before the last user message, ids of nine characters.
STYLES["mistral-v3"] = """\
{%- set last = namespace(user=-1) %}
{%- for m in messages %}{%- if m.role == "user" %}{%- set last.user = loop.index0 %}{%- endif %}{%- endfor %}
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == "user" %}
        {%- if tools is not none and loop.index0 == last.user %}{{- "[AVAILABLE_TOOLS] " ~ (tools | tojson) ~ "[/AVAILABLE_TOOLS]" }}{%- endif %}
        {{- "[INST] " ~ m.content ~ "[/INST]" }}
    {%- elif m.get("tool_calls") %}
        {{- "[TOOL_CALLS] [" }}
        {%- for call in m.tool_calls %}
            {%- if call.id | length != 9 %}{{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}{%- endif %}
            {{- (call.function | tojson)[:-1] ~ ', "id": "' ~ call.id ~ '"}' }}
            {{- "]" if loop.last else ", " }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif m.role == "assistant" %}
        {{- " " ~ m.content | trim ~ eos_token }}
    {%- elif m.role in ["tool_results", "tool"] %}
        {%- set content = m.content.content if m.content is mapping else m.content %}
        {{- '[TOOL_RESULTS] {"content": ' ~ content ~ ', "call_id": "' ~ m.tool_call_id ~ '"}[/TOOL_RESULTS]' }}
    {%- elif m.role == "system" and loop.first %}
    {%- else %}
        {{- raise_exception("Unexpected role " ~ m.role) }}
    {%- endif %}
{%- endfor %}
"""

# Mistral Small: a system prompt token, parts, a default prompt with today's date.
STYLES["mistral-system"] = """\
{%- set today = strftime_now("%Y-%m-%d") %}
{%- set default_system = "You are an assistant. The current date is " + today + ".\\n" %}
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- if messages[0]['content'] is string %}{%- set system = messages[0]['content'] %}
    {%- else %}{%- set system = messages[0]['content'][0]['text'] %}{%- endif %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set system = default_system %}
    {%- set rest = messages %}
{%- endif %}
{{- '[SYSTEM_PROMPT]' + system + '[/SYSTEM_PROMPT]' }}
{%- for message in rest %}
    {%- if message['role'] == 'user' %}
        {%- if message['content'] is string %}
            {{- '[INST]' + message['content'] + '[/INST]' }}
        {%- else %}
            {{- '[INST]' }}
            {%- for block in message['content'] | sort(attribute="type") %}
                {%- if block['type'] == 'text' %}{{- block['text'] }}
                {%- elif block['type'] in ['image', 'image_url'] %}{{- '[IMG]' }}
                {%- else %}{{- raise_exception('Only text and image blocks are supported in message content!') }}{%- endif %}
            {%- endfor %}
            {{- '[/INST]' }}
        {%- endif %}
    {%- elif message['role'] == 'assistant' %}
        {{- message['content'] + eos_token }}
    {%- else %}
        {{- raise_exception('Only user, system and assistant roles are supported!') }}
    {%- endif %}
{%- endfor %}
"""

# Qwen 2.5: tools as JSON lines in the system message, calls and results in tags, results of a turn together.
STYLES["qwen2.5"] = """\
{%- set system = messages[0]['content'] if messages[0]['role'] == 'system' else 'You are a helpful assistant.' %}
{{- '<|im_start|>system\\n' + system }}
{%- if tools %}
    {{- "\\n\\n# Tools\\n\\nSignatures in <tools></tools>:\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools>\\n\\nAnswer with <tool_call>{\\"name\\": ..., \\"arguments\\": ...}</tool_call>" }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}{{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' }}{{- message.content }}{{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# Qwen 3: the last real question is looked for from behind; earlier thoughts are dropped; an empty thought stops it.
STYLES["qwen3"] = """\
{%- set ns = namespace(seeking=true, last=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.seeking and message.role == "user" and message.content is string and not (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.seeking = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- ('\\n' if loop.index0 or content) ~ '<tool_call>\\n' ~ {"name": call.function.name, "arguments": call.function.arguments} | tojson ~ '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

# Gemma 2: no system role, the assistant is called model.
STYLES["gemma2"] = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}\
{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate.') }}{% endif %}\
{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}\
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"""

# Gemma 3: the system text leads the first user turn; parts with images.
STYLES["gemma3"] = """\
{{ bos_token }}
{%- set first_user_prefix = "" -%}
{%- set turns = messages -%}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}{%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}{%- set first_user_prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}{%- endif -%}
    {%- set turns = messages[1:] -%}
{%- endif -%}
{%- for message in turns -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}{%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}{{ '<start_of_image>' }}{%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""

# Phi-3: a tag for each role, eos where nothing is asked for.
STYLES["phi3"] = """\
{% for message in messages %}{% if message['role'] == 'system' and message['content'] %}{{'<|system|>\\n' + message['content'] + '<|end|>\\n'}}\
{% elif message['role'] == 'user' %}{{'<|user|>\\n' + message['content'] + '<|end|>\\n'}}\
{% elif message['role'] == 'assistant' %}{{'<|assistant|>\\n' + message['content'] + '<|end|>\\n'}}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""

# Phi-4-mini: tools as a text inside the system message.
STYLES["phi4-mini"] = """\
{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message and message['tools'] is not none %}\
{{ '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }}\
{% else %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"""

# Phi-4: a separator token between role and text.
STYLES["phi4"] = """\
{%- for message in messages -%}
{%- if message.role == 'system' or message.role == 'user' -%}{{ '<|im_start|>' + message.role + '<|im_sep|>' + message.content + '<|im_end|>' }}
{%- elif message.role == 'assistant' -%}{{ '<|im_start|>assistant<|im_sep|>' }}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant<|im_sep|>' }}{%- endif -%}
"""

# SmolLM3: metadata with the date, a flag for thinking in the system text, generation marks.
STYLES["smollm3"] = """\
{%- if enable_thinking is not defined -%}{%- set enable_thinking = true -%}{%- endif -%}
{%- set mode = "/think" if enable_thinking else "/no_think" -%}
{%- set instructions = "" -%}
{%- if messages and messages[0].role == "system" -%}
  {%- set text = messages[0].content -%}
  {%- if "/no_think" in text -%}{%- set mode = "/no_think" -%}{%- elif "/think" in text -%}{%- set mode = "/think" -%}{%- endif -%}
  {%- set instructions = text.replace("/no_think", "").replace("/think", "").rstrip() -%}
{%- endif -%}
{{ "<|im_start|>system\\n" }}
{%- if "/system_override" in instructions -%}
  {{ instructions.replace("/system_override", "").rstrip() ~ "<|im_end|>\\n" }}
{%- else -%}
  {{ "## Metadata\\n\\nToday Date: " ~ strftime_now("%d %B %Y") ~ "\\nReasoning Mode: " ~ mode ~ "\\n\\n## Custom Instructions\\n\\n" }}
  {{ instructions if instructions else ("Think first." if mode == "/think" else "Answer directly.") }}
  {{ "\\n\\n" }}
  {%- if xml_tools or tools -%}
    {%- for tool in xml_tools or tools -%}{{ "<tool>" ~ (tool | string) ~ "</tool>\\n" }}{%- endfor -%}
  {%- endif -%}
  {{ "<|im_end|>\\n" }}
{%- endif -%}
{%- for message in messages -%}
  {%- set content = message.content if message.content is string else "" -%}
  {%- if message.role == "user" -%}
    {{ "<|im_start|>user\\n" ~ content ~ "<|im_end|>\\n" }}
  {%- elif message.role == "assistant" -%}
    {%- generation -%}
      {{ "<|im_start|>assistant\\n" ~ ("<think>\\n\\n</think>\\n" if mode == "/no_think" else "") ~ content.lstrip("\\n") ~ "<|im_end|>\\n" }}
    {%- endgeneration -%}
  {%- elif message.role == "tool" -%}
    {{ "<|im_start|>user\\n" ~ content ~ "<|im_end|>\\n" }}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{ "<|im_start|>assistant\\n" ~ ("<think>\\n\\n</think>\\n" if mode == "/no_think" else "") }}
{%- endif -%}
"""

# OLMo 2: lines with a tag each, eos only behind the assistant.
STYLES["olmo2"] = """\
{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{{ '<|system|>\\n' + message['content'] + '\\n' }}\
{% elif message['role'] == 'user' %}{{ '<|user|>\\n' + message['content'] + '\\n' }}\
{% elif message['role'] == 'assistant' %}{% if not loop.last %}{{ '<|assistant|>\\n' + message['content'] + eos_token + '\\n' }}\
{% else %}{{ '<|assistant|>\\n' + message['content'] + eos_token }}{% endif %}{% endif %}\
{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}{% endfor %}"""

# Granite 3: roles between marks, a long default system text built piece by piece, tools, documents and thinking.
STYLES["granite3"] = """\
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set system_message = "Today's Date: " ~ strftime_now('%B %d, %Y') ~ ".\\nYou are Granite-like." %}
    {%- if tools and documents %}
        {%- set system_message = system_message + " Use the tools, and the documents for facts." %}
    {%- elif tools %}
        {%- set system_message = system_message + " Use the tools." %}
    {%- elif documents %}
        {%- set system_message = system_message + " Use the documents for facts." %}
    {%- elif thinking %}
        {%- set system_message = system_message + " Write your thoughts between <think></think>." %}
    {%- endif %}
    {%- if controls is defined and 'length' in controls %}{%- set system_message = system_message + " Length: " + controls['length'] + "." %}{%- endif %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + system_message + '<|end_of_text|>\\n' }}
{%- if tools %}{{- '<|start_of_role|>tools<|end_of_role|>' + tools | tojson(indent=4) + '<|end_of_text|>\\n' }}{%- endif %}
{%- if documents %}
    {{- '<|start_of_role|>documents<|end_of_role|>' }}
    {%- for document in documents %}
        {{- 'Document ' + loop.index0 | string + '\\n' + document['text'] }}
        {%- if not loop.last %}{{- '\\n\\n' }}{%- endif %}
    {%- endfor %}
    {{- '<|end_of_text|>\\n' }}
{%- endif %}
{%- for message in loop_messages %}
    {{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + (message['content'] or '') + '<|end_of_text|>\\n' }}
    {%- if loop.last and add_generation_prompt %}
        {{- '<|start_of_role|>assistant' }}
        {%- if controls %}{{- ' ' + controls | tojson() }}{%- endif %}
        {{- '<|end_of_role|>' }}
    {%- endif %}
{%- endfor %}"""

# DeepSeek R1: several system texts joined, full-width marks, thoughts of earlier answers cut off.
STYLES["deepseek"] = """\
{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}\
{% set ns = namespace(is_first=false, is_tool=false, system='') %}\
{%- for message in messages %}{%- if message['role'] == 'system' %}{% set ns.system = ns.system + message['content'] %}{%- endif %}{%- endfor %}\
{{ bos_token }}{{ ns.system }}\
{%- for message in messages %}\
{%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}{{ '<｜User｜>' + message['content'] }}{%- endif %}\
{%- if message['role'] == 'assistant' and message['tool_calls'] %}{%- set ns.is_tool = true -%}\
{%- for tool in message['tool_calls'] %}{{ ('<｜Assistant｜><｜tool▁calls▁begin｜>' if loop.first else '\\n') + '<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] + '\\n' + '```json' + '\\n' + tool['function']['arguments'] | tojson + '\\n' + '```' + '<｜tool▁call▁end｜>' }}{%- endfor %}\
{{ '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}{%- endif %}\
{%- if message['role'] == 'assistant' and not message['tool_calls'] and message['content'] is not none %}\
{% set content = message['content'] %}{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}\
{{ ('' if ns.is_tool else '<｜Assistant｜>') + content + '<｜end▁of▁sentence｜>' }}{%- endif %}\
{%- if message['role'] == 'tool' %}{{ '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}{%- endif %}\
{%- endfor -%}{% if add_generation_prompt and not ns.is_tool %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"""

# Hermes: a recursive macro turns JSON types into Python's.
STYLES["hermes-tools"] = """\
{%- macro python_type(spec) -%}
    {%- set names = {"string": "str", "number": "float", "integer": "int", "boolean": "bool"} -%}
    {%- if spec.type is string and names[spec.type] is defined -%}{{- names[spec.type] -}}
    {%- elif spec.type == "array" -%}{{- "list[" + python_type(spec["items"]) + "]" -}}
    {%- elif spec.type is iterable and spec.type is not string -%}
        {%- for one in spec.type -%}{{- python_type({"type": one}) -}}{%- if not loop.last -%}{{- " | " -}}{%- endif -%}{%- endfor -%}
    {%- else -%}{{- "Any" -}}{%- endif -%}
{%- endmacro -%}
{{- bos_token -}}<|im_start|>system
You call functions. Signatures: <tools>
{%- for tool in tools or [] %}
{%- set function = tool.function if tool.function is defined else tool %}
{{ function.name }}(
{%- for name, spec in function.parameters.properties.items() -%}
    {{- name ~ ": " ~ python_type(spec) -}}
    {%- if not loop.last %}, {% endif %}
{%- endfor -%}
){{ " - " ~ function.description if function.description }}
{%- endfor %}
</tools><|im_end|>
{% for message in messages %}
    {%- if message.tool_calls -%}
<|im_start|>assistant
        {%- for call in message.tool_calls %}
<tool_call>
{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
</tool_call>
        {%- endfor -%}
<|im_end|>
    {%- elif message.role == "tool" -%}
        {%- if loop.previtem and loop.previtem.role != "tool" %}{{- "<|im_start|>tool\\n" }}{% endif -%}
        {{- "<tool_response>\\n" ~ message.content ~ ("\\n</tool_response>\\n" if not loop.last else "\\n</tool_response>") -}}
        {%- if not loop.last and loop.nextitem.role != "tool" %}{{- "<|im_end|>" }}{%- elif loop.last %}{{- "<|im_end|>" }}{%- endif %}
    {%- else -%}
{{- "<|im_start|>" + message.role + "\\n" + message.content + "<|im_end|>" -}}
    {%- endif %}
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# Command R: documents with every field, numbered results.
STYLES["command-r"] = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set turns = messages[1:] %}{% set system = messages[0]['content'] %}{% else %}{% set turns = messages %}{% set system = 'You are a helpful conversational AI.' %}{% endif %}
{{ '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|># User Preamble' }}
{{ '\\n' + system | trim + '<|END_OF_TURN_TOKEN|>' }}
{%- for message in turns %}
{%- if message.role == 'user' %}{{ '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + message.content.strip() + '<|END_OF_TURN_TOKEN|>' }}
{%- elif message.role == 'assistant' %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' + (message.content or '').strip() + '<|END_OF_TURN_TOKEN|>' }}
{%- endif %}
{%- endfor %}
{%- if documents %}
{{ '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|><results>' }}
{%- for document in documents %}
{{ 'Document: ' }}{{ loop.index0 }}
{%- for key, value in document.items() %}
{{ key | lower | replace(' ', '_') }}: {{ value }}
{%- endfor %}
{%- if not loop.last %}
{{ '' }}
{%- endif %}
{%- endfor %}{{ '</results><|END_OF_TURN_TOKEN|>' }}
{%- endif %}
{%- if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"""

# Zephyr: eos after every message, control lines that only trim_blocks keeps out of the text.
STYLES["zephyr"] = """\
{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""

# Vicuna: a preamble, names in capitals, one space between.
STYLES["vicuna"] = """\
{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% set rest = messages[1:] %}{% else %}{{ 'A chat between a curious user and an assistant.' }}{% set rest = messages %}{% endif %}\
{% for m in rest %}{{ ' ' }}{% if m.role == 'user' %}{{ 'USER: ' ~ m.content.strip() }}{% elif m.role == 'assistant' %}{{ 'ASSISTANT: ' ~ m.content.strip() ~ eos_token }}{% else %}{{ m.role | upper ~ ': ' ~ m.content }}{% endif %}{% endfor %}\
{{ ' ASSISTANT:' if add_generation_prompt }}"""

# Alpaca: headings and blank lines.
STYLES["alpaca"] = """\
{% if messages and messages[0].role == 'system' %}
{{ messages[0].content.strip() }}


{% endif %}
{% for m in messages if m.role != 'system' %}
### {{ {'user': 'Instruction', 'assistant': 'Response'}.get(m.role, m.role | title) }}:
{{ m.content | trim }}

{% else %}
(nothing was asked)
{% endfor %}
{% if add_generation_prompt %}
### Response:
{% endif %}
"""

# Falcon's plain names.
STYLES["falcon"] = """\
{%- for message in messages %}{% if not loop.first %}{{ '\\n' }}{% endif %}{{ message['role'] | capitalize ~ ': ' ~ message['content'] | replace('\\r\\n', '\\n') | replace('\\n\\n', '\\n') }}{% endfor %}
{%- if add_generation_prompt %}{{ '\\nAssistant:' }}{% endif -%}"""

# GLM-like: a macro for parts, thinking by a flag, observations.
STYLES["glm"] = """\
[gMASK]<sop>
{%- macro visible(content) -%}
    {%- if content is string -%}{{ content }}
    {%- elif content is iterable and content is not mapping -%}
        {%- for item in content -%}{%- if item is mapping and item.type == 'text' -%}{{ item.text }}{%- elif item is string -%}{{ item }}{%- endif -%}{%- endfor -%}
    {%- else -%}{{ content }}{%- endif -%}
{%- endmacro -%}
{%- if tools %}<|system|>
# Tools
{% for tool in tools %}{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}{% endif -%}
{%- for m in messages %}
{%- if m.role == 'user' -%}<|user|>
{{ visible(m.content) }}
{{- '/nothink' if (enable_thinking is defined and not enable_thinking and not visible(m.content).endswith("/nothink")) else '' -}}
{%- elif m.role == 'assistant' -%}<|assistant|>
{%- set content = visible(m.content) %}
{%- if m.reasoning_content is string %}{{ '\\n<think>' + m.reasoning_content.strip() + '</think>' }}{%- else %}{{ '\\n<think></think>' }}{%- endif %}
{%- if content.strip() -%}{{ '\\n' + content.strip() }}{%- endif -%}
{% for tc in m.tool_calls or [] %}{{ '\\n<tool_call>' + tc.function.name }}
{% for k, v in tc.function.arguments.items() %}
<arg_key>{{ k }}</arg_key>
<arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>
{% endfor %}
</tool_call>{% endfor %}
{%- elif m.role == 'tool' -%}
{%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|observation|>' }}{%- endif %}
{{- '\\n<tool_response>\\n' }}{{- m.content }}{{- '\\n</tool_response>' }}
{%- elif m.role == 'system' -%}<|system|>
{{ visible(m.content) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{{- '\\n<think></think>' if (enable_thinking is defined and not enable_thinking) else '' -}}{%- endif -%}
"""

# Harmony-like: TypeScript signatures of the tools, channels, the effort of reasoning.
STYLES["harmony"] = """\
{%- macro type_of(spec) -%}
    {%- if spec.enum %}{{ '"' + spec.enum | join('" | "') + '"' }}
    {%- elif spec.type == "integer" or spec.type == "number" %}number
    {%- elif spec.type is sequence and spec.type is not string %}{{ spec.type | join(" | ") }}
    {%- else %}{{ spec.type }}{% endif -%}
{%- endmacro -%}
{%- macro namespace_of(name, tools) -%}
    {{- "namespace " + name + " {\\n\\n" }}
    {%- for tool in tools %}
        {{- "// " + tool.function.description + "\\ntype " + tool.function.name + " = (" }}
        {%- if tool.function.parameters.properties %}
            {{- "_: {\\n" }}
            {%- for key, spec in tool.function.parameters.properties.items() %}
                {%- if spec.description %}{{- "// " + spec.description + "\\n" }}{% endif %}
                {{- key + ("" if key in (tool.function.parameters.required or []) else "?") + ": " + type_of(spec) }}
                {%- if spec.default is defined %}{{- ", // default: " }}{{ spec.default | tojson if spec.default is not string else spec.default }}{% endif %}
                {{- "\\n" if loop.last else ",\\n" }}
            {%- endfor %}
            {{- "}" }}
        {%- endif %}
        {{- ") => any;\\n\\n" }}
    {%- endfor %}
    {{- "} // namespace " + name }}
{%- endmacro -%}
{{- "<|start|>system<|message|>Current date: " + strftime_now("%Y-%m-%d") + "\\n\\nReasoning: " + reasoning_effort | default("medium") + "<|end|>" }}
{%- set developer = messages[0].content if messages and messages[0].role in ["developer", "system"] else "" %}
{%- if developer or tools %}
    {{- "<|start|>developer<|message|>" }}
    {%- if developer %}{{- "# Instructions\\n\\n" + developer }}{% endif %}
    {%- if tools %}{{- "\\n\\n# Tools\\n\\n" + namespace_of("functions", tools) }}{% endif %}
    {{- "<|end|>" }}
{%- endif %}
{%- set last_call = namespace(name=none) %}
{%- for m in messages if m.role not in ["developer", "system"] %}
    {%- if m.role == "assistant" and "tool_calls" in m %}
        {%- if m.thinking %}{{- "<|start|>assistant<|channel|>analysis<|message|>" + m.thinking + "<|end|>" }}{% endif %}
        {%- for call in m.tool_calls %}
            {{- "<|start|>assistant to=functions." + call.function.name + "<|channel|>commentary json<|message|>" + call.function.arguments | tojson + "<|call|>" }}
            {%- set last_call.name = call.function.name %}
            {%- break %}
        {%- endfor %}
    {%- elif m.role == "tool" %}
        {%- if last_call.name is none %}{{- raise_exception("A tool message without a call.") }}{% endif %}
        {{- "<|start|>functions." + last_call.name + " to=assistant<|channel|>commentary<|message|>" + m.content | tojson + "<|end|>" }}
    {%- elif m.role == "assistant" %}
        {{- "<|start|>assistant<|channel|>final<|message|>" + m.content + ("<|return|>" if loop.last and not add_generation_prompt else "<|end|>") }}
    {%- else %}
        {{- "<|start|>" + m.role + "<|message|>" + m.content + "<|end|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif -%}
"""


def cases(case, short, turns, calls, parts, weather, now) -> list[dict]:
    """What each style is rendered with: `case` makes one."""
    one_call = [calls[0], calls[1] | {"tool_calls": calls[1]["tool_calls"][:1]}, calls[2]]
    one_call[1]["tool_calls"] = [one_call[1]["tool_calls"][0] | {"id": "call12345"}]
    thoughts = [
        short[0],
        {"role": "assistant", "content": "<think>\nold thoughts\n</think>\n\nAnswer."},
        {"role": "user", "content": "Again"},
    ]
    documents = [{"title": "A Doc", "text": "First text."}, {"title": "B", "text": "Zweiter ✓"}]
    made = [
        case(short), case(turns), case(turns[1:]), case(turns[:3], add_generation_prompt=False),
        case(calls, tools=[weather]), case(one_call, tools=[weather]), case(short, tools=[weather]),
        case(thoughts), case(turns, variables={"enable_thinking": False, "thinking": False}),
        case(thoughts, variables={"enable_thinking": True, "thinking": True}),
        case(parts), case(short, documents=documents), case(short + short),
        case([calls[0], {"role": "assistant", "content": None, "tool_calls": one_call[1]["tool_calls"]}]),
    ]
    return [one | {"now": now} for one in made]
