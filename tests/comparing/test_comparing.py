"""Which of a run's files is best: the loss of the training's own validation, copies, likeness, and a proposal."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from library import data, families
from library.cli.main import main
from library.comparing import compute, encoder, losses, plan, proposal
from library.comparing import shell as compare_shell
from library.comparing.proposal import FileScore
from library.config.problems import ConfigError, Message
from library.config.run_config import ControlUse
from library.config.schema import changed
from library.runs import layout, reader, registry
from library.sampling import plan as sampling_plan
from tests.sampling.test_sampling import adapter_names, lora_file
from tests.training import config_of, pictures, shallow, short_captions, train  # noqa: F401

PROMPT = "a cat --w 64 --h 64 --s 1 --d 3"
LORAS = [families.lora_script(name) for name in families.FAMILIES]


def quiet(message, done, total):
    """A report that nobody reads."""


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("KOHYA_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return pictures(tmp_path_factory.mktemp("eight"), ((64, 64),) * 8, repeats=1)


@pytest.fixture(scope="module")
def trained(shallow, images, tmp_path_factory):  # noqa: F811
    """A run of three steps with a file of each, of which the first and the last are spoiled."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("KOHYA_HOME", str(tmp_path_factory.mktemp("home")))
        config = config_of(
            shallow,
            "flux_train_network",
            train_data_dir=images,
            validation_split=0.25,
            network_dim=4,
            output_dir=tmp_path_factory.mktemp("out"),
            max_train_steps=3,
            save_every_n_steps=1,
            seed=4,
            validate_every_n_steps=1,
            mixed_precision="no",
        )
        outcome = train(config)
    first, middle = (next(outcome.file.parent.glob(f"*0000{step}.safetensors")) for step in (1, 2))
    for file, strength in ((first, -1), (outcome.file, -2)):  # the opposite of what was learned
        tensors = load_file(middle)
        save_file({name: value * strength if "lora_up" in name else value for name, value in tensors.items()}, file)
    return outcome


def compared(folder, *words):
    """What `kohya compare` stores for a run in this folder."""
    before = set(folder.glob("compare-*"))
    assert main(["compare", str(folder), "--cpu", *words]) == 0
    (place,) = set(folder.glob("compare-*")) - before
    return json.loads((place / compute.COMPARISON).read_text(encoding="utf-8"))  # its messages in English


def copying(path, title):
    """A sampler that answers with this picture in the column of this title."""

    class Copying(compute.ColumnSampler):
        def __call__(self, column, keep):
            picture = Image.open(path).convert("RGB")
            super().__call__(column, lambda row, image: keep(row, picture if column.title == title else image))

    return Copying


def test_the_middle_file_is_proposed_as_its_held_out_loss_is_the_lowest(trained, monkeypatch, capsys):
    learned = data.scan(plan.config_of_run(reader.run_at(trained.folder))).items[0].path
    monkeypatch.setattr(compute, "ColumnSampler", copying(learned, "step 3"))
    comparison = compared(trained.folder, "--prompt", PROMPT)
    validated = {event["step"]: event["loss"] for event in trained.events("validation")}
    assert (
        comparison["columns"] == ["base model", "step 1", "step 2", "step 3"]
        and comparison["held_out"]
        and comparison["rows"] == ["a cat"]
    )
    base, first, middle, last = comparison["losses"]
    assert middle == pytest.approx(validated[2], rel=1e-4) and middle < min(base, first, last)
    assert comparison["copies"] == [["", "", "", learned]]
    reason = "step 2: lowest held-out loss; later files copy 1 training image"
    assert comparison["proposal"] == {"column": 2, "reason": reason} and reason in capsys.readouterr().out
    assert comparison["likeness"] == [None] * 4 and any("--encoder dinov2" in note for note in comparison["notes"])
    assert all(Path(name).is_file() for name in (*comparison["files"][0], comparison["grid"]))
    stored = layout.load_facts(next(trained.folder.glob("compare-*")) / compute.COMPARISON)
    assert isinstance(stored["proposal"]["reason"], Message)  # the page can translate it


