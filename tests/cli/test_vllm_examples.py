"""The examples of vLLM's page on speculative decoding run unchanged but for import and models."""

from __future__ import annotations

import re
from typing import Any

import pytest

from outrider import ConfigError

PAGE = """
```python
from vllm import LLM, SamplingParams

prompts = [
    "The future of AI is",
]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)

llm = LLM(
    model="facebook/opt-6.7b",
    tensor_parallel_size=1,
    speculative_config={
        "model": "facebook/opt-125m",
        "num_speculative_tokens": 5,
    },
)
outputs = llm.generate(prompts, sampling_params)

for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs[0].text
    print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")
```

```python
from vllm import LLM, SamplingParams

prompts = [
    "The future of AI is",
]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)

llm = LLM(
    model="facebook/opt-6.7b",
    tensor_parallel_size=1,
    speculative_config={
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_max": 4,
    },
)
outputs = llm.generate(prompts, sampling_params)

for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs[0].text
    print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")
```

```python
from vllm import LLM, SamplingParams

prompts = [
    "The future of AI is",
]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)

llm = LLM(
    model="meta-llama/Meta-Llama-3.1-70B-Instruct",
    tensor_parallel_size=4,
    speculative_config={
        "model": "ibm-ai-platform/llama3-70b-accelerator",
        "draft_tensor_parallel_size": 1,
    },
)
outputs = llm.generate(prompts, sampling_params)

for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs[0].text
    print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")
```

```python
from vllm import LLM, SamplingParams

prompts = [
    "The future of AI is",
]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)

llm = LLM(
    model="meta-llama/Meta-Llama-3-8B-Instruct",
    tensor_parallel_size=4,
    speculative_config={
        "model": "yuhuili/EAGLE-LLaMA3-Instruct-8B",
        "draft_tensor_parallel_size": 1,
    },
)
outputs = llm.generate(prompts, sampling_params)

for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs[0].text
    print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")
```
"""
HERE = {
    "from vllm import": "from outrider import",
    "facebook/opt-6.7b": "builtin",
    "facebook/opt-125m": "builtin-draft",
    "meta-llama/Meta-Llama-3.1-70B-Instruct": "builtin",
    "ibm-ai-platform/llama3-70b-accelerator": "builtin-mlp_speculator",
    "meta-llama/Meta-Llama-3-8B-Instruct": "builtin",
    "yuhuili/EAGLE-LLaMA3-Instruct-8B": "builtin-eagle",
}
METHODS = ["draft_model", "ngram", "mlp_speculator", "eagle"]
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def here(block: str) -> str:
    for theirs, ours in HERE.items():
        block = block.replace(theirs, ours)
    return block


@pytest.mark.parametrize(("method", "block"), list(zip(METHODS, BLOCKS, strict=True)), ids=METHODS)
def test_an_example_runs(method: str, block: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, names = here(block), dict[str, Any]()
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
