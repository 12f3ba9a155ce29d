"""Every page that a command writes, opened in a browser: nothing is cut, nothing fails, all can be read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from qkv.cli import app
from tests.browser import Browser, Page, browser as started, executable
from tests.engine.tiny import save_llama

pytestmark = pytest.mark.slow

PROMPT = "The cat did not cross the street because it was too"
COMMANDS = {
    "explain": ["explain", "MODEL", PROMPT],
    "plan": ["plan", "MODEL", "-c", "640", "-n", "4", "--device", "h100", "--train", "2"],
    "context": ["context", "MODEL", "--texts", "2", "--times", "1", "--extend", "all", "--search", "4"],
    "ways": ["context", "MODEL", "--budget", "256", "--length", "600", "--times", "1", "--weighing"],
    "inspect": ["inspect", "MODEL"],
    "compare": ["compare", "MODEL", "OTHER"],
}
WIDTHS = (390, 1440)

# what is wider than its room, in the page and in its pictures, by the words in it
CUT = """[...document.querySelectorAll('main *')].filter(e => {
  const svg = e.closest('svg');
  if (svg === e || svg && e.tagName !== 'text') return false;
  if (!svg) return getComputedStyle(e).display !== 'inline' && e.scrollWidth > e.clientWidth + 1;
  const a = e.getBoundingClientRect(), b = svg.getBoundingClientRect();
  return a.left < b.left - 1 || a.right > b.right + 1 || a.top < b.top - 1 || a.bottom > b.bottom + 1;
}).map(e => e.textContent.slice(0, 60))"""

# the least contrast of text with what lies behind it (WCAG 2.2, relative luminance), and the words
CONTRAST = """(() => {
  const parsed = c => { const v = c.match(/[\\d.]+/g).map(Number); return [v[0], v[1], v[2], v[3] ?? 1] };
  const over = (a, b) => [0, 1, 2].map(i => a[i] * a[3] + b[i] * (1 - a[3])).concat(1);
  const light = c => [.2126, .7152, .0722].reduce((sum, w, i) => {
    const v = c[i] / 255; return sum + w * (v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4) }, 0);
  const behind = e => {
    const sheet = e.closest('svg')?.querySelector('.page');
    if (sheet) return parsed(getComputedStyle(sheet).fill);
    const layers = [];
    for (let at = e; at; at = at.parentElement) layers.push(parsed(getComputedStyle(at).backgroundColor));
    return layers.reverse().reduce((below, layer) => over(layer, below), [255, 255, 255, 1]) };
  let worst = [99, ''];
  for (const e of document.querySelectorAll('main *')) {
    const own = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
    if (!own || /^(SCRIPT|STYLE|OPTION)$/i.test(e.tagName)) continue;
    const style = getComputedStyle(e), ink = parsed(e.tagName === 'text' ? style.fill : style.color);
    const [a, b] = [light(over(ink, behind(e))), light(behind(e))];
    const found = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    if (found < worst[0]) worst = [found, e.textContent.slice(0, 40)];
  }
  return worst })()"""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with started(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the page of each command, of small random models."""
    executable()  # without a browser no page is made
    folder = tmp_path_factory.mktemp("pages")
    save_llama(folder / "a model", max_position_embeddings=640)
    save_llama(folder / "another", max_position_embeddings=640, num_hidden_layers=3, rope_theta=5e5)
    sources = {"MODEL": str(folder / "a model"), "OTHER": str(folder / "another")}
    for name, words in COMMANDS.items():
        asked = [sources.get(word, word) for word in words]
        done = CliRunner().invoke(app, [*asked, "--html", str(folder / f"{name}.html")])
        assert done.exit_code == 0, f"{name}: {done.output} {done.exception}"
    return folder


def checked(page: Page, width: int) -> None:
    assert page.value("innerWidth") == width
    assert page.value("document.documentElement.scrollWidth") <= width
    assert page.value(CUT) == []
    assert page.complaints == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_page_fits_and_can_be_read(
    chromium: Browser, pages: Path, name: str, width: int, dark: bool
) -> None:
    page = chromium.open(pages / f"{name}.html", width, dark)
    checked(page, width)
    assert page.requested == [(pages / f"{name}.html").as_uri()]  # it needs nothing but itself
    contrast, words = page.value(CONTRAST)
    assert contrast >= 4.5, f"{words!r} has a contrast of {contrast:.2f}"
    red = int(page.value("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]"))
    assert red < 40 if dark else red > 240
    page.close()


def test_another_row_repaints_the_tokens(chromium: Browser, pages: Path) -> None:
    page = chromium.open(pages / "explain.html", 390)
    data = json.loads(page.value("document.getElementById('data').textContent"))
    names = list(data["rows"])
    assert page.value("[...document.getElementById('what').options].map(o => o.value)") == names
    assert names[0] == "measured effect" and painted(page) == expected(data, names[0])
    assert "".join(data["tokens"]) == page.value("document.getElementById('strip').textContent") == PROMPT
    other = names[-1]
    assert other.startswith("attention, layer 1 head") and expected(data, other) != expected(data, names[0])
    page.value(
        f"document.getElementById('what').value = {json.dumps(other)};"
        "document.getElementById('what').dispatchEvent(new Event('change'))"
    )
    assert painted(page) == expected(data, other)
    assert page.value("document.getElementById('note').textContent") == data["rows"][other]["meaning"]
    checked(page, 390)
    page.close()


def painted(page: Page) -> list[tuple[str, float]]:
    """Of each token: green, red or none, and how strong."""
    grounds = page.value(
        "[...document.getElementById('strip').children].map(s => "
        "getComputedStyle(s).backgroundColor.match(/[\\d.]+/g).map(Number))"
    )
    found = []
    for red, green, _, *rest in grounds:
        strength = rest[0] if rest else 1.0
        found.append(("green" if green > red else "red", round(strength, 2)) if strength else ("none", 0.0))
    return found


def expected(data: dict[str, Any], name: str) -> list[tuple[str, float]]:
    values = data["rows"][name]["values"]
    most = max(abs(value or 0) for value in values)
    found = []
    for value in values:
        strength = 0.0 if value is None else float(f"{abs(value) / most * 0.65 + 1e-12:.2f}")
        found.append(("green" if value > 0 else "red", strength) if strength else ("none", 0.0))
    return found


def test_what_is_wrong_with_a_page_is_found(chromium: Browser, tmp_path: Path) -> None:
    """The checks themselves: each finds what it is there for."""
    file = tmp_path / "wrong.html"
    file.write_text(
        "<!doctype html><main><p style='width:800px;color:#999;background:#fff'>grey and wide</p>"
        "<div style='width:50px;overflow:hidden;white-space:nowrap'>cut in the middle</div>"
        "<svg width='40' height='20'><text y='15'>longer than its picture</text></svg></main>"
        "<img src='missing.png'>"
        "<script>console.error('said');undefined.thrown</script>"
    )
    page = chromium.open(file, 390)
    assert page.value("document.documentElement.scrollWidth") > 390
    assert page.value(CUT) == ["cut in the middle", "longer than its picture"]
    contrast, words = page.value(CONTRAST)
    assert words == "grey and wide" and contrast == pytest.approx(2.85, abs=0.01)
    assert any("said" in each for each in page.complaints)
    assert any("thrown" in each for each in page.complaints)
    assert (tmp_path / "missing.png").as_uri() in page.requested
    page.close()
