"""An early draft exit gives a prefix of the full draft, row by row; a staged drafter gives the same draft."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import answer, token_prompts

from outrider import LLM, ConfigError, SamplingParams
from outrider.cache.pool import Pool
from outrider.core.row import Row
from outrider.core.step import Batch
from outrider.core.step_input import StepInput
from outrider.core.stop_rule import NodeFeatures, StopRule, should_stop
from outrider.core.tree import Budget, Draft
from outrider.draft import method, methods
from outrider.draft.draft_model import DraftModel
from outrider.drafting import disco
from outrider.drafting.base import TextDrafter
from outrider.drafting.disco import FEATURES, Classifier
from outrider.models.decoder import Decoder
from outrider.testing import check_idle, make_row, random_prompts, run_staggered, visible_parts

SAMPLING = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.7, "repetition_penalty": 1.2},
)
Key = tuple[int, int]  # the seed of a row and how long it was
FREE = {"assistant_confidence_threshold": 0.0}  # measures, and never stops
DEPTH = 5


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Less confident in unlikely tokens, and the less the deeper they are."""
    file = str(tmp_path_factory.mktemp("classifier") / "stop.safetensors")
    made = Classifier(2).requires_grad_(False)
    for parameter in made.parameters():
        parameter.zero_()
    made.hidden.weight[0, 0], made.hidden.weight[1, -1] = 1.0, 1.0
    made.output.weight[0, :], made.output.bias[0] = torch.tensor([4.0, -0.3]), -0.8
    made.save(file)
    return file


@contextmanager
def recorded(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[Key, tuple[list[int], list[NodeFeatures]]]]:
    """Draft tokens of each row, with features if there is a stop rule."""
    heard: dict[Key, tuple[list[int], list[NodeFeatures]]] = {}
    propose = DraftModel.propose

    def listening(self: DraftModel, batch: Batch) -> Draft:
        draft = propose(self, batch)
        for step, tree in zip(batch, draft.trees):
            row = step.row
            if step.budget.nodes:
                features = self.stop.drafts[row].features if row in self.stop.drafts else {}
                heard[row.seed, len(row.tokens)] = tree.tokens, [features[i] for i in sorted(features)]
        return draft

    with monkeypatch.context() as patch:
        patch.setattr(DraftModel, "propose", listening)
        yield heard


def params(sampling: dict[str, Any], count: int = 5, tokens: int = 20) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=tokens + i, seed=i, ignore_eos=True, **sampling) for i in range(count)]


def empty(drafter: Any) -> None:
    """It remembers no row, wherever it might."""
    for part in (drafter, drafter.stop, *([drafter.staged.drafter] if drafter.staged else [])):
        for value in vars(part).values():
            assert not (isinstance(value, dict) and any(isinstance(key, Row) for key in value))


def use(llm: LLM, checkpoint: str, **more: Any) -> Any:
    llm.use({"method": "draft_model", "model": checkpoint, "num_speculative_tokens": DEPTH, **more})
    return llm.engine.drafter


def rule(kind: str, classifier: str, middle: float) -> tuple[dict[str, Any], StopRule]:
    """`middle`: an entropy that some draft tokens exceed."""
    if kind == "confidence":
        return {"assistant_confidence_threshold": 0.15}, StopRule(0.15)
    if kind == "classifier":
        return {"stop_classifier": classifier, "stop_classifier_threshold": 0.4}, StopRule(
            net=disco.load(classifier).flat(0.4)
        )
    return {"entropy_threshold": 0.3, "entropy_factor": 0.49 / middle}, StopRule(
        most=(1 - 0.3) ** 2 / (0.49 / middle)
    )


