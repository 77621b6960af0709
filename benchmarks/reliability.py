"""Reliability diagram: predicted and observed acceptance of draft tokens, by bins and by the control module.

    python benchmarks/reliability.py --out docs/img/reliability.svg [--json OUT] [MODEL]

Everything that the drafters propose is judged, whether it would pay or not, greedy and at temperature 0.8.
Nodes whose parent was accepted count, by tenths of their predicted probability.  Bins begin with nothing and
learn as they go; the module is the built-in one.  It was fitted to none of these prompts: the demo's, and
code and German of questions.jsonl.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from command_line import parser_of, write

from outrider import LLM, SamplingParams
from outrider.bench.conditions import conditions
from outrider.bench.plot import BLUE, GREY, RED, check_plot, row_of_panels, save
from outrider.bench.prompts import PROMPTS, TASKS, rendered
from outrider.bench.questions import prompts_of, read
from outrider.control.acceptance import Reliability
from outrider.control.module import DEFAULT, Module, load, method_name, sources
from outrider.tune.control import Answered, configs, record

FEWEST = 10  # observations of a point that is drawn
Judged = tuple[float, float, bool]  # probability by bins and by the module, whether it was accepted


class Point(NamedTuple):
    """A probability as predicted, and as observed so many times."""

    predicted: float
    observed: float
    observations: int

    @property
    def spread(self) -> float:
        """Half a 95 % interval of `observed`."""
        return float(
            1.96 * (self.observed * (1 - self.observed) / self.observations + self.observations**-2) ** 0.5
        )


def judged(answer: Answered, module: Module) -> list[Judged]:
    """The nodes of an answer that the module has an opinion of."""
    found = []
    names = [method_name(answer.names, source) for source in sources(len(answer.names))]
    for node in answer.nodes:
        if (name := names[node.request.method]) in module.network.methods:
            request = node.request._replace(method=module.network.methods.index(name))
            odds = node.probability * module.table(request)[node.place]
            found.append((node.probability, odds / (1 - node.probability + odds), node.accepted))
    return found


def log_loss(nodes: Sequence[Judged], which: int) -> float:
    return -sum(math.log(node[which] if node[2] else 1 - node[which]) for node in nodes)


def compared(answers: Sequence[Answered], module: Module) -> dict[str, Any]:
    """Mean log losses in nats, the module's lead with its standard error over prompts, and both diagrams."""
    by_prompt: dict[int, list[Judged]] = {}
    for answer in answers:
        by_prompt.setdefault(answer.prompt, []).extend(judged(answer, module))
    nodes = [node for group in by_prompt.values() for node in group]
    leads = [log_loss(group, 0) - log_loss(group, 1) for group in by_prompt.values()]
    made: dict[str, Any] = {
        "nodes": len(nodes),
        "lead of the module, nats": sum(leads) / len(nodes),
        "standard error": float(np.std(leads, ddof=1)) * len(leads) ** 0.5 / len(nodes),
    }
    for which, name in enumerate(("calibrated bins", "control module")):
        table = Reliability()
        for node in nodes:
            table.add(node[which], node[2])
        made[name] = {"log loss, nats": log_loss(nodes, which) / len(nodes), "points": table.table()}
    return made


def panel(found: dict[str, Any]) -> dict[str, Any]:
    """Legend -> points."""
    return {
        f"{name}, {part['log loss, nats']:.3f} nats": [Point(*point) for point in part["points"]]
        for name, part in found.items()
        if isinstance(part, dict)
    }


def draw(panels: Mapping[str, Mapping[str, Sequence[Point]]], title: str, out: Path) -> None:
    """Predicted (x) against observed probability (y) with 95 % intervals, a panel for each drafter.

    panels: drafter -> predictor -> points, of which those with few observations are left out.  The bars below
    are the numbers of observations of the first predictor.
    """
    figure, row = row_of_panels(len(panels), (0.6 + 2.7 * len(panels), 3.5))
    for axes, (drafter, predictors) in zip(row, panels.items()):
        axes.plot([0, 1], [0, 1], color=GREY, linewidth=0.8)
        for i, (name, points) in enumerate(predictors.items()):
            known = [point for point in points if point.observations >= FEWEST]
            if not known:
                continue
            x, colour = [point.predicted for point in known], (BLUE, RED)[i]
            y, spread = [point.observed for point in known], [point.spread for point in known]
            axes.errorbar(x, y, spread, fmt="os"[i], color=colour, markersize=4, label=name)
            if i == 0:
                most = max(point.observations for point in known)
                axes.bar(x, [0.2 * point.observations / most for point in known], 0.06, color="#d4dde4")
        axes.set_title(drafter, fontsize=9)
        axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="predicted probability", aspect="equal")
        axes.legend(frameon=False, fontsize=7, loc="upper left")
    row[0].set_ylabel("share accepted")
    save(figure, title, out)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("model", nargs="?", default="builtin")
    parser.add_argument("--draft", default="builtin-draft")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=64)
    given = parser.parse_args()
    check_plot(given.out)
    params = [SamplingParams(temperature=t, max_tokens=given.tokens, seed=1) for t in (0.0, 0.8)]
    llm = LLM(given.model, speculative_config=None, max_num_seqs=1)
    own = [(prompt.kind, rendered(prompt, llm.tokenizer)) for prompt in (*PROMPTS, *TASKS)]
    more, _ = prompts_of(llm, read(Path(__file__).with_name("questions.jsonl")), params[0])
    network, found = load(DEFAULT), {}
    for config in configs([given.draft]):
        answers = record(llm, config, [*own, *more], params, lambda kind: None)
        if not answers:
            raise SystemExit(f"Too few draft tokens of {config} were judged: give more --tokens.")
        name = " and ".join(answers[0].names)
        found[name] = compared(answers, Module(network, answers[0].names, trusted=True))
        figure = {key: value for key, value in found[name].items() if not isinstance(value, dict)}
        print(name, json.dumps(figure), flush=True)
    title = f"acceptance of draft tokens, {given.model}, {len(own) + len(more)} prompts"
    panels = {f"{name}, {part['nodes']} tokens": panel(part) for name, part in found.items()}
    draw(panels, title, given.out)
    write(given.json, {"conditions": conditions(), "drafters": found})


if __name__ == "__main__":
    main()
