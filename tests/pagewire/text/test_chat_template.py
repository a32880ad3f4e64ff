"""Chat templates: the published helpers work, a hostile template is contained."""

from datetime import datetime

import pytest

from pagewire.text.chat_template import ChatTemplate, ChatTemplateError

MESSAGES = [{"role": "user", "content": "Hi <b>"}, {"role": "assistant", "content": "Yo"}]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def render(source: str, **options: object) -> str:
    template = ChatTemplate(source, TOKENS, now=lambda: datetime(2026, 2, 3))
    return template.render(MESSAGES, **options)  # type: ignore[arg-type]


def test_messages_special_tokens_and_generation_prompt() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m['content'] }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    assert render(source) == "<s>[user]Hi <b></s>[assistant]Yo</s>[assistant]"
    assert render(source, add_generation_prompt=False) == "<s>[user]Hi <b></s>[assistant]Yo</s>"


def test_helpers() -> None:
    assert render("{{ messages[0] | tojson }}") == '{"role": "user", "content": "Hi <b>"}'
    assert render("{{ {'a': 'é'} | tojson(indent=1) }}") == '{\n "a": "é"\n}'
    assert render("{{ strftime_now('%d %b %Y') }}") == "03 Feb 2026"
    assert (
        render("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}{% endfor %}") == "Yo"
    )
    assert render("{% generation %}x{% endgeneration %}") == "x"
    assert render("{{ thinking }}{{ tools is none }}", variables={"thinking": 7}) == "7True"
    assert render("{% for m in messages %}\n  {{ m.role }}\n{% endfor %}\n") == "  user\n  assistant\n"


def test_a_template_may_refuse() -> None:
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ 'a' * 10000000000 }}",
        "{{ 9 ** 99999999 }}",
        "{% for i in range(10000000) %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{{ 'xxxxxxxxxxxxxxxx' * 1000 }}{% endfor %}{% endfor %}",
        "{{ 1 / 0 }}",
        "{{ messages[99].role.x }}",
        "{{ unknown_function() }}",
    ],
)
def test_hostile_and_broken_templates_are_errors(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        render(source)


def test_syntax_error_is_found_at_load() -> None:
    with pytest.raises(ChatTemplateError, match="broken"):
        ChatTemplate("{% if %}", TOKENS)


def test_variables_cannot_replace_the_messages() -> None:
    assert render("{{ messages | length }}", variables={"messages": []}) == "2"
