"""What the documents say is so: their configs build, their links lead somewhere, their commands are understood."""

import argparse
import ast
import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kohya_gui.i18n.texts import load_catalogue
from library import families
from library.cli import launch, main, presets_page, train_script
from library.config.building import build_config, find_missing
from library.config.outside_files import load_toml
from library.config.schema import flatten_sections
from library.families import RUNS, config_class
from library.sampling import prompts
from tests import links, source

DOCS = source.ROOT / "docs"
PAGES = [source.ROOT / "README.md", source.ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
GUIDES = [page for page in PAGES if page.parent.name not in ("decisions", "dev")]
# Written to be pasted, with a part that the reader fills in.
PLACEHOLDER = re.compile(r"<[a-z ]+>|\$\(|\.\.\.|\[--")


def name_of(page: Path) -> str:
    return page.relative_to(source.ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def commands() -> list[tuple[str, str]]:
    """Every `kohya ...` line of a bash block, with its page; continued lines joined, remarks left out."""
    lines = []
    for page in GUIDES:
        for line in "\n".join(blocks(page, "bash")).replace("\\\n", " ").splitlines():
            words = " ".join(line.partition(" # ")[0].split())
            if words.startswith("kohya ") and not PLACEHOLDER.search(words):
                lines.append((name_of(page), words))
    return lines


def anchors(page: Path) -> set[str]:
    """What the headings of a page are called in links, as GitHub makes it."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower()) for title in titles]
    return {title.replace(" ", "-") for title in plain}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    gone = []
    for link, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", page.read_text(encoding="utf-8")):
        target = page.parent / link if link else page
        if "://" in link or link.startswith("mailto:"):
            continue
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            gone.append(f"{link}#{anchor}" if anchor else link)
    assert not gone


def test_every_page_is_found_from_the_index():
    """The index leads to each page, or to the index of its folder."""
    named = {
        (folder / link).resolve()
        for folder in (DOCS, DOCS / "dev")
        for link in re.findall(r"\]\(([^)#]+)", (folder / "README.md").read_text(encoding="utf-8"))
    }
    left = [page for page in DOCS.rglob("*.md") if page.parent.name != "decisions" and page.resolve() not in named]
    assert [name_of(page) for page in left if page != DOCS / "README.md"] == []


def test_no_file_names_a_document_that_does_not_exist():
    """In comments, messages and other files than the documents themselves."""
    patterns = (
        "library/**/*.py",
        "kohya_gui/**/*.py",
        "benchmarks/*.py",
        "tests/**/*.py",
        "presets/*/*.toml",
        "setup.sh",
    )
    gone = {
        (path.relative_to(source.ROOT).as_posix(), name)
        for pattern in patterns
        for path in source.ROOT.glob(pattern)
        for name in re.findall(r"\bdocs/[\w/.-]+\.(?:md|ipynb|svg)\b", path.read_text(encoding="utf-8"))
        if not (source.ROOT / name).exists()
    }
    assert not gone


@pytest.mark.parametrize("page", [page for page in GUIDES if blocks(page, "toml")], ids=name_of)
def test_tomls_can_be_read(page):
    for text in blocks(page, "toml"):
        tomllib.loads(text)


def test_the_config_of_the_shells_page_is_complete():
    config = build_config(config_class("flux_train_network"), flatten_sections(tomllib.loads(example())), "shell.md")
    assert find_missing(config) == []


def example() -> str:
    (text,) = blocks(DOCS / "shell.md", "toml")
    return text


class Parsed(Exception):
    """Raised in place of what a command would do after its arguments are understood."""


@pytest.mark.parametrize(("page", "line"), commands())
def test_commands_are_understood(page, line, tmp_path, monkeypatch):
    """By the parser of the command itself; nothing is run."""
    monkeypatch.chdir(tmp_path)
    links.link_or_copy(tmp_path / "presets", source.ROOT / "presets")
    _, command, *arguments = shlex.split(line)
    assert command in main.COMMANDS, page
    kind = arguments[0] if arguments else ""
    if command in ("train", "check") or kind in {"cache": ("latents", "text"), "queue": ("add",)}.get(command, ()):
        understood_as_options(arguments if command in ("train", "check") else arguments[1:])
        return
    real = argparse.ArgumentParser.parse_args

    def parse_args(self, args=None, namespace=None):
        real(self, args, namespace)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    try:
        code = main.main([command, *arguments])
    except Parsed:
        return
    assert code == main.EXIT_DONE, line


def understood_as_options(words: list[str]) -> None:
    """Options of a training, of its launcher, and files: no name is unknown and every value can be read."""
    script = next((word for word in words if word in RUNS), "sdxl_train_network")
    _, flags, wrong = launch.split_launch([word for word in words if word not in RUNS and word != "--sdxl"])
    flags = launch.with_config(flags)
    path, flags = launch.split_file(flags)
    if path and "/" in path:
        assert Path(path).is_file(), path
    if "--fsdp" in flags:
        script = "flux_train"
    reading = train_script.read_command_line(config_class(script), flags, launch.LAUNCH_FLAGS)
    named = [*wrong, *(problem for problem in reading.problems if f"--{problem.option}" in flags)]
    unknown = [problem for problem in reading.problems if not problem.option]
    assert not named and not unknown


def test_other_lines_of_bash_blocks_exist():
    text = (source.ROOT / "setup.sh").read_text(encoding="utf-8")
    for page in GUIDES:
        for command in re.findall(r"setup\.sh ([a-z]+)", page.read_text(encoding="utf-8")):
            assert re.search(rf"^\s+[\w |]*\b{command}\b[\w |-]*\)", text, re.MULTILINE), (page.name, command)
        for script in re.findall(
            r"accelerate launch (?:-\S+ \S+ )*(sd-scripts/\S+\.py)", page.read_text(encoding="utf-8")
        ):
            assert (source.ROOT / script).is_file() or script.endswith("NAME.py"), (page.name, script)


@pytest.mark.parametrize("line", ["kohya --version", "kohya --help", "kohya models get", "kohya train --help"])
def test_cheap_commands_run(line, capsys):
    assert main.main(shlex.split(line)[1:]) == main.EXIT_DONE
    assert capsys.readouterr().out.strip()


def test_the_downloads_of_models_are_as_large_as_their_table_says(capsys):
    main.main(["models", "get"])
    sizes = set(re.findall(r"\): ([\d.]+) GB$", capsys.readouterr().out, re.MULTILINE))
    shown = (DOCS / "choose-a-model.md").read_text(encoding="utf-8")
    assert sizes and [size for size in sizes if f"{size} GB" not in shown] == []


def test_python_in_the_documents_can_be_parsed():
    for page in GUIDES:
        for text in blocks(page, "python"):
            ast.parse(text)


def test_the_notebook_runs_as_shipped(tmp_path, monkeypatch):
    """Its cells run from the first to the last; of what they start, kohya's commands are understood."""
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((DOCS / "colab.ipynb").read_text(encoding="utf-8"))
    code = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    started: list[str] = []
    names: dict[str, object] = {"start": lambda line, known: started.append(line.format(**known))}
    first = as_python(code[0].replace("/content/kohya-trainer", tmp_path.as_posix()))
    with pytest.raises(SystemExit, match="REPOSITORY"):
        exec(as_python(code[0].replace("/content", "/nowhere")), dict(names))
    for text in [first, *map(as_python, code[1:])]:
        exec(text, names)
    assert any("setup.sh install" in line for line in started)
    written = families.facts_of(families.SHOWN_BY_DEMO).scripts
    for command, words in re.findall(r"bin/kohya (\w+) ?(.*)$", "\n".join(started), re.MULTILINE):
        assert command in main.COMMANDS and Path(words).stem in written, "a TOML that the demo writes"
    assert sum("bin/kohya" in line for line in started) == 2


def as_python(cell: str) -> str:
    """A cell whose lines for the shell call `start` instead."""
    return re.sub(
        r"^(\s*)[!%](.*)$", lambda match: f"{match[1]}start({match[2]!r}, globals())", cell, flags=re.MULTILINE
    )


def test_the_shells_page_names_every_script():
    text = (DOCS / "shell.md").read_text(encoding="utf-8")
    unnamed = [script.stem for script in (source.ROOT / "sd-scripts").glob("*.py") if f"`{script.stem}`" not in text]
    assert not unnamed, f"add to the table of docs/shell.md: {unnamed}"


def test_messages_in_troubleshooting_are_those_of_the_program():
    """Each message of a table is one that a user can see, word by word, but for what stands for `...` and N."""
    said = [
        *load_catalogue("zh"),
        *(error["advice"] for error in load_toml(source.ROOT / "library/runs/known_errors.toml")["known"]),
    ]
    templates = [re.sub(r"\{[^}]*\}", "*", " ".join(text.split())) for text in said]
    rows = re.findall(r"^\| (\*.+?\*) \|", (DOCS / "troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE)
    messages = [message for row in rows for message in re.findall(r"\*([^*]+)\*", row)]
    assert len(messages) > 30
    for message in messages:
        parts = [
            part.strip() for part in re.split(r"\.\.\.|\bN\b", message.replace("N_name", "N-name")) if part.strip()
        ]
        fits = [text.replace("N_name", "N-name") for text in templates]
        assert any(all(part in text for part in parts) for text in fits), message


def test_the_options_of_prompts_are_listed_and_their_example_is_read():
    section = (
        (DOCS / "recipes.md").read_text(encoding="utf-8").partition("### A prompt file\n")[2].partition("\n### ")[0]
    )
    listed = {
        letter: name
        for letters, names in re.findall(r"^\| (`--[^|]*) \| (`[^|]*) \|", section, re.MULTILINE)
        for letter, name in zip(re.findall(r"--(\w+)", letters), re.findall(r"\w+", names), strict=True)
    }
    of_other_models = prompts.OTHER_MODELS
    assert listed == {letter: name for letter, (name, *_) in prompts.LETTERS.items() if name not in of_other_models}
    example = section.partition("```text\n")[2].partition("```")[0]
    beach, apple = [prompts.parse_line(line) for _, line in prompts.prompt_lines(example)]
    assert (beach.width, beach.height, beach.seed) == (1024, 1024, 1)
    assert (apple.negative_prompt, apple.sample_steps, apple.scale) == ("blurry, text", 28, 4)


def test_the_values_of_presets_are_fresh():
    text = presets_page.PRESETS_PAGE.read_text(encoding="utf-8")
    assert presets_page.VALUES_BLOCK.search(text)
    assert text == presets_page.with_tables(text), "run: python -m library.cli.presets_page"


def test_every_preset_has_a_column_with_its_values():
    tables = presets_page.preset_tables()
    for path in (source.ROOT / "presets").glob("*/*gb.toml"):
        kind = re.sub(r"-\d+gb$", "", path.stem)
        size = re.search(r"(\d+)gb$", path.stem)
        title = next(line for line in tables.splitlines() if f"`{path.parent.name}/{kind}-...`" in line)
        heads = tables[tables.index(title) :].split("\n\n")[1].splitlines()[0]
        assert size and f"| {size[1]} GB |" in heads, path


def test_each_decision_is_found_from_the_line_that_it_explains_and_leads_to_it():
    """Dated files, named in a comment beside the code, which they name in turn; and all in the list."""
    folder = source.ROOT / "docs" / "decisions"
    tracked = (
        "library/**/*.py",
        "kohya_gui/**/*.py",
        "benchmarks/*.py",
        "tests/**/*.py",
        "presets/*/*.toml",
        "*.toml",
        "setup.sh",
    )
    named: dict[str, set[str]] = {}
    for path in (path for pattern in tracked for path in source.ROOT.glob(pattern)):
        for name in re.findall(r"# Why: docs/decisions/(2\S+)", path.read_text(encoding="utf-8")):
            named.setdefault(name, set()).add(path.relative_to(source.ROOT).as_posix())
    decisions = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("2*.md")}
    assert decisions.keys() == named.keys()
    listed = (folder / "README.md").read_text(encoding="utf-8")
    for name, text in decisions.items():
        code = re.search(r"Date: 20\d\d-\d\d-\d\d\. Status: .*\. Code: `(.+)`\.\n", text)
        assert code and code[1] in named[name] and f"({name})" in listed, name


def test_a_lora_is_verified_and_renamed_as_its_page_says(tmp_path, monkeypatch, capsys):
    """The commands of use-your-lora.md, in their order, on one small file."""
    monkeypatch.chdir(tmp_path)
    layer = "lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q"
    tensors = {
        f"{layer}.lora_down.weight": torch.ones(4, 640),
        f"{layer}.lora_up.weight": torch.ones(640, 4),
        f"{layer}.alpha": torch.tensor(4.0),
    }
    for path in (tmp_path / "zorb.safetensors", tmp_path / "results" / "zorb.safetensors"):
        path.parent.mkdir(exist_ok=True)
        save_file(tensors, path)
    lines = [line for page, line in commands() if page == "docs/use-your-lora.md" and " merge " not in line]
    for line in [line for line in lines if line.startswith("kohya tools")]:
        assert main.main(shlex.split(line)[1:]) == main.EXIT_DONE, (line, capsys.readouterr())
    assert load_file(tmp_path / "zorb-kohya.safetensors").keys() == tensors.keys()
