"""What an option is: every kind of value from the shell, TOML and a form; errors; what wins over what."""

import tomllib
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from library import families
from library.cli import options_page
from library.config import values as config_values
from library.config.building import build_config, find_missing, replace_options
from library.config.formats import read_toml, to_toml, toml_value
from library.config.problems import ConfigError, Problem
from library.config.schema import changed, define_section, flatten_sections, opt, option_values, options_of
from library.config.values import join_words, split_words
from library.families import config_class


@dataclass(frozen=True, kw_only=True, slots=True)
class Things:
    flag: bool = opt(False, "A switch.")
    on: bool = opt(True, "A switch that is on.")
    count: int = opt(3, "A count.", min=1, max=10)
    maybe: int | None = opt(None, "A count or nothing.")
    rate: float = opt(1e-4, "A rate.", min=0.0)
    share: float | None = opt(None, "A share.")
    word: str | None = opt(None, "A word.")
    sep: str = opt(",", "A sign.")
    place: Path | None = opt(None, "A place.", kind="file")
    key: str | None = opt(None, "A key.", kind="secret")


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    kind: Literal["l1", "l2"] = opt("l2", "One of two.")
    level: Literal["INFO", "DEBUG"] | None = opt(None, "One of two, or nothing.")
    length: Literal[150, 225] | None = opt(None, "A number of two.")
    maker: Literal["AdamW", "Lion"] | str = opt("", "One of these or another.")
    words: tuple[str, ...] = opt((), "Words.")
    rates: tuple[float, ...] = opt((), "Rates.", min=0.0)

    def check(self, run: Any) -> Iterator[Problem]:
        if self.kind == "l1" and run.things.rate == 0:
            yield Problem("kind", "= l1 needs a rate above 0", also="rate")

    def missing(self, run: Any) -> Iterator[Problem]:
        if not run.things.word:
            yield Problem("word", "is not set: think of one")


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """A test."""

    aliases: ClassVar = {"wrod": "word"}
    retired: ClassVar = {"old": "use count"}
    foreign: ClassVar = {"gui_only": "no script reads it"}

    things: Things = define_section(Things)
    choices: Choices = define_section(Choices)

    def notes(self) -> Iterator[Problem]:
        if self.things.flag:
            yield Problem("flag", "does nothing")


def value(name, raw):
    config = build_config(Config, {name: raw}, notes=[])
    return option_values(config)[name]


@pytest.mark.parametrize(
    ("name", "raw", "expected"),
    [
        ("flag", True, True),
        ("flag", 1, True),
        ("flag", 0, False),
        ("flag", "true", True),
        ("on", "False", False),
        ("count", 7, 7),
        ("count", 7.0, 7),
        ("count", "7", 7),
        ("maybe", 0, 0),
        ("maybe", "0", 0),
        ("maybe", None, None),
        ("maybe", "", None),
        ("maybe", "123456789012345678901", 123456789012345678901),
        ("rate", "5e-5", 5e-5),
        ("rate", 1, 1.0),
        ("rate", 0, 0.0),
        ("share", None, None),
        ("share", 0.0, 0.0),
        ("word", "a b", "a b"),
        ("word", 12, "12"),
        ("word", " ", " "),
        ("word", "", None),
        ("sep", "", ","),
        ("sep", None, ","),
        ("sep", " ", " "),
        ("place", r"C:\new\x.safetensors", Path(r"C:\new\x.safetensors")),
        ("kind", "L1", "l1"),
        ("kind", "", "l2"),
        ("level", "debug", "DEBUG"),
        ("level", None, None),
        ("length", "150", 150),
        ("maker", "adamw", "AdamW"),
        ("maker", "torch.optim.Rprop", "torch.optim.Rprop"),
        ("words", ["a=1", "b=2"], ("a=1", "b=2")),
        ("words", "a=1 b=0.9,0.99", ("a=1", "b=0.9,0.99")),
        ("words", r'"C:\my files\a" C:\b', (r"C:\my files\a", r"C:\b")),
        ("words", None, ()),
        ("words", "", ()),
        ("rates", 1e-5, (1e-5,)),
        ("rates", "1e-5, 2e-5", (1e-5, 2e-5)),
        ("rates", [1, "2e-5"], (1.0, 2e-5)),
        ("count", [4], 4),
    ],
)
def test_value_is_read(name, raw, expected):
    actual = value(name, raw)
    assert actual == expected
    assert type(actual) is type(expected)


