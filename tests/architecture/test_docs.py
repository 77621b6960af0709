"""Links between the documents lead somewhere, and what they tell to type is accepted."""

from __future__ import annotations

import json
import re
from pathlib import Path

import families
import pytest

from outrider.checkpoints.spec import FAMILIES
from outrider.config import SpeculativeOptions

ROOT = Path(__file__).parents[2]
FOLDERS = ("", "docs/", "benchmarks/", "recipes/**/")
PAGES = [page for folder in FOLDERS for page in ROOT.glob(f"{folder}*.md")]
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, by GitHub's rule."""
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text())
    titles = re.findall(r"(?m)^#+ (.+)$", text)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        if link.startswith(("http:", "https:", "mailto:")):
            continue
        name, _, heading = link.partition("#")
        where = page.parent / name if name else page
        assert where.exists(), link
        assert not heading or heading in anchors(where), link


def test_published_names_lead_to_keys_that_exist() -> None:
    """Every whole speculative_config of the table; one that names no method has a draft model."""
    table = (ROOT / "docs" / "methods.md").read_text().split("## Published names")[1].split("\n## ")[0]
    configs = re.findall(r"`(\{.*?\})`", table)
    assert len(configs) > 15
    for config in map(json.loads, configs):
        SpeculativeOptions.of({"method": "draft_model", **config})


def test_numbers_of_families_are_those_of_the_code_and_of_the_tests() -> None:
    readme, models = (ROOT / "README.md").read_text(), (ROOT / "docs" / "models.md").read_text()
    found = re.search(r"(\d+) lean families, (\d+) variants", readme)
    assert found and found.groups() == (str(len(FAMILIES)), str(len(families.FAMILIES)))
    assert re.findall(r"the tests hold (\d+) variants", models) == [str(len(families.FAMILIES))]
