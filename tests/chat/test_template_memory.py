"""Templates that would take all memory are refused before they do; others write what they wrote."""

from __future__ import annotations

import json
import time
import tracemalloc

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lora_serve.chat import template
from lora_serve.chat.model_template import ModelTemplate
from lora_serve.chat.template import check_template, render_chat
from lora_serve.chat.template_memory import TemplateMemoryError, within_memory, written_chars
from lora_serve.errors import InvalidRequestError

MIB = 2**20
ROOM = 4 * MIB  # of a rendering here
PEAK = 48 * MIB  # a list's small objects are more than 64 bytes where a template makes many
BIG = "x" * MIB
MESSAGES = [{"role": "user", "content": "hi"}]

GROWN = (
    "{% set n = namespace(x=['x']) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
)
KEPT = "{% set n = namespace(x=[]) %}{% for i in range(99) %}KEEP{% endfor %}"
KEEP = "{% set n.x = n.x + [made] %}"


def doubled(expression: str, first: str) -> str:
    step = "{% set n.x = " + expression + " %}"
    return (
        "{% set n = namespace(x=" + first + ") %}{% for i in range(40) %}" + step + "{% endfor %}"
    )


HOSTILE = {
    "a text times": "{{ 'x' * 10**10 }}",
    "a constant": "{{ 'x' * 9999999999 }}",
    "a list times": "{{ ([0] * 10**9) | length }}",
    "a count times a text": "{{ 10**10 * 'x' }}",
    "a power": "{{ 10 ** (10 ** 9) > 1 }}",
    "products": doubled("n.x * n.x", "9"),
    "texts joined": doubled("n.x ~ n.x", "'x'"),
    "texts added": doubled("n.x + n.x", "'x'"),
    "lists added": doubled("n.x + n.x", "[0]"),
    "a width": "{{ '%9999999999d' % 1 }}",
    "a width among values": "{{ '%*d' % (10**10, 1) }}",
    "a precision": "{{ '%.9999999999f' % 1 }}",
    "a precision behind noughts": "{{ ('%.' ~ '0' * 20 ~ '99999999f') % 1 }}",
    "a key with brackets": "{{ '%(a(b))99999999s' % {'a(b)': 1} }}",
    "a form of many fields": "{{ ('%(a)s' * 99) % {'a': big} }}",
    "a filter's width": "{{ '%9999999999d' | format(1) }}",
    "a field": "{{ '{:>9999999999}'.format(1) }}",
    "a field among values": "{{ '{:{w}}'.format(1, w=10**10) }}",
    "a field of a text": "{{ '{:{w}}'.format(1, w='99999999') }}",
    "a field of a list": "{{ '{:{w[0]}}'.format(1, w=['99999999']) }}",
    "a field that is escaped": "{{ ('{:{w}}' | escape).format(1, w='99999999') }}",
    "a field of a map": "{{ '{x:>{w}}'.format_map({'x': 1, 'w': 10**10}) }}",
    "many fields": "{{ ('{0}' * 99).format(big) }}",
    "center": "{{ 'x'.center(10**10) }}",
    "zfill": "{{ 'x'.zfill(10**10) }}",
    "the filter center": "{{ 'x' | center(10**10) }}",
    "a constant filter": "{{ 'x' | center(9999999999) }}",
    "a mapped filter": "{{ ['x'] | map('center', 10**10) | list }}",
    "replace": "{{ big.replace('', big) }}",
    "the filter replace": "{{ big | replace('x', big) }}",
    "join": "{{ big.join(big) }}",
    "the filter join": "{{ big | join(big) }}",
    "join of what is mapped": "{{ big.join(range(9999) | map('string')) }}",
    "expandtabs": "{{ ('\t' * 100).expandtabs(10**9) }}",
    "translate": "{{ big.translate({120: big}) }}",
    "split": "{{ big.split('x') | length }}",
    "letters": "{{ big | list | length }}",
    "bytes": "{{ (1).to_bytes(10**10, 'big') | length }}",
    "indent": "{{ 'a\nb' | indent(10**10) }}",
    "indent by a text": "{{ ('\n' * 999) | indent(big) }}",
    "JSON's indent": "{{ [1] | tojson(indent=10**9) }}",
    "JSON's indent below none": GROWN.replace("60", "18") + "{{ n.x | tojson(indent=-1) }}",
    "JSON's separators": "{{ ([1] * 99) | tojson(separators=(big, ':')) }}",
    "separators made": "{{ ([1] * 99) | tojson(separators=[big, ':'] | map('string')) }}",
    "links": "{{ ('www.a.com ' * 99) | urlize(rel=big) }}",
    "targets of links": "{{ ('www.a.com ' * 99) | urlize(target=big) }}",
    "a date": "{{ strftime_now('%255Y' * 9999) | length }}",
    "places": "{{ 1 | round(10**7, 'ceil') }}",
    "batch": "{{ [1] | batch(10**9, 0) | list }}",
    "slice": "{{ [1] | slice(10**9) | list }}",
    "wordwrap": "{{ big | wordwrap(1, wrapstring=big) }}",
    "sum": "{{ ([[0] * 999] * 999) | sum(start=[]) | length }}",
    "sum of what items have": "{{ ([{'a': [0] * 29999}] * 200) | sum('a', []) | length }}",
    "random text": "{{ lipsum(10**9) }}",
    "written": GROWN + "{{ n.x }}",
    "string": GROWN + "{{ n.x | string }}",
    "tojson": GROWN + "{{ n.x | tojson }}",
    "joined to nothing": GROWN + "{{ n.x ~ '' }}",
    "put into a form": GROWN + "{{ '%s' % (n.x,) }}",
    "put into a field": GROWN + "{{ '{}'.format(n.x) }}",
    "in a list": GROWN + "{{ [n.x] | join }}",
    "a namespace": GROWN + "{{ n }}",
    "items": GROWN + "{{ {'a': n.x}.items() }}",
    "an error's text": GROWN + "{{ raise_exception(n.x) }}",
    "slices": KEPT.replace("KEEP", KEEP.replace("made", "big[i:]")),
    "upper": KEPT.replace("KEEP", KEEP.replace("made", "big.upper()")),
    "a filter": KEPT.replace("KEEP", KEEP.replace("made", "big | lower")),
    "a block": KEPT.replace("KEEP", "{% set made %}{{ big }}{{ i }}{% endset %}" + KEEP),
    "a macro": "{% macro m(i) %}{{ big }}{{ i }}{% endmacro %}"
    + KEPT.replace("KEEP", KEEP.replace("made", "m(i)")),
    "texts of a list in a block": "{% set d = [big[:9999]] %}{% set x %}{% for i in range(9999) %}"
    "{{ d }}{% endfor %}{% endset %}",
    "escaped texts in a block": "{% autoescape true %}{% set x %}{% for i in range(99) %}{{ big }}"
    "{% endfor %}{% endset %}{% endautoescape %}",
    "copies of what is escaped": "{% set e = big[:99999] | escape %}{% set x %}"
    "{% for i in range(999) %}{{ e }}{% endfor %}{% endset %}",
    "long lists": KEPT.replace("KEEP", KEEP.replace("made", str([0] * 9999))),
}


