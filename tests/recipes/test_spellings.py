"""Documents that show words in two forms."""

import random
import re
from pathlib import Path

import pytest

from outrider.checkpoints.hub import Checkpoint
from recipes.builtin import corpus, prose, spellings


@pytest.fixture(scope="module")
def vocabulary() -> spellings.Vocabulary:
    folder = Checkpoint.open("builtin").folder
    return spellings.Vocabulary(corpus.load_tokenizer(Path(folder)))


def test_a_word_is_known_with_a_blank_and_without_one(vocabulary: spellings.Vocabulary) -> None:
    assert {"Frank", "element"} <= set(vocabulary.words)  # of these only the form with a blank
    assert all(word.isalpha() and len(word) > 1 for word in vocabulary.words)
    assert len(vocabulary.words) == len(set(vocabulary.words))


def test_a_document_shows_the_same_words_in_the_form_that_it_asks_for(
    vocabulary: spellings.Vocabulary,
) -> None:
    for seed in range(300):
        text = spellings.document(random.Random(seed), vocabulary)
        asked, answer = (
            text.removeprefix(prose.BOS + prose.USER)
            .removesuffix(prose.END)
            .split(prose.END + prose.ASSISTANT)
        )
        given, wanted = asked.rsplit("\n=> ", 1)
        candidates = [
            words
            for name, form in spellings.FORMS.items()
            if (words := _read(name, given)) and form(words) == given
        ]
        assert any(spellings.WANTED[wanted](words).strip() == answer for words in candidates), text


def _read(form: str, text: str) -> list[str]:
    """The words of a text of the form."""
    if form == "letters":
        return text.replace("-", "").split(", ")
    return re.findall("[A-Za-z]+", text)


def test_random_words_are_made_of_pieces_of_the_vocabulary(vocabulary: spellings.Vocabulary) -> None:
    drawn = {vocabulary.draw(random.Random(seed)).lower() for seed in range(2000)}
    known = {word.lower() for word in vocabulary.words}
    assert 0.2 < len(drawn - known) / len(drawn) < 0.5
