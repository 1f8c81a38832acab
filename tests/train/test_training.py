"""Whole trainings on tiny models: what an option promises about the numbers and the files."""

import functools
import json
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from library import families
from library.curation.changes import companions
from library.families.flux.family import FluxFamily
from library.families.sdxl.family import SdxlFamily
from library.train import stop_requests
from library.train.step.rng import StepGenerators
from library.train.step_log import StepLog
from tests.training import FEW, LORA_OF_EACH_KIND, LORAS, SCRIPTS, STEADY, config_of, pictures, train

CLASSES = {"sdxl": SdxlFamily, "flux": FluxFamily}
FULL = [script for script in SCRIPTS if script not in LORAS]


@pytest.fixture
def run(demo, squares, tmp_path):
    """Train a script on square pictures, or on others, each time into a folder of its own."""
    count = iter(range(100))

    def start(script, **values):
        folder = values.pop("output_dir", tmp_path / f"run{next(count)}")
        return train(config_of(demo, script, **{"train_data_dir": squares, "output_dir": folder} | values))

    return start


@pytest.fixture(scope="module")
def plain(demo, squares, tmp_path_factory):
    """Two steps of the demo's config with caches in memory, trained once for each script."""
    values = {"train_data_dir": squares, "max_train_steps": 2}
    values |= {"cache_latents_to_disk": False, "cache_text_encoder_outputs_to_disk": False}

    @functools.cache
    def trained(script):
        return train(config_of(demo, script, output_dir=tmp_path_factory.mktemp("plain"), **values))

    return trained


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"runs"}


def metadata(file: Path) -> dict[str, str]:
    with safe_open(file, "pt") as opened:
        return opened.metadata()


# ---- the same numbers, in another way


@pytest.fixture
def noise_by_sample(monkeypatch):
    """Noise that depends on the step and on a sample's number in it, however the samples are put into batches."""
    now = {}

    def seed_batch(self, step, number):
        now.update(step=step, number=number)

    monkeypatch.setattr(StepGenerators, "seed_batch", seed_batch)
    for cls in CLASSES.values():
        original = cls.noised

        def noised(self, latents, generator, original=original):
            rows = []
            for i in range(len(latents)):
                number = (now["number"] - 1) * len(latents) + i
                rows.append(original(self, latents[i : i + 1], generator.manual_seed(now["step"] * 1000 + number)))
            fields = {name: [getattr(row, name) for row in rows] for name in rows[0].__dataclass_fields__}
            return type(rows[0])(**{n: None if v[0] is None else torch.cat(v) for n, v in fields.items()})

        monkeypatch.setattr(cls, "noised", noised)


@pytest.mark.parametrize("script", ["sdxl_train_network", "flux_train"])
def test_accumulating_two_batches_of_one_equals_a_batch_of_two(run, tmp_path, noise_by_sample, script):
    one_picture = pictures(tmp_path / "one", [(64, 64)], repeats=8)
    values = {"train_data_dir": one_picture, "max_train_steps": 4}
    whole = run(script, train_batch_size=2, **values)
    parts = run(script, train_batch_size=1, gradient_accumulation_steps=2, **values)
    assert parts.losses == pytest.approx(whole.losses, rel=1e-4)
    assert len(set(whole.losses)) == 4
    assert parts.numbers("grad_norm") == pytest.approx(whole.numbers("grad_norm"), rel=1e-3)


@pytest.mark.parametrize("script", ["sdxl_train_network", "flux_train"])
def test_the_last_step_of_an_epoch_has_the_mean_gradient_of_the_batches_that_are_left(
    run, tmp_path, noise_by_sample, script
):
    """Its one batch counts like any step of one batch, and is not divided by the number that a whole step has."""
    one_picture = pictures(tmp_path / "one", [(64, 64)], repeats=3)
    values = {"train_data_dir": one_picture, "train_batch_size": 1, "max_train_steps": 2, "learning_rate": 1e-30}
    alone = run(script, **values)
    parts = run(script, gradient_accumulation_steps=2, **values)
    assert parts.losses[1] == pytest.approx(alone.losses[1], rel=1e-4)
    assert parts.numbers("grad_norm")[2] == pytest.approx(alone.numbers("grad_norm")[2], rel=1e-3)


