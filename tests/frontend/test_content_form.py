"""Contents as texts and as parts, for chat templates that take one of them or both."""

import json
import pathlib
from typing import Any

import pytest

from rjax.errors import InvalidRequestError
from rjax.tokenization import Tokenizer
from rjax.tokenization.content_form import ContentForm, ContentForms, find_content_form

from .tiny_tokenizers import CHAT_TEMPLATE, KINDS

# Only loops over parts, as of LLaVA and SmolVLM: a text's characters have no type.
LOOPS = """\
{% for m in messages %}[{{ m.role }}]{% for c in m.content %}\
{% if c.type == 'image' %}<image>{% endif %}\
{% if c.type == 'text' %}{{ c.text }}{% endif %}{% endfor %};{% endfor %}"""
# Images first, by a filter; and the first part alone of the assistant's messages.
FILTERS = """\
{% for m in messages %}[{{ m['role'] }}]\
{% for c in m['content'] | selectattr('type', 'equalto', 'image') %}<image>{% endfor %}\
{% if m['role'] == 'assistant' %}{{ m['content'][0]['text'] }}\
{% else %}{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}{{ c['text'] }}\
{% endfor %}{% endif %};{% endfor %}"""
# Both, as of Gemma 3 and Qwen2.5-VL; the system's text is set before the loop.
BOTH = """\
{% if messages[0].role == 'system' %}{% set first = messages[0].content if \
messages[0].content is string else messages[0].content[0].text %}{{ first }}|\
{% set messages = messages[1:] %}{% endif %}\
{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}\
{% for c in m.content %}{% if c.type == 'image' or 'image' in c %}<image>\
{% elif c.type == 'text' %}{{ c.text }}{% endif %}{% endfor %}{% endif %};{% endfor %}"""
# By a macro, as of Qwen3-VL.
MACRO = """\
{% macro shown(content) %}{% if content is string %}{{ content }}{% else %}\
{% for c in content %}{% if 'text' in c %}{{ c.text }}{% endif %}{% endfor %}{% endif %}\
{% endmacro %}{% for m in messages %}[{{ m.role }}]{{ shown(m.content) }};{% endfor %}"""
TEXT = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }};{% endfor %}"  # Llama 3
JSON = "{% for m in messages %}[{{ m.role }}]{{ m.content | tojson }};{% endfor %}{# text #}"
# Qwen3's: a list counts as nothing.
STRICT = """\
{% for m in messages %}{% set text = m.content if m.content is string else '' %}\
[{{ m.role }}]{{ text }};{% endfor %}"""
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
A, B = {"type": "text", "text": "one"}, {"type": "text", "text": "two"}


def tokenizer(template: str) -> Tokenizer:
    return Tokenizer(KINDS["byte_level_bos"](), chat_template=template)


def rendered(template: str, messages: list[dict[str, Any]]) -> str:
    return tokenizer(template).apply_chat_template(messages, add_generation_prompt=False)


@pytest.mark.parametrize(
    ("template", "role", "form"),
    [
        (LOOPS, "user", ContentForm(text=False, parts=True)),
        (LOOPS, "system", ContentForm(text=False, parts=True)),
        (FILTERS, "user", ContentForm(text=False, parts=True)),
        (FILTERS, "assistant", ContentForm(text=False, parts=False)),
        (BOTH, "user", ContentForm(text=True, parts=True)),
        (BOTH, "system", ContentForm(text=True, parts=False)),
        (MACRO, "user", ContentForm(text=True, parts=True)),
        (TEXT, "user", ContentForm(text=True, parts=False)),
        (JSON, "user", ContentForm(text=True, parts=False)),
        (STRICT, "user", ContentForm(text=True, parts=False)),
        (NO_SYSTEM + BOTH, "system", ContentForm(text=False, parts=False)),
        (NO_SYSTEM + BOTH, "user", ContentForm(text=True, parts=True)),
    ],
)
def test_what_a_template_shows(template: str, role: str, form: ContentForm) -> None:
    hf = tokenizer(template).hf
    found = find_content_form(lambda m: str(hf.apply_chat_template(m, tokenize=False)), role)
    assert found == form


@pytest.mark.parametrize("template", [LOOPS, FILTERS, BOTH, MACRO, TEXT, STRICT])
def test_a_text_is_one_part(template: str) -> None:
    text = rendered(template, [{"role": "user", "content": "one"}])
    assert text == rendered(template, [{"role": "user", "content": [A]}])
    assert text == "[user]one;"


