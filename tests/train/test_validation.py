"""Images that are held back: measured the same way every time, and without a trace in the training."""

import json

import pytest
import torch

from library import data
from library.config.building import replace_options
from library.config.problems import ConfigError
from library.data.loading import Batches
from library.train.evaluation import validation as module
from tests.training import FULL_OF_EACH_KIND, LORA_OF_EACH_KIND, cached, config_of, pictures, train

TAGS = {"loss/validation/epoch_average", "loss/validation/epoch_divergence"}


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    """Eight pictures; a quarter of them is two."""
    return cached(pictures(tmp_path_factory.mktemp("eight"), ((64, 64),) * 8, repeats=1))


@pytest.fixture
def run(demo, eight, tmp_path):
    """Train on six of the eight, three steps an epoch."""
    count = iter(range(100))

    def start(script="flux_train_network", **values):
        values = {"validation_split": 0.25, "max_train_steps": 7, "output_dir": tmp_path / f"run{next(count)}"} | values
        return train(config_of(demo, script, train_data_dir=eight, **values))

    return start


def without(demo, eight, tmp_path, script, **values):
    """The same training on the same six images, with the two others gone."""
    config = config_of(demo, script, train_data_dir=eight, validation_split=0.25, output_dir=tmp_path, **values)
    paths = {image.path for image in data.scan(config).items}
    gone = [path for path in eight.rglob("*.png") if str(path) not in paths]
    assert len(gone) == 2
    return gone


@pytest.mark.parametrize("script", LORA_OF_EACH_KIND)
def test_training_does_not_notice(run, monkeypatch, script):
    """Dropout, captions and noise draw the same numbers, whether or not something is measured in between."""
    options = {"network_dropout": 0.3, "shuffle_caption": True, "cache_text_encoder_outputs": False}
    options["max_train_steps"] = 3
    measured = run(script, validate_every_n_steps=2, **options)
    monkeypatch.setattr(module.ValidationRunner, "when_due", lambda self: None)
    plain = run(script, **options)
    assert len(measured.events("validation")) == 2 and not plain.events("validation")
    assert measured.losses == plain.losses
    assert all(torch.equal(tensor, plain.tensors()[name]) for name, tensor in measured.tensors().items())


def test_no_graph_is_made_for_it(run):
    outcome = run(compile=True, compile_backend="eager", max_train_steps=4, validate_every_n_steps=2)
    assert len(outcome.events("validation")) == 3
    assert {event["step"] for event in outcome.events("compile")} <= {0, 1}


def test_the_same_model_measures_the_same_loss(run):
    """Nothing learns, so nothing may change: neither between epochs, nor with another seed of the training."""
    still = {"learning_rate": 1e-30, "validation_seed": 5, "cache_latents": False, "flip_aug": True}
    first = run(**still).events("validation")
    assert [event["epoch"] for event in first] == [1, 2] and [event["step"] for event in first] == [3, 6]
    assert first[0]["by_timestep"] == first[1]["by_timestep"]
    assert list(first[0]["by_timestep"]) == ["0.2", "0.4", "0.6", "0.8"]
    assert len(set(first[0]["by_timestep"].values())) == 4
    assert first[0]["loss"] == pytest.approx(sum(first[0]["by_timestep"].values()) / 4)
    once = still | {"max_train_steps": 3}
    other = run(**once, seed=7).events("validation")
    assert other[0]["by_timestep"] == first[0]["by_timestep"]
    seed_of_the_run = run(**once | {"validation_seed": None}, seed=5).events("validation")
    assert seed_of_the_run[0]["by_timestep"] == first[0]["by_timestep"]
    assert run(**once | {"validation_seed": 6}).events("validation")[0]["by_timestep"] != first[0]["by_timestep"]


def test_divergence_is_the_distance_from_training(run):
    outcome = run(validate_every_n_steps=2, validate_every_n_epochs=2)
    values = outcome.events("validation")
    assert [(event["when"], event["step"]) for event in values] == [("step", 2), ("step", 4), ("step", 6), ("epoch", 6)]
    average = outcome.numbers("avr_loss")
    for event in values:
        assert event["divergence"] == pytest.approx(event["loss"] - average[event["step"]])
    assert values[2]["loss"] == values[3]["loss"]  # measured once


def test_timesteps_of_sdxl_follow_its_limits(demo):
    from library import families

    def of(**values):
        return families.family_for(config_of(demo, "sdxl_train_network", **values)).validation_timesteps

    assert of() == [200, 400, 600, 800]
    assert of(min_timestep=500) == [600, 700, 800, 900]
    assert of(min_timestep=10, max_timestep=510) == [110, 210, 310, 410]


