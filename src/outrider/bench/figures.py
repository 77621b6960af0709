"""What one request cost, in the form that llama.cpp's `speculative` prints.

    encoded   25 tokens in    0.319 seconds, speed:   78.298 t/s      the steps that computed the prompt
    decoded  471 tokens in   19.278 seconds, speed:   24.432 t/s      all other steps, and what these emitted

Of each model, `prompt eval` is what it computed in the first kind of steps, `eval` in the second: the target known tokens and
all guesses of a step in one run, the draft its guesses.  The last step of a prompt guesses already, so that a model with weights has a few
tokens more than the prompt there.
"""

from __future__ import annotations

from outrider.engine.engine import Engine
from outrider.outputs import RequestOutput


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
        lines += [
            f"n_drafted = {total.drafted}",
            f"n_accept  = {total.accepted}",
            f"accept    = {total.acceptance:.3%}",
        ]
        read = (
            prompt if engine.drafter.slot_bytes else 0
        )  # a method without weights of its own reads no prompt
        if not total.lossless:
            lines.append("lossless  = no: the verification rule changes what the model says")
        lines += ["", "draft:", "", _line("prompt eval time", reading.times.propose, read + reading.guessed)]
        lines.append(_line("eval time", decoding.times.propose, decoding.guessed))
    lines += ["", "target:", "", _line("prompt eval time", reading.times.forward, prompt + reading.guessed)]
    lines.append(
        _line(
            "eval time",
            decoding.times.forward,
            decoding.known + decoding.guessed,
            f" in {decoding.steps} runs",
        )
    )
    return "\n".join(lines)


def _line(name: str, seconds: float, tokens: int, runs: str = "") -> str:
    ms = seconds * 1e3
    each = ms / tokens if tokens else 0.0
    return f"{name:>16} = {ms:9.2f} ms / {tokens:5d} tokens{runs} ({each:8.2f} ms per token, {_rate(tokens, seconds):9.2f} tokens per second)"


def _rate(tokens: int, seconds: float) -> float:
    return tokens / seconds if seconds else 0.0
