"""Reliability diagram of the adaptive controller: predicted against observed acceptance of draft tokens.

    python benchmarks/reliability.py --out docs/img/reliability.svg [--json OUT] [MODEL]

Nodes whose parent was accepted, by tenths of their predicted probability, over the demo's prompts, greedy
and at temperature 0.8.  The area of a point is the number of nodes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from outrider import LLM, SamplingParams
from outrider.bench.conditions import conditions
from outrider.bench.plot import check_plot, reliability
from outrider.bench.prompts import PROMPTS, TASKS, rendered

DRAFTERS = {
    "suffix": {"method": "suffix", "adaptive": True},
    "draft model": {"model": "builtin-draft", "adaptive": True},
    "both": {"method": "auto", "model": "builtin-draft"},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="builtin")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    check_plot(given.out)
    found: dict[str, list[tuple[float, float, int]]] = {}
    llm = LLM(given.model, speculative_config=None)
    for label, config in DRAFTERS.items():
        llm.use(config)
        asked = [rendered(prompt, llm.get_tokenizer()) for prompt in (*PROMPTS, *TASKS)]
        for temperature in (0.0, 0.8):
            params = SamplingParams(temperature=temperature, max_tokens=given.tokens, seed=1)
            for prompt in asked:
                llm.generate([prompt], params)
        found[label] = llm.engine.report()["reliability"]
    reliability(found, f"acceptance of draft tokens, {given.model}", given.out)
    if given.json:
        given.json.write_text(json.dumps({"conditions": conditions(), "points": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
