"""Chat templates that write what those of well-known models write, with tokenizers for them.

They are condensed: which token stands where, what opens and ends a turn, what they leave out of
earlier turns and which form of a tool call they take is as in the models'.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from engine.data.tokenizer import train_tokenizer

_HEAD = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
"""
_TOOL = """\
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
    {{- '<|im_start|>user' }}
{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
"""
_CALLS = """\
{%- for call in message.tool_calls or [] %}
    {%- if not loop.first or content %}{{- '\\n' }}{%- endif %}
    {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
    {{- call.function.arguments if call.function.arguments is string
        else (call.function.arguments | tojson) }}
    {{- '}\\n</tool_call>' }}
{%- endfor %}
"""
_START = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"

# As Qwen2.5's: tools answer in a user turn, several in one.
QWEN25 = f"""\
{_HEAD}
{{%- for message in messages %}}
    {{%- if message.role == 'tool' %}}{_TOOL}
    {{%- elif message.role == 'assistant' %}}
        {{%- set content = message.content or '' %}}
        {{{{- '<|im_start|>assistant\\n' + content }}}}{_CALLS}
        {{{{- '<|im_end|>\\n' }}}}
    {{%- elif message.role != 'system' or not loop.first %}}
        {{{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}}}
    {{%- endif %}}
{{%- endfor %}}
{_START}"""

# As Qwen3's: what was thought before the latest user message is left out, and an answer after it
# gets an empty thought where it has none.
QWEN3 = f"""\
{_HEAD}
{{%- set ns = namespace(last=0) %}}
{{%- for message in messages %}}
    {{%- if message.role == 'user' %}}{{%- set ns.last = loop.index0 %}}{{%- endif %}}
{{%- endfor %}}
{{%- for message in messages %}}
    {{%- if message.role == 'tool' %}}{_TOOL}
    {{%- elif message.role == 'assistant' %}}
        {{%- set content = message.content or '' %}}
        {{%- set thought = '' %}}
        {{%- if message.reasoning_content is string %}}
            {{%- set thought = message.reasoning_content %}}
        {{%- elif '</think>' in content %}}
            {{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}}
            {{%- set content = content.split('</think>')[-1].lstrip('\\n') %}}
        {{%- endif %}}
        {{{{- '<|im_start|>assistant\\n' }}}}
        {{%- if loop.index0 > ns.last and (loop.last or thought) %}}
            {{{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}}}
        {{%- endif %}}
        {{{{- content }}}}{_CALLS}
        {{{{- '<|im_end|>\\n' }}}}
    {{%- elif message.role != 'system' or not loop.first %}}
        {{{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}}}
    {{%- endif %}}
{{%- endfor %}}
{_START}
{{%- if add_generation_prompt and enable_thinking is defined and not enable_thinking %}}
    {{{{- '<think>\\n\\n</think>\\n\\n' }}}}
{{%- endif %}}"""