def tiny_encoder(folder):
    """DINOv2 with random weights."""
    from transformers import BitImageProcessor, Dinov2Config, Dinov2Model

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    Dinov2Model(Dinov2Config(**sizes)).save_pretrained(folder)
    BitImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}).save_pretrained(folder)
    return folder


def test_an_encoder_in_a_folder_measures_likeness(images, tmp_path):
    paths = sorted(map(str, images.rglob("*.png")))
    eye = encoder.ImageEncoder(encoder.encoder_folder(str(tiny_encoder(tmp_path / "eye")), tmp_path, quiet))
    features = eye.features(paths, torch.device("cpu"), quiet)
    assert features.shape == (8, 16) and torch.allclose(features.norm(dim=1), torch.ones(8))
    assert encoder.COPY <= encoder.threshold(features) <= encoder.SURE
    for name, said in (("dino", "write dinov2, clip or the folder"), (str(images), "no readable config.json")):
        with pytest.raises(ConfigError, match=said):
            encoder.ImageEncoder(encoder.encoder_folder(name, tmp_path, quiet))


def test_copies_are_found_by_their_looks(images, tmp_path):
    paths = sorted(map(str, images.rglob("*.png")))
    looks = compute.TrainingLooks(paths, quiet)
    Image.open(paths[2]).resize((80, 80)).save(tmp_path / "near.jpg")
    pictures(tmp_path / "others", ((64, 64),), seed=9)
    other = next((tmp_path / "others").rglob("*.png"))
    assert looks.nearest(str(tmp_path / "near.jpg")) == paths[2] and looks.nearest(str(other)) == ""


@pytest.mark.parametrize(
    ("scores", "held_out", "column", "said"),
    [
        ([(3, None, 0), (1, None, 0), (2, None, 2)], True, 1, "held-out loss; later files copy 2 training images"),
        ([(3, None, 0), (2, None, 0), (1, None, 1)], True, 1, "lowest held-out loss of the files that copy the fewest"),
        ([(1.0, None, 0), (0.9999, None, 0)], True, 0, "hardly differ, so an early one"),
        ([(2, None, 0), (1, None, 0)], False, 1, "trained on; such a loss favours later files"),
        ([(None, 0.2, 0), (None, 0.5, 0)], False, 1, "most like the training images"),
        ([(None, None, 0)], False, None, "Nothing could be measured"),
        ([(2, None, 0)], False, 0, "step 0 is the only file compared: a lower save_every_n_steps"),
        ([(2, None, 1), (1, None, 1)], True, 1, "it copies 1 training image"),
        ([(0.5, None, 0, True), (2, None, 0), (1, None, 0)], True, 2, "no file has a lower loss than the base model"),
        ([(3, None, 9, True), (2, None, 0), (1, None, 0)], True, 2, "step 2: lowest held-out loss"),
        ([(None, 0.9, 0, True), (None, 0.2, 1), (None, 0.3, 1)], False, 2, "training image, and no other file fewer"),
        ([(None, 0.9, 0, True), (None, 0.2, 1)], False, 1, "step 1 is the only file compared"),
        ([(1, None, 0, True), (None, None, 0)], True, None, "Nothing could be measured"),
        ([(3, None, 0, True), (2, None, 0)], True, 1, "step 1 is the only file compared: a lower save_every_n_steps"),
        ([(3, None, 0, True), (2, None, 2)], True, 1, "saves more of them; it copies 2 training images"),
        ([(2, None, 0, True), (2, None, 0)], True, 1, "saves more of them; no file has a lower loss than the base"),
    ],
)
def test_a_proposal_says_why(scores, held_out, column, said):
    measured = [FileScore(Message("step {step}", step=at), *score) for at, score in enumerate(scores)]
    proposed = proposal.propose_file(measured, held_out)
    assert proposed.column == column and said in str(proposed.reason)