@pytest.mark.parametrize("sampling", SAMPLING, ids=["greedy", "sampled", "penalty"])
@pytest.mark.parametrize("kind", ["confidence", "entropy", "classifier"])
def test_draft_ends_after_the_first_node_that_the_rule_stops_at(
    kind: str,
    sampling: dict[str, Any],
    fast: LLM,
    random_draft: str,
    classifier: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In one call and level by level, alone and in a batch.  The chain without the rule gives the exit."""
    monkeypatch.setattr("outrider.drafting.threshold.STEP", 0.0)  # a threshold that does not move
    prompts, each = random_prompts(5, seed=2), params(sampling)
    with recorded(fast, monkeypatch) as whole:
        use(fast, random_draft, **FREE)
        run_staggered(fast, prompts, each)
    entropies = sorted(t[1] for _, features in whole.values() for t in features)
    given, stop_rule = rule(kind, classifier, entropies[len(entropies) // 2] + 1e-3)
    seen = []
    for together in (True, False):
        for one_call in (True, False):
            with recorded(fast, monkeypatch) as heard, monkeypatch.context() as patch:
                if not one_call:
                    patch.setattr(Decoder, "fuses_chains", False)
                use(fast, random_draft, **given)
                for group in (
                    [list(zip(prompts, each))] if together else [[pair] for pair in zip(prompts, each)]
                ):
                    run_staggered(fast, [prompt for prompt, _ in group], [p for _, p in group])
                empty(fast.engine.drafter)
                check_idle(fast)
            seen.append(heard)
    assert all(heard == seen[0] for heard in seen), "not the same drafts in every way"
    shorter = 0
    for key in whole.keys() & seen[0].keys():
        tokens, features = whole[key]
        stops = [should_stop(stop_rule, t, level) for level, t in enumerate(features)]
        end = stops.index(True) + 1 if True in stops else len(tokens)
        assert seen[0][key][0] == tokens[:end]
        shorter += end < len(tokens)
    assert 3 < shorter < len(whole.keys() & seen[0].keys())


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_tree_does_not_grow_after_a_stopped_node(temperature: float, fast: LLM, random_draft: str) -> None:
    drafter = use(fast, random_draft, siblings=3, assistant_confidence_threshold=0.1)
    trees, propose = [], drafter.propose

    def listening(batch: Batch) -> Draft:
        draft = propose(batch)
        trees.extend(
            (tree, drafter.stop.drafts[row].features)
            for row, tree in zip(batch.rows, draft.trees)
            if tree.tokens
        )
        return draft

    drafter.propose = listening
    fast.generate(token_prompts(random_prompts(3)), params({"temperature": temperature}, 3))
    ended = 0
    for tree, features in trees:
        assert sorted(features) == list(range(len(tree.tokens)))
        for node, t in features.items():
            assert t[0] >= 0.1 or node not in tree.parents
            ended += t[0] < 0.1
    assert ended and any(len(set(tree.parents)) > 2 for tree, _ in trees)
    empty(drafter)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_sampled_nodes_are_kept(
    rule: str, fast: LLM, random_draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any token; only nothing is drafted after it."""
    prompts, each = random_prompts(4), params({"temperature": 0.9}, 4)
    with recorded(fast, monkeypatch) as whole:
        use(fast, random_draft, verification=rule, **FREE)
        run_staggered(fast, prompts, each)
    with recorded(fast, monkeypatch) as heard:
        use(fast, random_draft, verification=rule, assistant_confidence_threshold=0.1)
        run_staggered(fast, prompts, each)
    check_idle(fast)
    for key in [(i, len(prompt)) for i, prompt in enumerate(prompts)]:  # before the texts part
        tokens, features = whole[key]
        end = next((i + 1 for i, t in enumerate(features) if t[0] < 0.1), len(tokens))
        assert heard[key][0] == tokens[:end]
    assert any(len(tokens) < DEPTH for tokens, _ in heard.values())


def test_a_schedule_decides_how_deep(
    fast: LLM, llama: str, random_draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target as its own draft is always right: two more a round.  A random draft is always wrong."""
    prompt, asked = random_prompts(1)[0], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    for checkpoint, expected in ((llama, [2, 4, 6, 8, 9, 9]), (random_draft, [2, 1, 1, 1])):
        with recorded(fast, monkeypatch) as heard:
            use(
                fast,
                checkpoint,
                num_assistant_tokens_schedule="heuristic",
                num_assistant_tokens=2,
                num_speculative_tokens=9,
            )
            answer(fast, prompt, asked)
        sizes = [len(tokens) for tokens, _ in heard.values()]
        assert sizes[: len(expected)] == expected


def test_rows_that_opt_out_are_left_alone(fast: LLM, random_draft: str) -> None:
    drafter = use(fast, random_draft, entropy_threshold=0.4, drafter={"method": "ngram"})
    kept = copy.deepcopy(drafter.memory)
    outputs = fast.generate(
        token_prompts(random_prompts(2)), [SamplingParams(speculate=False, max_tokens=9, seed=1)] * 2
    )
    assert all(output.outputs[0].speculation.drafted == 0 for output in outputs)
    assert drafter.memory == kept and drafter.staged.forwards == 0
    empty(drafter)


def test_what_was_learned_can_be_put_back(fast: LLM, random_draft: str) -> None:
    drafter = use(fast, random_draft, entropy_threshold=0.4, drafter={"method": "recycle"})
    kept, asked = copy.deepcopy(drafter.memory), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    first = answer(fast, random_prompts(1)[0], asked).outputs[0].speculation
    assert drafter.memory != kept
    drafter.memory = kept
    fast.engine.forget_prefixes()
    assert answer(fast, random_prompts(1)[0], asked).outputs[0].speculation == first
    assert use(fast, random_draft, **FREE).memory is None, "nothing is learned"


# ---- staged


@contextmanager
def forwards(llm: LLM, drafter: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Counts the draft's forwards; every level is one."""
    count = [0]
    real = drafter.decoder.forward

    def counting(step_input: StepInput, pool: Pool) -> Any:
        count[0] += 1
        return real(step_input, pool)

    with monkeypatch.context() as patch:
        patch.setattr(drafter.decoder, "forward", counting)
        patch.setattr(type(drafter.decoder), "fuses_chains", False)
        yield count


INNER = (
    {"method": "ngram"},
    {"method": "ngram", "num_speculative_tokens": 2},
    {"method": "suffix", "suffix_decoding_use_tree_spec": True, "suffix_decoding_max_spec_factor": 8.0},
    {"method": "recycle", "min_token_prob": 0.0, "nodes": 12},
)


@pytest.mark.parametrize("inner", INNER, ids=lambda inner: "-".join(map(str, inner.values())))
@pytest.mark.parametrize(
    "more",
    [{}, {"assistant_confidence_threshold": 0.1}, {"verification": "rejection"}],
    ids=["plain", "stops", "drawn"],
)
def test_a_staged_chain_is_the_same_chain(
    more: dict[str, Any], inner: dict[str, Any], fast: LLM, random_draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [*random_prompts(3), [7, 8, 9, 10] * 6]
    for sampling in SAMPLING:
        seen = []
        for drafter in (None, inner):
            with recorded(fast, monkeypatch) as heard:
                use(fast, random_draft, drafter=drafter, **more)
                outputs = run_staggered(fast, prompts, params(sampling, len(prompts), 30))
            check_idle(fast)
            empty(fast.engine.drafter)
            seen.append((heard, [visible_parts(output.outputs) for output in outputs]))
        assert seen[0] == seen[1]


def test_chains_without_a_cheaper_draft_take_one_call(
    fast: LLM, random_draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = use(fast, random_draft, drafter={"method": "ngram", "num_speculative_tokens": 0})
    monkeypatch.setattr(made, "logits_after", lambda *_: pytest.fail("a forward for each depth"))
    asked = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    speculation = answer(fast, random_prompts(1)[0], asked).outputs[0].speculation
    assert speculation.drafted > 0 and made.staged.forwards >= speculation.drafted


@pytest.mark.parametrize("inner", INNER[:3], ids=lambda inner: "-".join(map(str, inner.values())))
def test_repetitive_text_takes_fewer_forwards(
    inner: dict[str, Any], fast: LLM, llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A greedy text that a strong bias makes a loop.  The counts are those of the same chains."""
    counts = []
    asked = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, allowed_token_ids=[7, 8])
    for drafter in (None, inner):
        made = use(fast, llama, drafter=drafter)
        with forwards(fast, made, monkeypatch) as count:
            answer(fast, [7, 8] * 6, asked)
        counts.append(count[0])
        fast.engine.forget_prefixes()
    assert counts[1] < 0.75 * counts[0]


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        ({"method": "draft_model"}, "does not draft from the text alone"),
        ({"method": "ngarm"}, "Did you mean 'ngram'"),
        ({}, "drafter needs a 'method'"),
        ({"method": "ngram", "prompt_lookup_maxx": 3}, "Did you mean 'prompt_lookup_max'"),
        ({"method": "ngram", "num_speculative_tokens": -1}, "num_speculative_tokens"),
    ],
)
def test_inner_drafters_that_cannot_be(
    inner: dict[str, Any], message: str, fast: LLM, random_draft: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        use(fast, random_draft, drafter=inner)


@pytest.mark.parametrize("name", [name for name, kind in methods().items() if issubclass(kind, TextDrafter)])
def test_drafts_after_tokens_ahead_equal_drafts_after_emitted_ones(name: str, fast: LLM) -> None:
    """`after` with tokens ahead equals `after` a row that has them, without memory of the row."""
    drafter = method(name).example(fast.engine.target)
    text = [5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6, 7]
    row, budget = make_row(text), Budget(3, drafter.size(3))
    before = drafter.after(row, (), budget)
    drafter.after(row, [11, 12], budget)
    ahead = drafter.after(row, [8], budget)
    assert drafter.after(row, (), budget)[:2] == before[:2]
    other = make_row([*text, 8])
    drafter.after(other, (), budget)
    assert ahead[:2] == drafter.after(other, (), budget)[:2]


def test_a_classifier_is_made_and_used_from_the_command_line(
    random_draft: str, llama: str, tmp_path: Path
) -> None:
    from outrider.cli import main

    prompts, out = tmp_path / "prompts.txt", tmp_path / "stop.safetensors"
    prompts.write_text("\n".join(f"the sun and the moon {i}" for i in range(6)))
    with pytest.raises(SystemExit) as leaving:
        main(
            [
                "tune",
                "disco",
                llama,
                random_draft,
                "--prompts",
                str(prompts),
                "-o",
                str(out),
                "-n",
                "60",
                "--temp",
                "0.8",
            ]
        )
    assert not leaving.value.code
    assert disco.load(str(out)).hidden.in_features == FEATURES
    llm = LLM(llama, speculative_config={"model": random_draft, "stop_classifier": str(out)})
    assert (
        llm.generate({"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=8, seed=1))[0]
        .outputs[0]
        .speculation.drafted
        > 0
    )