@pytest.mark.parametrize(
    ("template", "shown"),
    [(LOOPS, "onetwo"), (BOTH, "onetwo"), (MACRO, "onetwo"), (TEXT, "one\ntwo"),
     (STRICT, "one\ntwo"), (JSON, '"one\\ntwo"')],
)  # fmt: skip
def test_parts_are_shown_as_the_template_does_or_in_lines(template: str, shown: str) -> None:
    assert rendered(template, [{"role": "user", "content": [A, B]}]) == f"[user]{shown};"


def test_each_role_has_its_form() -> None:
    messages = [
        {"role": "system", "content": [A, B]},
        {"role": "user", "content": [A, B]},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "three"},
    ]
    found = rendered(BOTH, messages)
    assert found == "one\ntwo|[user]onetwo;[assistant]yes;[user]three;"
    found = rendered(LOOPS, messages)
    assert found == "[system]onetwo;[user]onetwo;[assistant]yes;[user]three;"


def test_a_last_message_that_is_continued() -> None:
    for template in (LOOPS, BOTH, TEXT):
        for content in ("one", [A]):
            messages = [
                {"role": "user", "content": "x"},
                {"role": "assistant", "content": content},
            ]
            found = tokenizer(template).apply_chat_template(
                messages, add_generation_prompt=False, continue_final_message=True
            )
            assert found.endswith("[assistant]one")


def test_a_template_of_the_call_has_its_own_form() -> None:
    own = tokenizer(TEXT)
    messages = [{"role": "user", "content": [A, B]}]
    assert own.apply_chat_template(messages) == "[user]one\ntwo;"
    assert own.apply_chat_template(messages, chat_template=LOOPS) == "[user]onetwo;"
    assert own.apply_chat_template(messages) == "[user]one\ntwo;"


def test_templates_are_tried_once_for_each_role() -> None:
    tried = []

    def render(messages: list[dict[str, Any]]) -> str:
        tried.append(messages[0]["role"])
        return " ".join(str(message["content"]) for message in messages)

    forms = ContentForms("text", render)
    for _ in range(3):
        forms.apply([{"role": "user", "content": "a"}, {"role": "system", "content": "b"}])
    assert len(tried) == 6
    ContentForms(CHAT_TEMPLATE, render).apply([{"role": "user", "content": [A, B]}])
    assert len(tried) == 6, "its source has no word for the text of a part"


@pytest.mark.parametrize(
    ("kind", "media"),
    [("image_url", "an image"), ("image", "an image"), ("input_audio", "audio"),
     ("video", "video"), ("file", "a file")],
)  # fmt: skip
def test_other_parts_are_refused_by_name(kind: str, media: str) -> None:
    messages = [{"role": "user", "content": [A, {"type": kind, kind: {}}]}]
    message = rf"messages\[0\] has a content part of type '{kind}', {media}: models take text only"
    with pytest.raises(InvalidRequestError, match=message):
        rendered(BOTH, messages)


@pytest.mark.parametrize(
    ("files", "shown"),
    [
        ({"tokenizer_config.json": {"chat_template": "own"}}, "own"),
        ({"chat_template.jinja": "jinja", "tokenizer_config.json": {}}, "jinja"),
        (
            {
                "chat_template.json": {"chat_template": "json"},
                "chat_template.jinja": "jinja",
                "tokenizer_config.json": {"chat_template": "own"},
            },
            "json",
        ),
        (
            {
                "processor_config.json": {"chat_template": "processor"},
                "chat_template.json": {"chat_template": "json"},
                "tokenizer_config.json": {},
            },
            "processor",
        ),
        (
            {
                "processor_config.json": {"image_seq_length": 256},
                "preprocessor_config.json": {"chat_template": 3},
                "tokenizer_config.json": {"chat_template": "own"},
            },
            "own",
        ),
    ],
)
def test_where_the_template_is(files: dict[str, Any], shown: str, tmp_path: pathlib.Path) -> None:
    KINDS["byte_level_bos"]().save(str(tmp_path / "tokenizer.json"))
    for name, value in files.items():
        text = value if isinstance(value, str) else json.dumps(value)
        (tmp_path / name).write_text(text)
    found = Tokenizer(tmp_path)
    assert found.apply_chat_template([{"role": "user", "content": "a"}]) == shown
    # One that a user gives precedes all of them.
    given = Tokenizer(tmp_path, chat_template="given")
    assert given.apply_chat_template([{"role": "user", "content": "a"}]) == "given"
