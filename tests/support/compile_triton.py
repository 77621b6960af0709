"""Compiles every Triton kernel for a CUDA device that need not be there: `python compile_triton.py 90`.

Launches are replaced by compilation for their arguments.  Prints the names of the kernels.
"""

from __future__ import annotations

import random
import sys
from types import SimpleNamespace
from typing import Any

import torch
from kernel_cases import CPU, heads_of, random_plan, sampled_row
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile, make_backend
from triton.runtime import driver, jit

from outrider.backends.base import LayerKV, ScoreModifier, Scores
from outrider.backends.layer import LayerExperts
from outrider.backends.triton.backend import TritonBackend
from outrider.backends.triton.distributions import sample
from outrider.backends.triton.features import features_of
from outrider.cache.pool import Pool
from outrider.checkpoints.quantize import quantize
from outrider.core.logprobs import Logprobs
from outrider.core.params import DistributionParams, SamplingParams
from outrider.core.tree import DraftTree
from outrider.sampling.processors import processors_of

TARGET = GPUTarget("cuda", int(sys.argv[1]), 32)
DONE: set[str] = set()


def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
    backend = make_backend(TARGET)
    bound, kinds, options = jit.create_function_from_signature(self.signature, self.params, backend)(
        *args, **named
    )
    if (key := f"{self.__name__} {kinds}") in DONE:
        return
    DONE.add(key)
    parsed, signature, constants, attributes = self._pack_args(backend, named, bound, kinds, options)
    source = ASTSource(self, signature, constants, attributes)
    compile(source, target=TARGET, options=parsed.__dict__)
    print(self.__name__)


def mixture(backend: TritonBackend, bits: int | None) -> LayerExperts:
    """Five experts of 64 dimensions."""

    def packed(*shape: int) -> Any:
        weight = torch.randn(shape)
        return backend.pack(weight if bits is None else quantize(weight, bits))

    gate_up, down = ([packed(*shape) for _ in range(5)] for shape in ((128, 128), (128, 64)))
    return backend.pack_experts(LayerExperts(backend.pack(torch.randn(5, 128)), gate_up, down, 2, True))


def main() -> None:
    jit.JITFunction.run = compiled
    driver.set_active(SimpleNamespace(get_current_target=lambda: TARGET))  # asked while a kernel compiles
    backend, dtype = TritonBackend(CPU, torch.bfloat16), torch.bfloat16
    x, few = torch.randn(70, 128, dtype=dtype), torch.randn(1, 128, dtype=dtype)
    weight = backend.pack(torch.randn(70, 128), torch.randn(70))
    backend.linear(x, weight, torch.zeros(70, 70, dtype=dtype))
    backend.linear(few, weight)
    backend.rms_norm(x, torch.randn(128), 1e-6)
    backend.silu_mul(x)
    backend.gelu_mul(x)
    backend.add_normed(x, x, torch.randn(128), 1e-6)
    backend.soft_cap(x.float(), 3.0)
    for bits in (None, 4):
        backend.add_mixture(x, x, mixture(backend, bits))
    spec, step_input = heads_of(8, 2, 128, True), random_plan(random.Random(0))
    turn, qkv = torch.rand(64, 128), torch.randn(step_input.length, 12 * 128, dtype=dtype)
    modifier = ScoreModifier(3.0, torch.rand(8), torch.rand(8))
    for kv_dtype in (torch.bfloat16, torch.int8):
        pool = Pool(2, 2, 128, 160, kv_dtype, CPU)
        q = backend.rope_store(qkv, spec, turn, LayerKV(step_input, pool, 1))
        backend.attend(q, spec, LayerKV(step_input, pool, 1), Scores(0.25, 0))
        backend.attend(q, spec, LayerKV(step_input, pool, 1), Scores(0.25, 5, modifier))
    logits = torch.randn(3, 9000)
    features_of(logits, torch.ones(3, dtype=torch.float64), torch.zeros(3, dtype=torch.int64))
    queries: Any = backend.verifier.queries("match")
    tree = DraftTree([1, 2], [-1, 0], [0.5, 0.5])
    backend.pick(logits, DistributionParams(), 5, 1, False)
    backend.pick_rows(logits, DistributionParams(0.8), [5, 6, 7], 3, torch.arange(9000, dtype=torch.int32))
    backend.pick_rows(logits, DistributionParams(0.0), [0, 0, 0], 3)
    asked = [DistributionParams(0.8), DistributionParams(0.0, 0.1, 5, 0.9), DistributionParams(1.0)]
    assert backend.top_next is not None
    words = backend.top_next.asked(asked, [5, 6, 7], 9000).on(CPU)
    backend.top_next(logits, words, 3, None)
    processed = sampled_row([1], DistributionParams(0.8, 0.1, 5, 0.9))
    processed.processors = processors_of(SamplingParams(presence_penalty=1.0), 1, 100, [], [])
    processed.logprobs = Logprobs("processed_logprobs", 2, None)
    queries.add(0, processed, tree, 0)
    backend.verifier.verify(logits, queries)
    owners, params = words[:, :1].repeat(1, 2) * 0, words[:1, 1:].contiguous().view(torch.float64)
    sample(logits, owners, params, owners, torch.zeros(3, dtype=torch.int64), 9000)
    sampled = tree._replace(distributions=[torch.rand(9000).double()], probs_of=[0, -1])
    for rule in ("rejection", "block", "traversal"):
        queries = backend.verifier.queries(rule)
        queries.add(0, sampled_row([1], DistributionParams(0.8, 0.1, 5, 0.9)), sampled, 0)
        backend.verifier.verify(logits, queries)


if __name__ == "__main__":
    main()
