"""The target as its own draft within a K/V budget, for many requests far into their texts.

    python benchmarks/windowed.py --folder DIR [--kv int8] [--json OUT]

DIR gets (or holds) the checkpoint: the Llama shape of 100 M weights, random, bfloat16.  Sixteen requests are
4,000 tokens into their texts.  They are samples of one prompt, which is computed once and then copied, so
that every request reads its own K/V, as with sixteen prompts.

The acceptance of random weights means nothing.  So the speed-up is also given for any number of tokens a
step: tokens a step · plain step / (draft + verification).  `pair` gives the tokens a step of such a draft for
a trained model (the built-in target, 700 tokens into a text).
"""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

from command_line import parser_of, write
from core import checkpoint, conditions, prompt, show
from rich.console import Console

from outrider import LLM, SamplingParams
from outrider.cache.pages import Cache
from outrider.core.block_table import PAGE, BlockTable

ROWS, LENGTH, NEW, BUDGET = 16, 4000, 24, 256
TEMPERATURES = {"greedy": 0.0, "T = 0.8": 0.8}


def apart(cache: Cache) -> None:
    """Requests that share a prompt get a copy each."""

    def copy(table: BlockTable, page: int) -> None:
        source, at = array("i", range(page * PAGE, (page + 1) * PAGE)), table.room
        cache._append(table, cache._take())
        for pool in cache.pools:
            pool.move(source, table.slots[at : at + PAGE])

    cache._share = copy  # type: ignore[method-assign]


def steps(llm: LLM, temperature: float, speculate: bool) -> dict[str, float]:
    """Steps in which all rows decode: tokens/s, tokens a step and request, acceptance, milliseconds."""
    params = SamplingParams(
        temperature=temperature, seed=1, max_tokens=NEW, n=ROWS, ignore_eos=True, speculate=speculate
    )
    llm.generate(prompt(LENGTH), SamplingParams(temperature=0, max_tokens=1))  # the prompt is in the cache
    llm.engine.reset()
    (output,) = llm.generate(prompt(LENGTH), params)
    work, stats = llm.engine.decode, output.speculation
    ms = {name: round(value / work.steps * 1e3, 1) for name, value in work.times._asdict().items()}
    return {
        "tokens/s": round(work.emitted / sum(work.times), 1),
        "tokens per step": round((stats.emitted - ROWS) / (stats.steps - ROWS), 2),
        "acceptance": round(stats.acceptance, 2),
        "draft, ms": ms["propose"],
        "target, ms": ms["forward"],
        "rest, ms": ms["rest"],
    }


def far(folder: Path, kv: str, depths: tuple[int, ...]) -> dict[str, Any]:
    llm = LLM(
        str(checkpoint(folder / "long", max_position_embeddings=17_000)),
        speculative_config=None,
        max_num_seqs=ROWS + 2,
        max_model_len=LENGTH + 2 * PAGE,
        kv_cache_dtype=kv,
    )
    found: dict[str, Any] = {}
    for depth in depths:
        llm.use(
            {
                "method": "draft_model",
                "model": "self",
                "draft_kv_budget": BUDGET,
                "num_speculative_tokens": depth,
            }
        )
        apart(llm.engine.cache)
        for name, temperature in TEMPERATURES.items():
            plain = found.setdefault(f"plain, {name}", None) or steps(llm, temperature, False)
            drafting = steps(llm, temperature, True)
            drafting["speed-up"] = round(drafting["tokens/s"] / plain["tokens/s"], 2)
            whole = plain["target, ms"] + plain["rest, ms"]
            drafting["tokens per step to break even"] = round(
                sum(drafting[f"{part}, ms"] for part in ("draft", "target", "rest")) / whole, 2
            )
            found |= {f"plain, {name}": plain, f"{depth} drafted, {name}": drafting}
    return found


def pair() -> dict[str, Any]:
    """The built-in target, 700 tokens into pieces of its own sampled text."""
    llm, found = LLM("builtin", max_num_seqs=8, speculative_config=None), dict[str, Any]()
    start = {"prompt": "The"}
    texts = llm.generate(
        [start] * 8,
        [SamplingParams(temperature=0.8, seed=i, max_tokens=700, ignore_eos=True) for i in range(8)],
    )
    prompts = [{"prompt_token_ids": text.outputs[0].token_ids} for text in texts]
    for budget in (64, 128, 256, 512):
        llm.use(
            {"method": "draft_model", "model": "self", "draft_kv_budget": budget, "num_speculative_tokens": 3}
        )
        for name, temperature in TEMPERATURES.items():
            outputs = llm.generate(
                prompts, SamplingParams(temperature=temperature, seed=3, max_tokens=100, ignore_eos=True)
            )
            whole = sum((output.speculation for output in outputs[1:]), outputs[0].speculation)
            found[f"budget {budget}, {name}"] = {
                "tokens per step": round(whole.tokens_per_step, 2),
                "acceptance": round(whole.acceptance, 2),
            }
    return found


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--kv", default="auto", help="auto or int8")
    parser.add_argument("--depths", type=int, nargs="*", default=[1, 3])
    parser.add_argument("--pair", action="store_true", help="the built-in target as well")
    given = parser.parse_args()
    found = {
        "conditions": conditions(),
        f"16 x 4,000 tokens, K/V {given.kv}": far(given.folder, given.kv, tuple(given.depths)),
    }
    if given.pair:
        found["3 drafted, built-in target"] = pair()
    show(found, Console())
    write(given.json, found)
