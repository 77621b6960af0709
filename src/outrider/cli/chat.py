"""`outrider chat`: a conversation in the terminal, or with lines piped in."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from outrider.cli.arguments import readable, undecodable
from outrider.cli.flags import Given, load, note, shared
from outrider.cli.generate import print_answer
from outrider.cli.speculation import AUTO, config_of
from outrider.core.validate import text_of
from outrider.errors import RequestError

if TYPE_CHECKING:
    from outrider.core.params import SamplingParams
    from outrider.llm import LLM
    from outrider.outputs import RequestOutput

HELP = """A line that ends in \\ goes on in the next one.
/stats         acceptance, speed and prefix cache hits so far
/system TEXT   set the system message (without TEXT: none) and restart
/reset         clear the conversation
/help          this list
/exit          leave (or Ctrl-D); Ctrl-C ends an answer"""
ROOM = 4  # 1 / ROOM of the context at least is left for an answer, if it may be so long


@shared
def chat(
    engine: Given,
    speculation: Given,
    sampling: Given,
    system: Annotated[str | None, Option("-sys", "--system-prompt", help="The system message.")] = None,
    template: Annotated[
        Path | None, Option("--chat-template-file", help="A Jinja template instead of the model's own.")
    ] = None,
) -> None:
    """Chat with a model.  The whole conversation is the prompt of every turn, and mostly in the prefix cache.

    In the conversation: /stats, /system TEXT, /reset, /help, /exit.
    """
    from outrider.core.params import SamplingParams

    written = text_of(template, "the chat template", RequestError) if template else None
    params = SamplingParams(**sampling)
    talk = Talk(load(engine, config_of(speculation, AUTO)), params, system, written)
    interactive = sys.stdin.isatty()
    if interactive:
        typer.echo("Type a message; /help lists the commands.", err=True)
    for message in messages(interactive):
        if message.startswith("/"):
            if not command(talk, message):
                break
        elif message.strip():
            answer(talk, message, interactive)


class Talk:
    """A conversation and the figures of its turns."""

    def __init__(
        self, llm: LLM, params: SamplingParams, system: str | None = None, template: str | None = None
    ) -> None:
        from outrider.core.row import Speculation
        from outrider.engine.chat_template import render

        self.llm, self.params, self.template = llm, params, template
        self.cached = self.prompt = self.turns = 0
        self.speculation = Speculation()
        self.start(system)
        if llm.tokenizer is not None and not (template or getattr(llm.tokenizer, "chat_template", None)):
            raise RequestError(
                "the model has no chat template: give one with --chat-template-file, or take generate."
            )
        render(llm.tokenizer, self.asked("Hello"))  # raises an error for a template that it cannot use

    def start(self, system: str | None) -> None:
        self.system = system
        self.history: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []

    def asked(self, question: str) -> dict[str, Any]:
        """The prompt of a question that follows the conversation."""
        return {
            "messages": [*self.history, {"role": "user", "content": question}],
            "chat_template": self.template,
        }

    def shorten(self, question: str) -> int:
        """Leave out the oldest turns if the question after them leaves too little room for an answer.

        Then half of the context is freed: what is left stays in the prefix cache for some turns.  Returns the
        number of turns that were left out.
        """
        context, first = self.llm.engine.max_len, 1 if self.system else 0
        wanted = min(context // ROOM, self.params.max_tokens or context)
        before, most = len(self.history), context - wanted
        while len(self.history) > first and self._length(question) > most:
            del self.history[first : first + 2]
            most = min(most, context // 2)
        return (before - len(self.history)) // 2

    def _length(self, question: str) -> int:
        """Tokens of the prompt."""
        from outrider.engine.chat_template import render

        return len(render(self.llm.tokenizer, self.asked(question))["prompt_token_ids"])

    def add(self, question: str, output: RequestOutput) -> None:
        self.history += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": output.outputs[0].text},
        ]
        self.turns += 1
        self.cached += output.num_cached_tokens or 0
        self.prompt += len(output.prompt_token_ids)
        self.speculation += output.speculation

    def stats(self) -> str:
        total, times, share = self.speculation, self.llm.engine.times, self.cached / max(1, self.prompt)
        turns = "turn" if self.turns == 1 else "turns"
        loss = "" if total.lossless else "\nnot lossless: the verification rule changes the output"
        return (
            f"{self.turns} {turns}, {total.emitted} tokens in {sum(times):.2f} s "
            f"({total.emitted / (sum(times) or 1):.1f} tokens/s)\n"
            f"speculation: {total.tokens_per_step:.2f} tokens per step, {total.accepted} of {total.drafted} "
            "draft tokens accepted "
            f"({total.acceptance:.0%}){loss}\n"
            f"prefix cache: {self.cached} of {self.prompt} prompt tokens hit ({share:.0%})"
        )


def answer(talk: Talk, question: str, interactive: bool) -> None:
    """One turn.  After Ctrl-C an interactive conversation keeps the partial answer; a piped one ends."""
    try:
        if left_out := talk.shorten(question):
            turns = "oldest turn is" if left_out == 1 else f"{left_out} oldest turns are"
            note(f"the {turns} left out: the context holds {talk.llm.engine.max_len} tokens.")
        output, interrupted = print_answer(talk.llm, talk.asked(question), talk.params)
    except RequestError as error:
        if not interactive:
            raise
        typer.echo(f"{error}  (/reset clears the conversation)", err=True)
        return
    if output is not None:
        talk.add(question, output)
    if interrupted and not interactive:
        typer.echo(talk.stats(), err=True)
        raise typer.Exit(130)


def command(talk: Talk, line: str) -> bool:
    """False if the conversation is over."""
    name, _, rest = line.strip().partition(" ")
    match name:
        case "/exit" | "/quit":
            return False
        case "/stats":
            typer.echo(talk.stats())
        case "/reset":
            talk.start(talk.system)
        case "/system":
            talk.start(rest.strip() or None)
        case "/help":
            typer.echo(HELP)
        case _:
            typer.echo(f"There is no command {name}.\n{HELP}")
    return True


def messages(interactive: bool) -> Iterator[str]:
    """Typed messages, or those of standard input.  A backslash at the end of a line joins the next one.

    Ctrl-C discards what is being typed; raises KeyboardInterrupt for a second one that follows.
    """
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  history and editing, where the platform has it
    given = typed() if interactive else piped()
    parts: list[str] = []
    for line in given:
        parts = [] if line is None else [*parts, line]
        if line is not None and not line.endswith("\\"):
            yield "\n".join([part[:-1] for part in parts[:-1]] + [line])
            parts = []
    if parts:
        yield "\n".join(part[:-1] for part in parts)


def piped() -> Iterator[str | None]:
    """The lines of standard input.  Raises RequestError if they are not UTF-8."""
    try:
        for line in sys.stdin:
            yield readable(line.rstrip("\n"), "standard input")
    except UnicodeDecodeError as error:
        raise RequestError(undecodable("standard input", error)) from error


def typed() -> Iterator[str | None]:
    """Typed lines until Ctrl-D; None for Ctrl-C, and KeyboardInterrupt for two of them in turn."""
    interrupted = False
    while True:
        try:
            line = input("> ")
        except EOFError:
            typer.echo()  # after the prompt, and what the terminal shows of the key
            return
        except KeyboardInterrupt:
            typer.echo()
            if interrupted:
                raise
            interrupted = True
            typer.echo("Ctrl-D, /exit or a second Ctrl-C leaves.", err=True)
            yield None
        else:
            interrupted = False
            yield line
