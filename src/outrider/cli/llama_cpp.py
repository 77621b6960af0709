"""Flags of llama.cpp that `generate`, `chat` and `serve` have no option for."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.cli.flag import Names, unsupported
from outrider.errors import ConfigError

# without effect here: the reason, which a note gives -> the flags
_WITHOUT_EFFECT = {
    "drafts run on the threads of -t": Names(
        valued="threads-draft -td --spec-draft-threads|threads-batch-draft -tbd",
    ),
    "prompts are computed on the threads of -t": Names(valued="threads-batch -tb"),
    "the draft sees what the target sees; draft_kv_budget narrows it": Names(valued="ctx-size-draft -cd"),
    "a draft of any length is verified": Names(valued="draft-min --draft-n-min --spec-draft-n-min"),
    "siblings in speculative_config makes trees": Names(valued="draft-p-split --spec-draft-p-split"),
    "K/V has one type for keys, values and the draft: use --kv-cache-dtype": Names(
        valued=(
            "cache-type-k -ctk|cache-type-v -ctv|cache-type-k-draft -ctkd --spec-draft-type-k|"
            "cache-type-v-draft -ctvd --spec-draft-type-v"
        ),
    ),
    "the KV cache has pages of one size, which all requests share": Names(
        valued="defrag-thold -dt",
        bare="kv-unified -kvu --no-kv-unified -no-kvu|swa-full",
    ),
    "K/V is on the device of its layer": Names(bare="kv-offload -kvo"),
    "the engine sizes its steps itself": Names(valued="batch-size -b|ubatch-size -ub"),
    "requests always share steps": Names(bare="cont-batching -cb"),
    "attention has one form here": Names(valued="flash-attn -fa"),
    "penalties look at the whole text": Names(valued="repeat-last-n"),
    "the text ends where the context is full": Names(valued="keep", bare="no-context-shift"),
    "weights are read from the file once and stay in memory": Names(bare="mlock|no-mmap|check-tensors"),
    "the operating system places the threads of -t": Names(valued="prio|poll|numa"),
    "the terminal is left as it is": Names(valued="color -co", bare="log-disable"),
    "the log has one form": Names(valued="verbosity -lv --log-verbosity", bare="verbose -v --log-verbose"),
    "nothing is computed before the prompt": Names(bare="no-warmup"),
    "chat templates are always rendered by Jinja": Names(bare="jinja"),
    "generate continues a text, chat talks": Names(bare="no-conversation -no-cnv"),
}
IGNORED = unsupported(_WITHOUT_EFFECT)
IGNORED_BY_ONE = unsupported(  # by `generate` and `chat`, which have one request
    {
        "there is one request": Names(valued="parallel -np"),
        "the terminal is left as it is": Names(bare="simple-io"),
    }
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