def encoder_prefix(script):
    """How the adapters of the first text encoder are named in files of a family; None where it never learns."""
    prefixes = families.load_object(families.facts_of(families.config_class(script).family).lora_names).prefixes[
        "kohya"
    ]
    return next((prefix for part, prefix in prefixes.items() if part != "denoiser"), None)


@pytest.mark.parametrize("script", [script for script in LORAS if encoder_prefix(script)])
def test_checkpointing_holds_with_encoders_that_learn(run, script):
    values = {
        "network_train_unet_only": False,
        "cache_text_encoder_outputs": False,
        "cache_latents": False,
        "learning_rate": 1e-2,
        "max_train_steps": 2,
    }
    plain = run(script, **values)
    assert run(script, gradient_checkpointing=True, **values).losses == plain.losses
    assert plain.losses != run(script, **values | {"text_encoder_lr": (0.0,)}).losses
    learned = {name for name, tensor in plain.tensors().items() if "lora_up" in name and tensor.any()}
    assert any(name.startswith(encoder_prefix(script)) for name in learned)


@pytest.mark.parametrize("script", LORAS)
def test_bf16_is_close_to_float32(run, plain, script):
    exact, mixed = plain(script), run(script, mixed_precision="bf16", max_train_steps=2)
    assert mixed.losses == pytest.approx(exact.losses, rel=0.03)
    assert mixed.losses != exact.losses
    assert {t.dtype for t in mixed.tensors().values() if t.is_floating_point()} == {torch.float32}


@pytest.mark.parametrize("script", LORAS)
def test_what_is_cached_is_what_would_be_computed(run, plain, script):
    """FLUX.1's tiny autoencoder has nearly no variance, so its latents are the same each time; U-Nets draw theirs."""
    uncached = {"cache_text_encoder_outputs": False, "cache_latents": "resnet" in FEW[script]}
    steady = STEADY.get(script, {})
    expected = run(script, **steady, max_train_steps=2) if steady else plain(script)
    found = run(script, **uncached, **steady, max_train_steps=2)
    assert found.losses == pytest.approx(expected.losses, rel=1e-3)


