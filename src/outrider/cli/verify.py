"""`outrider verify`: test on a model that speculation is lossless."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer import Option

from outrider.cli.arguments import bar_over
from outrider.cli.bench import Out, opened, print_line
from outrider.cli.flags import MAX_TOKENS, SEED, Given, checkpoint_of, load, shared
from outrider.cli.speculation import config_of
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.bench.questions import Question
    from outrider.certify.certificate import Certificate
    from outrider.certify.prompts import PromptSource
    from outrider.certify.run import Effort
    from outrider.llm import LLM

CONTEXT = 2048  # default max_model_len; two engines must fit into memory


Minutes = Annotated[
    float, Option("--minutes", min=0, help="Time for the tests; more time detects smaller deviations.")
]
BatchSize = Annotated[int, Option("-b", "--batch-size", min=2, help="Requests in a batch.")]
MaxTokens = Annotated[int, Option(*MAX_TOKENS, min=1, help="Maximum new tokens of a text.")]
Samples = Annotated[
    int, Option("--samples", min=0, help="Minimum texts of each prompt if distributions are tested.")
]
Seed = Annotated[int, Option(*SEED, min=0, help="Seed of prompts and texts.")]
ExpectLossy = Annotated[
    bool,
    Option("--expect-lossy", help="For rules that are not lossless: measure the deviation and do not fail."),
]


@shared
def verify(
    engine: Given,
    speculation: Given,
    asked: Given,
    minutes: Minutes = 2.0,
    batch_size: BatchSize = 8,
    max_tokens: MaxTokens = 64,
    samples: Samples = 0,
    seed: Seed = 0,
    expect_lossy: ExpectLossy = False,
    out: Out = None,
) -> None:
    """Test on your own model that speculation is lossless: same tokens, same distribution, no leaks.

    Greedy and seeded texts are compared token by token with those of plain decoding, one at a time and in a
    batch.  Rules that promise only the distribution are tested by chi-square.  The exit status is 0 if
    nothing was found, otherwise 1.

    Example:  outrider verify --speculative-config '{"model": "builtin-draft", "verification": "rejection"}'
    """
    from outrider.bench.questions import read
    from outrider.certify.prompts import PromptSource
    from outrider.certify.report import figures, panel
    from outrider.certify.run import Effort

    config = _config(speculation, expect_lossy)
    questions = read(asked["file"], raw=asked["raw"]) if "file" in asked else None
    sink = opened(out)
    engine.setdefault("max_model_len", min(CONTEXT, checkpoint_of(engine).spec.unscaled))
    llm = load(engine, max_num_seqs=batch_size)
    fast = llm.variant(config)
    tokens = max(1, min(max_tokens, llm.engine.max_len // 2))
    prompts, left_out = first_prompts(llm, questions, tokens, seed, asked["raw"])
    console = Console(stderr=out == "-")
    source = PromptSource(prompts, llm.engine.max_len - tokens, questions is None, seed)
    made = run(llm, fast, source, Effort(minutes, tokens, samples, seed), expect_lossy, console)
    console.print(panel(llm, config, made, left_out))
    if sink:
        given = {"minutes": minutes, "batch size": batch_size, "max tokens": max_tokens, "seed": seed}
        source_given = {"raw": asked["raw"], "prompts": str(asked["file"]) if questions else None}
        print_line(figures(llm, config, made, {**given, **source_given}), sink)
    if not made.passed:
        raise typer.Exit(1)


def _config(speculation: Given, expect_lossy: bool) -> dict[str, Any]:
    """speculative_config from the options.  Raises ConfigError if there is none or its rule does not fit."""
    from outrider.config import SpeculativeOptions

    config = config_of(speculation)
    if config is None:
        raise ConfigError("nothing to verify: give --speculative-config JSON, --method NAME or -md MODEL.")
    if SpeculativeOptions.of(config).rule.lossless and expect_lossy:
        raise ConfigError("--expect-lossy is for rules that are not lossless, and this one is: leave it out.")
    return config


def first_prompts(
    llm: LLM, questions: Sequence[Question] | None, tokens: int, seed: int, raw: bool
) -> tuple[list[list[int]], int]:
    """Token ids of the questions, or of the built-in prompts, and how many do not fit into the context."""
    from outrider.bench.questions import prompts_for
    from outrider.certify.prompts import random_prompts
    from outrider.core.params import SamplingParams

    if questions is None and llm.tokenizer is None:
        return random_prompts(llm, seed), 0
    found, left_out = prompts_for(llm, questions, SamplingParams(max_tokens=tokens), raw)
    return [prompt["prompt_token_ids"] for _, prompt in found], left_out


def run(
    llm: LLM, fast: LLM, prompts: PromptSource, effort: Effort, expect_lossy: bool, console: Console
) -> Certificate:
    from outrider.certify.run import certify

    with bar_over(effort.minutes, "Verifying", console) as tick:
        return certify(llm, fast, prompts, effort, expect_lossy, lambda what: tick(f"Verifying: {what}"))
