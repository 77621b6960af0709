"""Methods and other engines on Spec-Bench's questions, code and German: batch 1, greedy and at T = 0.8.

    python benchmarks/spec_bench.py --questions question.jsonl --json OUT
        [--methods LABEL …] [--models MODEL …] [--heads DIR]
        [--peer llama.cpp=DIR/target-bf16.gguf,DIR/draft-bf16.gguf] [--peer transformers=DIR/target,DIR/draft]
    python benchmarks/spec_figures.py OUT [--plot OUT.svg]               # tables in Markdown, and a picture

question.jsonl is Spec-Bench's: its six tasks; code and German come from questions.jsonl here.  The grown
target (builtin-100m) computes what the built-in one does, at the cost of 101 M weights.  grow.py writes the
grown pair for other engines; `outrider bench` says how these are found (docs/command-line.md).

- All methods and engines take turns, question by question, and get the same token ids.  What one of our
  methods learns from a question it may use in the next.
- Questions are first turns, cut in the middle until they and the answer fit into the 512 tokens that the
  built-in pair was trained on.
- A request *loops* if 30 % or more of the 4-grams of the plain answer occurred before in it.  Loops favour
  every method that copies, so the headline leaves these requests out for all methods.
- Methods that skip layers are left out on a grown target: its added layers change nothing.
- `--heads DIR`: with a folder a head, and `draft_model`, of another target (recipes/builtin/gpu.py).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from command_line import parser_of, write
from rich.console import Console
from spec_figures import by_kind, figures, headline

from outrider import LLM, SamplingParams
from outrider.bench.conditions import conditions
from outrider.bench.measure import PLAIN, Measured, Prompts, demonstrations
from outrider.bench.peers import Rival, running
from outrider.bench.questions import CHAT, Question, read
from outrider.bench.report import counted
from outrider.bench.rounds import Rounds, measure
from outrider.engine.chat_template import render
from outrider.errors import OutriderError

SETTINGS = {"greedy": {"temperature": 0.0}, "T = 0.8": {"temperature": 0.8, "top_p": 0.95}}
GROUPS = {
    "translation": "translation", "summarization": "summary", "qa": "question", "math_reasoning": "math",
    "rag": "retrieval", "code": "code", "German": "German",
}  # fmt: skip
SKIPPING = {"layerskip"}  # methods that leave layers of the target out
SMALL = "builtin"
MORE: dict[str, dict[str, Any]] = {
    "draft model, 4": {"model": "builtin-draft", "num_speculative_tokens": 4},
    "draft model, 4, int8": {"model": "builtin-draft", "num_speculative_tokens": 4, "quantization": "int8"},
    "draft model, tree 4 × 2": {"model": "builtin-draft", "num_speculative_tokens": 4, "siblings": 2},
    "EAGLE, tree": {"model": "builtin-eagle"},
    "EAGLE-3, tree": {"model": "builtin-eagle3"},
    "Hydra, tree": {"model": "builtin-hydra"},
    "Medusa, tree": {"model": "builtin-medusa"},
}


# ---- the requests


def chosen(questions: Iterable[Question], count: int) -> dict[str, list[Question]]:
    """`count` of each group, spread evenly, so that every category of MT-bench has its share."""
    groups: dict[str, list[Question]] = {}
    for question in questions:
        groups.setdefault(GROUPS.get(question.category, CHAT), []).append(question)
    return {
        kind: [all_of[i * len(all_of) // count] for i in range(count)]
        for kind, all_of in groups.items()
        if len(all_of) >= count
    }


def fitted(text: str, tokenizer: Any, room: int) -> list[int]:
    """The ids of a conversation with this turn, as many words of its middle left out as are too many."""
    words, low, high = text.split(" "), 1, len(text.split(" "))

    def ids(keep: int) -> list[int]:
        kept = words if keep == len(words) else [*words[: (keep + 1) // 2], *words[len(words) - keep // 2 :]]
        found: list[int] = render(tokenizer, {"messages": [{"role": "user", "content": " ".join(kept)}]})[
            "prompt_token_ids"
        ]
        return found

    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if len(ids(middle)) <= room else (low, middle - 1)
    return ids(low)


def requests(files: Iterable[Path], count: int, tokenizer: Any, room: int) -> Prompts:
    groups = chosen([question for file in files for question in read(file)], count)
    return [
        (kind, {"prompt_token_ids": fitted(question.turns[0], tokenizer, room)})
        for kind, group in groups.items()
        for question in group
    ]


# ---- the methods


def of_family(config: Mapping[str, Any] | None, heads: Path) -> Mapping[str, Any] | None:
    """With a draft model and heads of `heads` instead of the shipped ones."""
    if not config or ("model" not in config and config.get("method") != "draft_model"):
        return config
    name = config.get("model", "builtin-draft").removeprefix("builtin-")
    return {**config, "model": str(heads / ("draft_model" if name == "draft" else name))}


def configs(
    model: str, only: list[str] | None, heads: Path | None = None
) -> dict[str, Mapping[str, Any] | None]:
    """Plain decoding, the `demo` of every method, and larger drafts.  only: their labels."""
    every: dict[str, Mapping[str, Any] | None] = {**demonstrations(), **MORE}
    if heads:
        every = {label: of_family(config, heads) for label, config in every.items()}
    if unknown := set(only or ()) - every.keys():
        raise SystemExit(f"--methods: no {sorted(unknown)}; there are {', '.join(every)}.")
    return {
        label: config
        for label, config in every.items()
        if (not only or label in {PLAIN, *only})
        and (model == SMALL or not config or config.get("method") not in SKIPPING)
    }


def possible(llm: LLM, shown: Mapping[str, Any], console: Console) -> dict[str, Any]:
    """Those that run with this target; the others are named."""
    found = {}
    for label, config in shown.items():
        try:
            llm.variant(config)
            found[label] = config
        except OutriderError as error:
            console.print(f"[yellow]{label} does not run: {error}[/]")
    return found


def decode_seconds(model: str) -> float:
    """Median seconds of one plain decoding step."""
    llm = LLM(model=model, speculative_config=None)
    params, times = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True), []
    for _ in range(5):
        llm.engine.reset()
        llm.generate({"prompt_token_ids": list(range(100, 164))}, params)
        times.append(llm.engine.times.forward / llm.engine.steps)
    return statistics.median(times)


# ---- the run


def answers(
    llm: LLM,
    shown: Mapping[str, Any],
    asked: Prompts,
    setting: str,
    given: argparse.Namespace,
    console: Console,
) -> list[Measured]:
    """Every method and every mode of the other engines over all requests."""
    params = SamplingParams(max_tokens=given.tokens, seed=7, **SETTINGS[setting])
    rivals = [Rival.parse(text, given.models[0], None) for text in given.peer]
    with (
        running(rivals, llm, params, 4, given.peer_timeout) as others,
        counted(setting, (len(shown) + len(others)) * len(asked), console) as tick,
    ):
        return measure(llm, shown, asked, params, Rounds(runs=given.runs), tick, others)


def run(given: argparse.Namespace, console: Console, save: Callable[[dict[str, Any]], None]) -> None:
    found: dict[str, Any] = {}
    for model in given.models:
        llm = LLM(model=model, max_num_seqs=1, max_model_len=given.context, speculative_config=None)
        shown = possible(llm, configs(model, given.methods, given.heads), console)
        asked = requests(
            [given.questions, *given.own], given.per_category, llm.tokenizer, given.context - given.tokens
        )
        draft = str(given.heads / "draft_model") if given.heads else "builtin-draft"
        ratio = decode_seconds(draft) / decode_seconds(model)
        part = found[model] = {"draft forward / target forward": round(ratio, 4)}
        for setting in given.settings:
            began = time.perf_counter()
            part[setting] = figures(answers(llm, shown, asked, setting, given, console))
            title = f"{model}, {setting}, draft forward / target forward {ratio:.3f}"
            headline(title, part[setting], console)
            by_kind(title, part[setting], console)
            console.print(f"[dim]{time.perf_counter() - began:.0f} s[/]")
            save(found)


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--questions", type=Path, required=True)
    parser.add_argument("--own", type=Path, nargs="*", default=[Path(__file__).parent / "questions.jsonl"])
    parser.add_argument("--models", nargs="+", default=["builtin-100m"])
    parser.add_argument("--methods", nargs="+", help="labels (default: all)")
    parser.add_argument("--heads", type=Path, help="folder of a draft model and heads of another target")
    parser.add_argument(
        "--peer", action="append", default=[], help="NAME=TARGET,DRAFT, as in `outrider bench`"
    )
    parser.add_argument("--peer-timeout", type=float, default=600.0, help="seconds to load, and an answer")
    parser.add_argument("--per-category", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--context", type=int, default=512, help="prompt and answer together")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--runs", type=int, default=1, help="of every method for a question; the best counts")
    given = parser.parse_args()
    if given.tokens < 2:
        parser.error("--tokens must be at least 2: the first one comes with the prompt.")
    if given.peer and len(given.models) > 1:
        parser.error("--peer compares with one model: give one in --models.")
    return given


if __name__ == "__main__":
    asked_for, start = arguments(), time.perf_counter()

    def keep(found: dict[str, Any]) -> None:
        """After each part, so that a run that is stopped leaves what it has."""
        made = {"conditions": conditions(), "seconds": round(time.perf_counter() - start), "models": found}
        write(asked_for.json, made)

    screen = Console(width=180)
    run(asked_for, screen, keep)
    screen.print(f"[dim]{time.perf_counter() - start:.0f} s in all[/]")
