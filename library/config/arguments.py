"""argparse for our commands, with suggestions for misspelt words."""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from library.config.pasted import pasted_path
from library.config.values import did_you_mean

MISSING = "the following arguments are required: "  # how argparse begins the message


class HelpWithDefaults(argparse.HelpFormatter):
    """Help that names the default of each option whose text does not."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        is_default_clear = action.default in (None, False, "", argparse.SUPPRESS) or action.default == []
        if not action.option_strings or is_default_clear or "default" in (action.help or ""):
            return action.help
        return f"{action.help} (default: %(default)s)"


class Arguments(argparse.ArgumentParser):
    """A parser whose help states defaults, and whose errors name the option, choice or subcommand closest to an unknown
    word. `example` is a whole command, shown where arguments are missing."""

    _argv: Sequence[str] = ()

    def __init__(self, *args: Any, example: str = "", **options: Any) -> None:
        self.example = example
        options.setdefault("formatter_class", HelpWithDefaults)
        super().__init__(*args, **options)
        if self.description:  # of a subcommand: a phrase in the list of its parent, a sentence in its own help
            self.description = as_sentence(self.description)
        self.register("type", Path, pasted_path)  # cmd leaves ~, and forms quotes

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # pyrefly: ignore[bad-override]
        # argparse calls this for subcommands, too, with their part of the command line.
        self._argv = sys.argv[1:] if args is None else args
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Exit with argparse's message and the probably intended word, or with an example if arguments are missing."""
        if message.startswith(MISSING):
            example = f", such as {self.example}" if self.example else ""
            names = message.removeprefix(MISSING)
            self.exit(2, f"error: {self.prog} needs {names}{example}; {self.prog} --help says more\n")
        words = {word.partition("=")[0] for word in self._argv}
        # argparse's message lists the choices that it expected; options are candidates in any case.
        candidates = {word for word in self._words() if word.startswith("-") or word in message} - words
        hints = (did_you_mean(word, _candidates_of_kind(word, candidates)) for word in sorted(words) if word in message)
        hint = next((str(hint) for hint in hints if hint), "")
        super().error(message + hint)

    def _words(self) -> Iterator[str]:
        """Return options, choices and subcommands, including those of subcommands."""
        for action in self._actions:
            yield from action.option_strings
            yield from map(str, action.choices or ())
            parsers = action.choices.values() if isinstance(action.choices, Mapping) else ()
            for parser in parsers:
                if isinstance(parser, Arguments):
                    yield from parser._words()


def _candidates_of_kind(word: str, candidates: set[str]) -> set[str]:
    return {candidate for candidate in candidates if candidate.startswith("-") == word.startswith("-")}


def as_sentence(phrase: str) -> str:
    return phrase[:1].upper() + phrase[1:] + ("" if phrase.endswith(".") else ".")
