"""Commands as forms: guarded paths, results that overwrite nothing, and markup from the shell's own options."""

import re

import pytest

from kohya_gui.server.json_api import ApiRequest
from kohya_gui.tools import commands
from kohya_gui.tools.commands import ToolCommands
from library.captioning.shell import main as caption_main
from library.config.problems import ConfigError
from library.jobs import jobs
from library.masking.shell import main as mask_main
from library.runs import layout, process
from library.tools.shell import main as tools_main


@pytest.fixture
def page(tmp_path, monkeypatch):
    monkeypatch.setenv("KOHYA_HOME", str(tmp_path / "home"))
    started = []
    monkeypatch.setattr(
        jobs,
        "start_job",
        lambda kind, words: (
            started.append(words)
            or jobs.BackgroundJob(tmp_path / "x", {"kind": kind, "arguments": words, "state": "running"})
        ),
    )
    (tmp_path / "root").mkdir()
    for name in ("a", "b"):
        (tmp_path / "root" / f"{name}.safetensors").write_text("x")
    (tmp_path / "secret.safetensors").write_text("x")
    tool_commands = ToolCommands([(tmp_path / "root").resolve()])
    tool_commands.started = started
    return tool_commands


def begin(page, name, command="tools", **values):
    return page.begin(ApiRequest({"command": command, "name": name, "values": values}))


def test_a_form_is_started_with_guarded_paths(page, tmp_path):
    root = (tmp_path / "root").resolve()
    new = root / "new.safetensors"
    loras = f"{root}/a.safetensors=0.5\n{root}/../root/b.safetensors"
    status = begin(page, "merge", loras=loras, out=f"{root}/new.safetensors")
    assert page.started == [
        ["tools", "merge", f"{root / 'a.safetensors'}=0.5", f"{root / 'b.safetensors'}=1", f"--out={new}"]
    ]
    assert status["state"] == "running" and status["out"] == str(new)


READ = {"merge": "loras", "extract": "base", "resize": "lora", "convert": "lora", "metadata": "file"}
OTHERS = {"extract": {"tuned": "{}/b.safetensors"}, "resize": {"rank": "4"}, "convert": {"to": "comfy"}}


@pytest.mark.parametrize("name", READ)
def test_a_name_alone_is_put_beside_the_first_file(page, tmp_path, name):
    """Not into the folder in which the page was started."""
    root = (tmp_path / "root").resolve()
    others = {field: text.format(root) for field, text in OTHERS.get(name, {}).items()}
    for first in ("{}/a.safetensors", '"{}/a.safetensors"', "{}/a.safetensors\n{}/b.safetensors"):
        if name != "merge" and "\n" in first:
            continue
        begin(page, name, **{READ[name]: first.format(root, root)}, **others, out="new.safetensors")
        assert f"--out={root / 'new.safetensors'}" in page.started.pop()
    with pytest.raises(ConfigError, match="a.safetensors exists already"):
        begin(page, name, **{READ[name]: f"{root}/b.safetensors"}, **others, out="a.safetensors")
    with pytest.raises(ConfigError, match="outside"):
        begin(page, name, **{READ[name]: f"{root}/b.safetensors"}, **others, out="../new.safetensors")
    assert page.started == []


@pytest.mark.parametrize(("command", "name"), [("caption", "wd14"), ("caption", "hf"), ("mask", "model")])
def test_what_is_no_model_is_answered_with_what_one_is(page, tmp_path, command, name):
    words = {"words": "cat"} if command == "mask" else {}
    for text, says in (
        ("some words", "neither a folder nor a Hugging Face id"),
        (f"{tmp_path}/root/x", "does not exist"),
    ):
        with pytest.raises(ConfigError, match=f"^Model: .*{says}"):
            begin(page, name, command, folder=str(tmp_path / "root"), model=text, **words)
    assert page.started == []


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"loras": "{root}/a.safetensors", "out": "{root}/b.safetensors"}, "exists already and is not overwritten"),
        ({"loras": "{root}/a.safetensors", "out": "{root}/../new.safetensors"}, "outside"),
        ({"loras": "{root}/a.safetensors", "out": "{root}/new.ckpt"}, "must end in .safetensors"),
        ({"loras": "{root}/../secret.safetensors", "out": "{root}/new.safetensors"}, "outside"),
        ({"loras": "{root}/none.safetensors", "out": "{root}/new.safetensors"}, "does not exist"),
        ({"loras": "{root}/a.safetensors", "out": "{root}/n.safetensors", "base": "/etc/passwd"}, "outside"),
        (
            {"loras": "{root}/a.safetensors", "out": "{root}/n.safetensors", "rank": "x"},
            "^Rank: x is not a whole number",
        ),
        ({"loras": "{root}/a.safetensors", "out": "{root}/n.safetensors", "rank": "1.5"}, "1.5 is not a whole number"),
        (
            {"loras": "{root}/a.safetensors", "out": "{root}/n.safetensors", "dtype": "--out=/tmp/x"},
            "is none of the choices",
        ),
        ({"loras": "--base=/etc/passwd", "out": "{root}/n.safetensors"}, "LoRA files"),
    ],
)
def test_nothing_leads_out_or_over_a_file(page, tmp_path, values, says):
    root = (tmp_path / "root").resolve()
    with pytest.raises(ConfigError, match=says):
        begin(page, "merge", **{name: text.replace("{root}", str(root)) for name, text in values.items()})
    assert page.started == []


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"command": "train"},
        {"command": "tools", "name": "rm"},
        {"command": "tools", "name": 3},
        {"command": "caption", "name": "hf", "values": {"folder": "/etc", "model": "/etc"}},
        {"command": "tools", "name": "merge", "values": []},
    ],
)
def test_other_questions_are_sentences(page, fields):
    with pytest.raises(ConfigError):
        page.begin(ApiRequest(fields))
    assert page.started == []


