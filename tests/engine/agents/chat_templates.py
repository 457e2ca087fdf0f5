"""Chat templates that write what those of well-known models write, for any ChatML tokenizer."""

from __future__ import annotations

_HEAD = (
    "{%- if tools %}"
    "{{- '<|im_start|>system\\n' }}"
    "{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}"
    "{{- '# Tools\\n<tools>' }}"
    "{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}"
    "{{- '\\n</tools><|im_end|>\\n' }}"
    "{%- elif messages[0].role == 'system' %}"
    "{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}"
    "{%- endif %}"
)
_TOOL = (
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}"
    "{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}"
    "{{- '<|im_end|>\\n' }}{%- endif %}"
)
_START = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"

# As Qwen2.5's: tools answer in a user turn, several in one.
QWEN25 = (
    _HEAD
    + "{%- for message in messages %}"
    + "{%- if message.role == 'tool' %}"
    + _TOOL
    + "{%- elif message.role != 'system' or not loop.first %}"
    + "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    + "{%- endif %}{%- endfor %}"
    + _START
)

# As Qwen3's: what was thought before the latest user message is left out, and an answer after it
# gets an empty thought where it has none.
QWEN3 = (
    _HEAD
    + "{%- set ns = namespace(last=0) %}"
    + "{%- for message in messages %}{%- if message.role == 'user' %}"
    + "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    + "{%- for message in messages %}"
    + "{%- if message.role == 'tool' %}"
    + _TOOL
    + "{%- elif message.role == 'assistant' %}"
    + "{%- set parts = message.content.split('</think>') %}"
    + "{%- set answer = parts[-1].lstrip('\\n') %}"
    + "{%- set thought = parts[0].split('<think>')[-1].strip('\\n') %}"
    + "{%- if parts | length < 2 %}{%- set thought = '' %}{%- endif %}"
    + "{{- '<|im_start|>assistant\\n' }}"
    + "{%- if loop.index0 > ns.last and (loop.last or thought) %}"
    + "{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{%- endif %}"
    + "{{- answer + '<|im_end|>\\n' }}"
    + "{%- elif message.role != 'system' or not loop.first %}"
    + "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    + "{%- endif %}{%- endfor %}"
    + _START
)

# As Mistral's: tools answer to calls alone, and no text says where the policy speaks.
CALLS_ONLY = (
    "{%- for message in messages %}"
    "{%- if message.role == 'user' %}{{- '[INST] ' + message.content + '[/INST]' }}"
    "{%- elif message.role == 'assistant' %}"
    "{%- if message.tool_calls %}{{- '[CALLS] ' + (message.tool_calls[0].function | tojson) }}"
    "{%- else %}{{- ' ' + message.content }}{%- endif %}{{- eos_token }}"
    "{%- elif message.role == 'tool' %}"
    "{%- if not messages[loop.index0 - 1].tool_calls %}"
    "{{- raise_exception('a tool answered without a call') }}{%- endif %}"
    "{{- '[RESULT] ' + message.content + '[/RESULT]' }}"
    "{%- endif %}{%- endfor %}"
)
