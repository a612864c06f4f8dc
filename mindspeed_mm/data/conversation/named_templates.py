"""The published chat templates by name, written as Jinja with `{% generation %}` around targets.

Source: template names and texts as LLaMA-Factory and MindSpeed-MM publish them; here the newline after a turn's
`<|im_end|>` is outside the marks, because the model doesn't have to produce it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from mindspeed_mm.configs.data_rules import MODELS_OWN_TEMPLATES
from mindspeed_mm.utils.errors import ConfigError, did_you_mean

_MACROS = r"""
{%- macro body(content) -%}
  {%- if content is string -%}{{- content -}}
  {%- else -%}
    {%- for part in content -%}
      {%- if part.type == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
      {%- elif part.type == 'video' -%}{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
      {%- else -%}{{- part.text -}}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- macro answer(message) -%}
  {{- body(message.content) -}}
  {%- for call in message.tool_calls or [] -%}
    {%- if body(message.content) or not loop.first -%}{{- '\n' -}}{%- endif -%}
    {{- '<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' -}}
  {%- endfor -%}
{%- endmacro -%}
{%- set own_system = body(messages[0].content) if messages and messages[0].role == 'system' else none -%}
{%- set system = own_system if own_system is not none else default_system -%}
"""

_CHATML = (
    _MACROS
    + r"""
{%- if system or tools -%}
  {{- '<|im_start|>system\n' + system -}}
  {%- if tools -%}
    {{- '\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with '
      + 'function signatures within <tools></tools> XML tags:\n<tools>' -}}
    {%- for tool in tools -%}{{- '\n' + (tool | tojson) -}}{%- endfor -%}
    {{- '\n</tools>\n\nFor each function call, return a json object with function name and arguments within '
      + '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
      + '</tool_call>' -}}
  {%- endif -%}
  {{- '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == 'assistant' -%}
    {{- '<|im_start|>assistant\n' -}}
    {%- set text = answer(message) -%}
    {%- set thought = '' -%}
    {%- if thinks -%}
      {%- if message.reasoning_content -%}
        {%- set text = '<think>\n' + message.reasoning_content.strip('\n') + '\n</think>\n\n' + text -%}
      {%- endif -%}
      {%- if not enable_thinking -%}
        {%- set text = text.split('</think>')[-1].lstrip('\n') -%}
        {{- '<think>\n\n</think>\n\n' -}}
      {%- elif '<think>' not in text and '</think>' not in text -%}
        {%- set thought = '<think>\n\n</think>\n\n' -%}
      {%- endif -%}
    {%- endif -%}
    {%- generation -%}{{- thought + text + '<|im_end|>' -}}{%- endgeneration -%}
    {{- '\n' -}}
  {%- elif message.role == 'tool' and tool_as_user -%}
    {{- '<|im_start|>user\n<tool_response>\n' + body(message.content) + '\n</tool_response><|im_end|>\n' -}}
  {%- elif not (loop.first and message.role == 'system') -%}
    {{- '<|im_start|>' + message.role + '\n' + body(message.content) + '<|im_end|>\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\n' -}}
  {%- if thinks and not enable_thinking -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}
{%- endif -%}
"""
)

_HUMAN_ASSISTANT = (
    _MACROS
    + r"""
{%- if system -%}{{- 'System: ' + system + eos_token + '\n' -}}{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == 'assistant' -%}
    {%- generation -%}{{- answer(message) + eos_token -}}{%- endgeneration -%}
    {{- '\n' -}}
  {%- elif not (loop.first and message.role == 'system') -%}
    {{- 'Human: ' + body(message.content) + eos_token + '\nAssistant:' -}}
  {%- endif -%}
{%- endfor -%}
"""
)


class NamedTemplate(NamedTuple):
    """A template's Jinja text and the variables that distinguish it from others with the same text."""

    source: str
    variables: Mapping[str, Any]


def _chatml(system: str = "", tool_as_user: bool = True, thinks: bool = False) -> NamedTemplate:
    return NamedTemplate(_CHATML, {"default_system": system, "tool_as_user": tool_as_user, "thinks": thinks})


_QWEN2_VL = _chatml("You are a helpful assistant.", tool_as_user=False)
_QWEN3 = _chatml(thinks=True)
_QWEN3_NOTHINK = _chatml()

TEMPLATES: Mapping[str, NamedTemplate] = {
    "default": NamedTemplate(_HUMAN_ASSISTANT, {"default_system": ""}),
    "qwen": _chatml("You are Qwen, created by Alibaba Cloud. You are a helpful assistant."),
    "qwen2vl": _QWEN2_VL,
    "qwen2_vl": _QWEN2_VL,
    "qwen3": _QWEN3,
    "qwen3_nothink": _QWEN3_NOTHINK,
    "qwen3_vl": _QWEN3,
    "qwen3_vl_nothink": _QWEN3_NOTHINK,
}


def named_template(name: str) -> NamedTemplate:
    """Return the published template of that name.

    Raises:
        ConfigError: No such name here; the message has the nearest ones.
    """
    if name not in TEMPLATES:
        near = did_you_mean(name, [*TEMPLATES, *MODELS_OWN_TEMPLATES])
        raise ConfigError(
            f"dataset_param.basic_parameters.template: found '{name}'{near}; "
            f"here are: {', '.join(TEMPLATES)}; without the key the model's own chat template is used"
        )
    return TEMPLATES[name]
