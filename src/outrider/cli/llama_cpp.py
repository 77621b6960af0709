"""Flags of llama.cpp that `generate`, `chat` and `serve` have no option for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outrider.cli.flag import Flag
from outrider.errors import ConfigError

_ONE_POOL = "drafts run on the threads of -t"
_KV = "K/V has one type for keys, values and the draft: use --kv-cache-dtype"
_PAGES = "the KV cache has pages of one size, which all requests share"
STEP = "the engine sizes its steps itself"
MEMORY = "weights are read from the file once and stay in memory"
_LOOK = "the terminal is left as it is"
_LOG = "the log has one form"
_SYSTEM = "the operating system places the threads of -t"
_IGNORED = (  # without effect here; the help is the reason, and is not shown in --help
    Flag("", str, "--threads-draft -td --spec-draft-threads", _ONE_POOL),
    Flag("", str, "--threads-batch -tb", "prompts are computed on the threads of -t"),
    Flag("", str, "--threads-batch-draft -tbd", _ONE_POOL),
    Flag("", str, "--ctx-size-draft -cd", "the draft sees what the target sees; draft_kv_budget narrows it"),
    Flag("", str, "--draft-min --draft-n-min --spec-draft-n-min", "a draft of any length is verified"),
    Flag("", str, "--draft-p-split --spec-draft-p-split", "siblings in speculative_config makes trees"),
    Flag("", str, "--cache-type-k -ctk", _KV),
    Flag("", str, "--cache-type-v -ctv", _KV),
    Flag("", str, "--cache-type-k-draft -ctkd --spec-draft-type-k", _KV),
    Flag("", str, "--cache-type-v-draft -ctvd --spec-draft-type-v", _KV),
    Flag("", bool, "--kv-unified -kvu --no-kv-unified -no-kvu", _PAGES, False),
    Flag("", bool, "--swa-full", _PAGES, False),
    Flag("", str, "--defrag-thold -dt", _PAGES),
    Flag("", bool, "--kv-offload -kvo", "K/V is on the device of its layer", False),
    Flag("", str, "--batch-size -b", STEP),
    Flag("", str, "--ubatch-size -ub", STEP),
    Flag("", bool, "--cont-batching -cb", "requests always share steps", False),
    Flag("", str, "--flash-attn -fa", "attention has one form here"),
    Flag("", str, "--repeat-last-n", "penalties look at the whole text"),
    Flag("", str, "--keep", "the text ends where the context is full"),
    Flag("", bool, "--no-context-shift", "the text ends where the context is full", False),
    Flag("", bool, "--mlock", MEMORY, False),
    Flag("", bool, "--no-mmap", MEMORY, False),
    Flag("", bool, "--check-tensors", MEMORY, False),
    Flag("", str, "--prio", _SYSTEM),
    Flag("", str, "--poll", _SYSTEM),
    Flag("", str, "--numa", _SYSTEM),
    Flag("", str, "--color -co", _LOOK),
    Flag("", bool, "--log-disable", _LOOK, False),
    Flag("", bool, "--verbose -v --log-verbose", _LOG, False),
    Flag("", str, "--verbosity -lv --log-verbosity", _LOG),
    Flag("", bool, "--no-warmup", "nothing is computed before the prompt", False),
    Flag("", bool, "--jinja", "chat templates are always rendered by Jinja", False),
    Flag("", bool, "--no-conversation -no-cnv", "generate continues a text, chat talks", False),
)  # fmt: skip
IGNORED = tuple(replace(flag, hidden=True) for flag in _IGNORED)
IGNORED_BY_ONE = (  # by `generate` and `chat`, which have one request
    Flag("", str, "--parallel -np", "there is one request", hidden=True),
    Flag("", bool, "--simple-io", _LOOK, False, hidden=True),
)

OPTIONAL = {  # flags whose value older versions of llama.cpp do not have -> the values
    **dict.fromkeys(("-fa", "--flash-attn"), ("on", "off", "auto", "0", "1")),
    **dict.fromkeys(("-co", "--color"), ("on", "off", "auto")),
}
TALK = (
    "-i", "--interactive", "-if", "--interactive-first", "-cnv", "--conversation", "-mli",
    "--multiline-input",
)  # fmt: skip
TEXTS = (  # flags whose value is a text of any form
    "-p", "--prompt", "-f", "--file", "-sys", "--system-prompt", "-r", "--reverse-prompt", "-j",
    "--json-schema", "--grammar", "--regex",
)  # fmt: skip
TOKEN = ("-hft", "--hf-token")
REPOSITORY = {  # of GGUF files on the hub
    **dict.fromkeys(("-hf", "-hfr", "--hf-repo"), "-m"),
    **dict.fromkeys(("-hfd", "-hfrd", "--hf-repo-draft"), "-md"),
}
TAG = "Q4_K_M"  # that llama.cpp takes if none is given
HUB = {  # flags -> what to do instead
    **dict.fromkeys(("-hff", "--hf-file", "-mu", "--model-url"), "download the file and give it with -m"),
    **dict.fromkeys(TOKEN, "set the environment variable HF_TOKEN"),
}


def _tagged(hub_id: str) -> str:
    return hub_id if ":" in hub_id else f"{hub_id}:{TAG}"


def translated(words: Sequence[str]) -> list[str]:
    """The words of a command in the form that its options have.

    Inserts values of OPTIONAL flags, and a TAG after the hub id of -hf.  `chat` has no use for -i, -cnv ….
    Raises ConfigError for these with `generate`, and for -hff …, which would be read as -h -f and print the
    help.  `serve` has refusals of its own.
    """
    made: list[str] = []
    command = words[0] if words else ""
    for before, word, after in zip(["", *words], words, [*words[1:], ""]):
        if before in TEXTS:
            made.append(word)
            continue
        if before in REPOSITORY:
            made.append(_tagged(word))
            continue
        flag, _, given_with_it = word.partition("=")
        if flag in REPOSITORY and given_with_it:
            made += [REPOSITORY[flag], _tagged(given_with_it)]
            continue
        if word in REPOSITORY:
            made.append(REPOSITORY[word])
            continue
        if word in HUB and command != "serve":
            given = word if word in TOKEN else f"{word} {after}".strip()  # a token is not printed
            raise ConfigError(f"{given} is not known: {HUB[word]}.")
        if word in TALK and command == "generate":
            raise ConfigError(f"{word} is for conversations, and generate continues a text: take chat.")
        if word in TALK and command == "chat":
            continue
        made += [word, "on"] if word in OPTIONAL and after not in OPTIONAL[word] else [word]
    return made