def caches(folder):
    """Those on disk, with when each was written."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.suffix in (".npz", ".safetensors")}


def test_caches_on_disk_are_read_again(demo, run, plain, tmp_path):
    data = pictures(tmp_path / "data")
    values = {"train_data_dir": data, "cache_latents_to_disk": True, "cache_text_encoder_outputs_to_disk": True}
    values |= {"max_train_steps": 2}
    expected = set()
    for script in LORAS:
        first = run(script, **values)
        files = caches(data)
        assert run(script, **values).losses == first.losses == plain(script).losses
        assert caches(data) == files
        family = families.family_for(config_of(demo, script))
        expected |= {f"0064x0064{family.latent_cache.suffix}", family.text_cache.suffix.removeprefix("_")}
        assert {path.name.split("_", 1)[1] for path in files} == expected
    assert expected >= {"0064x0064_sdxl.npz", "te_outputs.npz", "0064x0064_flux.npz", "flux_te.npz"}
    images = {path.stem: path for path in data.rglob("*.png")}
    with_them = {file for image in images.values() for file in companions(image, sorted(os.listdir(image.parent)))}
    assert with_them >= caches(data).keys()  # the page's trash takes them along


# ---- how long


def test_epochs_decide_over_steps(run):
    by_epochs = run("flux_train_network", max_train_epochs=2, max_train_steps=999)
    assert by_epochs.facts["total_steps"] == len(by_epochs.losses) == 8
    assert [event["epoch"] for event in by_epochs.events("step")] == [1] * 4 + [2] * 4
    by_steps = run("flux_train_network", max_train_epochs=None, max_train_steps=8)
    assert by_steps.losses == by_epochs.losses
    accumulated = run("flux_train_network", max_train_epochs=2, gradient_accumulation_steps=3, seed=None)
    assert len(accumulated.losses) == 4  # each epoch ends with a step, if with fewer batches
    about = metadata(accumulated.file)
    assert about["ss_max_train_steps"] == "4" and int(about["ss_seed"]) == accumulated.facts["seed"]


# ---- what is written, and when


def test_files_states_and_what_is_kept_of_them(run, tmp_path):
    folder = tmp_path / "out"
    run(
        "flux_train_network",
        output_dir=folder,
        output_name="m",
        max_train_epochs=3,
        save_every_n_epochs=1,
        save_every_n_steps=2,
        save_last_n_steps=4,
        save_last_n_epochs=1,
        save_state=True,
        save_last_n_steps_state=2,
    )
    files = {"m-000002", "m-step00000008", "m-step00000010", "m-step00000012"}
    states = {"m-000002", "m-step00000010", "m-step00000012"}
    expected = {f"{file}.safetensors" for file in files | {"m"}} | {f"{state}-state" for state in states | {"m"}}
    assert names(folder) == expected  # and nothing temporary
    state = {path.name for path in (folder / "m-state").iterdir()}
    assert state >= {"model.safetensors", "optimizer.bin", "scheduler.bin", "random_states_0.bin", "train_state.json"}
    written = json.loads((folder / "m-step00000010-state" / "train_state.json").read_text())
    assert (written["current_epoch"], written["current_step"]) == (3, 10)
    assert metadata(folder / "m-000002.safetensors")["ss_epoch"] == "2"
    assert metadata(folder / "m-step00000010.safetensors")["ss_steps"] == "10"


def test_a_file_on_the_way_holds_the_weights_of_that_step(run, tmp_path):
    run("flux_train_network", output_dir=tmp_path / "a", output_name="m", save_every_n_steps=2)
    short = run("flux_train_network", max_train_steps=2)
    on_the_way = load_file(tmp_path / "a" / "m-step00000002.safetensors")
    assert all(torch.equal(on_the_way[name], tensor) for name, tensor in short.tensors().items())


@pytest.mark.parametrize("script", LORAS)
def test_a_lora_says_how_it_was_made(run, demo, script):
    outcome = run(script, max_train_epochs=1, output_name="zorb", network_alpha=4, training_comment="for a test")
    said, facts = metadata(outcome.file), families.facts_of(families.config_class(script).family)
    family = facts.name
    expected = {
        "ss_output_name": "zorb",
        "ss_network_module": next(iter(facts.adapter_modules)),
        "ss_network_dim": "8",
        "ss_network_alpha": "4.0",
        "ss_learning_rate": "0.005",
        "ss_seed": "42",
        "ss_steps": "4",
        "ss_epoch": "1",
        "ss_num_train_images": "8",
        "ss_num_batches_per_epoch": "4",
        "ss_base_model_version": facts.base_model_version,
        "ss_training_comment": "for a test",
        "ss_sd_model_name": demo.models[family][family].name,
        "modelspec.architecture": f"{facts.architecture}/lora",
        "modelspec.title": "zorb",
        "modelspec.resolution": "64x64",
    }
    assert {key: said.get(key) for key in expected} == expected
    assert json.loads(said["ss_tag_frequency"])["2_zorb toy"]["zorb toy"] == 4
    assert json.loads(said["ss_bucket_info"])["buckets"]["0"] == {"resolution": [64, 64], "count": 8}
    assert re.fullmatch("[0-9a-f]{64}", said["sshs_model_hash"])
    assert not any(str(demo.folder) in value for value in said.values())


@pytest.mark.parametrize("script", FULL)
def test_a_model_is_saved_as_the_file_it_came_from(plain, demo, script):
    family = families.config_class(script).family
    outcome = plain(script)
    before, after = load_file(demo.models[family][family]), outcome.tensors()
    assert {n: t.shape for n, t in after.items()} == {n: t.shape for n, t in before.items()}
    learnt = {name for name, tensor in after.items() if not torch.equal(tensor, before[name].float())}
    is_whole = any(name.startswith("first_stage_model.") for name in before)
    denoiser = [name for name in before if not is_whole or name.startswith("model.diffusion_model.")]
    is_frozen = getattr(families.family_for(config_of(demo, script)), "is_frozen", lambda _path: False)
    denoiser = [name for name in denoiser if not is_frozen(name)]
    assert learnt <= set(denoiser) and len(learnt) > 0.9 * len(denoiser)
    assert metadata(outcome.file)["modelspec.architecture"] == families.facts_of(family).architecture


def test_sdxl_text_encoders_are_trained_on_request(run, demo):
    outcome = run("sdxl_train", train_text_encoder=True, cache_text_encoder_outputs=False, learning_rate_te2=1e-3)
    before, after = load_file(demo.models["sdxl"]["sdxl"]), outcome.tensors()
    for encoder in ("conditioner.embedders.0.", "conditioner.embedders.1."):
        assert any(not torch.equal(after[n], t.float()) for n, t in before.items() if n.startswith(encoder))
    assert {"unet", "text_encoder1", "text_encoder2"} == set(outcome.events("step")[0]["lr"])


# ---- curves


def scalars(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (file,) = folder.rglob("events.out.tfevents.*")
    board = EventAccumulator(str(file)).Reload()
    return file, {tag: {e.step: e.value for e in board.Scalars(tag)} for tag in board.Tags()["scalars"]}


@pytest.mark.parametrize(
    ("script", "extra", "tags"),
    [
        (
            "sdxl_train_network",
            {"scale_weight_norms": 1.0, "network_train_unet_only": False, "cache_text_encoder_outputs": False},
            {
                "loss/current",
                "loss/average",
                "loss/epoch_average",
                "lr/unet",
                "lr/textencoder",
                "lr/group1",
                "norm/grad_norm",
                "max_norm/keys_scaled",
                "max_norm/max_key_norm",
                "norm/avg_key_norm",
            },
        ),
        (
            "sdxl_train_network",
            {},
            {"loss/current", "loss/average", "loss/epoch_average", "lr/unet", "lr/group0", "norm/grad_norm"},
        ),
        (
            "flux_train_network",
            {"network_train_unet_only": False, "cache_text_encoder_outputs": False},
            {
                "loss/current",
                "loss/average",
                "loss/epoch_average",
                "lr/unet",
                "lr/textencoder 1 ",
                "lr/textencoder",
                "lr/group1",
                "norm/grad_norm",
                "norm/avg_grad_norm",
            },
        ),
        ("flux_train", {}, {"loss", "loss/epoch", "lr/unet", "norm/grad_norm"}),
    ],
)
def test_tensorboard_has_the_curves_of_sd_scripts(run, tmp_path, script, extra, tags):
    outcome = run(script, max_train_steps=6, logging_dir=tmp_path / "logs", log_prefix="x-", **extra)
    file, curves = scalars(tmp_path / "logs")
    project = "network_train" if script in LORAS else "finetuning"
    assert re.fullmatch(rf"x-\d{{14}}/{project}/events.*", file.relative_to(tmp_path / "logs").as_posix())
    assert set(curves) == tags
    each, average = ("loss/current", "loss/epoch_average") if script in LORAS else ("loss", "loss/epoch")
    assert curves[each] == pytest.approx(outcome.numbers())
    assert all(curves[tag] == curves["lr/unet"] for tag in tags & {"lr/group0", "lr/group1"})
    assert curves["lr/unet"][6] == pytest.approx(outcome.events("step")[5]["lr"]["unet"])
    averages = outcome.numbers("avr_loss")
    assert curves[average] == pytest.approx({1: averages[4], 2: averages[6]})  # four steps an epoch


def test_curves_that_cannot_be_written_end_no_training(run, tmp_path, monkeypatch):
    from torch.utils.tensorboard import SummaryWriter

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SummaryWriter, "add_scalar", full)
    sampled = run("flux_train_network", logging_dir=tmp_path / "logs", max_train_steps=2)
    assert sampled.facts["state"] == "finished" and len(sampled.losses) == 2
    said = [str(event["text"]) for event in sampled.events("warning")]
    assert sum("nothing more is logged to TensorBoard" in text for text in said) == 1


# ---- previews


@pytest.mark.parametrize("script", LORA_OF_EACH_KIND)
def test_previews_do_not_disturb_and_are_named_as_before(run, tmp_path, script, capfd, monkeypatch):
    monkeypatch.setattr("library.train.journal.MIN_SHOWN", 0.0)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("# two\nzorb toy --w 64 --h 96 --s 2 --d 7 --l 2\n\nred zorb --w 64 --h 64 --s 2 --n blurry\n")
    common = {"output_name": "m", "network_dropout": 0.2, "learning_rate": 2e-2, "max_train_steps": 2}
    plain = run(script, **common)
    folder = tmp_path / "sampled"
    sampled = run(
        script,
        output_dir=folder,
        sample_prompts=prompts,
        sample_every_n_steps=1,
        sample_at_first=True,
        sample_sampler="euler",
        **common,
    )
    assert re.search(r"Ready for the first step after .*, generating samples \d", capfd.readouterr().out)
    assert sampled.losses == plain.losses
    assert all(torch.equal(sampled.tensors()[n], t) for n, t in list(plain.tensors().items())[:20])
    names = sorted(path.name for path in (folder / "sample").iterdir())
    moment = r"\d{14}"
    whens = ("000001", "000002", "e000000")
    expected = [rf"m_{when}_{i:02d}_{moment}{seed}\.png" for when in whens for i, seed in ((0, "_7"), (1, r"_\d+"))]
    assert len(names) == 6 and all(map(re.fullmatch, expected, names))
    from PIL import Image

    sizes = {Image.open(folder / "sample" / name).size for name in names}
    assert sizes == {(64, 96), (64, 64)}
    same_seed = [Image.open(folder / "sample" / name).tobytes() for name in names if name.endswith("_7.png")]
    assert len(set(same_seed)) == 3  # before, amidst and after: it learns
    assert [event["step"] for event in sampled.events("sample")] == [0, 0, 1, 1, 2, 2]


def test_previews_by_epoch_are_named_by_epoch(run, tmp_path):
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps([{"prompt": "zorb", "width": 64, "height": 64, "sample_steps": 1, "seed": 5}]))
    folder = tmp_path / "out"
    outcome = run(
        "flux_train_network",
        output_dir=folder,
        output_name="m",
        sample_prompts=prompts,
        max_train_steps=8,
        sample_every_n_epochs=1,
        sample_every_n_steps=1,
    )
    names = sorted(path.name for path in (folder / "sample").iterdir())
    assert [re.sub(r"\d{14}", "T", name) for name in names] == ["m_e000001_00_T_5.png", "m_e000002_00_T_5.png"]
    assert [event["step"] for event in outcome.events("sample")] == [4, 8]  # names of one second are the same


# ---- stopping


def test_a_stopped_run_saves_and_can_be_gone_on_with(run, tmp_path, monkeypatch):
    """That each family continues exactly: contract/test_family.py."""
    script = "flux_train_network"
    straight = run(script, max_train_steps=6)
    push, folder = StepLog.push, tmp_path / "stopped"

    def stop_at_3(self, *args):
        push(self, *args)
        if self._clock.step == 3:
            (self._journal.record.folder / "stop").write_text("after_step")

    monkeypatch.setattr(stop_requests, "MAX_READ_SHARE", 1e9)  # look at the disk after every step, however slow it is
    monkeypatch.setattr(StepLog, "push", stop_at_3)
    stopped = run(script, output_dir=folder, output_name="m", max_train_steps=6)
    monkeypatch.setattr(StepLog, "push", push)
    assert stopped.facts["state"] == "stopped"
    assert stopped.losses == straight.losses[:3]
    assert {"m.safetensors", "m-state"} <= names(folder)
    assert metadata(stopped.file)["ss_steps"] == "3"
    went_on = run(script, output_dir=folder, output_name="m", max_train_steps=6, resume=folder / "m-state")
    assert went_on.losses == straight.losses[3:]
    assert went_on.facts["state"] == straight.facts["state"] == "finished"
    assert all(torch.equal(t, straight.tensors()[n]) for n, t in list(went_on.tensors().items())[:20])
