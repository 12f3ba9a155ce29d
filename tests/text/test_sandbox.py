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


NESTED = (
    "{% set ns = namespace(x=[0], y=(0,)) %}"
    "{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% set ns.y = (ns.y, ns.y) %}{% endfor %}"
)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 10 ** 10000000000 }}",
        "{% set a = 7 ** 5000000 %}{% set b = 3 ** 5000000 %}{{ 1 if a // b else 0 }}",
        "{{ 1 | round(20000000, 'ceil') }}",
        "{{ '1' | round(20, 'ceil') }}",
        "{{ 0x" + "f" * 20 + " }}",
        "{{ ('f' * 20) | int(0, 16) }}",
        "{% set ns = namespace(n=3) %}{% for i in range(90) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    ],
)
def test_numbers_without_end_are_refused(source):
    """Also where the compiler would work them out by itself."""
    with pytest.raises(TokenizerError, match=r"more than 64 bits|rounds what is no number"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% set x = [[0] * 1000000] * 300 %}{{ x | sum(start=[]) | length }}",
        "{{ (('a' * 16000000) | list | map('string') | list) | length }}",
        "{% set ns = namespace(x=[]) %}{% for i in range(1000) %}"
        "{% set ns.x = ns.x + ['a' * 10000000 ~ i] %}{% endfor %}",
        "{{ ('a ' * 8000000).split() | length }}",
        "{{ ('{0}' * 100000).format('a' * 1000000) }}",
        "{{ ('%(a)s' * 100000) % {'a': 'a' * 1000000} }}",
        "{% for c in 'a' * 16000000 %}{% endfor %}",
        "{{ [[1, 2] * 500000] | tojson(indent=900) }}",
        NESTED + "{{ ns.x }}",
        NESTED + "{{ ns.x | tojson }}",
        NESTED + "{{ '%s' % ns.x }}",
        NESTED + "{{ ns.x == [ns.x] }}",
        NESTED + "{{ {ns.y: 1} }}",
        NESTED + "{{ {}[ns.y] }}",
        NESTED + "{{ [1] | map(ns.y) | list }}",
        NESTED + "{{ raise_exception(ns.x) }}",
        NESTED + "{{ {'x': ns.x}.items() }}",
    ],
)
def test_all_that_one_rendering_makes_is_bounded(source):
    """Inside one expression too, where no loop could look at the time."""
    with pytest.raises(TokenizerError, match=r"makes more than 268,435,456 bytes|takes too long"):
        render(source)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ 'a' | urlencode }}", "No filter named 'urlencode'"),
        ("{{ 'a' is escaped }}", "No test named 'escaped'"),
        ("{{ 'a'.translate({97: 98}) }}", r"calls \.translate\(\), which none may here"),
        ("{{ dict.fromkeys([1]) }}", "calls what is no function for templates"),
        ("{% include 'x' %}", "uses include, which none may here"),
        ("{% autoescape true %}{{ 1 }}{% endautoescape %}", "uses scopedevalcontextmodifier"),
        ("{{ '%1000000000d' is odd }}", "tests whether what is no number is odd"),
        ("{{ '%c' % 55296 }}", "formats with %c"),
        ("{{ '{:c}'.format(55296) }}", "formats with a conversion"),
        ("{{ '\\ud800' }}", "lone surrogate"),
        ("{{ namespace(a=1) }}", "prints a _Namespace, which is no text"),
        ("x" * 70_000, "has 70,000 characters; 65,536 are the most"),
    ],
)
def test_what_is_not_listed_is_refused(source, message):
    with pytest.raises(TokenizerError, match=message):
        render(source)


def test_brackets_without_end_cost_nothing():
    assert render("[:" * 30_000) == "[:" * 30_000


def test_a_long_conversation_is_no_reason_to_stop():
    source = "{% for m in xs %}{{ '<' + m.role + '>' + m.content | trim + '</>' }}{% endfor %}"
    xs = [{"role": "user", "content": " wörld" * 1000}] * 500
    assert len(render(source, xs=xs)) == 500 * (5999 + 9)
