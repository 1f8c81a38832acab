"""The page's forms are the shell's options, and say what is wrong before anything starts."""

from pathlib import Path

import pytest

from library.config.problems import ConfigError
from library.tools.forms import FORMS
from library.tools.shell import build_tools_parser


def guard(text, kind, label):
    if "secret" in text:
        raise ConfigError(f"{label}: {text} is outside")
    return Path("/root") / text


def test_every_tool_is_there_with_its_options():
    tools = FORMS.all()
    assert list(tools) == ["merge", "extract", "resize", "convert", "verify", "metadata"]
    assert [f.name for f in tools["resize"].fields] == [
        "lora",
        "rank",
        "conv_rank",
        "method",
        "parameter",
        "verbose",
        "out",
        "dtype",
    ]
    fields = {f.name: f for f in tools["resize"].fields}
    assert (
        fields["method"].choices == ("fixed", "sv_ratio", "sv_fro", "sv_cumulative")
        and fields["method"].default == "fixed"
    )
    assert fields["out"].kind == "new" and fields["out"].required and fields["lora"].kind == "file"
    assert all(f.help for tool in tools.values() for f in tool.fields)
    assert not any(f.name in ("in_place", "yes", "json") for f in tools["metadata"].fields)


@pytest.mark.parametrize(
    ("tool", "values", "expected"),
    [
        (
            "merge",
            {"loras": "a.safetensors=0.5\n b.safetensors ", "out": "o.safetensors"},
            {
                "loras": [f"{Path('/root/a.safetensors')}=0.5", f"{Path('/root/b.safetensors')}=1"],
                "out": Path("/root/o.safetensors"),
            },
        ),
        (
            "extract",
            {"tuned": "t", "base": "b", "out": "o", "rank": "8", "clamp": "1"},
            {"tuned": Path("/root/t"), "base": Path("/root/b"), "rank": 8, "clamp": 1.0, "dtype": "fp16"},
        ),
        (
            "metadata",
            {"file": "a", "set": "modelspec.title=--Zorb\nss_a=b", "remove": "ss_*", "out": "b"},
            {"set": ["modelspec.title=--Zorb", "ss_a=b"], "remove": ["ss_*"], "in_place": False},
        ),
        ("verify", {"lora": "-a", "verbose": True}, {"lora": Path("/root/-a"), "verbose": True, "json": False}),
    ],
)
def test_a_filled_form_is_a_command(tool, values, expected):
    words = FORMS.words(tool, values, guard)
    asked = vars(build_tools_parser().parse_args(words[1:]))
    assert words[0] == "tools" and {name: asked[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("tool", "values", "says"),
    [
        ("merge", {}, "LoRA files: this must be filled in\nNew file: this must be filled in"),
        ("resize", {"lora": "a", "out": "o", "rank": "many"}, "Rank: many is not a whole number"),
        ("resize", {"lora": "a\nb", "out": "o", "rank": "1"}, "LoRA file: this is one line"),
        ("convert", {"lora": "a", "out": "o", "to": "mine"}, "Names: 'mine' is none of the choices"),
        ("merge", {"loras": "a.safetensors=x", "out": "o"}, "the weight of a.safetensors is 'x'"),
        ("merge", {"loras": "a.safetensors=nan", "out": "o"}, "finite"),
        ("merge", {"loras": "secret", "out": "o"}, "LoRA files: secret is outside"),
        ("verify", {"lora": "a", "in_place": True}, "has no such field"),
        ("format", {}, "does not exist"),
    ],
)
def test_mistakes_are_sentences(tool, values, says):
    with pytest.raises(ConfigError) as wrong:
        FORMS.words(tool, values, guard)
    assert says in str(wrong.value)
