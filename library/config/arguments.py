"""The parser of a command's arguments: argparse's, which also says what a misspelt word was probably meant to be."""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from library.config.values import did_you_mean


class Arguments(argparse.ArgumentParser):
    """A parser whose errors name the option, choice or subcommand that is most like the word that it does not know."""

    _given: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # pyrefly: ignore[bad-override]
        """As argparse does, which calls this for subcommands, too."""
        self._given = sys.argv[1:] if args is None else args
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """End with argparse's sentence and the word that was meant."""
        words = {word.partition("=")[0] for word in self._given}
        known = {word for word in self._words() if word.startswith("-") or word in message} - words
        told = (did_you_mean(word, _same_sort(word, known)) for word in sorted(words) if word in message)
        meant = next((str(meant) for meant in told if meant), "")
        super().error(message + meant)

    def _words(self) -> Iterator[str]:
        """Options, choices and subcommands, and those of subcommands."""
        for action in self._actions:
            yield from action.option_strings
            yield from map(str, action.choices or ())
            parsers = action.choices.values() if isinstance(action.choices, Mapping) else ()
            for parser in parsers:
                if isinstance(parser, Arguments):
                    yield from parser._words()


def _same_sort(word: str, known: set[str]) -> set[str]:
    """Options for an option, other words for another word."""
    return {one for one in known if one.startswith("-") == word.startswith("-")}
