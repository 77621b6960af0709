"""The offline API: plain, with a draft model, with n-gram look-up, and streaming.

python examples/offline.py
"""

from __future__ import annotations

from outrider import LLM, SamplingParams

prompts = ["The future of AI is", "<|bos|><|user|>What do plants need in order to grow?<|end|><|assistant|>"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_tokens=40)

CONFIGS = (
    None,
    {"model": "builtin-draft", "num_speculative_tokens": 5},
    {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4},
)


def main() -> None:
    for config in CONFIGS:
        llm = LLM(model="builtin", tensor_parallel_size=1, speculative_config=config)
        for output in llm.generate(prompts, sampling_params):
            print(f"Prompt: {output.prompt!r}, Generated text: {output.outputs[0].text!r}")
            speculation = output.speculation
            print(
                f"  {speculation.tokens_per_step:.2f} tokens per step, {speculation.acceptance:.0%} accepted"
            )

    shown = 0
    for output in llm.stream(prompts[1], SamplingParams(temperature=0, max_tokens=40)):
        text = output.outputs[0].text
        print(text[shown:], end="", flush=True)
        shown = len(text)
    print()


if __name__ == "__main__":
    main()