def test_the_markup_has_every_option_once():
    markup = commands.tools_tab_html()
    for name, form in commands.TOOLS.all().items():
        for field in form.fields:
            assert markup.count(f'id="tools-{name}-{field.name}"') == 1, (name, field.name)
    assert 'data-pick="new"' in markup and markup.count("data-pick") >= 12


def running(kind, *words):
    folder = jobs.new(kind)
    facts = {"kind": kind, "state": "running", "arguments": words, **process.identity()}
    layout.store(folder / jobs.JOB, facts)


@pytest.mark.parametrize(
    ("kind", "words", "title"),
    [
        ("caption", ["caption", "wd14", "images"], "Tags (WD14 tagger)"),
        ("caching", ["cache", "latents", "images-flux_train_network.toml"], "Cache of images"),
        ("models", ["models", "get", "--into=models"], "Download"),
        ("sample", ["sample", "flux_train_network.toml"], "Generate"),
        ("compare", ["compare", "fox-20260101-120000-abcd"], "Compare"),
        ("demo", ["demo", "--no-train"], "Demo"),
    ],
)
def test_a_second_process_of_a_kind_waits_for_the_first_by_its_title(page, kind, words, title):
    commands.refuse_second(kind)
    running(kind, *words)
    with pytest.raises(ConfigError, match=f"^{re.escape(title)} is still running"):
        commands.refuse_second(kind)


def test_three_tools_may_run_at_once(page):
    for _ in range(3):
        commands.refuse_second("tools")
        running("tools", "tools", "merge")
    with pytest.raises(ConfigError, match="^Merge is still running"):
        commands.refuse_second("tools")


@pytest.mark.parametrize("name", READ)
def test_a_file_that_a_tool_is_writing_is_not_begun_twice(page, tmp_path, name):
    """A double click on Run began the work twice, and the second process failed at its end."""
    root = (tmp_path / "root").resolve()
    others = {field: text.format(root) for field, text in OTHERS.get(name, {}).items()}
    values = {READ[name]: f"{root}/a.safetensors", **others}
    running("tools", "tools", name, f"--out={root}/new.safetensors")
    with pytest.raises(ConfigError, match=r"new.safetensors is being written already: wait until"):
        begin(page, name, **values, out="new.safetensors")
    begin(page, name, **values, out="other.safetensors")
    assert len(page.started) == 1


@pytest.mark.parametrize(
    ("command", "name", "values", "label"),
    [
        ("tools", "metadata", {"set": "title"}, "Set"),
        ("tools", "metadata", {"set": "ss_title=x", "out": ""}, "New file"),
        ("tools", "merge", {"base": "{root}/b.safetensors", "rank": "4"}, "Base model"),
        ("tools", "merge", {"conv_rank": "0"}, "Rank of convolutions"),
        ("tools", "merge", {"rank": "x"}, "Rank"),
        ("tools", "merge", {"dtype": "int3"}, "Stored as"),
        ("tools", "extract", {"conv_rank": "0"}, "Rank of convolutions"),
        ("tools", "extract", {"min_diff": "-1"}, "Smallest difference"),
        ("tools", "extract", {"iterations": "-1"}, "Iterations"),
        ("tools", "extract", {"clamp": "0"}, "Clamp"),
        ("tools", "extract", {"device": "tpu"}, "Device"),
        ("tools", "resize", {"rank": "0"}, "Rank"),
        ("tools", "resize", {"rank": "4", "method": "sv_ratio"}, "Parameter"),
        ("tools", "resize", {"rank": "4", "method": "sv_fro", "parameter": "2"}, "Parameter"),
        ("tools", "convert", {"to": "mine"}, "Names"),
        ("caption", "wd14", {"batch_size": "0"}, "Batch size"),
        ("caption", "wd14", {"general": "2"}, "Threshold"),
        ("caption", "wd14", {"extension": "txt"}, "Caption ending"),
        ("caption", "hf", {"max_tokens": "0"}, "Longest caption"),
        ("caption", "hf", {"existing": "keep"}, "Images with a caption"),
        ("mask", "model", {"words": "cat", "batch_size": "0"}, "Batch size"),
        ("mask", "model", {"words": ","}, "What to learn"),
        ("mask", "model", {"words": "cat", "threshold": "2"}, "Threshold"),
        ("mask", "alpha", {"outside": "200"}, "Rest of the image"),
        ("mask", "alpha", {"existing": "keep"}, "Images with a mask"),
    ],
)
def test_bad_input_is_answered_with_the_label_of_its_field(page, tmp_path, command, name, values, label):
    """Whether the form or its command refuses it, no name of an option of the shell is left in the sentence."""
    root, forms = tmp_path / "root", commands.COMMANDS[command]
    (root / "cat.png").write_bytes(b"")
    (root / "config.json").write_text("{}", encoding="utf-8")
    kinds = {"new": root / "new.safetensors", "folder": root, "model": root}
    filled = {
        field.name: str(kinds.get(field.kind, root / "a.safetensors"))
        for field in forms.all()[name].fields
        if field.kind in (*kinds, "file", "files")
        and field.name not in ("trained_on", "base")
        or name == "extract"
        and field.name == "base"
    }
    values = {option: value.replace("{root}", str(root)) for option, value in values.items()}
    main = {"tools": tools_main, "caption": caption_main, "mask": mask_main}[command]
    with pytest.raises(ConfigError) as wrong:
        main(forms.words(name, {**filled, **values}, page.guard)[1:])
    said = str(forms.labelled(name, wrong.value.said)).replace(str(root), "")
    assert label in said and not re.search(r"--\w|[a-z]_[a-z]", said.replace("sv_", ""))
