"""`outrider serve`: the server, with vLLM's options.

Every field of EngineOptions and ServerOptions is an option of its name; its help is in their docstrings.
"""

from __future__ import annotations

import inspect
import json
import logging
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from importlib.util import find_spec
from typing import Annotated, Any, get_type_hints

import typer
from typer.main import get_command

from outrider.cli.flag import Flag
from outrider.cli.flags import (
    CONTEXT,
    MODEL_HELP,
    SPECULATION,
    layers,
    note_ignored,
    values_of,
    without_gpu_layers,
)
from outrider.cli.serve_flags import ALIASES, IGNORED, REFUSED
from outrider.cli.speculation import AUTO, config_of
from outrider.cli.vllm import adapters, configured, nested, repeated, sized
from outrider.errors import ConfigError

PACKAGES = ("fastapi", "uvicorn", "httptools", "prometheus_client")  # of the extra `serve`
ENVIRONMENT = {"api_key": "OUTRIDER_API_KEY"}
SEVERAL = (  # options of which one may have several values
    "--served-model-name",
    "--api-key",
    "--allowed-origins",
    "--allowed-methods",
    "--allowed-headers",
    "--lora-modules",
    "--cuda-graph-sizes",
    "--cudagraph-capture-sizes",
    "--ignore-patterns",
)
OBJECTS = {
    "--speculative-config",
    "--override-generation-config",
    "--default-chat-template-kwargs",
    "-O",
} | {  # options that have an object
    name for flag in (*IGNORED, *REFUSED) for name in flag.names.split() if "-config" in flag.names
}


def serve(context: typer.Context) -> int:
    """Serve a model with OpenAI's protocol: outrider serve MODEL --port 8000.  --help lists the options."""
    about = """Serve a model with OpenAI's protocol.

    Example:  outrider serve builtin --speculative-config '{"model": "builtin-draft"}' --port 8000
    """
    return run_with_options(context, Command("outrider serve", about, start))


@dataclass(frozen=True)
class Command:
    """A command that loads a model with the options of `serve`.

    name: with its program.  about: its help.
    begin: called with ServerOptions, engine options, speculative_config, threads, and the values of `more`.
    more: options of its own.  server: fields of ServerOptions that it has; None: all.
    """

    name: str
    about: str
    begin: Callable[..., None]
    more: tuple[Flag, ...] = ()
    server: tuple[str, ...] | None = None


