"""The log keeps the order that it promises."""

from __future__ import annotations

import re
from pathlib import Path

LOG = (Path(__file__).parents[2] / "docs" / "log.md").read_text()


def test_the_log_is_newest_first_and_its_index_is_complete() -> None:
    entries = re.findall(r"(?m)^## (\d{4}-\d\d-\d\d): (.+)$", LOG)
    days = [day for day, _ in entries]
    assert days == sorted(days, reverse=True)
    index = re.findall(r"(?m)^- \[(.+)\]\(#(\S+)\)$", LOG)
    anchors = [re.sub(r"[^\w\- ]", "", f"{day} {title}".lower()).replace(" ", "-") for day, title in entries]
    assert index == [(title, anchor) for (_, title), anchor in zip(entries, anchors, strict=True)]