def rendered(source: str) -> str:
    return render_chat(
        ModelTemplate(source),
        MESSAGES,
        add_generation_prompt=True,
        continue_final_message=False,
        chat_template=None,
        tools=None,
        template_kwargs={"big": BIG},
        max_chars=64 * MIB,
        max_seconds=20.0,
    )


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_template_that_would_take_all_memory_is_refused_before_it_does(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template, "MAX_BYTES", ROOM)
    begin = time.process_time()
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequestError, match=r"more than 4 MiB|refused the messages: "):
            rendered(HOSTILE[kind])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < PEAK
    assert time.process_time() - begin < 5.0


def test_the_refusal_names_the_limit_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "MAX_BYTES", ROOM)
    with pytest.raises(TemplateMemoryError) as caught:
        rendered("{{ 'x' * 10**10 }}")
    assert str(caught.value) == (
        "the chat template makes more than 4 MiB of values of these messages; send fewer or "
        "shorter ones, or take a simpler template"
    )
    assert caught.value.param == "messages"


def test_a_constant_that_takes_all_memory_takes_none_when_its_template_is_read() -> None:
    for source in ("{{ 'y' * 9999999999 }}", "{{ 'y' | center(9999999999) }}"):
        check_template(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 999 }}{{ '%5d|%-3s' % (1, 'a') }}{{ '{:>9}{}'.format('x', 2) }}{{ 2 ** 64 }}",
        "{{ 'call 12345678901 %s' % 'x' }}{{ 'call 12345678901 {}'.format('x') }}",
        "{{ '%%(a (b))|%5.1f%%|%-*d|%s' % (2.25, 4, 7, '(') }}{{ '%(a)4s' % {'a': 1} }}",
        "{{ '{:{w}}|{:>{}}'.format(99999, 'x', 9, w=7) }}"
        "{{ '{a:.{n}f}'.format_map({'a': 2, 'n': 1}) }}{{ ('{:{w}}' | escape).format('<', w=3) }}",
        "{{ 2.345 | round(1, 'floor') }}"
        "{{ [1, {'a': 2}] | tojson(separators=(',  ', ':')) }}{{ 'www.a.com' | urlize(9) }}"
        "{{ [{'a': [1]}] | sum('a', []) }}",
        "{% set x %}{{ [1, none, 2.5] }}{{ nothing }}{{ '<' | escape }}{% endset %}{{ x }}",
        "{{ [1, [2, {'a': 'b'}]] | tojson(indent=4) }}{{ 'x' | center(9) }}{{ 'ab' | list }}",
        "{{ 'a,b'.split(',') | join('-') }}{{ 'abc'[1:] }}{{ [[1], [2]] | sum(start=[]) }}",
        "{{ [3, 4, 5] | batch(linecount=2) | list }}{{ [3, 4] | slice(2) | list }}",
        "{{ 'a b' | wordwrap(1) }}{{ 'a\nb' | indent(2, first=True) }}{{ 'a'.zfill(3) }}",
        "{% autoescape true %}{{ '<' ~ 'b' }}{% endautoescape %}{{ ['a'] | map('upper') | join }}",
        "{{ range(3) | sum }}{{ [{'a': 1}] | map(attribute='a') | sum }}{{ big | length }}",
    ],
)
def test_a_template_of_which_nothing_grows_is_rendered(source: str) -> None:
    plain = ImmutableSandboxedEnvironment()
    plain.filters["tojson"] = json.dumps
    assert rendered(source) == plain.from_string(source).render(big=BIG)


def test_a_long_conversation_has_room() -> None:
    """An honest template may add each message to the text so far."""
    source = (
        "{% set n = namespace(x='') %}{% for m in messages %}"
        "{% set n.x = n.x ~ '<' ~ m.role ~ '>' ~ m.content | trim %}{% endfor %}{{ n.x }}"
    )
    messages = [{"role": "user", "content": "x" * 1000}] * 1000
    text = render_chat(
        ModelTemplate(source),
        messages,
        add_generation_prompt=True,
        continue_final_message=False,
        chat_template=None,
        tools=None,
        template_kwargs={},
    )
    assert len(text) == 1006 * 1000


def test_what_a_value_has_twice_counts_twice_and_a_list_in_itself_once() -> None:
    value: list[object] = ["x"]
    for _ in range(60):
        value = [value, value]
    assert written_chars(value) > 2**60
    endless: list[object] = []
    endless.append(endless)
    assert written_chars(endless) < 1000


def test_a_room_is_one_renderings() -> None:
    with within_memory(ROOM), within_memory(2 * ROOM):
        pass
    assert rendered("{{ big }}") == BIG
