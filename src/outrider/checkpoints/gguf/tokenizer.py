"""The tokenizer in the metadata of a GGUF file: byte-level BPE ("gpt2") or SentencePiece's BPE ("llama").

The metadata hold vocabulary, scores and merges.  The regular expressions that split a text into words are
only named there, after a model; they and the defaults are those of llama.cpp's llama-vocab.cpp.
"""

from __future__ import annotations

from typing import Any

from outrider.checkpoints.gguf.file import GgufFile
from outrider.errors import ModelError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6  # token types
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{OTHERS}"
QWEN35 = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{OTHERS}"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
MODELS = {  # patterns, applied one after the other -> the names that metadata have for them
    (LLAMA3,): "llama3 llama-v3 llama-bpe falcon3 dbrx smaug-bpe chatglm-bpe glm4",
    (QWEN2,): "qwen2 deepseek-r1-qwen megrez stablelm2 hunyuan solar-open",
    (QWEN35,): "qwen35",
    (TEKKEN,): "tekken",
    (GPT4O,): "gpt-4o llama4 kanana2 talkie",
    (GPT2,): "gpt-2 phi-2 mpt olmo jais trillion exaone4",
    (r"\p{N}", GPT2): "smollm starcoder refact command-r codeshell exaone minerva-7b",
    (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}"): "deepseek-coder",
    (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"): "default",
}
PATTERNS = {name: patterns for patterns, names in MODELS.items() for name in names.split()}
# Pre-tokenizers under which a word that is itself a token is not split by merges, and that add BOS by
# default.
WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "tekken")
# Control tokens that end a text, regardless of the metadata's EOS.
END_TOKENS = (
    "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<|im_end|>", "<|end|>", "<end_of_turn>",
    "</s>", "<EOT>", "<|return|>", "<|call|>",
)  # fmt: skip
HARMONY = {"<|return|>", "<|call|>"}  # of gpt-oss
SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
PREFIX = "tokenizer.ggml."


def read_end_tokens(file: GgufFile) -> frozenset[int]:
    """Ids that end a text: those named in the metadata, and every control token of END_TOKENS."""
    metadata = file.metadata
    named = {metadata.get(f"{PREFIX}{name}_token_id") for name in ("eos", "eot", "eom")}
    tokens = zip(metadata.get(f"{PREFIX}tokens", ()), metadata.get(f"{PREFIX}token_type", ()))
    control = {token: i for i, (token, kind) in enumerate(tokens) if kind == CONTROL and token in END_TOKENS}
    if control.keys() >= HARMONY:
        control.pop("<|end|>", None)  # ends a message; others follow
    return frozenset(token for token in named if token is not None) | frozenset(control.values())


def read_tokenizer(file: GgufFile) -> Any:
    """A transformers tokenizer, or None for a file without a vocabulary.

    Raises ModelError for an unknown kind.
    """
    fields = {
        key.removeprefix(PREFIX): value
        for key, value in file.metadata.items()
        if key.startswith("tokenizer.")
    }
    model = fields.get("model", "none")
    if model == "none" or "tokens" not in fields:
        return None
    if model not in ("gpt2", "llama"):
        raise ModelError(
            f"{file.path} has a tokenizer of model {model!r}, which is not supported: "
            'pass LLM(tokenizer="a folder").'
        )
    fields.setdefault("token_type", [NORMAL] * len(fields["tokens"]))
    try:
        return _build(fields, model)
    except Exception as error:  # tokenizers raises errors of many kinds
        raise ModelError(f"{file.path}: the tokenizer's metadata are corrupt or unknown: {error}.") from error


def _build(fields: dict[str, Any], model: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    core = _byte_level(fields) if model == "gpt2" else _sentencepiece(fields)
    special = {
        name: fields["tokens"][fields[f"{key}_token_id"]]
        for name, key in SPECIAL_TOKENS.items()
        if f"{key}_token_id" in fields
    }
    _add_special_tokens(core, fields)
    _add_template(core, fields, model, special)
    tokenizer: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=core, clean_up_tokenization_spaces=False, **special
    )
    tokenizer.chat_template = fields.get("tokenizer.chat_template")
    return tokenizer


def _add_special_tokens(core: Any, fields: dict[str, Any]) -> None:
    """Control and user-defined tokens, which no merge builds."""
    from tokenizers import AddedToken

    for kind in (CONTROL, USER_DEFINED):
        tokens = [
            token for token, its in zip(fields["tokens"], fields["token_type"]) if its == kind and token
        ]
        core.add_tokens([AddedToken(token, special=kind == CONTROL, normalized=False) for token in tokens])


def _add_template(core: Any, fields: dict[str, Any], model: str, special: dict[str, str]) -> None:
    """BOS before every text and EOS after it, where the metadata or the defaults ask for them."""
    from tokenizers import processors

    adds_bos = fields.get("add_bos_token", model == "llama" or fields.get("pre") in WHOLE_WORDS)
    bos = [special["bos_token"]] if adds_bos and "bos_token" in special else []
    eos = [special["eos_token"]] if fields.get("add_eos_token", False) and "eos_token" in special else []
    if bos or eos:
        ids = [(token, fields["tokens"].index(token)) for token in dict.fromkeys([*bos, *eos])]
        core.post_processor = processors.TemplateProcessing(single=[*bos, "$A", *eos], special_tokens=ids)


def _byte_level(fields: dict[str, Any]) -> Any:
    """Byte-level BPE: split into words by the patterns, map bytes to characters, apply the listed merges."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = fields.get("pre", "default")
    if name not in PATTERNS:
        raise ValueError(f'the words of pre-tokenizer {name!r} are unknown: pass LLM(tokenizer="a folder")')
    merges = [tuple(merge.split(" ", 1)) for merge in fields["merges"]]
    vocabulary = {token: i for i, token in enumerate(fields["tokens"])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=name in WHOLE_WORDS))
    if PATTERNS[name] in ((QWEN2,), (QWEN35,)):
        # as in their published tokenizers; llama.cpp does not normalise
        core.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PATTERNS[name]]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    core.decoder = decoders.ByteLevel()
    return core


def _sentencepiece(fields: dict[str, Any]) -> Any:
    """SentencePiece's BPE: spaces become ▁, unknown characters byte tokens, and scores give the merges."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens, kinds = fields["tokens"], fields["token_type"]
    bpe = models.BPE(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=_merges(fields),
        unk_token=next((token for token, kind in zip(tokens, kinds) if kind == UNKNOWN), None),
        fuse_unk=True,
        byte_fallback=BYTE in kinds,
    )
    core = Tokenizer(bpe)
    spaces = normalizers.Replace(" ", "▁")
    decoding = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if fields.get("add_space_prefix", True):
        core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        core.decoder = decoders.Sequence([*decoding, decoders.Strip(" ", 1, 0)])
    else:
        core.normalizer = spaces
        core.decoder = decoders.Sequence(decoding)
    return core


def _merges(fields: dict[str, Any]) -> list[tuple[str, str]]:
    """Merges in order of rank: every split of every piece into two pieces, pieces of the highest score first.

    SentencePiece stores no merges; it joins the two neighbours whose union has the highest score.
    """
    pieces = zip(fields["tokens"], fields["scores"], fields["token_type"])
    scores = {token: score for token, score, kind in pieces if kind in (NORMAL, USER_DEFINED)}
    by_score = sorted(scores, key=lambda token: -scores[token])
    splits = ((token[:i], token[i:]) for token in by_score for i in range(1, len(token)))
    return [(left, right) for left, right in splits if left in scores and right in scores]
