"""The parser of our commands: what its help states."""

import argparse

from library.config.arguments import Arguments


def test_help_states_each_default_once_and_begins_with_a_sentence():
    parser = Arguments("kohya x", description="show or change a thing")
    parser.add_argument("--rank", type=int, default=16, help="rank of a module")
    parser.add_argument("--size", default="auto", help="size of it (default: the GPU's)")
    parser.add_argument("--word", default="", help="its name")
    parser.add_argument("--set", action="append", default=[], help="an option")
    parser.add_argument("--no", action="store_true", help="do nothing")
    parser.add_argument("--hidden", default=3, help=argparse.SUPPRESS)
    shown = parser.format_help()
    assert "\nShow or change a thing.\n" in shown and "rank of a module (default: 16)" in shown
    assert shown.count("default") == 2 and "hidden" not in shown


def test_a_phrase_in_the_list_of_subcommands_is_a_sentence_in_their_help():
    parser = Arguments("kohya x")
    command = parser.add_subparsers().add_parser("show", help="show it", description="show it")
    assert "show it\n" in parser.format_help() and "\nShow it.\n" in command.format_help()
