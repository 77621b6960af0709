"""Tokenizers by the `tokenizers` library alone, where transformers adds nothing to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from outrider.checkpoints.validate import read_json

SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")
KNOWN = {*SPECIAL, "tokenizer_class", "backend", "model_max_length", "is_local", "local_files_only"}
CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")  # those without code of a model's own
FILE, CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
OTHER_FILES = (
    "special_tokens_map.json", "added_tokens.json", "tokenizer.model", "tekken.json",
    "additional_chat_templates", "chat_template.json",
)  # fmt: skip
MODEL_TYPES = {"llama", "mistral", "qwen3"}  # others may have a tokenizer of their own, as qwen2 has
MOST_TOKENS = 100_000  # transformers edits larger ones


class PlainTokenizer:
    """A tokenizer.json, with the methods of transformers' tokenizers that generating needs.

    load: reads it as transformers' tokenizer, `full`, which every other attribute is of.
    """

    is_fast = True

    def __init__(
        self, core: Any, special: dict[str, str], chat_template: str | None, load: Callable[[], Any]
    ) -> None:
        self.backend_tokenizer, self.special, self.load = core, special, load
        self.chat_template = chat_template
        self.added_tokens_decoder: dict[int, Any] = core.get_added_tokens_decoder()
        self.all_special_ids = [core.token_to_id(token) for token in special.values()]
        self.eos_token_id = core.token_to_id(special["eos_token"]) if "eos_token" in special else None

    @cached_property
    def full(self) -> Any:
        return self.load()

    def __getattr__(self, name: str) -> Any:
        # copies ask for the two, and have nothing to load yet
        if name.startswith("__") or name in ("full", "load"):
            raise AttributeError(name)
        return getattr(self.full, name)

    def __len__(self) -> int:
        size: int = self.backend_tokenizer.get_vocab_size()
        return size

    def __call__(self, *given: Any, **options: Any) -> Any:
        return self.full(*given, **options)

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        tokenize: bool = True,
        return_assistant_tokens_mask: bool = False,
        **given: Any,
    ) -> Any:
        template = self.chat_template if chat_template is None else chat_template
        if tokenize or template is None or return_assistant_tokens_mask:
            given |= {"tokenize": tokenize, "return_assistant_tokens_mask": return_assistant_tokens_mask}
            return self.full.apply_chat_template(conversation, chat_template=chat_template, **given)
        from transformers.utils.chat_template_utils import render_jinja_template

        # a key without a value is left out, as transformers does
        messages = [
            {key: value for key, value in message.items() if value is not None} for message in conversation
        ]
        names: dict[str, Any] = {**self.special, **given}
        rendered: Any = render_jinja_template(conversations=[messages], chat_template=template, **names)
        return rendered[0][0]  # of texts and the places of generated ones

    def encode(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> list[int]:
        ids: list[int] = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        several = [ids] if isinstance(ids, int) else ids
        text: str = self.backend_tokenizer.decode(several, skip_special_tokens=skip_special_tokens)
        return text

    def get_vocab(self) -> dict[str, int]:
        vocabulary: dict[str, int] = self.backend_tokenizer.get_vocab()
        return vocabulary

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        find = self.backend_tokenizer.id_to_token
        return find(ids) if isinstance(ids, int) else [find(token) for token in ids]


def plain_tokenizer(folder: Path, load: Callable[[], Any]) -> PlainTokenizer | None:
    """The tokenizer of a folder; None if transformers would change its tokenizer.json."""
    from tokenizers import Tokenizer

    if not _stands_alone(folder):
        return None
    settings = read_json(folder / CONFIG)
    if not settings.keys() <= KNOWN or settings.get("tokenizer_class") not in CLASSES:
        return None
    core: Any = Tokenizer.from_file(str(folder / FILE))
    special = {name: settings[name] for name in SPECIAL if settings.get(name) is not None}
    if not _used_as_written(core, special):
        return None
    path = folder / TEMPLATE
    template = path.read_text(encoding="utf-8") if path.is_file() else None
    return PlainTokenizer(core, special, template, load)


def _stands_alone(folder: Path) -> bool:
    """Whether a folder has a tokenizer.json that neither other files nor the type of the model change."""
    if not ((folder / FILE).is_file() and (folder / CONFIG).is_file()):
        return False
    if any((folder / name).exists() for name in OTHER_FILES):
        return False
    model = folder / "config.json"
    return not model.is_file() or read_json(model).get("model_type") in MODEL_TYPES


def _used_as_written(core: Any, special: Mapping[str, Any]) -> bool:
    """Whether transformers takes a tokenizer as it is, with these special tokens."""
    if core.truncation is not None or core.padding is not None or core.get_vocab_size() > MOST_TOKENS:
        return False
    known = {token.content for token in core.get_added_tokens_decoder().values() if token.special}
    return all(isinstance(token, str) and token in known for token in special.values())