@pytest.mark.parametrize(
    ("name", "raw", "sentence"),
    [
        ("flag", 2, "flag must be true or false, got 2"),
        ("flag", "maybe", "flag must be true or false, got 'maybe'"),
        ("count", 0, "count must be at least 1 and at most 10, got 0"),
        ("count", 3.7, "count must be a whole number, got 3.7"),
        ("count", True, "count must be a whole number, got True"),
        ("count", None, "count needs a whole number; the default is 3"),
        ("count", "", "count needs a whole number; the default is 3"),
        ("count", [1, 2], "count takes one value, got 2: [1, 2]"),
        ("rate", "abc", "rate must be a number, got 'abc'"),
        ("rate", float("nan"), "rate must be a number, got nan"),
        ("rate", "inf", "rate must be a number, got 'inf'"),
        ("rate", -1, "rate must be at least 0.0, got -1.0"),
        ("word", True, "word must be text, got True"),
        ("word", {"a": 1}, "word must be text, got {'a': 1}"),
        ("kind", "l3", "kind must be one of l1, l2, got 'l3'"),
        ("words", 'a "b', "words has a quote that is never closed: 'a \"b'"),
        ("rates", ["x"], "rates must be a number, or several, got 'x'"),
    ],
)
def test_wrong_value_is_one_sentence(name, raw, sentence):
    with pytest.raises(ConfigError) as e:
        value(name, raw)
    assert str(e.value) == sentence


def test_every_wrong_value_of_several_is_named():
    with pytest.raises(ConfigError) as e:
        value("rates", "1, x, 2, y, x")
    assert str(e.value).splitlines() == [f"rates must be a number, or several, got '{word}'" for word in "xy"]
    config = config_class("sdxl_train_network")
    with pytest.raises(ConfigError) as e:
        build_config(config, {"save_at_steps": "0,-1,abc,500"})
    assert [str(problem).rpartition(" ")[2] for problem in e.value.problems] == ["0", "-1", "'abc'"]
    assert not any(problem.fix for problem in e.value.problems), "a fix would take away 500"
    with pytest.raises(ConfigError) as e:
        build_config(config, {"save_at_steps": list(range(-40, 0))})
    assert len(e.value.problems) == 11 and "and 30 more like these" in str(e.value)


def test_every_problem_at_once_with_its_source():
    wrong = {"cuont": 1, "rate": "x", "old": 5, "kind": "l1", "place": "/a", "level": "?"}
    with pytest.raises(ConfigError) as e:
        build_config(Config, wrong, "run.toml")
    assert str(e.value).splitlines() == [
        "in run.toml: cuont is not an option (did you mean count?)",
        "in run.toml: old was removed: use count",
        "in run.toml: rate must be a number, got 'x'",
        "in run.toml: level must be one of INFO, DEBUG, got '?'",
    ]


def test_rules_across_options_are_reported_with_wrong_values_unless_they_depend_on_them():
    with pytest.raises(ConfigError) as e:
        build_config(Config, {"kind": "l1", "rate": 0, "count": "x"})
    assert len(str(e.value).splitlines()) == 2
    with pytest.raises(ConfigError) as e:
        build_config(Config, {"kind": "l1", "rate": "x"})
    assert str(e.value) == "rate must be a number, got 'x'"


def test_old_names_are_read_with_a_note():
    notes = []
    config = build_config(Config, {"wrod": "hi", "gui_only": 1, "old": False, "flag": True}, "a.toml", notes)
    assert config.things.word == "hi"
    assert [*map(str, notes)] == [
        "in a.toml: wrod is an old name; it is read as word",
        "in a.toml: gui_only is ignored: no script reads it",
        "flag does nothing",
    ]


def test_notes_without_a_list_are_warnings(caplog):
    build_config(Config, {"gui_only": 1})
    assert "gui_only is ignored" in caplog.text


def test_config_is_a_value():
    config = build_config(Config, {})
    with pytest.raises(FrozenInstanceError):
        config.things.count = 4
    other = replace_options(config, count=4, word="x")
    assert (config.things.count, other.things.count, other.things.word) == (3, 4, "x")
    assert changed(config) == {}
    assert changed(other) == {"things": {"count": 4, "word": "x"}}
    with pytest.raises(ConfigError):
        replace_options(config, count=40)
    assert [*map(str, find_missing(config))] == ["word is not set: think of one"]
    assert find_missing(other) == []


def test_secrets_stay_out_of_files():
    config = build_config(Config, {"key": "s3cret", "count": 4})
    assert "s3cret" not in to_toml(config)
    assert changed(config, secrets=True)["things"]["key"] == "s3cret"


def test_toml_is_readable_and_comes_back(tmp_path):
    values = {
        "flag": True,
        "on": False,
        "rate": 0.0,
        "maybe": 0,
        "word": 'Ü "quoted" \\ and\nnew \x7f line',
        "place": r"D:\xl\new\t.safetensors",
        "words": ["a=1", r"C:\x", "it's"],
        "rates": [1e-5, 2.0],
        "kind": "l1",
    }
    config = build_config(Config, values | {"rate": 0.5})
    path = tmp_path / "run.toml"
    path.write_text(to_toml(config, comment="A run.\n\nOf mine."), encoding="utf-8")
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# A run.\n#\n# Of mine.\n\n[things]\n")
    assert r"place = 'D:\xl\new\t.safetensors'" in text
    assert build_config(Config, read_toml(path)) == config


