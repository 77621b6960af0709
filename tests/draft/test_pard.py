"""PARD: the depths of one forward equal a naive one over text and masks, and so do the distributions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from vocabularies import byte_level, tiny_words, twin

from outrider import LLM, ConfigError, ModelError, SamplingParams
from outrider.backends.torch.sampling import probabilities
from outrider.draft import detect
from outrider.draft.draft_model.drafter import ModelDrafter
from outrider.drafting.trees.sampled import Tree
from outrider.heads.choose import Chooser
from outrider.testing import assert_same_text, random_prompts, tiny_checkpoint
from outrider.testing.checkpoints import VOCABULARY as V

MASK, PADDED, DEPTH = V + 9, V + 20, 4  # the target has no such token
GREEDY = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_checkpoint(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Another network, whose vocabulary is padded, in the published layout."""
    published = {"pard_token": MASK, "spd_type": "pard", "vocab_size": PADDED}
    return tiny_checkpoint(tmp_path_factory.mktemp("draft"), "Qwen2", seed=1, **published)


@pytest.fixture(scope="module")
def llm(target: str) -> LLM:
    return LLM(target, dtype="float32", max_num_seqs=3, max_num_batched_tokens=16)


class Drafted(NamedTuple):
    """The text that was known, the logits [depth, V] and the tree of one row in one step."""

    known: list[int]
    logits: Tensor
    tree: Tree


@contextmanager
def recorded(drafter: Any) -> Iterator[list[Drafted]]:
    found, heard, one_pass = list[Drafted](), list[Tensor](), drafter.one_pass
    grow, logits_after = one_pass.grow, drafter.logits_after

    def hearing(*given: Any) -> Tensor:
        heard.append(logits_after(*given).clone())
        return heard[-1]

    def growing(step_input: Any, tips: Any) -> None:
        grow(step_input, tips)
        (logits,) = heard
        heard.clear()
        parts = torch.split(logits, [tree.budget.depth for tree, _ in tips])
        found.extend(Drafted([*tree.row.tokens], part, tree) for (tree, _), part in zip(tips, parts))

    one_pass.grow, drafter.logits_after = growing, hearing
    yield found


def naive(network: Any, known: list[int], depth: int, mask: int = MASK) -> Tensor:
    """The logits of all depths, by transformers, without a cache."""
    with torch.no_grad():
        logits: Tensor = network(torch.tensor([[*known, *[mask] * (depth - 1)]])).logits[0]
    return logits[len(known) - 1 :, :V]


def paths_of(tree: Tree) -> dict[tuple[int, ...], float]:
    """Tokens from the root to each node -> its confidence.  Nodes of equal joint confidence have no order."""
    nodes = range(len(tree.tokens))
    return {tuple(tree.path_tokens(node)): round(tree.confidence[node], 4) for node in nodes}


def test_every_depth_equals_a_naive_forward(llm: LLM, draft: str) -> None:
    """Prompts in chunks, rows that come and go, cached prefixes: K/V of no mask token is ever read again."""
    assert detect(draft) == "draft_model"
    fast = llm.variant({"model": draft, "num_speculative_tokens": DEPTH})
    network = AutoModelForCausalLM.from_pretrained(draft, dtype=torch.float32)
    prompts = random_prompts(5, longest=40)
    with recorded(fast.engine.drafter) as found:
        first = fast.generate([{"prompt_token_ids": ids} for ids in prompts], GREEDY)
        texts = [[*ids, *out.outputs[0].token_ids, 9, 8] for ids, out in zip(prompts, first)]
        fast.generate([{"prompt_token_ids": ids} for ids in texts], GREEDY)
    assert {len(one.logits) for one in found} == {*range(1, DEPTH + 1)} and len(found) > 100
    for known, logits, tree in found:
        expected = naive(network, known, len(logits))
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
        assert tree.tokens == logits.argmax(-1).tolist()


