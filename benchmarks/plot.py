"""Bar chart of decode tokens/s by engine and method, from a result of spec_bench.py.

python benchmarks/plot.py benchmarks/results/2026-11-21-spec-bench.json docs/img/spec-bench.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from outrider.bench.plot import pyplot, save

Rates = dict[str, float | None]  # engine -> decode tokens/s
ENGINES = ("Outrider", "llama.cpp", "OpenVINO GenAI", "vLLM", "transformers")
OURS = {"plain": "plain decoding", "draft model": "draft model, 3", "n-gram": "n-gram look-up"}
COLORS = {"plain": "#b8c4ce", "n-gram": "#5b8db8", "draft model": "#1f4e79"}


def rates(rows: dict[str, Any], kind: str) -> Rates:
    """Over the requests that do not loop; None where an engine has no such run."""
    suffix = "" if kind == "plain" else f", {kind}"
    names = {engine: OURS[kind] if engine == "Outrider" else f"{engine}{suffix}" for engine in ENGINES}
    return {
        engine: rows.get(name, {}).get("no loops", {}).get("decode tokens/s")
        for engine, name in names.items()
    }


def draw(rows: dict[str, Any], title: str, out: Path) -> None:
    figure, axes = pyplot().subplots(figsize=(7.2, 3.4), layout="constrained")
    height = 0.26
    for place, (kind, color) in enumerate(COLORS.items()):
        values = rates(rows, kind)
        at = [i + (place - 1) * height for i in range(len(ENGINES))]
        axes.barh(at, [values[engine] or 0 for engine in ENGINES], height, color=color, label=kind)
        for y, engine in zip(at, ENGINES):
            if (value := values[engine]) is not None:
                axes.text(value + 1, y, f"{value:.0f}", va="center", fontsize=8)
    axes.set_yticks(range(len(ENGINES)), ENGINES)
    axes.invert_yaxis()
    axes.set_xlabel("decode tokens/s")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    save(figure, title, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--setting", choices=("greedy", "sampled"), default="sampled")
    given = parser.parse_args()
    result = json.loads(given.result.read_text())
    sampling = "T = 0.8" if given.setting == "sampled" else "greedy"
    title = f"101 M target, {sampling}, 2 cores ({result['conditions']['date']})"
    draw(result[f"{given.setting}, peers"], title, given.out)


if __name__ == "__main__":
    main()
