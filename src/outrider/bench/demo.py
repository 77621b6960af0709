"""`outrider demo`: the same tokens, sooner.  Two panes side by side, then every method in one table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.markup import escape

from outrider.bench.measure import PLAIN, Configs, Prompts, demonstrations
from outrider.bench.panes import Piece, pieces_of, replay
from outrider.bench.prompts import PROMPTS, TASKS, Prompt, rendered
from outrider.bench.report import counted, remarks, table
from outrider.bench.rounds import Rounds, measure
from outrider.checkpoints.hub import GROWN, Checkpoint
from outrider.core.params import SamplingParams
from outrider.errors import OutriderError
from outrider.llm import LLM

CONTEXT, ROUNDS, SECONDS = 1024, 5, 50.0
LEAST_ROUNDS, FEWEST = 3, 3  # rounds for which there should be time; prompts at least
SHOWN = 3  # prompts in the panes
MEASURED = 32  # most tokens of an answer in the table
DRAFT, DEPTH = "builtin-draft", 5  # depth of its drafts on a target that is not small
ADAPTIVE = "auto"
SKIPPING = "layerskip"  # skips what was added to a grown model, which would always be right
SIZE = (
    "The built-in model is so small that drafting hardly pays. It runs here at the cost of a model of 101 M "
    "weights, by layers and columns that are computed and add nothing; --small shows it as it is."
)


@dataclass(frozen=True)
class Show:
    """Contents of the demo: prompts, methods (plain decoding first), and the one of the right pane."""

    llm: LLM
    prompts: list[Prompt]
    configs: Configs
    best: Mapping[str, Any]


def demo(model: str | None, drafts: list[str], small: bool, tokens: int, console: Console) -> bool:
    """Run the demo.  True if every method emitted the tokens of plain decoding.

    model: None is the built-in one.  drafts: draft models and heads for it.
    """
    name = model or ("builtin" if small else GROWN)
    with console.status(escape(f"Loading {name}")):
        context = min(CONTEXT, Checkpoint.open(name).spec.unscaled)
        llm = LLM(model=name, speculative_config=None, max_num_seqs=1, max_model_len=context)
        show = _own(llm, drafts, console) if model else _builtin(llm, small)
    console.print(f"[bold]Outrider[/] on {llm.engine.decoder.backend.name}.", soft_wrap=True)
    if name == GROWN:
        console.print(SIZE)
    params = SamplingParams(temperature=0.0, max_tokens=tokens)
    speed = _side_by_side(show, params, console)
    return _compare(show, replace(params, max_tokens=min(tokens, MEASURED)), speed, console)


def _builtin(llm: LLM, small: bool) -> Show:
    configs = dict(demonstrations())
    if not small:
        configs = {
            label: _deeper(config)
            for label, config in configs.items()
            if config is None or config["method"] != SKIPPING
        }
    return Show(llm, list(TASKS), configs, {"method": ADAPTIVE, "model": DRAFT})


def _deeper(config: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """A demonstration; with the draft model at the depth that pays on a larger target.

    The adaptive one stays as it is in the right pane, so that it begins with what was learned there.
    """
    if not config or config.get("model") != DRAFT or config["method"] == ADAPTIVE:
        return config
    return {**config, "num_speculative_tokens": DEPTH}


def _own(llm: LLM, drafts: list[str], console: Console) -> Show:
    """The drafts, and the methods without weights; leaves out a method that does not run on this model."""
    best: dict[str, Any] = {"method": ADAPTIVE, "model": drafts[0]} if drafts else {"method": ADAPTIVE}
    asked: dict[str, Mapping[str, Any]] = {ADAPTIVE: best, **{name: {"model": name} for name in drafts}}
    for label, config in demonstrations().items():
        if config is not None and "builtin" not in str(config):
            asked[label] = config
    configs: dict[str, Mapping[str, Any] | None] = {PLAIN: None}
    for label, config in asked.items():
        try:
            llm.variant(config)
        except OutriderError as error:
            if config.get("model") in drafts:
                raise
            console.print(f"[dim]Left out: {label}: {error}[/]", soft_wrap=True)
        else:
            configs[label] = config
    return Show(llm, [*PROMPTS[2:3], *PROMPTS[6:]], configs, best)


def _prompts(show: Show) -> Prompts:
    return [(prompt.kind, rendered(prompt, show.llm.tokenizer)) for prompt in show.prompts]


def _side_by_side(show: Show, params: SamplingParams, console: Console) -> float:
    """Record the first prompts with plain decoding and with the best method, and replay them.

    Returns the tokens per second of plain decoding.
    """
    variants = [show.llm.variant(config) for config in (None, show.best)]
    prompts = _prompts(show)
    for variant in variants:
        for _, ids in prompts[-2:]:
            variant.generate(ids, params)  # warm up
    tokens = seconds = 0.0
    for prompt, (_, ids) in list(zip(show.prompts, prompts))[:SHOWN]:
        plain, fast = (_recorded(variant, ids, params) for variant in variants)
        replay(prompt.turns[-1], plain, fast, console)
        tokens, seconds = tokens + len(plain), seconds + plain[-1].seconds
    return tokens / seconds


def _recorded(llm: LLM, prompt: Any, params: SamplingParams) -> list[Piece]:
    llm.engine.forget_prefixes()
    answer = llm.generate(prompt, params)[0].outputs[0]
    return pieces_of(answer, lambda ids: str(llm.tokenizer.decode(ids, skip_special_tokens=True)))


def _compare(show: Show, params: SamplingParams, speed: float, console: Console) -> bool:
    """Measure all methods in interleaved rounds and print one table, the fastest first.

    speed: tokens per second of plain decoding.  A slow machine measures fewer prompts.
    """
    assert params.max_tokens
    answers = SECONDS * speed / (len(show.configs) * params.max_tokens) - 1  # the first one warms up
    prompts = _prompts(show)[: max(FEWEST, int(answers / LEAST_ROUNDS))]
    with counted("Measuring", len(show.configs) * len(prompts) * ROUNDS, console) as tick:
        rounds = Rounds(ROUNDS, runs=1, seconds=SECONDS, fresh=False)
        results = measure(show.llm, show.configs, prompts, params, rounds, tick)
    plain, num_rounds = results[0], len(results[0].runs[0].turns)
    title = f"greedy, {len(prompts)} prompts one at a time, medians of {num_rounds} interleaved rounds"
    console.print(table(title, sorted(results, key=lambda result: -result.speed), plain))
    for remark in remarks(results):
        console.print(f"[dim]{remark}[/]")
    same = not any(result.differs(plain) for result in results)
    console.print(
        "Every method emitted the same tokens as plain decoding."
        if same
        else "[bold red]Tokens differ: this is a bug.[/]"
    )
    return same or not show.llm.engine.exact