def test_toml_may_be_flat_or_in_tables(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text('count = 4\n[anything]\nword = "x"\n', encoding="utf-8-sig")
    assert read_toml(path) == {"count": 4, "word": "x"}
    assert flatten_sections({"a": {"x": 1}, "b": {"y": 2}}) == {"x": 1, "y": 2}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"a = \n", "is not valid TOML"),
        (b'a = "C:\\xl"\n', "in double quotes write \\\\ for \\"),
        (b'a = "C:\\Users"\n', "in double quotes write \\\\ for \\"),
        (b"\xff\xfe\x00", "is not a text file in UTF-8"),
        (None, "does not exist"),
    ],
)
def test_broken_file_is_one_sentence(tmp_path, content, sentence):
    path = tmp_path / "a.toml"
    if content:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as e:
        read_toml(path)
    assert sentence in str(e.value)
    assert str(path) in str(e.value)
    assert len(str(e.value).splitlines()) == 1


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16-le", "utf-16-be"])
def test_a_file_of_windows_editor_is_read(tmp_path, encoding):
    path = tmp_path / "a.toml"
    mark = "\ufeff" if encoding.startswith("utf-16") else ""
    path.write_bytes(f'{mark}output_name = "Zürich"\r\nseed = 3\r\n'.encode(encoding))
    assert read_toml(path) == {"output_name": "Zürich", "seed": 3}


def test_numbers_that_mean_nothing_are_not_written():
    for number in (float("nan"), float("inf")):
        with pytest.raises(ConfigError):
            toml_value(number)


@pytest.mark.parametrize("script", families.RUNS)
def test_a_path_that_no_disk_has_is_one_sentence(script):
    paths = [
        option for option in options_of(config_class(script)).values() if option.kind in ("file", "files", "folder")
    ]
    assert len(paths) > 10
    for value, words in {
        "x" * 300: "is too long",
        "a/" * 2500: "is too long",
        "名" * (256 if config_values.WINDOWS else 86): "is too long",
        "a\tb": "no path can have",
    }.items():
        for option in paths:
            with pytest.raises(ConfigError, match=words):
                option.read([value] if option.many else value)


def test_a_path_that_only_windows_refuses_is_one_sentence_there(monkeypatch):
    """Else the folder cannot be made, once the model is loaded."""
    option = options_of(config_class(next(iter(families.RUNS))))["output_dir"]
    monkeypatch.setattr(config_values, "WINDOWS", False)
    good = ["D:\\a (b)\\ü", "\\\\?\\D:\\long", "D:/a", "\\\\nas\\a"]
    bad = ["D:\\a?", "D:\\a|b", "D:\\a*", "D:\\at 12:30", "\\\\?\\D:\\a:b", "//nas/a:b"]
    assert [option.read(text) for text in good + bad] == good + bad
    monkeypatch.setattr(config_values, "WINDOWS", True)
    assert [option.read(text) for text in good] == good
    assert option.read("D:\\" + "名" * 255) and option.read("D:\\" + "🐱" * 127)
    with pytest.raises(ConfigError, match="is too long"):  # Windows counts in UTF-16
        option.read("D:\\" + "🐱" * 128)
    weighted = options_of(config_class("sdxl_train_network"))["sample_lora"]
    assert weighted.read(["D:\\a.safetensors:0.8"]) == ("D:\\a.safetensors:0.8",)
    for text in bad:
        with pytest.raises(ConfigError, match=r"has .*, which Windows does not allow in paths"):
            option.read(text)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_toml(text):
    assert tomllib.loads(f"a = {toml_value(text)}")["a"] == text


@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**63), 2**63 - 1) | st.booleans())
def test_any_number_survives_toml(number):
    back = tomllib.loads(f"a = {toml_value(number)}")["a"]
    assert back == number
    assert type(back) is type(number)


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]))))
def test_items_survive_one_line(items):
    assert split_words(join_words(items)) == items


def test_declaring_the_same_option_twice_is_refused():
    @dataclass(frozen=True, kw_only=True, slots=True)
    class Twice:
        things: Things = define_section(Things)
        again: Things = define_section(Things)

    with pytest.raises(TypeError, match="flag is declared in both things and again"):
        options_of(Twice)


def test_the_engine_stays_small():
    with pytest.raises(TypeError, match="unknown hints: color"):
        opt(1, "A number.", color="red")


def test_docs_have_a_line_for_each_option():
    page = options_page.option_tables(options_of(Config).values())
    for name in options_of(Config):
        assert f"| `{name}` |" in page
