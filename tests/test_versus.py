"""benchmarks/versus.py: the same TOML for every program, what their output says, and the table that comes of it."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from benchmarks import versus, versus_files, versus_measure
from benchmarks.versus import THIS_TRAINER, Program
from library import families
from library.config.building import build_config
from library.families import random_module

# A stand-in for a trainer: it prints as sd-scripts or as this trainer does, and leaves a file.
SCRIPT = """
import sys, time, tomllib
from pathlib import Path
import numpy as np
from safetensors.numpy import save_file

given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
config = tomllib.loads(Path(given["--config_file"]).read_text())
steps, style = config["max_train_steps"], Path(__file__).with_name("style").read_text()
pictures = sorted(Path(given["--train_data_dir"]).rglob("*.png"))
assert len(pictures) == 12 and Path(config["pretrained_model_name_or_path"]).is_file()
np.savez(pictures[0].with_name("01_sdxl.npz"), a=np.ones(1))
if style == "broken":
    raise ValueError("no such thing as a | b")
for step in range(1, steps + 1):
    time.sleep(0.05)
    if style == "bar":
        print(f"\\rsteps: 50%|#| {step}/{steps} [00:01<00:00, 1.2s/it, avr_loss=0.{step}]", end="", file=sys.stderr)
    else:
        print(f"step {step}/{steps}, epoch 1, loss 0.9000 (average 0.{step}), 0.05 s/it, 0:00:01 left")
    sys.stdout.flush()
tensors = {"a.weight": np.ones((2, 3 if style == "bar" else 4), np.float16), "b.weight": np.ones(2, np.float32)}
if style != "bar":
    tensors["c.weight"] = np.ones(1, np.float16)
save_file(tensors, Path(given["--output_dir"]) / (given["--output_name"] + ".safetensors"), {"ss_" + style: "1"})
"""


@pytest.fixture
def checkout(tmp_path):
    """A function: a folder that looks like the checkout of a trainer."""

    def make(name, style):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "sdxl_train_network.py").write_text(SCRIPT)
        (folder / "options.py").write_text('add("--gradient_checkpointing")')
        (folder / "style").write_text(style)
        return folder

    return make


@pytest.fixture
def inputs(tmp_path):
    """What a work folder has of an earlier time: a model and pictures, so that none are made."""
    from library.demo import images

    place = tmp_path / "work" / "inputs"
    (place / "models").mkdir(parents=True)
    save_file({"a": np.ones(1)}, place / "models" / "sdxl.safetensors")
    images.draw_images(place / "images")
    return place.parent


def test_every_case_is_a_config_of_this_trainer_without_a_remark():
    cases = [case for tiny in (False, True) for case in versus_files.versus_cases(tiny, 60)]
    every = {"qwen_image_edit", *families.FAMILIES}
    assert {(case.family, case.kind) for case in cases} == {(f, k) for f in every for k in ("lora", "full")}
    for case in cases:
        notes: list[str] = []
        shown = {"control_directory": "images"} if case.shown else {}
        build_config(families.config_class(case.script), case.options | shown, notes=notes)
        assert [note for note in notes if "no effect" in note] == [], case.title


def test_programs_are_run_in_turn_and_a_failure_is_a_row(checkout, inputs, monkeypatch, capsys):
    ours, bar, broken = checkout("ours", "plain"), checkout("bar", "bar"), checkout("broken", "broken")
    monkeypatch.setattr(versus, "PROJECT_ROOT", ours)
    (ours / "sd-scripts").symlink_to(ours)
    rivals = [f"--rival={path.name}={path}:{sys.executable}" for path in (bar, broken)]
    asked = ["--tiny", "--family", "sdxl", "--kind", "lora", "--steps", "6", "--work", str(inputs)]
    assert versus.main([*asked, "--cases", "checkpointing", "compiled", *rivals]) == 0
    results = json.loads((inputs / "results.json").read_text())
    rows = {(row["case"], row["program"]): row for row in results["rows"]}
    mine, other = (rows["sdxl lora checkpointing", name] for name in (THIS_TRAINER, "bar"))
    for row in (mine, other):
        assert row["loss"] == 0.6 and row["caches"] == "made" and 0 < row["first_step_s"] <= row["wall_s"]
        assert 0 < row["s_it"] < row["wall_s"]
    assert rows["sdxl lora checkpointing", "broken"]["failed"] == "ValueError: no such thing as a | b"
    assert rows["sdxl lora compiled", "bar"]["failed"] == "has no compile"
    assert rows["sdxl lora compiled", THIS_TRAINER]["caches"] == "found"
    lines = (inputs / "results.md").read_text().splitlines()
    table = [line for line in lines if line.startswith("| sdxl")]
    assert len(table) == len(rows) == 6 and all(line.replace("\\|", "").count("|") == 10 for line in table)
    assert "1 tensors missing, 1 of another shape, 1 more metadata, 1 metadata missing" in table[1]
    assert f"| {other['s_it'] / mine['s_it']:.2f} |" in table[0] and "| 1.00 |" in table[1]
    assert any(line.startswith(f"- {THIS_TRAINER}") and "torch" in line for line in lines)
    with pytest.raises(SystemExit):
        versus.main([*asked, "--cases", "fastest"])
    assert "unknown: fastest; choose from checkpointing, " in capsys.readouterr().err
    assert versus.main([*asked, "--cases", "checkpointing"]) == 0  # the files of the first time are in nobody's way


MUSUBI = """
import sys, tomllib
from pathlib import Path
import numpy as np
from safetensors.numpy import load_file, save_file

