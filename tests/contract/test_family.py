"""What every family owes the trainer, held through trainings of its tiny model. A new family is picked up here."""

import pytest
import torch

from library import families, methods
from library.sampling import caption_prompts
from tests import links
from tests.training import LORAS, RELATED, RUNS, SCRIPTS, config_of, references, train

FAMILIES = sorted(families.FAMILIES)
SIZE = torch.tensor([[64.0, 128.0, 0.0, 0.0, 64.0, 128.0]])


def trained(demo, data, script, folder, **values):
    return train(config_of(demo, script, train_data_dir=data, output_dir=folder, **values))


def rate(script):
    """A learning rate with which a few steps show."""
    return {"learning_rate": 1e-3 if families.config_class(script).kind == "finetune" else 2e-2}


@pytest.fixture(scope="module")
def learnt(demo, squares, tmp_path_factory):
    """A function: script -> a training with seed 7, which learns much, and all it can leave; once for each script."""
    results = {}

    def find(script):
        if script not in results:
            folder, more = tmp_path_factory.mktemp("learnt"), {"save_state_on_train_end": True, **rate(script)}
            results[script] = trained(demo, squares, script, folder, seed=7, max_train_steps=7, **more)
        return results[script]

    return find


def loaded(config):
    """The family, and its networks without what learns."""
    family = families.family_for(config)
    return family, family.load(torch.float32)


def assert_equal(first, other):
    """Two files hold the same tensors, bit for bit."""
    assert first.keys() == other.keys()
    assert [name for name, tensor in first.items() if not torch.equal(tensor, other[name])] == []


def answer(family, parts):
    """What the denoiser says about one noised batch and one caption, always the same."""
    generator = torch.Generator().manual_seed(3)
    channels = family.latents(parts, torch.zeros(1, 3, 64, 128)).shape[1]
    noised = family.noised(torch.randn(1, channels, 8, 16, generator=generator), generator)
    with torch.no_grad():
        return family.predict(parts.denoiser, noised, family.text(parts, ["zorb toy, red"]), SIZE)


@pytest.mark.parametrize("name", FAMILIES)
def test_images_and_captions_become_what_the_denoiser_reads(demo, name):
    family, parts = loaded(config_of(demo, families.lora_script(name)))
    assert family.name == name
    latents = family.latents(parts, torch.rand(2, 3, 64, 128) * 2 - 1, torch.Generator().manual_seed(0))
    assert latents.dtype == torch.float32
    assert latents.shape[0] == 2 and latents.shape[2:] == (8, 16)
    text = family.text(parts, ["zorb toy", "plix house, blue sea"])
    assert set(text) == set(family.text_cache.keys)
    assert all(len(tensor) == 2 for tensor in text.values())
    for encoder in parts.encoders:  # one at a time they say the same, so that some can be cached and others learn
        alone = family.text(parts, ["zorb toy", "plix house, blue sea"], (encoder,))
        assert all(torch.equal(tensor, text[key]) for key, tensor in alone.items())
    noised = family.noised(latents, torch.Generator().manual_seed(0))
    assert noised.latents.shape == noised.target.shape == latents.shape
    assert noised.timesteps.shape == noised.weight.shape == (2,)
    again = family.noised(latents, torch.Generator().manual_seed(0))
    assert torch.equal(noised.latents, again.latents) and torch.equal(noised.timesteps, again.timesteps)
    predicted = family.predict(parts.denoiser, noised, text, SIZE.repeat(2, 1))
    assert predicted.shape == latents.shape and predicted.dtype == torch.float32
    assert predicted.isfinite().all() and predicted.std() > 0


# A word of two vectors hardly moves the loss of the tiny model.
@pytest.mark.parametrize("script", [*SCRIPTS, "train_db"])
def test_the_loss_falls_in_7_steps(demo, squares, tmp_path, script, learnt):
    """Measured against a run that hardly learns: with one seed both meet the very same noise in every step."""
    steps = {"max_train_steps": 7, "learning_rate": 1e-12, "seed": 7}
    losses, idle = learnt(script).losses, trained(demo, squares, script, tmp_path, **steps).losses
    assert len(losses) == len(idle) == 7
    assert losses[0] == idle[0]

    assert sum(losses[-3:]) < 0.99 * sum(idle[-3:])


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_same_seed_gives_the_same_run_and_another_seed_another(demo, squares, tmp_path, script, learnt):
    first = learnt(script)
    same = trained(demo, squares, script, tmp_path / "same", seed=7, max_train_steps=7, **rate(script))
    other = trained(demo, squares, script, tmp_path / "other", seed=8, max_train_steps=1, **rate(script))
    assert first.losses == same.losses and len(first.losses) == 7
    assert_equal(first.tensors(), same.tensors())
    assert set(first.losses).isdisjoint(other.losses)


