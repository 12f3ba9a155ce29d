"""Inspection as people see it: the eight steps, the comparison, the pictures, and how fast it starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import qkv
from qkv.errors import QkvError, SourceError
from qkv.inspection import diagram, page
from qkv.inspection.folding import folded
from qkv.inspection.pictures import masks
from qkv.inspection.steps import stacks
from tests.spec import descriptions as of


def config(shared_folder: Path, name: str) -> Path:
    return shared_folder / "configs" / f"{name}_config.json"


def test_llama_3_1_8b_reads_as_people_know_it(shared_folder: Path) -> None:
    found = qkv.inspect(config(shared_folder, "meta-llama--Meta-Llama-3.1-8B"))
    lines = {step.title: step.lines for step in found.steps}
    assert list(lines) == [
        "Tokens", "Size", "Attention", "Positions", "Block", "Visibility", "Head", "Serving",
    ]  # fmt: skip
    assert "8,030,261,248 parameters, 16.1 GB in bfloat16" in found.title
    assert lines["Tokens"][0] == "128,256 entries, each a vector of 4,096"
    assert lines["Size"][0] == "32 layers, width 4,096"
    assert lines["Attention"] == ("32 query heads share 8 key/value heads (GQA 4:1), head size 128",)
    assert lines["Positions"][0] == (
        "rotary, theta 500,000, Llama-3 scaling x8; 29 of 64 pairs unchanged, "
        "29 slowed by a factor of 8, 6 in between"
    )
    assert lines["Block"][-1] == "gated SiLU feed-forward of 14,336"
    assert lines["Visibility"] == ("every token sees itself and all before it",)
    assert lines["Head"] == ("next token, own output matrix",)
    assert lines["Serving"] == (
        "131,072 bytes of cache a token in 16 bits: 16.00 GiB at 131,072 tokens",
        "splits over up to 8 devices without copying keys and values",
    )


def test_figures_name_the_keys_they_come_from(shared_folder: Path) -> None:
    data = qkv.inspect(config(shared_folder, "meta-llama--Meta-Llama-3.1-8B")).data()
    evidence = {step["title"]: step["evidence"] for step in data["steps"]}
    assert evidence["Attention"]["num_key_value_heads"] == 8
    assert evidence["Positions"]["rope_scaling.factor"] == 8.0
    assert evidence["Block"]["intermediate_size"] == 14_336
    assert data["cache_bytes_at_context"] == 131_072**2
    json.dumps(data)


def test_every_published_configuration_is_read_or_its_unknown_parts_are_listed(shared_folder: Path) -> None:
    files = sorted((shared_folder / "configs").glob("*_config.json"))
    assert len(files) >= 22
    for file in files:
        found = qkv.inspect(file)
        assert found.model is not None, file.name
        str(found), json.dumps(found.data()), page(found)


def test_the_packaged_model_is_inspected_without_its_weights(smollm2_file: Path) -> None:
    found = qkv.inspect("smollm2")
    assert found.model is not None and found.model.parameters() == 134_515_008
    assert found.context == 8192
    assert "9 query heads share 3 key/value heads (GQA 3:1), head size 64" in str(found)


def test_inspecting_imports_no_torch(shared_folder: Path) -> None:
    code = "import sys, qkv; print(qkv.inspect(sys.argv[1])); sys.exit('torch' in sys.modules)"
    path = config(shared_folder, "meta-llama--Meta-Llama-3.1-8B")
    assert subprocess.run([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE).returncode == 0


def test_a_missing_source_is_one_sentence() -> None:
    with pytest.raises(SourceError, match="is not here"):
        qkv.inspect("no-such-model")
    with pytest.raises(QkvError):
        qkv.inspect(5)  # type: ignore[arg-type]


def test_comparing_shows_only_what_differs_and_what_follows(shared_folder: Path) -> None:
    found = qkv.compare(
        config(shared_folder, "meta-llama--Meta-Llama-3.1-8B"),
        config(shared_folder, "meta-llama--Meta-Llama-3.1-70B"),
    )
    titles = [change.title for change in found.changes]
    assert "Attention" in titles and "Visibility" not in titles and "Head" not in titles
    figures = {c.what: (c.left, c.right) for c in found.consequences}
    assert figures["parameters"] == (8_030_261_248, 70_553_706_496)
    assert figures["cache bytes of 1,024 tokens"] == (1024 * 131_072, 1024 * 327_680)
    assert "decoder.layers" in " ".join(found.data()["description"])


def test_a_model_compared_with_itself_does_not_differ(shared_folder: Path) -> None:
    path = config(shared_folder, "openai--gpt-oss-20b")
    found = qkv.compare(path, path)
    assert found.changes == () and found.consequences == ()
    assert "The two are described alike." in str(found)


@pytest.mark.parametrize("name", of.ALL)
def test_every_description_draws_itself(name: str) -> None:
    """Well-formed, one frame for each distinct layer, nothing outside the sheet."""
    model = of.ALL[name]()
    root = ElementTree.fromstring(diagram(model, name))
    width, height = (float(root.attrib[side]) for side in ("width", "height"))
    ns = "{http://www.w3.org/2000/svg}"
    frames = [r for r in root.iter(f"{ns}rect") if r.attrib.get("class") == "fold"]
    assert len(frames) == sum(len(folded(stack).runs) for _, stack in stacks(model))
    for box in root.iter(f"{ns}rect"):
        right = float(box.attrib.get("x", 0)) + float(box.attrib["width"])
        bottom = float(box.attrib.get("y", 0)) + float(box.attrib["height"])
        assert right <= width and bottom <= height
    for words in root.iter(f"{ns}text"):
        assert 0 <= float(words.attrib["y"]) <= height


def test_a_picture_for_each_kind_of_layer(shared_folder: Path) -> None:
    found = qkv.inspect(config(shared_folder, "openai--gpt-oss-20b"))
    assert found.model is not None
    pictures = masks(found.model)
    assert [words for _, words, _ in pictures] == [
        "every token sees itself and the 127 before it",
        "every token sees itself and all before it",
    ]
    for _, _, picture in pictures:
        assert picture.count('class="seen"') > 0
        ElementTree.fromstring(picture)


def test_the_page_needs_nothing_but_itself(shared_folder: Path) -> None:
    text = page(qkv.inspect(config(shared_folder, "deepseek-ai--DeepSeek-V3")))
    assert text.startswith("<!doctype html>") and "<svg" in text
    for reference in ("src=", "href=", "@import", "url("):
        assert reference not in text
