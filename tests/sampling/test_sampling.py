"""Drawing: columns of strengths and files with one seed, exact sums, waiting for the GPU, and files that do not fit."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from library import families
from library.adapter_files import names
from library.cli.launch import script_of_toml
from library.cli.main import main
from library.config.problems import ConfigError
from library.jobs import jobs
from library.methods import lora
from library.methods.applied import AppliedLoras
from library.methods.applied_files import AppliedFiles
from library.runs import gpu_slots, gpu_wait, layout, process, reader, start
from library.sampling import plan, shell
from library.sampling.generate import generate
from library.sampling.prompts import Prompt
from tests.training import shallow  # noqa: F401

SCRIPTS = [families.lora_script(name) for name in families.FAMILIES]
CAT = Prompt("a cat", width=64, height=64, seed=3, sample_steps=2)


def quiet(message, done, total):
    """A report that nobody reads."""


@pytest.fixture
def given(shallow, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv("KOHYA_HOME", str(tmp_path / "home"))

    def of(script):
        return shell.read_sample_config(shallow.configs[script], {"mixed_precision": "no"}, script_of_toml).config

    return of


def adapter_names(family, parts):
    """Some layers of the denoiser and of a text encoder, by the names that files have for them."""
    from library.methods import targets

    adapters = {}
    for part, root in lora.networks(parts).items():
        layers = [
            adapter
            for adapter in targets.find_target_layers(root, part, family.adapter_name, ())
            if "att" in adapter.path.lower()
        ]
        adapters |= {
            adapter.name: adapter.layer for adapter in layers[:3] if isinstance(adapter.layer, torch.nn.Linear)
        }
    return adapters


def lora_file(path, layers, rank=4, seed=0, text=True):
    """A LoRA that changes these layers visibly."""
    chance = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, layer in layers.items():
        if text or name.startswith("lora_unet"):
            rows, columns = layer.weight.shape
            tensors[f"{name}.lora_down.weight"] = torch.randn(rank, columns, generator=chance)
            tensors[f"{name}.lora_up.weight"] = torch.randn(rows, rank, generator=chance)
            tensors[f"{name}.alpha"] = torch.tensor(float(rank))
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path)
    return path


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_grid_over_strengths_is_generated_with_one_seed_and_metadata(given, script, tmp_path):
    config = given(script)
    family = families.family_for(config)
    parts = family.load(torch.float32, torch.float32)
    file = lora_file(tmp_path / "zorb.safetensors", adapter_names(family, parts))
    columns = plan.plan_columns("strengths", [(file, 1.0)], [0.0, 1.0, 0.0])
    stored = []
    sheet = generate(config, columns, [CAT], tmp_path / "out", quiet, lambda one: stored.append(one.as_json()))
    bare, changed, again = (Image.open(name) for name in sheet.files[0])
    assert bare.tobytes() == again.tobytes() != changed.tobytes()  # a strength of 0 is the base model itself
    assert bare.size == (64, 64) and sheet.columns == ["× 0", "× 1", "× 0"] and len(stored) == 4
    facts = json.loads(changed.text["kohya"])
    assert facts["seed"] == 3 and facts["loras"] == [{"file": "zorb.safetensors", "strength": 1.0}]
    assert changed.text["parameters"].startswith("a cat <lora:zorb:1>\n") and "Seed: 3" in changed.text["parameters"]
    grid = Image.open(sheet.grid)
    assert grid.width > 3 * 64 and Path(sheet.grid).parent.parent == tmp_path / "out"


def test_what_is_added_is_what_a_merge_adds(given, tmp_path):
    config = given(SCRIPTS[0])
    family = families.family_for(config)
    parts = family.load(torch.float32, torch.float32)
    layers = adapter_names(family, parts)
    name = next(name for name in layers if name.startswith("lora_unet"))
    layer = layers[name]
    x = torch.randn(2, 5, layer.weight.shape[1])
    before = layer(x)
    rows, columns = layer.weight.shape
    first, two = lora_file(tmp_path / "a.safetensors", layers), lora_file(tmp_path / "b.safetensors", layers, 3, 1)
    w = {
        key: torch.randn(rows if key.endswith("_a") else 2, 2 if key.endswith("_a") else columns)
        for key in ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
    }
    save_file(
        {f"{name}.{key}": value for key, value in w.items()} | {f"{name}.alpha": torch.tensor(1.0)},
        tmp_path / "loha.safetensors",
    )
    k = {
        "lokr_w1": torch.randn(2, 2),
        "lokr_w2_a": torch.randn(rows // 2, 3),
        "lokr_w2_b": torch.randn(3, columns // 2),
    }
    save_file(
        {f"{name}.{key}": value for key, value in k.items()} | {f"{name}.alpha": torch.tensor(6.0)},
        tmp_path / "lokr.safetensors",
    )
    applied = AppliedLoras(parts, family)
    files = [first, two, tmp_path / "loha.safetensors", tmp_path / "lokr.safetensors"]
    for path in files:
        applied.add(path)
    assert applied.changes_text and torch.equal(layer(x), before)
    deltas = [t[f"{name}.lora_up.weight"] @ t[f"{name}.lora_down.weight"] for t in map(load_file, files[:2])]
    deltas.append((w["hada_w1_a"] @ w["hada_w1_b"]) * (w["hada_w2_a"] @ w["hada_w2_b"]) / 2)
    deltas.append(torch.kron(k["lokr_w1"], k["lokr_w2_a"] @ k["lokr_w2_b"]) * 6 / 3)
    for path, delta in zip(files, deltas, strict=True):
        applied.set({path: 0.7})
        torch.testing.assert_close(layer(x), before + 0.7 * x @ delta.T, rtol=1e-4, atol=1e-3)
    applied.set({first: 0.5, two: -1.0})
    both = before + x @ (0.5 * deltas[0] - deltas[1]).T
    torch.testing.assert_close(layer(x), both, rtol=1e-4, atol=1e-3)
    applied.set({})
    assert torch.equal(layer(x), before)


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"lora_unet_nowhere.lora_down.weight": (2, 2)}, "nothing for this model"),
        ({"{name}.lora_down.weight": (2, 7), "{name}.lora_up.weight": (9, 2)}, "another size"),
        ({"{name}.lora_down.weight": (2, 7)}, "another size"),
        ({"{name}.lora_down.weight": (2, 7), "{name}.dora_scale": (1, 7)}, "another size"),
        ({"{name}.oft_blocks": (3, 2, 5)}, "another size"),
        ({"{name}.something": (2, 2)}, "which is neither LoRA nor a kind of LyCORIS"),
    ],
)
def test_files_that_do_not_fit_are_sentences(given, tmp_path, tensors, says):
    config = given(SCRIPTS[0])
    family = families.family_for(config)
    parts = family.load(torch.float32, torch.float32)
    name = next(iter(adapter_names(family, parts)))
    save_file(
        {key.replace("{name}", name): torch.zeros(shape) for key, shape in tensors.items()}, tmp_path / "x.safetensors"
    )
    with pytest.raises(ConfigError, match=says):
        AppliedLoras(parts, family).add(tmp_path / "x.safetensors")
    (tmp_path / "y.safetensors").write_bytes(b"nothing")
    with pytest.raises(ConfigError):
        AppliedLoras(parts, family).add(tmp_path / "y.safetensors")


@pytest.mark.skipif(os.name == "nt", reason="Windows replaces no file that is mapped")
@pytest.mark.parametrize("when", ["loading the model", "generating"])
def test_a_file_that_is_replaced_meanwhile_is_reported(given, tmp_path, when):
    """While it is read, nothing is generated; afterwards the images are kept."""
    config = given(SCRIPTS[0])
    family = families.family_for(config)
    file = lora_file(tmp_path / "zorb.safetensors", adapter_names(family, family.load(torch.float32, torch.float32)))
    model = Path(config.model.pretrained_model_name_or_path or "")
    copy = Path(shutil.copytree(model.parent, tmp_path / "model")) / model.name if model.is_file() else None
    assert copy, "a single file"
    config = replace(config, model=replace(config.model, pretrained_model_name_or_path=str(copy)))
    read, changes = AppliedFiles.add, iter([copy, file])

    def exchange():
        for path in changes:
            os.replace(shutil.copy(path, tmp_path / "new"), path)
            return

    def add(self, path):
        read(self, path)
        if when == "loading the model":
            exchange()

    def report(message, done, total):
        if str(message) == when == "generating":
            exchange()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AppliedFiles, "add", add)
        with pytest.raises(ConfigError, match=f"{copy.name} was replaced or changed"):
            generate(config, [plan.Column("", ((file, 1.0),))], [CAT], tmp_path / "out", report)
    assert len([*(tmp_path / "out").rglob("00_00.png")]) == (when == "generating")


def test_columns_and_prompts_that_make_no_sense_are_refused():
    file, other = Path("a.safetensors"), Path("b.safetensors")
    assert [column.title for column in plan.plan_columns("files", [(file, 1.0), (other, 0.8)])] == ["a", "b × 0.8"]
    assert plan.plan_columns("together", [])[0].loras == ()
    assert plan.plan_columns("base", []) == plan.plan_columns("together", [])
    base, both = plan.plan_columns("base", [(file, 1.0), (other, 0.8)])
    assert (base.title, base.loras) == ("base model", ()) and [both] == plan.plan_columns(
        "together", [(file, 1.0), (other, 0.8)]
    )
    for compare, loras, strengths in (
        ("strengths", [], [1.0]),
        ("files", [(file, 1.0), (file, 0.5)], [1.0]),
        ("together", [(file, float("nan"))], [1.0]),
        ("strengths", [(file, 1.0)], [99.0]),
    ):
        with pytest.raises(ConfigError):
            plan.plan_columns(compare, loras, strengths)
    with pytest.raises(ConfigError, match="write a prompt"):
        plan.check_image_count(1, [])
    with pytest.raises(ConfigError, match="too many"):
        plan.check_image_count(50, [CAT] * 5)
    first, second = plan.with_one_seed([Prompt("a"), Prompt("b")])
    assert first.seed == second.seed is not None and plan.with_one_seed([CAT]) == [CAT]
    assert {prompt.seed for prompt in plan.with_one_seed([Prompt("a"), CAT], 7)} == {7, CAT.seed}
    (drawn,) = plan.with_one_seed([Prompt("a")], -1)  # `kohya compare --seed -1`
    assert drawn.seed not in (None, -1)


def test_columns_of_files_of_one_name_are_told_apart_by_their_folders():
    files = [Path("/runs/old/cat.safetensors"), Path("/runs/new/cat.safetensors"), Path("/runs/new/dog.safetensors")]
    columns = plan.plan_columns("files", [(file, 1.0) for file in files])
    assert [column.title for column in columns] == ["old/cat", "new/cat", "dog"]
    (column,) = plan.plan_columns("together", [(file, 0.5) for file in files[:2]])
    assert column.title == "old/cat × 0.5, new/cat × 0.5"


@pytest.mark.parametrize("asked", ["--lora=a.safetensors=nan", "--lora=a.safetensors=-inf", "--strengths=1,nan"])
def test_a_strength_that_is_no_number_is_refused_before_anything_is_read(asked, tmp_path):
    with pytest.raises(ConfigError, match=r"numbers from -10 to 10, not nan|is '(nan|-inf)', which is not a number"):
        shell.main([str(tmp_path / "model.safetensors"), "--prompt=cat", asked], lambda path: "")


def test_images_of_prompts_are_looked_at_before_loading_where_the_model_is_shown_them(given, tmp_path):
    (tmp_path / "text.png").write_text("no image")
    told = []
    for path, says in (("gone.png", "gone.png does not exist"), ("text.png", "text.png cannot be read as an image")):
        prompt = replace(CAT, control_image_path=(str(tmp_path / path),))
        with pytest.raises(ConfigError, match=says):
            generate(given("flux_2_train_network"), plan.plan_columns("together", []), [prompt], tmp_path, told.append)
        sheet = generate(
            given("flux_train_network"), plan.plan_columns("together", []), [prompt], tmp_path / "out", quiet
        )
        assert Path(sheet.grid).is_file()
    assert not told


def test_the_shell_draws_and_says_what_is_wrong(given, shallow, tmp_path, capsys, monkeypatch):  # noqa: F811
    given(SCRIPTS[0])
    config = str(shallow.configs[SCRIPTS[0]])
    line = "a cat --w 68 --h 64 --s 1 --l nan"
    folder = tmp_path / "job"
    folder.mkdir()
    monkeypatch.setenv(jobs.JOB_FOLDER_VARIABLE, str(folder))
    assert main(["sample", config, "--prompt", line, "--out", str(tmp_path / "o"), "--cpu"]) == 0
    result = layout.load_facts(folder / jobs.RESULT)
    assert result["rows"] == ["a cat"] and Path(result["files"][0][0]).is_file() and Path(result["grid"]).is_file()
    assert gpu_slots.held_devices() == set()
    told = capsys.readouterr().err
    assert [f"note: {note}" for note in result["warnings"]] == [x for x in told.splitlines() if x.startswith("note: ")]
    assert "note: prompt: --w 68 becomes 64" in told and "note: prompt: --l nan is ignored" in told
    for words, says in (
        (["--lora", "x=strong"], "which is not a number"),
        (["--set", "novalue"], "OPTION=VALUE"),
        (["--compare", "files"], "nothing to compare"),
        (["--strengths", "a"], "strengths are numbers"),
        ([], "write a prompt"),
    ):
        prompts = ["--prompt", line] if words else []
        assert main(["sample", config, *prompts, *words]) == 1
        assert says in capsys.readouterr().err
    assert main(["sample", str(tmp_path / "none.safetensors"), "--prompt", "a"]) == 1


WRONG_FILES = {
    "a LoRA that does not exist": lambda folder: ["--lora", str(folder / "gone.safetensors")],
    "a LoRA that is damaged": lambda folder: ["--lora", str(folder / "text.safetensors")],
    "an image that does not exist": lambda folder: ["--prompt", f"a cat --ci {folder / 'gone.png'}"],
    "a folder that cannot be made": lambda folder: ["--out", str(folder / "text.safetensors" / "out")],
    "a text encoder that does not exist": lambda folder: ["--set", f"text_encoder={folder / 'gone.safetensors'}"],
}


@pytest.mark.parametrize("wrong", WRONG_FILES)
def test_files_are_checked_before_the_wait_for_a_gpu_and_ask_for_none(given, shallow, tmp_path, monkeypatch, wrong):  # noqa: F811
    given(SCRIPTS[0])
    (tmp_path / "text.safetensors").write_text("no header")

    def fail(*_):
        raise AssertionError("asked for a GPU")

    monkeypatch.setattr(shell, "reserve_devices", fail)
    for name in ("is_available", "device_count", "_lazy_init", "get_device_capability"):
        monkeypatch.setattr(torch.cuda, name, fail)
    config = str(shallow.configs["flux_2_train_network"])
    words = ["--prompt=a cat", f"--out={tmp_path / 'out'}", *WRONG_FILES[wrong](tmp_path)]
    with pytest.raises(ConfigError, match=r"gone|text\.safetensors"):
        shell.main([config, *words], script_of_toml)


def test_kohya_sample_waits_until_no_training_has_the_device(given, monkeypatch, tmp_path):
    given(SCRIPTS[0])
    monkeypatch.setattr(gpu_wait, "WAITING", 0.0)
    monkeypatch.setattr(gpu_slots, "devices", lambda: ("0",))
    training = reader.RecordedRun(tmp_path / "zorb", {"id": "zorb", "state": "running", "devices": ["0"]})
    monkeypatch.setattr(type(training), "active", property(lambda self: self in busy))
    monkeypatch.setattr(type(training), "is_here", property(lambda self: True))
    busy = [training]
    monkeypatch.setattr(reader, "runs", lambda: [training])
    told = []

    def hear(text):
        told.append(str(text))
        if len(told) == 3:
            busy.clear()

    with gpu_wait.reserve_devices({}, hear) as own:
        assert told == ["waiting for zorb"] * 3
        assert own == ("0",) and gpu_slots.held_devices() == {"0"}
        assert "0" not in gpu_slots.free_devices([])
        with pytest.raises(ConfigError, match="or caching"):  # so no training gets it meanwhile
            start.begin_job(start.TrainingJob("x", "x", "x", str(tmp_path / "o"), ""))
    assert gpu_slots.held_devices() == set()
    other = {**process.identity(), "process_start": 1.0, "since_boot": 1.0}
    layout.store(gpu_slots._holders() / "1.json", {**other, "devices": ["0"]})
    assert gpu_slots.held_devices() == set()  # of a process that was killed


def test_names_of_other_programs_are_understood(given, tmp_path):
    config = given(SCRIPTS[0])
    family = families.family_for(config)
    parts = family.load(torch.float32, torch.float32)
    layers = {n: adapter for n, adapter in adapter_names(family, parts).items() if n.startswith("lora_unet")}
    path = lora_file(tmp_path / "a.safetensors", layers)
    out = tmp_path / "b.safetensors"
    assert main(["tools", "convert", str(path), "--to", "diffusers", "--out", str(out)]) == 0
    assert names.split_key(next(iter(load_file(out))))
    applied = AppliedLoras(parts, family)
    applied.add(out)
    layer = next(iter(layers.values()))
    x = torch.randn(1, 3, layer.weight.shape[1])
    before = layer(x)
    applied.set({out: 1.0})
    assert not torch.equal(layer(x), before)