@pytest.mark.parametrize("siblings", [1, 3])
def test_samples_have_the_distributions_of_their_depth(llm: LLM, draft: str, siblings: int) -> None:
    config = {"model": draft, "num_speculative_tokens": 3, "siblings": siblings, "verification": "traversal"}
    fast, params = llm.variant(config), SamplingParams(temperature=0.7, top_p=0.9, seed=4, max_tokens=12)
    network = AutoModelForCausalLM.from_pretrained(draft, dtype=torch.float32)
    with recorded(fast.engine.drafter) as found:
        fast.generate([{"prompt_token_ids": ids} for ids in random_prompts(3)], params)
    branched = [len(one.tree.tokens) > len(set(one.tree.parents)) for one in found]
    assert len(found) > 8 and any(branched) == (siblings > 1)
    for known, logits, tree in found:
        made, expected = tree.draft_tree, naive(network, known, len(logits))
        for node, depth in enumerate(made.depths):
            q = probabilities(expected[depth - 1], tree.row.distribution)
            assert q is not None
            torch.testing.assert_close(made.distributions[made.probs_of[node]], q, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize(
    "more",
    [
        {"siblings": 3},
        {"quantization": "int8"},
        {"draft_kv_budget": 12},
        {"assistant_confidence_threshold": 0.05, "num_assistant_tokens_schedule": "heuristic"},
        {"adaptive": True},
        {"vocab_mismatch": "allow"},
        {"vocab_mismatch": "intersect"},
        {"vocab_mismatch": "retokenize"},
    ],
    ids=str,
)
def test_every_option_leaves_the_text(llm: LLM, draft: str, more: dict[str, Any]) -> None:
    config = {"method": "pard", "model": draft, "num_speculative_tokens": DEPTH, **more}
    plain = llm.variant(None)
    assert_same_text(plain, config)
    plain.use(config)
    assert sum(out.speculation.drafted for out in plain.generate(random_prompts(3), GREEDY)) > 0


@pytest.mark.parametrize("kernels", ["c", "torch"])
def test_both_backends_draft_the_same(
    kernels: str, target: str, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_KERNELS", kernels)
    fast = LLM(target, dtype="float32", max_num_seqs=3, speculative_config={"model": draft})
    network = AutoModelForCausalLM.from_pretrained(draft, dtype=torch.float32)
    with recorded(fast.engine.drafter) as found:
        fast.generate([{"prompt_token_ids": ids} for ids in random_prompts(3)], GREEDY)
    assert len(found) > 20
    for known, logits, _ in found:
        torch.testing.assert_close(logits, naive(network, known, len(logits)), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("verification", ["match", "traversal"])
def test_one_read_for_all_rows_gives_the_trees_of_one_read_a_node(
    verification: str, target: str, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and sampled rows, one with a processor, in one batch on the backend that can leave tokens."""
    monkeypatch.setenv("OUTRIDER_KERNELS", "torch")
    config = {"model": draft, "num_speculative_tokens": 2, "siblings": 3, "verification": verification}
    fast, trees = LLM(target, dtype="float32", speculative_config=config), []
    given = [{"temperature": 0.0}, {"temperature": 0.8, "top_k": 9}, {"min_tokens": 5}]
    params = [SamplingParams(seed=i, max_tokens=9, **more) for i, more in enumerate(given)]
    for on_device in (True, False):
        if not on_device:
            monkeypatch.setattr(Chooser, "stays_on_device", lambda choose, rows: False)
        with recorded(fast.engine.drafter) as found:
            fast.generate([{"prompt_token_ids": ids} for ids in random_prompts(3)], params)
        trees.append([paths_of(one.tree) for one in found])
    assert trees[0] == trees[1] and len(trees[0]) > 12


def test_shuffled_ids_draft_the_same_trees(llm: LLM, target: str, tmp_path: Path) -> None:
    """ "intersect": the mask is an id of the draft, whether or not the target has that token."""
    shuffled, mask = twin(target, tmp_path / "twin", *tiny_words(), byte_level, 1.0), 77
    rows = [load_file(Path(name) / "model.safetensors")["lm_head.weight"] for name in (target, shuffled)]
    (theirs,) = (rows[1] == rows[0][mask]).all(-1).nonzero().flatten().tolist()
    assert theirs != mask
    trees = []
    for name, token, mismatch in ((target, mask, "refuse"), (shuffled, theirs, "intersect")):
        config = {"method": "pard", "model": name, "mask_token_id": token, "vocab_mismatch": mismatch}
        fast = llm.variant({**config, "num_speculative_tokens": 3, "siblings": 2})
        with recorded(fast.engine.drafter) as found:
            fast.generate([{"prompt_token_ids": ids} for ids in random_prompts(2)], GREEDY)
        trees.append([(one.tree.tokens, one.tree.parents) for one in found])
    assert trees[0] == trees[1] and len(trees[0]) > 6


def test_a_mask_token_makes_a_model_draft_in_one_forward(llm: LLM, target: str, draft: str) -> None:
    def mask_of(**config: Any) -> int | None:
        drafter = llm.variant(config).engine.drafter
        assert isinstance(drafter, ModelDrafter)
        return None if drafter.one_pass is None else drafter.one_pass.mask

    assert mask_of(model=draft) == mask_of(method="pard", model=draft) == MASK
    assert mask_of(method="draft_model", model=draft, parallel_drafting=True) == MASK
    assert mask_of(method="draft_model", model=draft, parallel_drafting=False) is None
    assert mask_of(model=target, mask_token_id=3) == 3
    assert mask_of(model=target) is None
    assert mask_of(model="self", draft_kv_budget=16) is None


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"method": "pard", "model": "{target}"}, ConfigError, "has no pard_token: give another draft model"),
        ({"model": "{target}", "parallel_drafting": True}, ConfigError, "has no pard_token"),
        (
            {"method": "pard", "model": "{draft}", "parallel_drafting": False},
            ConfigError,
            "True, or left out",
        ),
        ({"model": "{draft}", "parallel_drafting": 1}, ConfigError, "True or False"),
        ({"model": "{draft}", "drafter": {"method": "ngram"}}, ConfigError, "leave drafter out"),
        ({"model": "{draft}", "mask_token_id": PADDED}, ModelError, f"mask_token_id .* 0 … {PADDED - 1}"),
        ({"model": "{draft}", "parallel_drafting": False, "mask_token_id": 3}, ConfigError, "has no effect"),
        ({"method": "pard", "model": "self", "draft_kv_budget": 9}, ConfigError, '"self" is the target'),
        ({"model": "self", "draft_kv_budget": 9, "mask_token_id": 3}, ConfigError, '"self" is the target'),
        ({"method": "ngram", "parallel_drafting": True}, ConfigError, "It is a key of 'draft_model'"),
        ({"model": "{draft}", "online": {"path": "x"}}, ConfigError, "is not trained while serving"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(
    llm: LLM, target: str, draft: str, config: dict[str, Any], error: type[Exception], message: str
) -> None:
    if "model" in config:
        config = {**config, "model": config["model"].format(target=target, draft=draft)}
    with pytest.raises(error, match=message):
        llm.variant(config)


def test_a_published_mask_outside_of_the_vocabulary_is_refused(llm: LLM, tmp_path: Path) -> None:
    """The authors' trainer writes -1 where no unused token was named."""
    folder = tiny_checkpoint(tmp_path, pard_token=-1)
    with pytest.raises(ModelError, match=f"pard_token of .* in 0 … {V - 1}"):
        llm.variant({"model": folder})
