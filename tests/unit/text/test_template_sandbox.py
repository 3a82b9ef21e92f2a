"""Templates that do too much are refused, at start-up and in requests; the loop runs on."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from asyncllm.errors import BadRequest, ModelError
from asyncllm.text import ChatTemplate
from asyncllm.text.template_sandbox import TooMuchWork, Work, template_environment

LINE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
#: Only for messages that ask for it, as a client may.
TRIGGERED = "{% if messages[0].content == 'go' %}BOMB{% endif %}" + LINE
USER = [{"role": "user", "content": "Hi"}]
GO = [{"role": "user", "content": "go"}]

BOMBS = {
    "range": "{% for i in range(10**9) %}{% endfor %}",
    "nested loops": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    ),
    "loop that rejects all": (
        "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}"
    ),
    "macro": (
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(99) }}"
    ),
    "recursive loop": (
        "{% for a in [[1]*9]*9 recursive %}{{ loop([[[1]*9]*9]*9) }}{{ loop([1]*9) }}{% endfor %}"
    ),
    "doubling by +": (
        "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}"
        "{% endfor %}{{ ns.x }}"
    ),
    "doubling by ~": (
        "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}"
        "{% endfor %}{{ ns.x }}"
    ),
    "doubling by a block": (
        "{% set ns = namespace(x='a') %}{% for i in range(99) %}"
        "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}{{ ns.x }}"
    ),
    "output": "{% set x = 'a' * 9999999 %}{% for i in range(9999) %}{{ x }}{% endfor %}",
    "product": "{{ 'a' * 10**10 }}",
    "list": "{{ ([1] * 10**5 * 10**5)|length }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "width of %": "{{ '%9999999999d' % 1 }}",
    "width of format": "{{ '{:9999999999}'.format(1) }}",
    "width of a nested format": "{{ '{:{}}'.format(1, 9999999999) }}",
    "ljust": "{{ 'a'.ljust(9999999999) }}",
    "center": "{{ 'a'|center(9999999999) }}",
    "computed width": "{% set n = 10**10 %}{{ 'a'|center(n) }}",
    "indent": "{{ 'a\n'|indent(9999999999) }}",
    "tojson": "{{ [1]|tojson(indent=99999999) }}",
    "batch": "{{ [1]|batch(9999999999, 'x')|list }}",
    "slice": "{{ [1]|slice(9999999999)|list }}",
    "replace": "{% set x = 'a' * 10**6 %}{{ x.replace('a', x) }}",
    "replacing filter": "{% set x = 'a' * 10**6 %}{{ x|replace('a', x) }}",
    "join": "{% set x = 'a' * 10**6 %}{{ x.join(['b'] * 10**5) }}",
    "search": (
        "{% set x = range(99999)|list %}{% for i in range(99999) %}{{ -1 in x }}{% endfor %}"
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_model_with_a_bomb_is_refused_or_its_requests_are(name: str) -> None:
    started = time.thread_time()
    with pytest.raises((ModelError, TooMuchWork, BadRequest)) as caught:
        ChatTemplate(BOMBS[name] + LINE).render(USER)
    assert "\n" not in str(caught.value)
    assert time.thread_time() - started < 30


def test_at_start_a_loop_is_named() -> None:
    with pytest.raises(ModelError, match="chat template cannot be used: it takes too many steps"):
        ChatTemplate(BOMBS["nested loops"] + LINE)


@pytest.mark.parametrize("name", ["nested loops", "search"])
async def test_a_request_that_triggers_one_does_not_stop_the_loop(name: str) -> None:
    template = ChatTemplate(TRIGGERED.replace("BOMB", BOMBS[name]))
    longest, last, done = 0.0, time.perf_counter(), False

    async def watch() -> None:
        nonlocal longest, last
        while not done:
            await asyncio.sleep(0.005)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now

    watcher = asyncio.create_task(watch())
    with pytest.raises(BadRequest, match="too many steps"):
        await template.render_async(GO, add_generation_prompt=False)
    assert await template.render_async(USER) == "user: Hi\n"
    done = True
    await watcher
    assert longest < 1.0  # the rendering takes two seconds


async def test_long_conversations_are_rendered_in_a_thread() -> None:
    """They give the same text as short ones do."""
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": f"message {number}"} for number in range(20_000)
    ]
    template = ChatTemplate(LINE)
    with pytest.raises(TooMuchWork):
        template.render(messages, work=Work(steps=10_000, seconds=1.0))
    text = await template.render_async(messages)
    assert text == "".join(f"user: {message['content']}\n" for message in messages)


def test_what_templates_use_still_works() -> None:
    source = (
        "{% for m in messages if m.role != 'system' %}{{ loop.index }}/{{ loop.length }}"
        "{{ '' if loop.last else ', ' }}{% else %}none{% endfor %} "
        "{{ '%05d|%-3s' % (7, 'a') }} {{ '{:>4}'.format(1) }} {{ 'a' ~ 1 ~ none }} "
        "{{ messages|map(attribute='role')|join(',') }} {{ [3, 1]|sort|tojson(indent=2) }} "
        "{{ {'big': 10**12}|tojson }} {{ 'ab'|replace('a', 'xx') }} {{ 'x' * 3 }} {{ 2 ** 10 }}"
    )
    messages = [{"role": role, "content": ""} for role in ("system", "user", "assistant")]
    assert ChatTemplate(source).render(messages) == (
        "1/2, 2/2 00007|a      1 a1None system,user,assistant [\n  1,\n  3\n] "
        '{"big": 1000000000000} xxb xxx 1024'
    )


def test_deeply_nested_templates_are_refused() -> None:
    with pytest.raises(ModelError):
        ChatTemplate("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}")


def test_what_templates_find_is_copied_as_a_dict() -> None:
    """Each rendering copies it, and a ``ChainMap`` is copied in Python."""
    environment = template_environment()
    template = environment.from_string("{{ name }} {{ namespace(a=1).a }}", {"name": "x"})
    assert type(template.globals) is dict
    assert template.render() == "x 1"
    assert template.render(name="y") == "y 1"
