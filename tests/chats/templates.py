"""Templates of tests, each with the shape of a known one."""

CHATML = """{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""

LLAMA = """{{ bos_token }}{% for message in messages %}
{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles must alternate: user, assistant') }}
{% endif %}
{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' -}}
{{ message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

TAGGED = """{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{ '<|im_start|>assistant\\n' }}
{%- generation -%}{{ message.content + '<|im_end|>' }}{%- endgeneration -%}{{ '\\n' }}
{%- else -%}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif -%}{%- endfor -%}"""

# Earlier thinking is left out, as Qwen3's does.
FORGETS = """{%- for message in messages -%}
{%- set text = message.content if loop.last else message.content.split('</think>')[-1] -%}
{{ '<|im_start|>' + message.role + '\\n' + text + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""

# A token behind the last turn only, as Phi-3's.
CLOSED = """{%- for message in messages -%}
{{ '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>\\n' }}{%- else -%}{{ eos_token }}{%- endif -%}"""