# As DeepSeek-R1's distillations': the prompt opens the thought, which no turn keeps; calls have no
# content, and their arguments are text.
R1_DISTILL = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}{{- message.content }}
    {%- elif message.role == 'user' %}{{- '<｜User｜>' + message.content }}
    {%- elif message.role == 'assistant' and message.content is none %}
        {{- '<｜Assistant｜><｜tool▁calls▁begin｜>' }}
        {%- for call in message.tool_calls %}
            {{- '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name }}
            {{- '\\n```json\\n' + call.function.arguments + '\\n```<｜tool▁call▁end｜>' }}
        {%- endfor %}
        {{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<｜Assistant｜>' + message.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}
    {%- elif message.role == 'tool' %}
        {{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}
    {{- '<｜Assistant｜><think>\\n' }}
{%- endif %}"""

# As Llama 3.1's: text is stripped, and a turn has one call.
LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (message.content | tojson) }}
        {{- '<|eot_id|>' }}
    {%- elif message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name }}
        {{- '", "parameters": ' + (call.arguments | tojson) + '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
        {%- if tools and loop.index0 == 0 %}
            {%- for tool in tools %}{{- (tool | tojson(indent=4)) + '\\n\\n' }}{%- endfor %}
        {%- endif %}
        {{- message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

# As Gemma 2's: the roles take turns, and the assistant is called "model".
GEMMA = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}{{- raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/...') }}
    {%- endif %}
    {%- set role = 'model' if message.role == 'assistant' else message.role %}
    {{- '<start_of_turn>' + role + '\\n' + message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""

# As SmolLM2's: a system message of its own.
SMOLLM2 = """\
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nYou are a helpful AI assistant named SmolLM<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# As Mistral's: no text says where the policy speaks, and calls have ids of nine characters.
MISTRAL = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools and loop.last %}
            {{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- if call.id is not defined or call.id | length != 9 %}
                {{- raise_exception('Tool call IDs should be alphanumeric strings of length 9!') }}
            {%- endif %}
            {{- '{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + ', "id": "' + call.id + '"}' }}
            {{- '' if loop.last else ', ' }}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif message.role == 'assistant' %}{{- ' ' + message.content + eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] ' + message.content + '[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception('Only user and assistant roles are supported!') }}
    {%- endif %}
{%- endfor %}"""

# Tools answer to calls alone.
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

# As SmolLM3's and those that TRL patches: what the assistant writes is marked, its header too.
GENERATION = """\
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- generation %}
            {{- '<|im_start|>assistant\\n' + message.content + '<|im_end|>\\n' }}
        {%- endgeneration %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


@dataclass(frozen=True)
class Family:
    """A template, its control tokens, and what it is known to open and to end turns with."""

    template: str
    control: tuple[str, ...]
    eos: str
    end: str
    opening: str = ""
    plain: tuple[str, ...] = ()  # tokens that are no control tokens
    metaspace: bool = False  # a text begins with a space, as SentencePiece has it


_CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_DEEPSEEK = ("<｜User｜>", "<｜Assistant｜>", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")
_LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
FAMILIES = {
    "qwen2.5": Family(QWEN25, _CHATML, "<|im_end|>", "<|im_end|>", plain=_TAGS[2:]),
    "qwen2.5-base": Family(QWEN25, _CHATML, "<|endoftext|>", "<|im_end|>", plain=_TAGS[2:]),
    "qwen3": Family(QWEN3, _CHATML, "<|im_end|>", "<|im_end|>", plain=_TAGS),
    "r1-distill": Family(
        R1_DISTILL, _DEEPSEEK, _DEEPSEEK[3], _DEEPSEEK[3], opening="<think>\n", plain=_TAGS[:2]
    ),
    "llama3": Family(LLAMA3, (*_LLAMA, "<|end_of_text|>"), "<|end_of_text|>", "<|eot_id|>"),
    "gemma": Family(
        GEMMA, ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<eos>", "<end_of_turn>"
    ),
    "smollm2": Family(SMOLLM2, _CHATML, "<|im_end|>", "<|im_end|>"),
    "mistral": Family(
        MISTRAL,
        ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        "</s>",
        "</s>",
        metaspace=True,
    ),
    "generation": Family(GENERATION, _CHATML, "<|endoftext|>", "<|im_end|>"),
}
_TEXTS = [f"What is {a} plus {b}? It is {a + b}." for a in range(20) for b in range(20)]


@cache
def _core(metaspace: bool) -> PreTrainedTokenizerFast:
    if not metaspace:
        return train_tokenizer(_TEXTS, 300)
    core = Tokenizer(models.BPE(unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    core.decoder = decoders.Metaspace(prepend_scheme="first")
    alphabet = [chr(i) for i in range(32, 127)] + ["\n"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>"], initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(_TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")


def family_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A small tokenizer with the control tokens and the template of a family."""
    family = FAMILIES[name]
    made: Any = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_core(family.metaspace).backend_tokenizer.to_str()),
        eos_token=family.eos,
        pad_token=family.eos,
        bos_token=next((t for t in family.control if "begin" in t or t in ("<s>", "<bos>")), None),
        extra_special_tokens=list(family.control),
        clean_up_tokenization_spaces=False,
    )
    made.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in family.plain])
    made.chat_template = family.template
    return made  # type: ignore[no-any-return]