def recorded(folder, run_config, *saved, **more):
    """A run whose record says that it has saved these files."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = {
        "id": folder.name,
        "script": run_config.script,
        "state": "finished",
        "started": 1.0,
        "seed": 3,
        "folder": str(folder),
        "output_dir": str(folder),
        "config": changed(run_config),
        **more,
    }
    layout.store(folder / layout.RUN, facts)
    lines = [{"kind": "saved", "file": str(path), "step": step} for step, path in enumerate(saved, 1)]
    (folder / layout.PROGRESS).write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    registry.add_pointer(folder)
    return reader.run_at(folder)


@pytest.mark.parametrize("script", LORAS)
def test_every_family_is_compared_with_prompts_of_its_captions(shallow, images, tmp_path, script):  # noqa: F811
    config = config_of(shallow, script, train_data_dir=images, mixed_precision="no", output_dir=tmp_path)
    family = families.family_for(config)
    file = lora_file(tmp_path / "a.safetensors", adapter_names(family, family.load(torch.float32, torch.float32)))
    run = recorded(tmp_path / "run-1", config, file)
    comparison = compared(run.folder)
    assert len(comparison["rows"]) <= compute.PROMPTS_FROM_CAPTIONS and all(
        row.startswith("zorb toy") for row in comparison["rows"]
    )
    assert comparison["columns"] == ["base model", "step 1"] and comparison["losses"][0] != comparison["losses"][1] > 0
    assert not comparison["held_out"] and comparison["proposal"]["column"] == 1
    assert any("held no images out" in str(note) for note in comparison["notes"])


def replace_base(config, path):
    return replace(config, model=replace(config.model, pretrained_model_name_or_path=str(path)))


def test_whole_models_are_columns_beside_their_base_while_it_is_there(shallow, images, tmp_path, monkeypatch):  # noqa: F811
    config = config_of(
        shallow,
        "flux_train",
        train_data_dir=images,
        mixed_precision="no",
        output_dir=tmp_path,
        max_train_steps=2,
        save_every_n_steps=1,
        learning_rate=0.05,
    )
    outcome = train(config)
    comparison = compared(outcome.folder, "--prompt", PROMPT)
    assert comparison["columns"] == ["base model", "step 1", "step 2"] and len({*comparison["losses"]}) == 3
    assert len({Image.open(name).tobytes() for name in comparison["files"][0]}) == 3
    base = Path(config.model.pretrained_model_name_or_path)
    monkeypatch.setattr(plan, "config_of_run", lambda run: replace_base(config, base.with_name("gone.safetensors")))
    monkeypatch.setattr(sampling_plan, "MAX_IMAGES", 2)  # the base is not counted, as it has no column
    without = compared(outcome.folder, "--prompt", PROMPT)
    assert without["columns"] == ["step 1", "step 2"] and without["losses"] == comparison["losses"][1:]
    assert any("The base model is left out (" in note for note in without["notes"])


def test_runs_without_files_and_damaged_files_are_sentences(shallow, images, tmp_path):  # noqa: F811
    config = config_of(shallow, LORAS[0], train_data_dir=images, output_dir=tmp_path)
    with pytest.raises(ConfigError, match="no run has saved a file yet"):
        plan.run_of("")
    with pytest.raises(ConfigError, match="nowhere is not a run"):
        plan.run_of("nowhere")
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        plan.run_of(str(tmp_path))
    empty = recorded(tmp_path / "runs" / "empty-1", config)
    assert plan.run_of("empty-1").id == plan.run_of(str(tmp_path)).id == "empty-1"
    with pytest.raises(ConfigError, match="has saved no file yet"):
        plan.saved_files_of_run(empty)
    gone = recorded(tmp_path / "gone-1", config, tmp_path / "none.safetensors")
    with pytest.raises(ConfigError, match="are gone: none.safetensors"):
        plan.saved_files_of_run(gone)
    (tmp_path / "bad.safetensors").write_text("x")
    save_file({"a": torch.zeros(1)}, tmp_path / "good.safetensors")
    run = recorded(tmp_path / "bad-1", config, tmp_path / "bad.safetensors", tmp_path / "good.safetensors")
    files, _ = plan.saved_files_of_run(run)
    with pytest.raises(ConfigError, match="bad.safetensors is not a file of tensors"):
        compute.readable_files(files[:1], config)
    readable, notes = compute.readable_files(files, config)
    assert [file.path.name for file in readable] == ["good.safetensors"] and "is left out" in str(notes[0])
    many = recorded(tmp_path / "many-1", config, *[tmp_path / "good.safetensors"] * 3)
    assert [file.step for file in plan.saved_files_of_run(many)[0]] == [3]
    cases = (
        ({"script": "gone_train"}, "this version does not have"),
        ({"config": {"steps": {}}}, "which model"),
        ({"script": "sdxl_train_textual_inversion"}, "no LoRA and no model"),
    )
    for facts, said in cases:
        with pytest.raises(ConfigError, match=said):
            plan.config_of_run(reader.RecordedRun(tmp_path, {**gone.facts, **facts}))
    with pytest.raises(ConfigError, match="there are no prompts"):
        compute.caption_prompts(None, ControlUse())


def test_a_resumed_run_has_the_files_of_the_run_before(shallow, tmp_path):  # noqa: F811
    names = [tmp_path / f"{number}.safetensors" for number in range(4)]
    for path in names:
        path.write_text("x")
    config = config_of(shallow, LORAS[0], output_dir=tmp_path)
    recorded(tmp_path / "first-1", config, *names[:3])
    later = recorded(tmp_path / "later-1", config, started=2.0, resumes="first-1")
    steps = [{"kind": "step", "step": 3, "loss": 1.0}, {"kind": "saved", "file": str(names[3]), "step": 4}]
    (later.folder / layout.PROGRESS).write_text("".join(json.dumps(step) + "\n" for step in steps), "utf-8")
    files, _ = plan.saved_files_of_run(later)
    assert [(file.step, file.path.name[0]) for file in files] == [
        (1, "0"),
        (2, "1"),
        (4, "3"),
    ]  # 2.safetensors is of step 3


@pytest.mark.parametrize(
    ("script", "values"),
    [
        ("flux_train_network", {"network_module": "lycoris.kohya", "network_args": ["algo=lokr", "factor=4"]}),
        ("sdxl_train_network", {"cache_text_encoder_outputs": False, "network_train_unet_only": False}),
        ("sdxl_train", {}),
    ],
)
def test_the_loss_is_that_of_the_runs_own_validation(shallow, images, tmp_path, script, values):  # noqa: F811
    """Also of LyCORIS, of text encoders that learned, and of whole models, whose data set file holds images out."""
    options = {
        "train_data_dir": images,
        "validation_split": 0.25,
        "validate_every_n_steps": 1,
        "network_dim": 4,
        **values,
    }
    if script == "sdxl_train":
        place = next(images.glob("1_*")).as_posix()
        (tmp_path / "data.toml").write_text(
            "[[datasets]]\nresolution = 64\nbatch_size = 2\nvalidation_split = 0.25\n"
            f"[[datasets.subsets]]\nimage_dir = '{place}'\ncaption_extension = '.txt'\n"
        )
        options = {"train_data_dir": None, "dataset_config": tmp_path / "data.toml", "max_train_steps": 3}
    options = {"max_train_steps": 1, "mixed_precision": "no", "seed": 4} | options
    config = config_of(shallow, script, output_dir=tmp_path, **options)
    outcome = train(config)
    comparison = compared(outcome.folder, "--prompt", PROMPT)
    measured = outcome.events("validation")[-1]["loss"]
    assert comparison["held_out"] and comparison["losses"][1:] == [pytest.approx(measured, rel=1e-4)]


def test_an_encoder_adds_likeness_and_marks_copies(trained, images, tmp_path, monkeypatch):
    learned = data.scan(plan.config_of_run(reader.run_at(trained.folder))).items[0].path
    monkeypatch.setattr(compute, "ColumnSampler", copying(learned, "step 3"))
    monkeypatch.setattr(compute.TrainingLooks, "nearest", lambda self, path: "")  # the encoder alone
    comparison = compared(
        trained.folder, "--prompt", PROMPT, "--files", "1", "--encoder", str(tiny_encoder(tmp_path / "eye"))
    )
    assert (
        comparison["columns"] == ["base model", "step 3"]
        and comparison["copies"][0][1] == learned
        and -1 <= comparison["likeness"][0] <= 1
    )
    assert not any("--encoder" in note for note in comparison["notes"])
    assert any("1 of 3 files" in note for note in comparison["notes"])


def test_of_many_files_some_are_compared_with_the_last(shallow, tmp_path):  # noqa: F811
    paths = [tmp_path / f"{number}.safetensors" for number in range(10)]
    for path in paths:
        path.write_text("x")
    run = recorded(tmp_path / "run-1", config_of(shallow, LORAS[0], output_dir=tmp_path), *paths)
    files, notes = plan.saved_files_of_run(run, 4)
    assert [file.step for file in files] == [1, 4, 7, 10] and "4 of 10 files" in str(notes[0])
    assert [file.step for file in plan.saved_files_of_run(run, 1)[0]] == [10]


def test_a_data_set_that_is_gone_leaves_out_the_loss_alone(shallow, tmp_path):  # noqa: F811
    config = config_of(shallow, LORAS[0], train_data_dir=tmp_path / "gone", output_dir=tmp_path)
    images, notes = compute.survey_run_images(config, quiet)
    assert images is None and "cannot be read any more" in str(notes[0])


def test_few_images_are_measured_as_they_are_where_none_are_held_out(shallow, images):  # noqa: F811
    config = config_of(shallow, LORAS[0], train_data_dir=images, flip_aug=True)
    shown, held_out = losses.choose_measured_images(data.scan(config))
    assert (
        not held_out
        and len(shown) == losses.MEASURED_IMAGES
        and not any(image.subset.flip_aug for image in shown.items)
    )


def test_everything_wrong_is_said_at_once_and_before_a_gpu_is_waited_for(shallow, tmp_path, capsys, monkeypatch):  # noqa: F811
    monkeypatch.setattr(compare_shell, "reserve_devices", lambda *_: pytest.fail("a GPU was waited for"))
    config = config_of(shallow, "flux_train_network", train_data_dir=tmp_path / "gone", output_dir=tmp_path)
    sections = changed(config)
    sections["model"] |= {"pretrained_model_name_or_path": str(tmp_path / "gone.safetensors")}
    run = recorded(tmp_path / "wrong-1", config, tmp_path / "bad.safetensors", config=sections)
    (tmp_path / "bad.safetensors").write_text("x")
    words = ["--files", "0", "--encoder", str(tmp_path / "no_encoder"), "--prompts", str(tmp_path / "gone.txt")]
    assert main(["compare", str(run.folder), "--cpu", *words]) == 1
    said = capsys.readouterr().err
    for part in (
        "--files 0",
        "no_encoder is not there",
        "gone.txt",
        "bad.safetensors is not a file",
        "gone.safetensors",
    ):
        assert part in said
    assert main(["compare", str(run.folder), "--cpu"]) == 1
    assert "there are no prompts, and no captions to take them from" in capsys.readouterr().err


@pytest.mark.parametrize("seed", ["-1", "5"])
def test_seeds_of_a_comparison_are_stored_with_it(trained, seed):
    comparison = compared(trained.folder, "--prompt", "a cat --w 64 --h 64 --s 1", "--seed", seed, "--files", "1")
    (used,) = comparison["seeds"]
    with Image.open(comparison["files"][0][1]) as image:
        assert used >= 0 and f"Seed: {used}," in image.text["parameters"]
    again = compared(trained.folder, "--prompt", f"a cat --w 64 --h 64 --s 1 --d {used}", "--files", "1")
    assert Image.open(again["files"][0][1]).tobytes() == Image.open(comparison["files"][0][1]).tobytes()
