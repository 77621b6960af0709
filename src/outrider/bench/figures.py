"""What one request cost, in the form that llama.cpp's `speculative` prints.

    encoded   25 tokens in    0.319 seconds, speed:   78.298 t/s      the steps that computed the prompt
    decoded  471 tokens in   19.278 seconds, speed:   24.432 t/s      all other steps, and what these emitted

`prompt eval` is what these prompt steps cost a model, `eval` what decoding cost it: the target computes the pending token and
all guesses of a step in one run, the draft is charged for all guesses, those of the prompt step included.
"""

from __future__ import annotations

from outrider.engine.engine import Engine
from outrider.llm import RequestOutput


def figures(engine: Engine, output: RequestOutput) -> str:
    """The engine must have run this request alone since its clock was reset."""
    reading, decoding, total = engine.reading, engine.decoding, output.speculation
    prompt = reading.known
    lines = [
        f"encoded {prompt:4d} tokens in {sum(reading.times):8.3f} seconds, speed: {_rate(prompt, sum(reading.times)):8.3f} t/s",
        f"decoded {decoding.emitted:4d} tokens in {sum(decoding.times):8.3f} seconds, "
        f"speed: {_rate(decoding.emitted, sum(decoding.times)):8.3f} t/s",
        "",
    ]
    guessing = engine.controller.nodes(1) > 0
    if guessing:
        lines.append(f"n_draft   = {engine.controller.nodes(1)}")
    lines.append(f"n_predict = {total.emitted}")
    if guessing:
        lines += [f"n_drafted = {total.drafted}", f"n_accept  = {total.accepted}", f"accept    = {total.acceptance:.3%}"]
        drafting = reading.times.propose + decoding.times.propose - engine.drafter.reading
        guessed = reading.guessed + decoding.guessed
        lines += ["", "draft:", "", *_block(engine.drafter.reading, prompt, drafting, guessed, "")]
    computed = decoding.known + decoding.guessed
    lines += ["", "target:", "", *_block(reading.times.forward, prompt, decoding.times.forward, computed, f" in {decoding.steps} runs")]
    return "\n".join(lines)


def _block(reading: float, prompt: int, seconds: float, tokens: int, runs: str) -> list[str]:
    """A model that reads no prompt has no line for it."""
    lines = [_line("prompt eval time", reading, prompt, "")] if reading else []
    return [*lines, _line("eval time", seconds, tokens, runs)]


def _line(name: str, seconds: float, tokens: int, runs: str) -> str:
    ms = seconds * 1e3
    each = ms / tokens if tokens else 0.0
    return (
        f"{name:>16} = {ms:9.2f} ms / {tokens:5d} tokens{runs} ({each:8.2f} ms per token, {_rate(tokens, seconds):9.2f} tokens per second)"
    )


def _rate(tokens: int, seconds: float) -> float:
    return tokens / seconds if seconds else 0.0
