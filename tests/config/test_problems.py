"""Problems are values: they go from one process to another whole, and nobody takes their sentences apart."""

import ast
import pickle

import pytest

from library.check.report import Finding
from library.config.building import build_config, draft, working_fix
from library.config.problems import (
    ConfigError,
    Message,
    Problem,
    first_line,
    join_messages,
    ngettext,
    problem_from_json,
    require_choice,
    without_flags,
)
from library.families import config_class
from tests import source

CUTTING = {"split", "splitlines", "partition", "rpartition", "startswith", "endswith", "find", "index", "removeprefix"}
MAKERS = {"Problem", "Message", "ConfigError", "about_images", "wrong_argument"}
SDXL = config_class("sdxl_train_network")


@pytest.mark.parametrize("count", [1, 2])
def test_an_error_inside_a_sentence_keeps_its_templates_so_that_all_of_it_is_translated(count):
    error = ConfigError(*(Problem("", "{file} is missing", file=f"{number}.npz") for number in range(count)))
    message = Message("{problem}; resume from {state}", problem=error, state="/state")
    assert str(message) == f"{error}; resume from /state"
    inner = message.as_json()["arguments"]["problem"]
    parts = [inner] if count == 1 else [*inner["arguments"].values()]
    assert [part["template"] for part in parts] == ["{file} is missing"] * count
    assert str(pickle.loads(pickle.dumps(message))) == str(message)


def test_a_problem_is_its_sentence_and_all_that_it_was_made_of():
    limits = Message("at least {low}", low=1)
    message = Problem(
        "seed",
        "must be {limits}, got {value}",
        limits=limits,
        value="'{'",
        place="in {x}.toml: ",
        also="resume",
        fix={"seed": 1},
    )
    assert str(message) == "in {x}.toml: seed must be at least 1, got '{'"
    assert str(message.about) == "must be at least 1, got '{'"
    for copy in (problem_from_json(message.as_json()), pickle.loads(pickle.dumps(message))):
        assert copy == message and copy.as_json() == message.as_json() and copy.options == {"seed", "resume"}
        assert copy.arguments["limits"].template == "at least {low}" and copy.fix == {"seed": 1}
    assert str(message.replaced(option="resume", place="--")) == "--resume must be at least 1, got '{'"
    assert str(Problem("ae", ": {path} does not exist", path="a").about) == "a does not exist"
    for ending in ("and seed exclude each other", "= 3 needs seed", "(3) must be below seed"):  # no sentences
        below = Problem("resume", ending, place="--").about.capitalized()
        assert str(below) == f"resume {ending}" and problem_from_json(below.as_json()) == below


def test_options_are_no_flags_for_readers_of_a_form():
    flag = Problem("ae", ": {path} does not exist", path="--a", place="--")
    in_file = Problem("ae", "is wrong", place="in a.toml: ")
    assert str(without_flags(flag)) == "ae: --a does not exist" and without_flags(in_file) == in_file
    assert str(without_flags(join_messages([flag, in_file], "\n"))) == "ae: --a does not exist\nin a.toml: ae is wrong"
    assert without_flags("--ae is text") == "--ae is text"


def test_an_error_holds_problems_and_says_them_in_lines():
    error = ConfigError(Problem("seed", "is wrong"), "plain\nlines")
    assert str(error) == "seed is wrong\nplain\nlines" and [problem.option for problem in error.problems] == [
        "seed",
        "",
        "",
    ]
    assert ConfigError("{path} does not exist", path="{}").problems[0].template == "{path} does not exist"


@pytest.mark.parametrize("name", ["option", "place", "topic", "fix", "also", "code", "template"])
def test_an_argument_that_is_named_like_a_fact_of_problems_stays_an_argument(name):
    (problem,) = ConfigError(Message(f"{{{name}}} is off", **{name: "compile"})).problems
    assert str(problem) == "compile is off" and problem.option == problem.place == problem.topic == ""
    assert problem_from_json(problem.as_json()) == problem


def test_an_error_about_a_number_of_things_keeps_both_forms_for_translation():
    (problem,) = ConfigError(ngettext("{count} file is damaged", "{count} files are damaged", 2)).problems
    assert str(problem) == "2 files are damaged" and problem.arguments["said"].plural == "{count} files are damaged"


def test_a_fix_that_leaves_the_problem_standing_is_not_offered():
    with pytest.raises(ConfigError) as refused:
        build_config(SDXL, {"fp8_base": True})
    (problem,) = refused.value.problems
    rough = draft(SDXL, {"fp8_base": True})
    assert working_fix(problem, rough) == {"mixed_precision": "bf16"}
    assert (
        working_fix(problem.replaced(fix={"seed": 1}), rough)
        == {}
        == working_fix(problem.replaced(fix={"no_option": 1}), rough)
    )


def test_nobody_takes_the_sentence_of_a_problem_apart():
    """They ask the error's problems for their option, fix, topic or code, and name the arguments of templates."""
    paths = [path for folder in source.OURS for path in (source.ROOT / folder).rglob("*.py")]
    trees = {path.relative_to(source.ROOT).as_posix(): source.tree(path) for path in paths}
    assert len(trees) > 500
    assert [f"{path}:{line}" for path, tree in trees.items() for line in (*taken_apart(tree), *joined(tree))] == []


def taken_apart(tree):
    """Lines of handlers that look into the text of a ConfigError."""
    return [line for handler in ast.walk(tree) if isinstance(handler, ast.ExceptHandler) for line in cuts(handler)]


def joined(tree):
    """Lines that make a problem of an f-string, in which no argument has a name."""
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in MAKERS - {"ConfigError"}:
            template = call.args[1 if call.func.id == "Problem" else 0 :][:1]
            if any(isinstance(character, ast.JoinedStr) for character in template):
                yield call.lineno


def cuts(handler):
    """The lines of a handler of ConfigError that look into the error's text."""
    if handler.name is None or handler.type is None or ast.unparse(handler.type) != "ConfigError":
        return
    text = f"str({handler.name})"
    for node in ast.walk(handler):
        is_cut = isinstance(node, ast.Attribute) and node.attr in CUTTING and ast.unparse(node.value) == text
        asked = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("re."):
            asked = node.args
        if is_cut or text in map(ast.unparse, asked):
            yield node.lineno


def test_a_fix_in_words_names_a_value_or_says_what_to_leave_out():
    finding = Finding("config", "bad", "network_module x is not offered", {"network_module": None, "network_dim": 1})
    assert finding.advice == "; fix: leave network_module out; fix: network_dim = 1"


def test_the_first_line_of_an_error_is_its_class_if_it_has_no_text():
    assert [first_line(error) for error in (ValueError("a\nb"), ValueError("\n c"), ValueError(), KeyError())] == [
        *("a", "c", "ValueError", "KeyError")
    ]


def test_a_value_that_is_no_choice_is_refused_with_the_choices():
    require_choice("side", 128, (128, 256))
    with pytest.raises(ConfigError, match="^side is 7: use one of 128, 256$"):
        require_choice("side", 7, (128, 256))
