import pytest

from qkv.errors import TokenizerError
from qkv.text.sandbox import Template


def render(source, seconds=5.0, **variables):
    return Template(source, seconds)(variables)


def test_blocks_take_their_own_line_and_the_loop_controls_work():
    source = "{% for x in xs %}\n  {% if x == 2 %}{% continue %}{% endif %}\n{{ x }}\n{% endfor %}\n."
    assert render(source, xs=[1, 2, 3]) == "1\n3\n."
    assert (
        render("{% for x in xs %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}", xs=[1, 2]) == "1"
    )


def test_json_is_written_as_models_were_trained():
    value = {"b": "<é'", "a": [1, None]}
    assert render("{{ v | tojson }}", v=value) == '{"b": "<é\'", "a": [1, null]}'
    assert render("{{ v | tojson(indent=1) }}", v=[1]) == "[\n 1\n]"


def test_what_templates_commonly_use_works():
    assert (
        render(
            "{% set ns = namespace(n=0) %}{% for x in xs %}{% set ns.n = ns.n + x %}{% endfor %}{{ ns.n }}",
            xs=[1, 2],
        )
        == "3"
    )
    assert render("{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f(1) ~ f('a') }}") == "[1][a]"
    assert render("{% generation %}{{ x }}{% endgeneration %}", x=1) == "1"
    assert render("{{ dict(a=1).items() | list }}{{ 'a b'.split() | join('-') }}") == "[('a', 1)]a-b"
    assert (
        render("{{ 'x' * 3 + '%s' % 'y' }}{{ 'aXa' | replace('X', '-') }}{{ 'a\nb' | indent(2) }}")
        == "xxxya-aa\n  b"
    )
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("{{ missing }}{{ x.missing }}", x={}) == ""


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
        "{% for i in range(90000) %}{% for j in range(90000) %}{% set x = i %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for c in s %}{% for d in s %}{% for e in s %}{% endfor %}{% endfor %}{% endfor %}",
    ],
)
def test_work_without_end_is_stopped(source):
    with pytest.raises(TokenizerError, match="takes too long"):
        render(source, seconds=0.05, s="x" * 10000)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(90000) %}{{ s }}{% endfor %}",
        "{{ 'a' * 10000000000 }}",
        "{{ 10000000000 * 'a' }}",
        "{{ [0] * 10000000000 }}",
        "{{ 10 ** 10000000000 }}",
        "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='a') %}{% for i in range(60) %}"
        "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
        "{% set b = s * 1000 %}{{ b.replace('x', b) }}",
        "{% set b = s * 1000 %}{{ b | replace('x', b) }}",
        "{% set b = s * 1000 %}{{ b.join(b | list) }}",
        "{% set b = s * 1000 %}{{ b | list | join(b) }}",
    ],
)
def test_growth_without_end_is_stopped(source):
    with pytest.raises(TokenizerError, match="makes more than 16,777,216 characters"):
        render(source, s="x" * 1000)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a'.ljust(1000000000) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%.1000000000f' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 1000000000) }}",
        "{{ 'a\nb' | indent(1000000000) }}",
        "{{ [1] | tojson(indent=1000000000) }}",
    ],
)
def test_padding_without_end_is_stopped(source):
    with pytest.raises(TokenizerError, match=r"The chat template .* a width"):
        render(source)


def test_ordinary_formats_work():
    assert render("{{ 'In 2024: %d, %.2f' % (123456, 1) }}") == "In 2024: 123456, 1.00"
    assert render("{{ 'In 2024: {}, {:>3}'.format(123456, 1) }}") == "In 2024: 123456,   1"
    assert render("{{ s.find('b', 2000) }}", s="a" * 3000 + "b") == "3000"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__.json }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ namespace(__class__=1) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ xs.append(1) }}",
        "{% include 'x' %}",
        "{{ range(1000000000) }}",
        "{{ 'a' | center(1000) }}",
        "{% if %}",
        "{{ 1 / 0 }}",
        "{{ none + 1 }}",
        "{{ messages[0]['content'] + 'x' }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    ],
)
def test_whatever_else_a_template_does_wrong_is_one_sentence(source):
    with pytest.raises(TokenizerError, match="The chat template"):
        render(source, xs=[], messages=[{"role": "user"}])
