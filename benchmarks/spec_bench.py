"""Speculation on a grown target: methods and other engines on Spec-Bench's questions and our own, batch 1.

    python benchmarks/grow.py --folder DIR
    python benchmarks/spec_bench.py --folder DIR --questions question.jsonl [--json OUT]

DIR holds target/ and draft/ as grow.py writes them; target-bf16.gguf, draft-bf16.gguf, target-ov/ and
draft-ov/ are the same for llama.cpp and OpenVINO.  question.jsonl is Spec-Bench's: its six categories, and
code and German from questions.jsonl here.

What is measured:

- Every engine gets the same token ids and stops at the same end token.
- tok/s counts new tokens over wall clock, prompt included; decode tok/s leaves the first step out.
- Questions are first turns, cut in the middle until they and the answer fit into the 512 tokens that the
  built-in pair was trained on.
- Our methods take turns category by category.  What one learns from a request it may use in the next.
- A request *loops* if 30 % or more of the 4-grams of the plain answer occurred before in it.  Loops favour
  every method that copies, so the headline leaves these requests out for all methods.
- A method that skips layers is not shown: the added layers of a grown target change nothing, so skipping
  them would always be right.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import peers
import rivals
from pair import decode_seconds
from rich.console import Console
from spec_figures import by_kind, figures, headline, part

from outrider import LLM, SamplingParams
from outrider.bench.conditions import conditions
from outrider.bench.measure import PLAIN, Measured, Run, demonstrations, once
from outrider.bench.questions import Question, read
from outrider.core.clock import Times
from outrider.core.row import Speculation
from outrider.engine.chat_template import render
from outrider.errors import OutriderError
from outrider.outputs import CompletionOutput

GREEDY = "greedy"
SETTINGS = {GREEDY: {"temperature": 0.0, "top_p": 1.0}, "sampled": {"temperature": 0.8, "top_p": 0.95}}
GROUPS = {
    "translation": "translation", "summarization": "summary", "qa": "question", "math_reasoning": "math",
    "rag": "retrieval",
    "code": "code", "German": "German",
}  # fmt: skip
CHAT = "multi-turn"  # what Spec-Bench makes of the categories of MT-bench
SKIPPING = {"layerskip"}  # methods that leave layers of the target out
DRAFT = "draft model"
CHAINS: dict[str, dict[str, Any]] = {
    **{f"{DRAFT}, {k}": {"num_speculative_tokens": k} for k in (3, 4, 5)},
    f"{DRAFT}, 4, int8": {"num_speculative_tokens": 4, "quantization": "int8"},
    f"{DRAFT}, tree 4 × 2": {"num_speculative_tokens": 4, "siblings": 2},
    f"{DRAFT}, 4, block rule": {"num_speculative_tokens": 4, "verification": "block"},
}
FILES = {"llama.cpp": ("target-bf16.gguf", "draft-bf16.gguf"), "OpenVINO GenAI": ("target-ov", "draft-ov")}


@dataclass(frozen=True)
class Asked:
    kind: str
    ids: list[int]


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


def requests(files: Iterable[Path], count: int, tokenizer: Any, room: int) -> list[Asked]:
    groups = chosen([question for file in files for question in read(file)], count)
    return [
        Asked(kind, fitted(question.turns[0], tokenizer, room))
        for kind, group in groups.items()
        for question in group
    ]


# ---- answers


def configs(draft: str, only: list[str] | None) -> dict[str, Mapping[str, Any] | None]:
    """Plain decoding, the `demo` of every method, and more settings of the draft model.

    only: keep labels that contain one of these words.
    """
    every = {
        **demonstrations(),
        **{label: {"method": "draft_model", "model": draft, **keys} for label, keys in CHAINS.items()},
    }
    honest = {
        label: config for label, config in every.items() if not config or config["method"] not in SKIPPING
    }
    return {
        label: config
        for label, config in honest.items()
        if label == PLAIN or not only or any(word in label for word in only)
    }


def ours(
    llm: LLM, asked: list[Asked], shown: Mapping[str, Any], params: SamplingParams, repeats: int
) -> tuple[list[Measured], dict[str, str]]:
    """Every method over all requests, and why some cannot run; the best of `repeats` answers each."""
    variants, refused = {}, {}
    for label, config in shown.items():
        try:
            variants[label] = llm.variant(config)
        except OutriderError as error:
            refused[label] = str(error)
    results = {
        label: Measured(label, promise=variant.engine.rule.promise) for label, variant in variants.items()
    }
    for kind in dict.fromkeys(request.kind for request in asked):
        for label, variant in variants.items():
            group = [{"prompt_token_ids": request.ids} for request in asked if request.kind == kind]
            memory = variant.engine.drafter.memory
            once(
                variant, kind, group[:1], replace(params, max_tokens=8), memory
            )  # another method ran before: its weights are in the processor's caches
            variant.engine.drafter.memory = memory
            for prompt in group:
                memory = variant.engine.drafter.memory
                runs = [once(variant, kind, [prompt], params, memory) for _ in range(repeats)]
                results[label].runs.append(min(runs, key=lambda run: run.seconds))
    for variant in variants.values():
        variant.engine.check()
    return list(results.values()), refused


def theirs(name: str, asked: list[Asked], answers: list[rivals.Answer]) -> Measured:
    result = Measured(name, promise="")
    for request, a in zip(asked, answers):
        told = Speculation(a.steps, a.drafted, a.accepted, len(a.tokens) if a.steps else 0)
        result.runs.append(
            Run(
                request.kind,
                a.seconds,
                Times(),
                [CompletionOutput(0, "", a.tokens, speculation=told, token_times=a.times)],
            )
        )
    return result


def peer_results(
    folder: Path,
    asked: list[Asked],
    settings: Mapping[str, dict[str, float]],
    given: argparse.Namespace,
    console: Console,
) -> tuple[dict[str, list[Measured]], dict[str, Any]]:
    """setting -> the modes of all peers; and how each mode went."""
    found: dict[str, list[Measured]] = {title: [] for title in settings}
    about: dict[str, Any] = {}
    for engine in given.peers:
        model, draft = (str(folder / file) for file in FILES.get(engine, ("target", "draft")))
        if not Path(model).exists():
            about[engine] = f"no {model}"
            continue
        for mode, suffix in rivals.MODES.items():
            if (engine, mode) in rivals.LEFT_OUT:
                continue
            began = time.perf_counter()
            job = rivals.Job(
                [request.ids for request in asked], dict(settings), given.tokens, model, draft, mode,
                given.draft_tree, repeats=given.repeats,
                threads=given.threads,
            )  # fmt: skip
            outcome = rivals.run(engine, job, peers.Tools())
            if outcome.status == rivals.MISSING:
                about[engine] = outcome.status
                break
            about[engine + suffix] = {
                "status": outcome.status,
                **outcome.version,
                "seconds": round(time.perf_counter() - began, 1),
            }
            console.print(
                f"[dim]{engine}{suffix}: {outcome.status}, {about[engine + suffix]['seconds']} s[/]"
            )
            for title, answers in outcome.answers.items():
                found[title].append(theirs(engine + suffix, asked, answers))
    return found, about


# ---- the run


def first(asked: list[Asked], count: int) -> list[int]:
    """Indices of the first `count` of each kind."""
    return [
        i
        for i, request in enumerate(asked)
        if [other.kind for other in asked[:i]].count(request.kind) < count
    ]


def show(title: str, made: dict[str, dict[str, Any]], console: Console) -> None:
    headline(title, made, console)
    by_kind(title, made, console)


def run(given: argparse.Namespace, console: Console, save: Callable[[dict[str, Any]], None]) -> None:
    target, draft = str(given.folder / "target"), str(given.folder / "draft")
    llm = LLM(model=target, max_num_seqs=1, seed=0, speculative_config=None)
    asked = requests(
        [given.questions, *given.own], given.per_category, llm.tokenizer, given.context - given.tokens
    )
    ratio = decode_seconds(draft) / decode_seconds(target)
    about = f"draft forward / target forward: {ratio:.3f}"
    console.print(f"{about}; {len(asked)} requests, {given.tokens} new tokens at most")
    found: dict[str, Any] = {"draft forward / target forward": round(ratio, 4)}
    answers: dict[str, list[Measured]] = {}
    for title in given.settings:
        params = SamplingParams(max_tokens=given.tokens, seed=7, **SETTINGS[title])
        some = [
            asked[i]
            for i in first(asked, given.per_category if title == GREEDY else given.sampled_per_category)
        ]
        began = time.perf_counter()
        answers[title], found["not run"] = ours(
            llm, some, configs(draft, given.methods), params, given.repeats
        )
        found[title] = figures(answers[title])
        show(f"{title} ({about})", found[title], console)
        console.print(f"[dim]{time.perf_counter() - began:.0f} s[/]")
        save(found)
    for label, why in found["not run"].items():
        console.print(f"[yellow]{label} did not run: {why}[/]")
    few = [asked[i] for i in first(asked, given.peers_per_category)]
    settings = {title: SETTINGS[title] for title in given.peer_settings if title in answers and given.peers}
    rivalled, found["peers"] = (
        peer_results(given.folder, few, settings, given, console) if settings else ({}, {})
    )
    for title, others in rivalled.items():
        where = first([Asked(run.kind, []) for run in answers[title][0].runs], given.peers_per_category)
        mine = [part(result, where) for result in answers[title]]
        params = SamplingParams(max_tokens=given.tokens, seed=7, **SETTINGS[title])
        (again, *_), _ = ours(llm, few, {PLAIN: None}, params, given.repeats)
        drift = found[f"{title}, plain decoding after the peers / before"] = round(
            again.speed / mine[0].speed, 3
        )
        found[f"{title}, peers"] = figures([*mine, *others])
        show(
            f"{title}, with peers ({about}; our plain decoding after them: {drift:.2f} of before)",
            found[f"{title}, peers"],
            console,
        )
    save(found)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--questions", type=Path, required=True)
    parser.add_argument("--own", type=Path, nargs="*", default=[Path(__file__).parent / "questions.jsonl"])
    parser.add_argument("--per-category", type=int, default=10, help="greedy")
    parser.add_argument("--sampled-per-category", type=int, default=4)
    parser.add_argument("--peers-per-category", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--context", type=int, default=512, help="prompt and answer together")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--methods", nargs="*", help="parts of the labels of those wanted (default: all)")
    parser.add_argument("--peers", nargs="*", choices=rivals.ENGINES, default=list(rivals.ENGINES))
    parser.add_argument("--peer-settings", nargs="*", choices=SETTINGS, default=[GREEDY])
    parser.add_argument("--guesses", type=int, default=4, help="tokens that a peer guesses ahead")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if os.environ.get("OMP_NUM_THREADS") != str(given.threads):
        parser.error(f"set OMP_NUM_THREADS={given.threads}, so that all engines have --threads threads.")
    if given.tokens < 2:
        parser.error("--tokens must be at least 2: the first one comes with the prompt.")
    if given.peers_per_category > min(given.per_category, given.sampled_per_category):
        parser.error(
            "--peers-per-category may not exceed --per-category and --sampled-per-category: "
            "peers answer some of our requests."
        )
    return given


if __name__ == "__main__":
    asked_for, start = arguments(), time.perf_counter()

    def keep(found: dict[str, Any]) -> None:
        """After each part, so that a run that is stopped leaves what it has."""
        made = {"conditions": conditions(), "seconds": round(time.perf_counter() - start), **found}
        if asked_for.json:
            asked_for.json.write_text(json.dumps(made, indent=1) + "\n")

    screen = Console(width=180)
    run(asked_for, screen, keep)
    screen.print(f"[dim]{time.perf_counter() - start:.0f} s in all[/]")
