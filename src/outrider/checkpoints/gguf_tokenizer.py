"""The tokenizer in the metadata of a GGUF file: byte-level BPE ("gpt2") or SentencePiece's BPE ("llama").

Built here from the metadata alone, as what the file names is llama.cpp's: the pattern that cuts a text into words is known
there by the name of a model.  The patterns and defaults are those of llama.cpp's llama-vocab.cpp.
"""

from __future__ import annotations

from typing import Any

from outrider.checkpoints.gguf import File
from outrider.errors import ModelError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{WORDS}"
QWEN2 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{WORDS}"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
KNOWN = {
    (LLAMA3,): "llama3 llama-v3 llama-bpe falcon3 dbrx smaug-bpe chatglm-bpe glm4",
    (QWEN2,): "qwen2 deepseek-r1-qwen megrez stablelm2 hunyuan solar-open",
    (TEKKEN,): "tekken",
    (GPT2,): "gpt-2 phi-2 mpt olmo jais trillion exaone4",
    (r"\p{N}", GPT2): "smollm starcoder refact command-r codeshell exaone minerva-7b",
    (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}"): "deepseek-coder",
    (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"): "default",
}
PATTERNS = {name: patterns for patterns, names in KNOWN.items() for name in names.split()}
WHOLE = (
    "llama3",
    "llama-v3",
    "llama-bpe",
    "falcon3",
    "tekken",
)  # a word that is a token is never cut; BOS by default
ENDS = (  # control tokens that end a text, whatever the metadata call eos
    "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "</s>", "<EOT>",
)  # fmt: skip


def ending_of(file: File) -> frozenset[int]:
    """Ids that end a text: what the metadata say, and the control tokens that do so in every model."""
    named = {file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")}
    tokens = zip(
        file.metadata.get("tokenizer.ggml.tokens", ()), file.metadata.get("tokenizer.ggml.token_type", ())
    )
    return frozenset(i for i in named if i is not None) | {
        i for i, (t, kind) in enumerate(tokens) if kind == CONTROL and t in ENDS
    }


def tokenizer_of(file: File) -> Any:
    """A transformers tokenizer, None where the file has no vocabulary."""
    told = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in file.metadata.items()
        if key.startswith("tokenizer.")
    }
    model = told.get("model", "none")
    if model == "none" or "tokens" not in told:
        return None
    if model not in ("gpt2", "llama"):
        raise ModelError(
            f'{file.path} has a tokenizer of model {model!r}, which is not supported: pass LLM(tokenizer="a folder").'
        )
    try:
        return _made(told, model)
    except Exception as error:  # tokenizers raises errors of many kinds
        raise ModelError(f"{file.path}: the tokenizer's metadata are corrupt or unknown: {error}.") from error


def _made(told: dict[str, Any], model: str) -> Any:
    from tokenizers import AddedToken, processors
    from transformers import PreTrainedTokenizerFast

    tokens = told["tokens"]
    told.setdefault("token_type", [NORMAL] * len(tokens))
    core = _byte_level(told) if model == "gpt2" else _sentencepiece(told)
    special = {
        name: tokens[told[f"{key}_token_id"]] for name, key in NAMED.items() if f"{key}_token_id" in told
    }
    for kind in (CONTROL, USER_DEFINED):
        found = (token for token, its in zip(tokens, told["token_type"]) if its == kind and token)
        core.add_tokens([AddedToken(token, special=kind == CONTROL, normalized=False) for token in found])
    ends = {
        "bos": told.get("add_bos_token", model == "llama" or told.get("pre") in WHOLE),
        "eos": told.get("add_eos_token", False),
    }
    added = {
        name: special[f"{name}_token"]
        for name, wanted in ends.items()
        if wanted and f"{name}_token" in special
    }
    if added:
        whole = [
            *(added[n] for n in ("bos",) if n in added),
            "$A",
            *(added[n] for n in ("eos",) if n in added),
        ]
        ids = [(token, tokens.index(token)) for token in added.values()]
        core.post_processor = processors.TemplateProcessing(single=whole, special_tokens=ids)
    made: Any = PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False, **special)  # type: ignore[no-untyped-call]
    made.chat_template = told.get("tokenizer.chat_template")
    return made


NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def _byte_level(told: dict[str, Any]) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = told.get("pre", "default")
    if name not in PATTERNS:
        raise ValueError(
            f'the words of pre-tokenizer {name!r} are unknown here: pass LLM(tokenizer="a folder")'
        )
    merges = [tuple(merge.split(" ", 1)) for merge in told["merges"]]
    vocabulary = {token: i for i, token in enumerate(told["tokens"])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=name in WHOLE))
    if PATTERNS[name] == (QWEN2,):  # as its published tokenizers do; llama.cpp does not
        core.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PATTERNS[name]]
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    return core


def _sentencepiece(told: dict[str, Any]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens, kinds = told["tokens"], told["token_type"]
    unknown = next((token for token, kind in zip(tokens, kinds) if kind == UNKNOWN), None)
    core = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)}, merges=_merges(told), unk_token=unknown,
            fuse_unk=True, byte_fallback=BYTE in kinds,
        )
    )  # fmt: skip
    spaces = normalizers.Replace(" ", "▁")
    prefix = told.get("add_space_prefix", True)
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return core


def _merges(told: dict[str, Any]) -> list[tuple[str, str]]:
    """SentencePiece joins the two neighbours that make the piece of the highest score: every way to make a piece, best first."""
    scores = {
        token: score
        for token, score, kind in zip(told["tokens"], told["scores"], told["token_type"])
        if kind in (NORMAL, USER_DEFINED)
    }
    ways = [
        (token[:i], token[i:])
        for token in sorted(scores, key=lambda t: -scores[t])
        for i in range(1, len(token))
    ]
    return [(a, b) for a, b in ways if a in scores and b in scores]
