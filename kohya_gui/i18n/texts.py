"""Translations of the page: a gettext catalogue for each language, keyed by English templates.

The page is rendered in English once, for all visitors. Each browser requests the catalogue of its language and
translates what it shows (words.js); so new texts are written in English, with an entry in each catalogue. Texts without
an entry stay in English: logs, and texts of other programs and files.

A sentence with arguments is looked up by its template, such as `{count} images`; sentences.py sends the browser the
templates of the sentences that it shows.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from kohya_gui.server.json_api import ApiRequest, Handler
from library.config.json_types import JsonObject
from library.config.problems import ConfigError

LANGUAGES = {"en": "English", "zh": "中文", "ja": "日本語"}
CATALOGUES_FOLDER = Path(__file__).parent / "words"
MEANINGS_FOLDER = Path(__file__).parent / "meanings"  # of docs/words.md, which few visitors open


# Why: docs/decisions/2026-11-20-english-in-the-sources.md
@cache
def load_catalogue(language: str, folder: Path = CATALOGUES_FOLDER) -> Mapping[str, str]:
    """Return the catalogue of a language: English templates -> translations. Raises ConfigError if there is none."""
    from babel.messages.pofile import read_po  # only needed for languages other than English

    if language not in LANGUAGES or language == "en":
        raise ConfigError("there are no words for {language}", language=language)
    with (folder / f"{language}.po").open("rb") as file:
        return dict(
            pair for line in read_po(file) if line.id and line.string for pair in _template_pairs(line.id, line.string)
        )


def _template_pairs(english: str | Sequence[str], words: str | Sequence[str]) -> Iterator[tuple[str, str]]:
    """English templates and their translations; a language without a plural has one form for all numbers."""
    if isinstance(english, str):
        yield english, str(words)
    else:
        yield from zip(english, (words[0], words[-1]), strict=True)


def handlers() -> dict[str, Handler]:
    """Return handlers of requests from the page's scripts."""

    def words(request: ApiRequest) -> JsonObject:
        return {"words": load_catalogue(request.text("language"))}

    return {"words": words}
