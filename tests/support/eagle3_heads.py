"""EAGLE-3 heads as the reference publishes them, and a naive forward of one in float64, row by row."""

from __future__ import annotations

from array import array
from typing import Any

import torch
from torch import Tensor
from toys import HIDDEN, LAYERS, V

from outrider import LLM
from outrider.core.step_input import StepInput
from outrider.draft.eagle3 import Eagle3, Network

H, INNER, HEADS, KV, D, VD = 64, 80, 4, 2, 24, 128  # head_dim is not h / heads
TEXT, PAIRS = [3, 141, 59, 265, 358, 97, 9], 4  # the first PAIRS + 1 tokens are certain, the others drafted

Config = dict[str, Any]
Tensors = dict[str, Tensor]


def official(**config: Any) -> tuple[Config, Tensors]:
    """A random head as the reference publishes it; num_hidden_layers is the target's, as in some files."""
    torch.manual_seed(3)
    ids = torch.randperm(V)[:VD].sort().values
    shapes = {
        "fc.weight": (H, 3 * HIDDEN),
        "midlayer.self_attn.q_proj.weight": (HEADS * D, 2 * H),
        "midlayer.self_attn.k_proj.weight": (KV * D, 2 * H),
        "midlayer.self_attn.v_proj.weight": (KV * D, 2 * H),
        "midlayer.self_attn.o_proj.weight": (H, HEADS * D),
        "midlayer.mlp.gate_proj.weight": (INNER, H),
        "midlayer.mlp.up_proj.weight": (INNER, H),
        "midlayer.mlp.down_proj.weight": (H, INNER),
        "lm_head.weight": (VD, H),
    }
    tensors = {name: torch.randn(shape) * 0.15 for name, shape in shapes.items()}
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
    tensors |= {f"{name}.weight": 1 + torch.randn(H) * 0.2 for name in norms}
    tensors |= {
        "d2t": ids - torch.arange(VD),
        "t2d": torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True),
    }
    base = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": H,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": D,
        "rms_norm_eps": 1e-5,
        "vocab_size": V, "draft_vocab_size": VD, "max_position_embeddings": 16, "hidden_act": "silu",
        "tie_word_embeddings": False,
    }  # fmt: skip
    return {**base, **config}, tensors


def random_network(*args: Any, **options: Any) -> Network:
    """A network with random weights, always the same, and norms other than 1."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = Network(*args, **options)
        for name, weight in network.named_parameters():
            weight.data.normal_(float(weight.dim() == 1), 0.5 if "lm_head" in name else 0.2)
    return network


def rotated(x: Tensor, at: int, theta: float) -> Tensor:
    """A head [D] at position `at`."""
    first, second = x.chunk(2)
    angle = at * theta ** (-2 * torch.arange(D // 2, dtype=torch.float64) / D)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin])


def naive(
    config: Config,
    tensors: Tensors,
    states: Tensor,
    embedding: Tensor,
    text: list[int],
    pairs: int,
    **how: Any,
) -> Tensor:
    """Logits float64 after the last certain pair and each draft token; states [pairs, n]."""
    w = {name: t.double() for name, t in tensors.items() if t.is_floating_point()}
    eps, theta = config.get("rms_norm_eps", 1e-6), config.get("rope_theta", 10000.0)

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x @ x / len(x) + eps).sqrt() * w[f"{name}.weight"]

    def linear(x: Tensor, name: str) -> Tensor:
        return w[f"{name}.weight"] @ x + w.get(f"{name}.bias", torch.zeros((), dtype=torch.float64))

    def attend(u: Tensor, name: str, at: int, kept: list[tuple[Tensor, Tensor]]) -> Tensor:
        q, k, v = (linear(u, f"{name}.self_attn.{p}_proj").view(-1, D) for p in "qkv")
        kept.append((torch.stack([rotated(head, at, theta) for head in k]), v))
        out = []
        for i, head in enumerate(q):
            g, turned = i // (HEADS // KV), rotated(head, at, theta)
            scores = torch.stack([turned @ keys[g] / D**0.5 for keys, _ in kept])
            out.append(sum(p * values[g] for p, (_, values) in zip(scores.softmax(0), kept)))
        return linear(torch.cat(out), f"{name}.self_attn.o_proj")

    def mlp(x: Tensor, name: str) -> Tensor:
        gate = linear(x, f"{name}.mlp.gate_proj")
        return linear(gate * gate.sigmoid() * linear(x, f"{name}.mlp.up_proj"), f"{name}.mlp.down_proj")

    above = sorted({name.split(".")[1] for name in w if name.startswith("layers.")})
    kept: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in ("midlayer", *above)}
    output, recurring = [], torch.empty(0)
    for at, token in enumerate(text[1:]):
        if at < pairs:
            g = states[at].double()
            if "fc_norm.0.weight" in w:
                g = torch.cat([norm(part, f"fc_norm.{i}") for i, part in enumerate(g.split(HIDDEN))])
            g = norm(g, "input_norm") if "input_norm.weight" in w else g
            g = linear(g, "fc") if "fc.weight" in w else g
        else:
            g = recurring
        e = w["embed_tokens.weight"][token] if "embed_tokens.weight" in w else embedding[token].double()
        normed = norm(g, "midlayer.hidden_norm")
        x = normed if how.get("residual_normed") else g
        x = x + attend(
            torch.cat([norm(e, "midlayer.input_layernorm"), normed]), "midlayer", at, kept["midlayer"]
        )
        x = x + mlp(norm(x, "midlayer.post_attention_layernorm"), "midlayer")
        for layer in above:
            x = x + attend(norm(x, f"layers.{layer}.input_layernorm"), f"layers.{layer}", at, kept[layer])
            x = x + mlp(norm(x, f"layers.{layer}.post_attention_layernorm"), f"layers.{layer}")
        recurring = norm(x, "norm") if how.get("output_normed") else x
        if at >= pairs - 1:
            output.append(linear(x if how.get("bare") else norm(x, "norm"), how.get("head", "lm_head")))
    return torch.stack(output)


def packed(llm: LLM, folder: str, states: Tensor, **options: Any) -> tuple[Any, Tensor]:
    """The network of a file, and the same logits by it."""
    net: Any = Eagle3(Eagle3.Options(model=folder, **options), llm.engine.target).net
    pool, table, step_input = net.stack.pool(16), array("i", range(1, 16)), StepInput()
    step_input.chain(table, 0, TEXT[1 : PAIRS + 1])
    o = net.forward(step_input.build(), pool, net.from_states(states.clone()))[-1:]
    output = [net.logits(o)]
    for at, token in enumerate(TEXT[PAIRS + 1 :], PAIRS):
        step_input = StepInput.of_chain(table, at, [token])
        o = net.forward(step_input, pool, net.from_output(o.clone()))
        output.append(net.logits(o))
    return net, torch.cat(output)


def agree(llm: LLM, folder: str, head: tuple[Config, Tensors], taps: int = 3, **how: Any) -> Any:
    states, embedding = torch.randn(PAIRS, taps * HIDDEN) * 2, llm.engine.decoder.embed(range(V))
    net, output = packed(llm, folder, states)
    expected = naive(*head, states, embedding, TEXT, PAIRS, **how)
    assert output.shape == expected.shape
    torch.testing.assert_close(output.double(), expected, rtol=1e-4, atol=1e-4)
    return net