given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
config = tomllib.loads(Path(given["--config_file"]).read_text())
data = tomllib.loads(Path(config.pop("dataset_config")).read_text())
assert data["general"].pop("resolution") == [128, 128] and data["general"].pop("caption_extension") == ".txt"
assert data["general"] == {"enable_bucket": True, "batch_size": 1}
for one in data["datasets"]:
    folder = Path(one["image_directory"])
    assert one["num_repeats"] > 0 and len(list(folder.glob("*.png"))) == 6
    edits = config.get("model_version") == "edit-2511"
    kind = "qie" if edits else "qi"
    assert one.get("control_directory", "") == (one["image_directory"] if edits else "")
    text = sorted(folder.glob(f"*_{kind}_te.safetensors"))
    latents = sorted(folder.glob(f"*_{kind}.safetensors"))
    for latent_file, text_file in zip(latents, text, strict=True):
        arrays = load_file(latent_file)
        _, _, height, width = next(iter(arrays.values())).shape
        size = f"1x{height}x{width}_float32"
        assert set(arrays) == {f"latents_{size}", *([f"latents_control_0_{size}"] if edits else [])}
        assert latent_file.name == f"{text_file.name[:2]}_{8 * width:04d}x{8 * height:04d}_{kind}.safetensors"
        (name, array), = load_file(text_file).items()
        assert name == "varlen_vl_embed_float32" and array.ndim == 2