def run_with_options(context: typer.Context, command: Command) -> int:
    """Run a command with its options.  Returns the exit status: 130 after Ctrl-C."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, context_settings=CONTEXT)
    app.command()(function_of(command))
    options = {
        name: each.opts[0] for each in get_command(app).params for name in (*each.opts, *each.secondary_opts)
    }
    words = sized(nested(configured(context.args, options), OBJECTS))
    status = app(repeated(words, SEVERAL), prog_name=command.name, standalone_mode=False)
    return status if isinstance(status, int) else 0


def function_of(command: Command) -> Callable[..., None]:
    """The command with its options.  Made when it runs, because importing their classes takes seconds."""
    from outrider.config import EngineOptions, options
    from outrider.serve.options import ServerOptions

    served = [
        each.name for each in fields(ServerOptions) if command.server is None or each.name in command.server
    ]

    def function(place: str | None, threads: int | None, **given: Any) -> None:
        for flag in REFUSED:
            if given.pop(flag.word) not in (None, False):
                raise ConfigError(f"{flag.names.split()[0]} is not supported: {flag.help}.")
        note_ignored(IGNORED, given)
        config = config_of(values_of(SPECULATION, given), AUTO)
        more = {flag.field: given.pop(flag.word) for flag in command.more}
        own = {name: given.pop(name) for name in served}
        own = {name: tuple(value) if isinstance(value, list) else value for name, value in own.items()}
        if "allowed_origins" in own:
            own["allowed_origins"] = listed(own["allowed_origins"])
        own["lora_modules"] = adapters(own["lora_modules"])
        server = options(ServerOptions, own, "server option")
        if place is not None and given["model"] not in (None, place):
            raise ConfigError(f"the model is given twice, as {place!r} and as --model {given['model']!r}.")
        engine = {**given, "model": place or given["model"] or "builtin"}
        engine["max_model_len"] = given["max_model_len"] or None  # llama.cpp's -c 0
        if given["gpu_layers"] is not None:
            engine["gpu_layers"] = layers(given["gpu_layers"])
        command.begin(server, *without_gpu_layers(engine, config), threads, **more)

    argument = Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
    parameters = [
        inspect.Parameter("place", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=argument),
        *(flag.parameter("Batch") for flag in command.more),
        *(flag.parameter("Speculation") for flag in SPECULATION),
        _flag("threads", int, "CPU threads; default: OMP_NUM_THREADS, or one per core.").parameter("Model"),
        *_parameters(EngineOptions, "Model"),
        *_parameters(ServerOptions, "Server", served),
        *(flag.parameter("Server") for flag in (*IGNORED, *REFUSED)),
    ]
    function.__doc__ = command.about
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return function


def start(options: Any, engine: dict[str, Any], config: dict[str, Any] | None, threads: int | None) -> None:
    """Check packages and all options, then load and serve."""
    check(options, engine, config, threads)
    from outrider.parallel.start import join, placed
    from outrider.serve.run import Service, run

    if placed() is not None and options.replicas > 1:
        raise ConfigError("--replicas starts processes of this machine: start it without a launcher.")
    if placed():
        join()  # one rank serves
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING, force=True)
    service = Service(options, engine, config, threads)
    if options.replicas > 1:
        if sys.platform == "win32":
            raise ConfigError("--replicas needs Linux or macOS: start several servers.")
        from outrider.serve.replicas.run import run_replicas

        run_replicas(service)
    else:
        run(service)


def check(options: Any, engine: dict[str, Any], config: dict[str, Any] | None, threads: int | None) -> None:
    """Raise ConfigError for missing packages and wrong options: before anything is loaded."""
    if not all(map(find_spec, PACKAGES)):
        raise ConfigError("the server needs more packages: pip install 'outrider[serve]'.")
    from outrider.config import EngineOptions, SpeculativeOptions
    from outrider.parallel.start import check_launched

    layout = EngineOptions(**engine).layout
    SpeculativeOptions.of(config)
    options.keys()
    if threads is not None and threads < 1:
        raise ConfigError(f"threads must be at least 1, got {threads}.")
    check_launched(layout)  # without it the other processes would wait for a rank 0 that serves alone


def _parameters(kind: type[Any], panel: str, only: Sequence[str] | None = None) -> list[inspect.Parameter]:
    """An option for every field of an options class, or for some."""
    help, hints = documented(kind), get_type_hints(kind)
    made = []
    for field in fields(kind):
        if only is not None and field.name not in only:
            continue
        hint, default = hints[field.name], field.default
        if field.name == "gpu_layers":
            hint = str  # a number, or llama.cpp's all and auto
        if "Mapping" in str(hint):
            hint = str  # JSON
        if str(hint) == "tuple[str, ...]":
            hint, default = list[str], []
        default = None if default is MISSING else default
        made.append(_flag(field.name, hint, help.get(field.name, ""), default).parameter(panel))
    return made


def _flag(name: str, hint: Any, help: str, default: Any = None) -> Flag:
    flag = name.replace("_", "-")
    names = f"--{flag}/--no-{flag}" if hint is bool else f"--{flag}"
    return Flag(name, hint, f"{names} {ALIASES.get(name, '')}", help, default, variable=ENVIRONMENT.get(name))


def listed(given: tuple[str, ...]) -> Any:
    """Values of --allowed-origins, which vLLM has as one list in JSON."""
    if len(given) != 1 or not given[0].startswith("["):
        return given
    try:
        return tuple(json.loads(given[0]))
    except ValueError as error:
        raise ConfigError(f"--allowed-origins: {given[0]!r} is no JSON: {error}.") from error


def documented(kind: type[Any]) -> dict[str, str]:
    """Field -> its line in the table of a docstring."""
    names = {field.name for field in fields(kind)}
    found: dict[str, str] = {}
    current: list[str] = []
    for line in (inspect.getdoc(kind) or "").splitlines():
        entry = re.match(r"(\w+(?:, \w+)*)\s{2,}(.*)", line)
        if entry and set(entry[1].split(", ")) <= names:
            current = entry[1].split(", ")
            found |= dict.fromkeys(current, entry[2])
        elif line.startswith("  ") and current:
            found |= {name: f"{found[name]} {line.strip()}" for name in current}
        else:
            current = []
    return found