@pytest.mark.parametrize("script", LORAS)
def test_a_saved_lora_loads_as_it_was_trained(demo, squares, tmp_path, script, learnt):
    outcome = learnt(script)
    names = {"output_dir": tmp_path, "train_data_dir": squares}
    base = answer(*loaded(config_of(demo, script, **names)))

    config = config_of(demo, script, network_weights=outcome.file, **names)
    family, parts = loaded(config)
    methods.attach_method(parts, family, config).train(False)
    from_file = answer(family, parts)

    from safetensors.torch import load_file

    config = config_of(demo, script, **names)
    family, parts = loaded(config)
    method = methods.attach_method(parts, family, config)
    method.restore(load_file(outcome.file.with_name(f"{outcome.file.stem}-state") / "model.safetensors"))
    method.train(False)
    # To the last bits: sums depend on how numbers lie in memory, which differs between a file's and others.
    torch.testing.assert_close(answer(family, parts), from_file, rtol=1e-5, atol=1e-6)
    assert (from_file - base).abs().max() > 1e-3 * base.std()


@pytest.mark.parametrize("script", [*(script for script in SCRIPTS if script not in LORAS), "train_db"])
def test_a_saved_model_loads_as_it_was_trained(demo, squares, tmp_path, script, learnt):
    outcome = learnt(script)
    option = "pretrained_model_name_or_path"
    names = {"output_dir": tmp_path / "x", "train_data_dir": squares}
    start = config_of(demo, script, **names)
    base = answer(*loaded(start))
    tokenizers = demo.models[start.family][start.family].parent
    for folder in tokenizers.glob("tokenizer*"):  # they are found beside the model
        if not (outcome.file.parent / folder.name).exists():
            links.link_or_copy(outcome.file.parent / folder.name, folder)
    # Not mapped: products on a CPU differ in their last bit with the place of a weight in memory.
    read = {option: outcome.file, "disable_mmap_load_safetensors": True}
    from_file = answer(*loaded(config_of(demo, script, **read, **names)))

    from safetensors.torch import load_file

    family, parts = loaded(start)
    method = methods.attach_method(parts, family, start)
    method.restore(load_file(outcome.file.with_name(f"{outcome.file.stem}-state") / "model.safetensors"))
    # To the last bits: sums depend on how numbers lie in memory, which differs between a file's and others.
    torch.testing.assert_close(answer(family, parts), from_file, rtol=1e-5, atol=1e-6)
    assert (from_file - base).abs().max() > 1e-3 * base.std()


@pytest.mark.parametrize("script", RELATED)
def test_files_have_the_names_and_metadata_of_sd_scripts(demo, squares, tmp_path, script, learnt):
    """A whole model in Stable Diffusion's own names, and a word's vectors as emb_params, which continue learning."""
    from safetensors import safe_open

    outcome, start = learnt(script), config_of(demo, script)
    facts = families.facts_of(start.family)
    with safe_open(outcome.file, "pt") as file:
        about, shapes = file.metadata(), {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert all(name.startswith("modelspec.") for name in about)
    assert about["modelspec.architecture"] == facts.architecture + start.file_kind[1]
    if script == "train_db":
        with safe_open(start.model.pretrained_model_name_or_path, "pt") as file:
            assert shapes == {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        return
    assert shapes == {"emb_params": (start.embedding.num_vectors_per_token, *shapes["emb_params"][1:])}
    again = trained(demo, squares, script, tmp_path, weights=outcome.file, learning_rate=1e-12, max_train_steps=1)
    torch.testing.assert_close(again.tensors()["emb_params"], outcome.tensors()["emb_params"], rtol=1e-5, atol=1e-6)


def same_end(first, other, start):
    """Both runs have the same losses after step `start`, the same averages, rates, and the same file."""
    for name in ("loss", "avr_loss", "lr", "grad_norm"):
        expected = {step: value for step, value in first.numbers(name).items() if step > start}
        assert other.numbers(name) == expected
    assert_equal(first.tensors(), other.tensors())


@pytest.mark.parametrize("script", [*SCRIPTS, *RELATED])
def test_resuming_after_step_3_equals_6_straight_steps(demo, shapes, tmp_path, script):
    """Three sizes, so that epochs of 4 batches end within; a schedule that continues where it was; a seed by chance."""
    steps = {"max_train_steps": 6, "resolution": "96", "lr_scheduler": "cosine", "lr_warmup_steps": 2, "seed": None}
    straight = trained(
        demo, shapes, script, tmp_path / "a", output_name="m", save_every_n_steps=3, save_state=True, **steps
    )
    state = tmp_path / "a" / "m-step00000003-state"
    resumed = trained(demo, shapes, script, tmp_path / "b", resume=state, **steps)
    same_end(straight, resumed, 3)


@pytest.mark.parametrize("script", [*RUNS, *RELATED])
def test_samples_from_captions_need_no_prompt_file(demo, squares, tmp_path, monkeypatch, script):
    monkeypatch.setattr(caption_prompts, "MAX_STEPS", 1)
    values = {"max_train_steps": 1, "sample_from_captions": 1, "sample_at_first": True}
    if families.config_class(script)().control_images.guided:
        values["conditioning_data_dir"] = references(squares, tmp_path)
    outcome = trained(demo, squares, script, tmp_path / "out", **values)
    assert [event["step"] for event in outcome.events("sample")] == [0, 0, 1, 1] and not outcome.events("sample_failed")