assert Path(config.pop("dit")).is_file() and config["weighting_scheme"] == "none" and "resolution" not in config
save_file({"a": np.ones(1)}, Path(given["--output_dir"]) / (given["--output_name"] + ".safetensors"))
"""


@pytest.mark.parametrize("family", ["qwen_image", "qwen_image_edit", "krea_2"])
def test_musubi_tuner_gets_the_case_in_its_own_files_and_the_caches_with_it(tmp_path, family):
    folder = tmp_path / "musubi"
    (folder / "src" / "musubi_tuner").mkdir(parents=True)
    (folder / "src" / "musubi_tuner" / "parser.py").write_text('add("--gradient_checkpointing")')
    name = "krea2" if family == "krea_2" else "qwen_image"
    (folder / f"{name}_train_network.py").write_text(MUSUBI)
    versus_files.make_versus_inputs(tmp_path / "inputs", {family}, tiny=True)
    rival = Program.parse(f"musubi={folder}")
    every = {case.title: case for case in versus_files.versus_cases(True, 6)}
    row = versus.run_program(rival, every[f"{family} lora checkpointing"], tmp_path, 60)
    assert "failed" not in row and list(row["file"]["tensors"]) == ["a"]
    assert (
        versus.run_program(rival, every[f"{family} lora compiled_checkpointing"], tmp_path, 60)["failed"]
        == "has no compile"
    )


def test_a_model_of_one_block_of_each_kind_becomes_one_of_many(tmp_path):
    from safetensors.numpy import load_file

    rng = np.random.default_rng(0)
    names = (
        "img_in.weight",
        "transformer_blocks.0.attn.to_q.weight",
        "transformer_blocks.0.img_mod.1.bias",
        "single_blocks.0.linear1.weight",
        "z",
    )
    small = {name: rng.standard_normal((2, i + 1)).astype(np.float32) for i, name in enumerate(names)}
    save_file(small, tmp_path / "small.safetensors", {"format": "pt"})
    sizes = SimpleNamespace(blocks=3, single_blocks=5)
    versus_files.repeat_blocks(tmp_path / "small.safetensors", tmp_path / "large.safetensors", sizes)
    large = load_file(tmp_path / "large.safetensors")
    blocks = {n.replace(".0.", f".{i}."): a for n, a in small.items() for i in range(3) if n.startswith("transf")}
    blocks |= {f"single_blocks.{i}.linear1.weight": small["single_blocks.0.linear1.weight"] for i in range(5)}
    wanted = blocks | {name: small[name] for name in ("img_in.weight", "z")}
    assert large.keys() == wanted.keys() and all(np.array_equal(large[name], wanted[name]) for name in wanted)


def test_the_file_of_one_block_has_every_other_weight_of_the_full_model():
    cached = [family for family in versus_files.known_families() if versus_files.has_musubi_caches(family)]
    assert "krea_2" in cached
    for family in cached:
        module, config = random_module(families.owner(family)), versus_files.find_subject(family).config
        sizes = families.sizes_of_model(families.owner(family), config, True)
        whole, small = (
            {name: tuple(tensor.shape) for name, tensor in module.make_networks(of).denoiser().state_dict().items()}
            for of in (sizes, versus_files.with_one_block(family, sizes))
        )
        assert {name: whole.get(name) for name in small} == small, family


def test_a_training_that_takes_too_long_is_ended(tmp_path):
    command = [sys.executable, "-c", "import time; print('1/9 ', flush=True); time.sleep(60)"]
    result = versus_measure.measure_training(command, 9, tmp_path / "log", {}, tmp_path, limit=3)
    assert result["failed"] == "not done after 3 s" and result["wall_s"] < 30 and "s_it" not in result


LOGS = {
    # Recorded: sd-scripts 48d368f and this trainer, their last lines of 40 steps.
    "steps: 100%|##########| 40/40 [00:38<00:00,  1.03it/s, avr_loss=1.62]": 1.62,
    "step 40/40, epoch 2, loss 1.6512 (average 1.6975), 0.75 s/it, 0:00:00 left": 1.6975,
}


@pytest.mark.parametrize("line", LOGS)
def test_steps_are_read_from_both_kinds_of_log(line):
    progress = versus_measure.PrintedSteps(40, began=100.0)
    progress.feed("caching latents: 100%|###| 24/24 [00:05<00:00]\n 12/400 [x", 101.0)
    assert not progress.facts()
    for step in range(1, 41):
        whole = line.replace("40/40", f"{step}/40")
        progress.feed(whole[:25], 110.0 + 0.5 * step)  # output comes in pieces
        progress.feed(whole[25:] + "\n", 110.0 + 0.5 * step)
    assert progress.facts() == {"first_step_s": 10.5, "s_it": 0.5}
    assert versus_measure.read_log(line) == {"loss": LOGS[line]}


def test_a_rival_is_a_folder_and_a_python_that_exist(tmp_path, monkeypatch):
    plain = Program.parse(f"sd-scripts={tmp_path}")
    assert (plain.name, plain.folder, plain.python) == ("sd-scripts", tmp_path.resolve(), sys.executable)
    assert Path(Program.parse(f"a={tmp_path}:{sys.executable}").python).samefile(sys.executable)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "C:").mkdir()  # a colon that is part of the path, as on Windows
    assert Program.parse("a=C:").folder == tmp_path / "C:"
    for wrong in (f"a={tmp_path}/none", f"a={tmp_path}:none", "a"):
        with pytest.raises(ValueError, match="NAME=PATH or NAME=PATH:PYTHON"):
            Program.parse(wrong)
    from_elsewhere = plain.environment(tmp_path, "case")
    assert from_elsewhere["PYTHONPATH"] == str(tmp_path.resolve())


def test_the_reason_is_the_last_error_of_a_log():
    log = 'Traceback:\n  File "x.py", line 3\ntorch.OutOfMemoryError: CUDA out of memory.\nsteps:  5%|# | 2/40\n'
    assert versus_measure.last_words(log) == "torch.OutOfMemoryError: CUDA out of memory."
    assert (
        versus_measure.last_words("x.py: error: unrecognized arguments: --a")
        == "x.py: error: unrecognized arguments: --a"
    )
    assert versus_measure.last_words("killed\n") == "killed" and versus_measure.last_words("") == ""
