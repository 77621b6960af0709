"""A conversation from Python: the history is the prompt, and the prefix cache holds its K/V.

python examples/chat.py
"""

from __future__ import annotations

from outrider import LLM, SamplingParams

QUESTIONS = ("What do plants need in order to grow?", "And what do trees need?", "Thank you!")


def main() -> None:
    llm = LLM(model="builtin", speculative_config={"model": "builtin-draft", "num_speculative_tokens": 2})
    history = [{"role": "system", "content": "Answer in one sentence."}]
    for question in QUESTIONS:
        history.append({"role": "user", "content": question})
        (output,) = llm.chat(history, SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_tokens=40))
        answer = output.outputs[0].text
        history.append({"role": "assistant", "content": answer})
        print(f"> {question}\n{answer}")
        print(f"  [{output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens were cached]")


if __name__ == "__main__":
    main()