def test_curves_have_the_names_of_sd_scripts(run, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    outcome = run(logging_dir=tmp_path / "logs", validate_every_n_steps=3)
    board = EventAccumulator(str(next((tmp_path / "logs").glob("*/network_train"))))
    board.Reload()
    tags = set(board.Tags()["scalars"])
    assert {tag for tag in tags if "validation" in tag} == TAGS | {tag.replace("epoch", "step") for tag in TAGS}
    epochs = [(event.step, event.value) for event in board.Scalars("loss/validation/epoch_average")]
    losses = [e["loss"] for e in outcome.events("validation") if e["when"] == "epoch"]
    assert epochs == [(1, pytest.approx(losses[0])), (2, pytest.approx(losses[1]))]


def test_at_most_so_many_batches(run, monkeypatch):
    counts = []
    monkeypatch.setattr(
        module.ValidationRunner, "_loss", lambda self, batch, *_: counts.append(batch) or torch.tensor(0.25)
    )
    run(max_validation_steps=1, max_train_steps=6, train_batch_size=1)
    assert len(counts) == 4
    counts.clear()
    run(max_train_steps=6, train_batch_size=1)
    assert len(counts) == 8
    (of_a_pair,) = run(max_train_steps=3, train_batch_size=2).events("validation")
    assert of_a_pair["loss"] == 0.25  # the mean over images, whatever the batch size


def test_held_back_images_are_not_varied_and_not_learned(demo, eight, tmp_path):
    config = config_of(
        demo,
        "flux_train_network",
        train_data_dir=eight,
        output_dir=tmp_path,
        validation_split=0.25,
        flip_aug=True,
        caption_dropout_rate=1.0,
        cache_latents=False,
        cache_text_encoder_outputs=False,
    )
    images = data.scan(config)
    assert len(images.items) == 6 and len(images.validation.items) == 2
    assert not {i.path for i in images.items} & {i.path for i in images.validation.items}
    batches = Batches(images.validation, config, seed=1)
    drawn_batches = [batches.make(draw) for epoch in (1, 2, 3) for draw in batches.draws(epoch)]
    assert all(words.startswith("zorb toy") for batch in drawn_batches for words in batch.captions)
    assert all(
        torch.equal(one.pixels, drawn_batches[0].pixels) for one in drawn_batches if one.paths == drawn_batches[0].paths
    )


@pytest.mark.parametrize("script", FULL_OF_EACH_KIND)
def test_a_dataset_file_holds_back_in_full_trainings_too(demo, eight, tmp_path, script):
    (tmp_path / "data.toml").write_text(
        "[[datasets]]\nresolution = 64\nbatch_size = 2\nvalidation_split = 0.25\n"
        f"[[datasets.subsets]]\nimage_dir = '{(eight / '1_zorb toy').as_posix()}'\ncaption_extension = '.txt'\n"
    )
    events = train(
        config_of(
            demo,
            script,
            train_data_dir=None,
            dataset_config=tmp_path / "data.toml",
            output_dir=tmp_path,
            max_train_steps=3,
        )
    ).events("validation")
    assert [event["step"] for event in events] == [3] and events[0]["loss"] > 0


def test_an_image_that_cannot_be_read_leaves_out_the_validation_alone(run, monkeypatch):
    """The steps learn what they would have learned."""
    straight = run()

    def unreadable(*_):
        raise ConfigError("3.png is missing")

    monkeypatch.setattr(module.ValidationRunner, "_loss", unreadable)
    outcome = run()
    (said,) = {event["text"] for event in outcome.events("warning")}
    assert said == "this validation is left out (3.png is missing); the training continues"
    assert not outcome.events("validation") and outcome.losses == straight.losses


def test_a_state_keeps_what_was_held_out(run, demo, eight, tmp_path):
    """Also where the resuming run has another seed, which alone would hold out other images."""
    saved = run(max_train_steps=3, save_state=True, seed=1)
    state = next(saved.file.parent.glob("*-state"))
    before = data.scan(config_of(demo, "flux_train_network", train_data_dir=eight, validation_split=0.25, seed=1))
    assert tuple(json.loads((state / "train_state.json").read_text())["held_out"]) == before.held_out
    resumed = run(max_train_steps=5, resume=state, seed=3)
    assert "2 of 8 images held out for validation: 2 of 8 in 1_zorb toy" in (resumed.folder / "log.txt").read_text(
        "utf-8"
    )
    later = config_of(demo, "flux_train_network", train_data_dir=eight, validation_split=0.25, seed=3, resume=state)
    assert data.scan(later).held_out == before.held_out != data.scan(replace_options(later, resume=None)).held_out
