"""Compare trained heads with the shipped ones, and put the better ones in their place.

    python recipes/builtin/compare.py DIR [--questions question.jsonl] [--install | --target FOLDER]

DIR holds a folder a head, as in the archives of gpu.py.  Shown are tokens per step of greedy answers, 64
tokens a prompt: on the prompts of the demo, on four questions of each task of Spec-Bench, and on tasks with
held-out wordings; with chains of three draft tokens, and with the trees of the method's defaults and with 59
nodes.  `--install` takes a head over if the mean gain of a request is at least two standard errors on any of
the three, with chains, and no loss of that size is on another.  `--target` is for heads of another target;
the shipped EAGLE-3 and DFlash read other layers of it than those that correspond.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from outrider import LLM, SamplingParams  # noqa: E402 - behind the path
from outrider.bench.prompts import PROMPTS, rendered  # noqa: E402
from outrider.bench.questions import Question, read  # noqa: E402
from outrider.engine.chat_template import render  # noqa: E402
from outrider.train.methods import method  # noqa: E402
from recipes.builtin.evaluate import questions  # noqa: E402

BUILTIN = ROOT / "src/outrider/builtin"
TOKENS, CONTEXT, EACH = 64, 512, 4
SEVERAL = {"eagle": 59, "eagle3": 59, "hydra": 59, "medusa": 59}  # nodes of wide trees
Ids = list[list[int]]


def asked(llm: LLM, file: Path | None) -> dict[str, Ids]:
    """Prompts as token ids: of the demo, of Spec-Bench, and held-out tasks."""
    tokenizer, room = llm.tokenizer, CONTEXT - TOKENS
    found = {"demo": [rendered(prompt, tokenizer)["prompt_token_ids"] for prompt in PROMPTS]}
    if file is not None:
        some = read(file, limit=EACH)
        found["Spec-Bench"] = [_cut(_ids(tokenizer, question), room) for question in some]
    texts = [text for _, _, text in questions(2, "wordings")]
    found["held out"] = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    return {name: [ids for ids in group if len(ids) <= room] for name, group in found.items()}


def _ids(tokenizer: Any, question: Question) -> list[int]:
    messages = [{"role": "user", "content": question.turns[0]}]
    return list(render(tokenizer, {"messages": messages})["prompt_token_ids"])


def _cut(ids: list[int], room: int) -> list[int]:
    """Without so many tokens of the middle as are too many."""
    return ids if len(ids) <= room else [*ids[: room // 2], *ids[len(ids) - (room - room // 2) :]]


def tokens_per_step(llm: LLM, prompts: Ids, config: Mapping[str, Any]) -> list[float]:
    """Of every request."""
    llm.use(config)
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    llm.use(None)
    return [output.outputs[0].speculation.tokens_per_step for output in outputs]


def configs(name: str, folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    kind = method(name)
    chain = {"model": str(folder), "num_speculative_tokens": 2 if name == "hydra" else 3, **kind.drafts}
    yield "chain", chain
    if "tree" in kind.drafts:
        yield "tree", {"model": str(folder)}
    if name in SEVERAL:
        depth = {"num_speculative_tokens": 8} if name.startswith("eagle") else {}
        yield "tree of 59", {"model": str(folder), "nodes": SEVERAL[name], **depth}


def better(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> bool:
    """pairs: (before, after) of the requests of each group."""
    signs = []
    for before, after in pairs:
        gains = [b - a for a, b in zip(before, after)]
        error = statistics.stdev(gains) / len(gains) ** 0.5
        mean = statistics.mean(gains)
        signs.append((mean > 2 * error) - (mean < -2 * error))
    return max(signs) > 0 and min(signs) >= 0


def shipped(name: str) -> Path:
    return BUILTIN / ("draft" if name == "draft_model" else f"heads/{name}")


def install(name: str, folder: Path) -> None:
    """Copy the weights; of a head its config, too: that of the draft model is kept as it is shipped."""
    shutil.copyfile(folder / "model.safetensors", shipped(name) / "model.safetensors")
    if name != "draft_model":
        shutil.copyfile(folder / "config.json", shipped(name) / "config.json")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--questions", type=Path)
    parser.add_argument("--install", action="store_true")
    parser.add_argument("--target", default="builtin")
    parser.add_argument("--only", nargs="+")
    given = parser.parse_args()
    if given.install and given.target != "builtin":
        parser.error("--install is for the shipped target")
    llm = LLM(given.target, max_num_seqs=8, max_model_len=CONTEXT, speculative_config=None)
    groups, told = asked(llm, given.questions), dict[str, Any]()
    found = sorted(path.parent for path in given.folder.glob("*/model.safetensors"))
    for folder in (path for path in found if not given.only or path.name in given.only):
        name, told[folder.name] = folder.name, {}
        kinds = zip(configs(name, shipped(name)), configs(name, folder))
        pairs = []
        for (kind, old), (_, new) in kinds:
            for group, prompts in groups.items():
                before, after = (tokens_per_step(llm, prompts, config) for config in (old, new))
                means = [round(statistics.mean(each), 3) for each in (before, after)]
                told[name][f"{kind}, {group}"] = means
                print(f"{name:16s} {kind:10s} {group:12s} {means[0]:.2f} -> {means[1]:.2f}", flush=True)
                if kind == "chain":
                    pairs.append((before, after))
        take = better(pairs)
        print(f"{name}: {'better' if take else 'not better'}", flush=True)
        if take and given.install:
            install(name, folder)
    (given.folder / "compared.json").write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
