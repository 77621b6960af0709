"""The examples of vLLM's page on speculative decoding run unchanged but for import and models."""

from __future__ import annotations

from typing import Any

import pytest

from outrider import ConfigError

EXAMPLE = """
from vllm import LLM, SamplingParams

prompts = [
    "The future of AI is",
]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)

llm = LLM(
    model="MODEL",
    tensor_parallel_size=RANKS,
    speculative_config={
        SPECULATION
    },
)
outputs = llm.generate(prompts, sampling_params)

for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs[0].text
    print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")
"""
# By method: what the page has for MODEL, RANKS and SPECULATION.
EXAMPLES = {
    "draft_model": (
        "facebook/opt-6.7b",
        "1",
        '"model": "facebook/opt-125m",\n        "num_speculative_tokens": 5,',
    ),
    "ngram": (
        "facebook/opt-6.7b",
        "1",
        '"method": "ngram",\n        "num_speculative_tokens": 5,\n        "prompt_lookup_max": 4,',
    ),
    "mlp_speculator": (
        "meta-llama/Meta-Llama-3.1-70B-Instruct",
        "4",
        '"model": "ibm-ai-platform/llama3-70b-accelerator",\n        "draft_tensor_parallel_size": 1,',
    ),
    "eagle": (
        "meta-llama/Meta-Llama-3-8B-Instruct",
        "4",
        '"model": "yuhuili/EAGLE-LLaMA3-Instruct-8B",\n        "draft_tensor_parallel_size": 1,',
    ),
}
HERE = {
    "from vllm import": "from outrider import",
    "facebook/opt-6.7b": "builtin",
    "facebook/opt-125m": "builtin-draft",
    "meta-llama/Meta-Llama-3.1-70B-Instruct": "builtin",
    "ibm-ai-platform/llama3-70b-accelerator": "builtin-mlp_speculator",
    "meta-llama/Meta-Llama-3-8B-Instruct": "builtin",
    "yuhuili/EAGLE-LLaMA3-Instruct-8B": "builtin-eagle",
}


@pytest.mark.parametrize("method", EXAMPLES)
def test_an_example_runs(method: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, names = EXAMPLE, dict[str, Any]()
    for theirs, ours in [*zip(("MODEL", "RANKS", "SPECULATION"), EXAMPLES[method]), *HERE.items()]:
        code = code.replace(theirs, ours)
    if "tensor_parallel_size=4" in code:
        with pytest.raises(ConfigError, match="tensor_parallel_size 4 does not divide 6 attention heads"):
            exec(code, {})
        code = code.replace("    tensor_parallel_size=4,\n", "")
    exec(code, names)
    assert capsys.readouterr().out.startswith("Prompt: 'The future of AI is', Generated text: ")
    (output,) = names["outputs"]
    assert type(names["llm"].engine.drafter).__module__.split(".")[2] == method
    emitted = output.outputs[0]
    assert emitted.finish_reason == "stop" or (
        len(emitted.token_ids) == 16 and (method == "ngram" or output.speculation.drafted > 0)
    )
