"""Our tokenizer and chat templates against Hugging Face's own, with the constructs that published templates use."""

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from pagewire.text.chat_template import ChatTemplateError
from pagewire.text.tokenizer import Tokenizer
from tests.tiny_tokenizers import byte_fallback, byte_level, write_model_directory

# The shapes of Gemma 3, Qwen 2.5, Llama 3.2 and Mistral: first-system handling, namespaces, whitespace control, errors.
TEMPLATES = {
    "gemma": """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- if (message['role'] == 'assistant') -%}{%- set role = "model" -%}{%- else -%}
        {%- set role = message['role'] -%}{%- endif -%}
    {{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}{{ raise_exception("Invalid content type") }}{%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{'<start_of_turn>model\n'}}{%- endif -%}
""",
    "qwen": """{%- if tools %}
    {{- '<|im_start|>system\\n' }}{% for tool in tools %}{{- tool | tojson }}{% endfor %}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(last=none) %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or
        (message.role == "assistant" and not message.tool_calls) %}
        {%- set ns.last = message.role %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and ns.last is not none %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""",
    "llama": """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday: " + date_string + "\\n\\n" + system_message }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'
            + message['content'] | trim + eos_token }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
""",
    "mistral": """{{ bos_token }}{% for message in messages %}
{% if message['role'] == 'system' %}{% continue %}{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}
    {% generation %}{{ message['content'] + eos_token}}{% endgeneration %}
{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}
{% endfor %}
  trailing {{ messages | tojson(indent=2) }}
""",
}
CONVERSATIONS = [
    [{"role": "user", "content": 'Hi <b>& "you"</b> 世界 '}],
    [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "a"}],
    [
        {"role": "user", "content": "a\n"},
        {"role": "assistant", "content": "  b"},
        {"role": "user", "content": "👩‍👩‍👧"},
    ],
    [{"role": "user", "content": "x"}, {"role": "user", "content": "y"}, {"role": "other", "content": "z"}],
]


def both(directory: Path) -> tuple[Tokenizer, PreTrainedTokenizerFast]:
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(directory / "tokenizer.json"), bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    )
    return Tokenizer.load(directory), theirs


@pytest.mark.parametrize("name", sorted(TEMPLATES))
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chat_templates(tmp_path: Path, name: str, add_generation_prompt: bool) -> None:
    directory = write_model_directory(tmp_path, byte_level())
    (directory / "chat_template.jinja").write_text(TEMPLATES[name], encoding="utf-8")
    ours, theirs = both(directory)
    assert ours.chat_template is not None
    num_rendered = 0
    for messages in CONVERSATIONS:
        try:
            expected = theirs.apply_chat_template(
                messages,
                chat_template=TEMPLATES[name],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as error:  # jinja2's, as raise_exception there makes it
            with pytest.raises(ChatTemplateError, match=str(error).split(":")[-1].strip()[:20]):
                ours.chat_template.render(messages, add_generation_prompt=add_generation_prompt)
            continue
        num_rendered += 1
        assert ours.chat_template.render(messages, add_generation_prompt=add_generation_prompt) == expected
    assert num_rendered >= 2


@pytest.mark.parametrize("kind", ["byte_level", "gemma", "llama2"])
def test_ids_and_text(tmp_path: Path, kind: str) -> None:
    backend = {"byte_level": byte_level, "gemma": byte_fallback, "llama2": lambda: byte_fallback(strip=True)}[kind]()
    ours, theirs = both(write_model_directory(tmp_path, backend))
    texts = [
        "the cat",
        " lead",
        "a  b\n\n\tc",
        "你好世界 한국어 👩‍👩‍👧 é",
        "<eos>x<bos>",
        "mixed<pad> the",
        "def f(x):\n    return x",
    ]
    for text in texts:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special)
            assert ours.decode(ids, skip_special_tokens=special) == theirs.decode(
                ids, skip_special_tokens=special, clean_up_tokenization_spaces=False
            )
