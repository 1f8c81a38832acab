"""A message is a value: it cannot be changed, equals what says the same, and survives every way to another process."""

import copy
import json
import pickle

import pytest

from library.config.problems import ConfigError, Message, Problem, as_problems, counted, join_messages, ngettext
from library.runs import layout

NESTED = Message("{what} in {folder}", what=counted(2, "image"), folder="/x")
EVERY = [
    Message("saving"),
    NESTED,
    counted(1, "image"),
    counted(1_000, "image"),
    join_messages([NESTED, "plain {braces}"]),
    Problem("vae", "{path} is missing", path="/x", place="in a.toml: ", fix={"vae": None}, also="seed", code="x"),
    Problem("", "{inner}", inner=NESTED),
]


@pytest.mark.parametrize("message", EVERY, ids=str)
def test_a_message_survives_copying_pickling_and_a_record(message, tmp_path):
    layout.store(tmp_path / "run.json", {"said": message, "same words": str(message), "list": [{"x": message}]})
    stored = layout.load_facts(tmp_path / "run.json")
    assert type(stored["same words"]) is str  # a text of the user's that looks like one
    for same in (stored["said"], stored["list"][0]["x"], copy.deepcopy(message), pickle.loads(pickle.dumps(message))):
        assert same == message and hash(same) == hash(message) and type(same) is type(message)
        assert (str(same), same.template, same.arguments) == (str(message), message.template, message.arguments)
    raw = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
    assert raw["said"] == str(message)  # for people and for older versions
    assert {"template", "arguments"} <= raw["texts"][0].keys()


@pytest.mark.parametrize("message", EVERY, ids=str)
def test_a_message_is_no_str_and_cannot_be_changed(message):
    assert not isinstance(message, str) and message != str(message)
    for name in ("template", "arguments", "anything"):
        with pytest.raises(AttributeError):
            setattr(message, name, "x")
        with pytest.raises(AttributeError):
            delattr(message, name)
    with pytest.raises(TypeError):
        message.arguments["x"] = "y"
    for mixed in (lambda: message + "x", lambda: "x" in message, lambda: ", ".join([message]), lambda: len(message)):
        with pytest.raises(TypeError):
            mixed()


def test_messages_that_say_the_same_are_equal():
    assert Message("{a} of {b}", a=1, b=2) == Message("{a} of {b}", b="2", a="1")
    assert Message("{a}", a=1) != Message("{a}", a=2) and Message("1") != Message("{a}", a=1)
    assert Problem("seed", "is wrong", fix={"seed": 1}) == Problem("seed", "is wrong")  # another fix, the same problem
    assert Problem("seed", "is wrong") != Problem("vae", "is wrong") != Message("is wrong")


def test_numbers_choose_the_template_as_in_gettext():
    several = [
        str(ngettext("{count} image in {folder}", "{count} images in {folder}", n, folder="x")) for n in (0, 1, 2)
    ]
    assert several == ["0 images in x", "1 image in x", "2 images in x"]
    assert str(counted(1_000, "step")) == "1,000 steps"
    assert str(Message("{few} left", few=counted(1, "step")).capitalized()) == "1 step left"
    (problem,) = as_problems([counted(3, "image")])
    assert str(problem) == "3 images"


def test_what_is_put_into_a_message_can_be_changed_at_every_depth():
    error = ConfigError("{path} is no model: {why}", path="secret/x", why=Message("{name} is secret", name="secret"))
    hidden = error.said.changed(lambda text: text.replace("secret", "***"))
    assert str(hidden) == "***/x is no model: *** is secret"
    assert hidden.arguments["why"].template == "{name} is secret"
