"""Timings of one request, in the form that llama.cpp's `speculative` prints.

    encoded   25 tokens in    0.319 seconds, speed:   78.298 t/s    prefill steps
    decoded  471 tokens in   19.278 seconds, speed:   24.432 t/s    all other steps and their output

| line | measured time |
|---|---|
| prompt eval time | forwards of a model in the prefill steps |
| eval time | forwards in all other steps: of the target over known and draft tokens, of the draft model |
| sample time | verification, sampling and bookkeeping; greedy sampling in a fused forward is in eval time |
| load time | loading target and draft model together |
| total time | loading and the request |

The last prefill step also drafts.  So a draft model has a few tokens more than the prompt in its first line.
"""

from __future__ import annotations

from outrider.control.auto import AutoController
from outrider.control.fixed import FixedController
from outrider.core.clock import Work
from outrider.engine.engine import Engine
from outrider.outputs import RequestOutput


def figures(engine: Engine, output: RequestOutput, load_seconds: float, total_seconds: float) -> str:
    """Timings as text.  The engine must have run this request alone since its clock was reset."""
    prefill, decoding, total = engine.prefill, engine.decode, output.speculation
    prompt, drafts = prefill.known, engine.controller.nodes(1)
    lines = [_phase("encoded", prompt, prefill), _phase("decoded", decoding.emitted, decoding), ""]
    if drafts:
        lines.append(f"n_draft   = {_most_drafted(engine)}")
    lines.append(f"n_predict = {total.emitted}")
    if drafts:
        lines += [
            f"n_drafted = {total.drafted}",
            f"n_accept  = {total.accepted}",
            f"accept    = {total.acceptance:.3%}",
        ]
        if not total.lossless:
            lines.append("lossless  = no: the verification rule changes the output")
        lines += _adaptive(output)
        # a method without a model has no prefill
        read = prompt if engine.drafter.footprint(engine.device).total() else 0
        lines += ["", "draft:", "", _line("prompt eval time", prefill.times.propose, read + prefill.nodes)]
        lines.append(_line("eval time", decoding.times.propose, decoding.nodes))
    lines += ["", "target:", ""]
    lines += [
        f"{'load time':>16} = {1e3 * load_seconds:9.2f} ms",
        _line("sample time", prefill.times.rest + decoding.times.rest, total.emitted),
        _line("prompt eval time", prefill.times.forward, prompt + prefill.nodes),
        _line(
            "eval time",
            decoding.times.forward,
            decoding.known + decoding.nodes,
            f" in {decoding.steps} runs",
        ),
        f"{'total time':>16} = {1e3 * total_seconds:9.2f} ms / {prompt + total.emitted:5d} tokens",
    ]
    return "\n".join(lines)


def _most_drafted(engine: Engine) -> str:
    """The most draft tokens of a step: of a chain their number, of a tree its depth and its nodes."""
    controller = engine.controller
    limits = controller.limits if isinstance(controller, AutoController) else controller
    nodes = controller.nodes(1)
    depth = limits.depth_for(1) if isinstance(limits, FixedController) else nodes
    return f"{nodes}" if nodes <= depth else f"{depth} (depth of a tree of up to {nodes} nodes)"


def _adaptive(output: RequestOutput) -> list[str]:
    """Choices of an adaptive controller, its expectations, and its estimate of the gain."""
    lines = []
    for drafting in (sample.drafting for sample in output.outputs):
        if drafting is not None and drafting.steps:
            steps = sum(drafting.steps.values())
            chosen = ", ".join(f"{arm} {count}" for arm, count in drafting.steps.items())
            lines += [
                f"chosen    = {chosen} (steps; {drafting.nodes / steps:.2f} nodes a step)",
                f"expected  = {drafting.expected:.1f} accepted tokens, {drafting.accepted} were",
                f"gain      = {drafting.gain:.2f}x: {1e3 * drafting.seconds / steps:.3f} ms a step, "
                f"{1e3 * drafting.plain_seconds:.1f} ms for these tokens without drafts, as measured",
            ]
    return lines


def _phase(name: str, tokens: int, work: Work) -> str:
    seconds = sum(work.times)
    return f"{name} {tokens:4d} tokens in {seconds:8.3f} seconds, speed: {_rate(tokens, seconds):8.3f} t/s"


def _line(name: str, seconds: float, tokens: int, runs: str = "") -> str:
    ms = seconds * 1e3
    each = ms / tokens if tokens else 0.0
    return (
        f"{name:>16} = {ms:9.2f} ms / {tokens:5d} tokens{runs} "
        f"({each:8.2f} ms per token, {_rate(tokens, seconds):9.2f} tokens per second)"
    )


def _rate(tokens: int, seconds: float) -> float:
    return tokens / seconds if seconds else 0.0
