"""Samples in few steps: a LoRA that is in the network only meanwhile; steps, guidance and noise levels by choice."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from library import families
from library.cli import train_script
from library.config.building import Layer, build_config, read_layers
from library.config.formats import read_toml, to_toml
from library.config.problems import ConfigError
from library.config.schema import options_of
from library.config.strengths import weighted_file
from library.config.values import split_strength
from library.families import config_class
from library.families.base import SampleRequest
from library.families.sdxl.facts import SIGMAS_OF_4_STEPS, SIGMAS_OF_8_STEPS
from library.objectives import diffusion
from library.sampling import few_steps, generate, plan
from library.sampling.plan import Column
from library.sampling.prompts import Prompt, with_defaults
from tests.sampling.test_sampling import adapter_names, given, lora_file, quiet  # noqa: F401
from tests.training import shallow  # noqa: F401

SCRIPTS = [families.lora_script(name) for name in families.FAMILIES]
FLOW = [script for script in SCRIPTS if families.config_class(script).shifts_samples]
CAT = Prompt("a cat", width=64, height=64, seed=3)
KNOWN = [(name, lora) for name in families.FAMILIES for lora in families.facts_of(name).few_step_loras]


def with_options(config, **values):
    return replace(config, sample=replace(config.sample, **values))


def loaded(config):
    family = families.family_for(config)
    return family, family.load(torch.float32, torch.float32)


def lora_for(config, path):
    family, parts = loaded(config)
    return lora_file(path, adapter_names(family, parts))


def pixels(config, columns, folder):
    sheet = generate.generate(config, columns, [replace(CAT, sample_steps=2)], folder, quiet)
    return [np.asarray(Image.open(file)) for file in sheet.files[0]]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_sample_lora_counts_like_a_file_of_the_column_and_is_named_in_the_image(given, script, tmp_path):  # noqa: F811
    config = given(script)
    file = lora_for(config, tmp_path / "fast.safetensors")
    expected, base = pixels(config, [Column("with", ((file, 0.5),)), Column("base", ())], tmp_path / "columns")
    sampled = with_options(config, sample_lora=(f"{file}:0.5",))
    sheet = generate.generate(sampled, [Column("base", ())], [replace(CAT, sample_steps=2)], tmp_path / "own", quiet)
    image = Image.open(sheet.files[0][0])
    assert np.array_equal(np.asarray(image), expected) and not np.array_equal(expected, base)
    assert "<lora:fast:0.5>" in image.text["parameters"]


def test_a_sample_lora_is_off_again_after_a_column(given, tmp_path):  # noqa: F811
    config = given("flux_train_network")
    file = lora_for(config, tmp_path / "fast.safetensors")
    config = with_options(config, sample_lora=(str(file),), sample_steps=1)
    model = generate.open_sampling_model(config, (), quiet)
    generate.ColumnSampler(model, [CAT], config)(Column("base", ()), lambda *_: None)
    (changes,) = model.applied._loras._changes.values()
    assert changes and not any(change.strength or change._on_device for change in changes)


@pytest.mark.parametrize("script", SCRIPTS)
def test_steps_guidance_and_noise_levels_reach_the_denoiser(given, script):  # noqa: F811
    config = given(script)
    family, parts = loaded(config)
    sampler, passes = family.sampler(parts), []
    parts.denoiser.register_forward_pre_hook(lambda *_: passes.append(1))

    def latents(**options):
        passes.clear()
        defaults = few_steps.prompt_defaults(with_options(config, **options), family.sample_defaults)
        with torch.no_grad():
            return sampler.latents(generate.request_of(with_defaults(CAT, defaults, 16), generate.AS_SEEN))

    three = latents(sample_steps=3, sample_scale=1.0)
    assert len(passes) == 3
    own = latents(sample_sigmas=(0.9, 0.5), sample_scale=1.0)
    assert len(passes) == 2 and not torch.equal(own, three)
    if script in FLOW:
        shifted = latents(sample_steps=3, sample_scale=1.0, sample_shift=7.0)
        line = [1.0, 2 / 3, 1 / 3]
        listed = latents(sample_sigmas=tuple(7 * s / (1 + 6 * s) for s in line), sample_scale=1.0)
        assert torch.allclose(shifted, listed, atol=1e-5) and not torch.allclose(shifted, three, atol=1e-3)
    guided = latents(sample_steps=3, sample_scale=5.0)
    assert not torch.equal(guided, three)


def test_sdxl_follows_the_noise_levels_of_its_own_schedule_to_the_same_image(given):  # noqa: F811
    config = given("sdxl_train_network")
    family, parts = loaded(config)
    sampler = family.sampler(parts)
    from library.families.shared.unet_sampler import scheduler

    steps = scheduler("euler", False)
    steps.set_timesteps(4)
    request = generate.request_of(with_defaults(CAT, family.sample_defaults, 8), generate.AS_SEEN)
    request = replace(request, steps=4, scale=1.0, sampler_name="euler")
    with torch.no_grad():
        own = sampler.latents(request)
        listed = sampler.latents(replace(request, sigmas=tuple(steps.sigmas[:-1].tolist()), sampler_name="ddim"))
        renoised = sampler.latents(replace(request, sigmas=SIGMAS_OF_4_STEPS, sampler_name="lcm"))
        again = sampler.latents(replace(request, sigmas=SIGMAS_OF_4_STEPS, sampler_name="lcm"))
    assert torch.allclose(own, listed, atol=1e-3)
    assert torch.equal(renoised, again) and renoised.isfinite().all()


@pytest.mark.parametrize("steps", [1, 4, 50, 51, 1000])
def test_lcm_takes_as_many_steps_as_it_is_asked_for(steps):
    from library.families.shared.unet_sampler import scheduler, set_noise_levels

    lcm = scheduler("lcm", False)
    set_noise_levels(lcm, SampleRequest("", steps=steps, sampler_name="lcm"))
    assert len(lcm.timesteps) == steps == len(lcm.timesteps.unique())


# A level that repeats gives no number: 0 / 0 in DPM-Solver, an error in LMS.
@pytest.mark.parametrize(
    ("name", "terminal_zero", "steps", "taken"),
    [
        ("dpmsolver", False, 999, 999),
        ("dpmsolver", False, 1000, 999),
        ("dpmsolver++", False, 1000, 999),
        ("dpmsolver", True, 700, 666),
        ("lms", True, 998, 997),
    ],
)
def test_a_noise_level_that_would_repeat_is_left_out(name, terminal_zero, steps, taken):
    from library.families.shared.unet_sampler import scheduler, set_noise_levels

    sampler, latents = scheduler(name, True, terminal_zero), torch.randn(1, 4, 2, 2)
    set_noise_levels(sampler, SampleRequest("", steps=steps, sampler_name=name))
    assert len(sampler.timesteps) == taken
    for t in sampler.timesteps:
        latents = sampler.step(sampler.scale_model_input(latents, t).tanh(), t, latents, return_dict=False)[0]
    assert latents.isfinite().all()


@pytest.mark.parametrize("levels", [SIGMAS_OF_4_STEPS, SIGMAS_OF_8_STEPS])
def test_the_noise_levels_of_sdxl_are_those_of_evenly_spaced_timesteps(levels):
    alphas = diffusion.alphas(terminal_zero=False).double()
    timesteps = [1000 - number * (1000 // len(levels)) - 1 for number in range(len(levels))]
    expected = [float(((1 - alphas[t]) / alphas[t]).sqrt()) for t in timesteps]
    assert levels == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(("name", "lora"), KNOWN, ids=[lora.title for _, lora in KNOWN])
def test_a_published_lora_brings_its_settings_and_is_known_by_its_file(name, lora):
    config_class = families.config_class(families.lora_script(name))

    def defaults(**values):
        config = build_config(config_class, values, notes=[])
        return few_steps.prompt_defaults(config, {"sample_steps": 30, "scale": 7.5, "width": 512})

    found = defaults(sample_lora=lora.value)
    steps = len(lora.prompt.get("sample_sigmas", ())) or lora.prompt["sample_steps"]
    assert found["sample_steps"] == steps <= 8 and found["scale"] == 1.0 and found["width"] == 512
    assert {name: found[name] for name in lora.prompt} == dict(lora.prompt)
    other = defaults(sample_lora=lora.value, sample_steps=6, sample_scale=1.5, sample_sampler="heun")
    assert (other["sample_steps"], other["scale"], other["sample_sampler"]) == (6, 1.5, "heun")
    assert "sample_sigmas" not in other
    owner, repository, *_, file = lora.file.split("/")
    downloaded = f"C:\\models\\{repository}\\{file}", f"/hub/models--{owner}--{repository}/snapshots/1/{file}"
    assert all(lora.is_named(path) for path in (lora.file, *downloaded))
    assert not lora.is_named("/models/another.safetensors")
    assert defaults(sample_lora="/models/another.safetensors")["sample_steps"] == 30


def test_what_a_prompt_says_itself_counts():
    defaults = {"sample_steps": 4, "sample_sigmas": (1.0, 0.5), "scale": 1.0, "width": 64, "height": 64}
    assert with_defaults(Prompt("a"), defaults, 8).sample_sigmas == (1.0, 0.5)
    own = with_defaults(Prompt("a", sample_steps=20), defaults, 8)
    assert (own.sample_steps, own.sample_sigmas, own.scale) == (20, None, 1.0)


@pytest.mark.parametrize(
    ("text", "file", "strength"),
    [
        ("a/b/c.safetensors", "a/b/c.safetensors", 1.0),
        ("a/b/c.safetensors:0.125", "a/b/c.safetensors", 0.125),
        ("C:\\loras\\c.safetensors", "C:\\loras\\c.safetensors", 1.0),
        ("C:\\loras\\c.safetensors:-1", "C:\\loras\\c.safetensors", -1.0),
        ("c.safetensors:nan", "c.safetensors:nan", 1.0),
        (":0.5", ":0.5", 1.0),
    ],
)
def test_a_strength_follows_the_file_after_a_colon(text, file, strength):
    assert split_strength(text) == (file, strength)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"sample_sigmas": [0.5, 1.0]}, "sample_sigmas must fall and stay above 0"),
        ({"sample_sigmas": [1.0, 0.0]}, "sample_sigmas must fall and stay above 0"),
        ({"sample_sigmas": [2.0, 1.0]}, "sample_sigmas must be at most 1, which is pure noise for this model, got 2"),
        ({"sample_sigmas": [0.5, 2.0]}, "sample_sigmas must be at most 1, which is pure noise for this model, got 2"),
        ({"sample_sigmas": "1, nan"}, "sample_sigmas must be a number, or several, got 'nan'"),
        ({"sample_batch_size": 0}, "sample_batch_size must be auto or a number from 1 to 64, got 0"),
        ({"sample_batch_size": -2}, "sample_batch_size must be auto or a number from 1 to 64, got -2"),
        ({"sample_batch_size": 65}, "sample_batch_size must be auto or a number from 1 to 64, got 65"),
        ({"sample_steps": 1001}, "sample_steps must be at most 1,000"),
        ({"sample_shift": -1}, "sample_shift must be above 0"),
        ({"sample_lora": "a.safetensors:11"}, "sample_lora has the strength 11; strengths are numbers from -10 to 10"),
    ],
)
def test_values_that_make_no_sense_are_named(values, says):
    with pytest.raises(ConfigError) as error:
        build_config(families.config_class("flux_train_network"), values, notes=[])
    assert says in str(error.value)
    if "sample_sigmas" in values and values["sample_sigmas"][0] == 2:  # the noise of SDXL has no limit
        build_config(families.config_class("sdxl_train_network"), values, notes=[])


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_missing_file_is_named_before_anything_is_loaded(given, script, tmp_path, monkeypatch):  # noqa: F811
    config = with_options(given(script), sample_lora=(f"{tmp_path / 'gone.safetensors'}:0.5",))
    monkeypatch.setattr(generate, "open_sampling_model", lambda *_: pytest.fail("the model was opened"))
    with pytest.raises(ConfigError, match="sample_lora: .*gone.safetensors does not exist"):
        generate.generate(config, [Column("base", ())], [CAT], tmp_path, quiet)


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_tab_and_the_shell_take_them_from_a_training(script):
    values = {"sample_lora": "a.safetensors", "sample_steps": 4, "sample_sigmas": (1.0,), "sample_scale": 1.0}
    assert plan.sampling_values(families.config_class(script), values) == values


# Another spelling of a file and its strength -> words of the sentence, and what its fix writes.
SPELLINGS = {
    "a.safetensors=0.8": ("takes the strength after a colon: write a.safetensors:0.8", "a.safetensors:0.8"),
    "owner/name/a.safetensors=1": ("after a colon: write owner/name/a.safetensors:1", "owner/name/a.safetensors:1"),
    "a.ckpt=strong": ("takes the strength after a colon: write a.ckpt:0.8", "a.ckpt:0.8"),
    "a.safetensors:": ("has the strength '', which is not a number; write a.safetensors:0.8", None),
    "a.safetensors:0.5:0.6": ("has two strengths; write a.safetensors:0.5", "a.safetensors:0.5"),
    ":0.8": ("names no file, only a strength; write FILE:0.8", None),
    "=0.8": ("names no file, only a strength; write FILE:0.8", None),
    "0.8": ("names no file, only a strength; write FILE:0.8", None),
}


@pytest.mark.parametrize("option", ["sample_lora", "assistant_lora"])
@pytest.mark.parametrize("text", SPELLINGS)
def test_another_spelling_of_a_strength_is_answered_with_the_right_one(option, text):
    says, right = SPELLINGS[text]
    (problem,) = read_layers(config_class("flux_train_network"), [Layer({option: text})]).problems
    assert problem.option == option and says in str(problem)
    assert problem.fix == ({option: right} if right else {})
    if right:
        assert not read_layers(config_class("flux_train_network"), [Layer({option: right})]).problems


FILES = {
    "a.safetensors:0.8": ("a.safetensors:0.8",),
    "C:/my loras/fast one.safetensors:0.8": ("C:/my loras/fast one.safetensors:0.8",),
    '"/my loras/a.safetensors"': ("/my loras/a.safetensors",),
    "it's.safetensors": ("it's.safetensors",),
    "a.safetensors:0.8 b.ckpt:-1 someone/adapters/c.safetensors": (
        "a.safetensors:0.8",
        "b.ckpt:-1",
        "someone/adapters/c.safetensors",
    ),
    "a.safetensors\nb.safetensors:0.5": ("a.safetensors", "b.safetensors:0.5"),
    '"/my loras/a.safetensors:0.5" b.safetensors': ("/my loras/a.safetensors:0.5", "b.safetensors"),
    "": (),
}


@pytest.mark.parametrize("text", FILES)
def test_loras_for_samples_are_one_or_several_in_every_way(text, tmp_path):
    cls, expected = config_class("flux_train_network"), FILES[text]
    for value in (text, [*expected]):  # as a form and an older TOML have it, and as a list
        read = read_layers(cls, [Layer({"sample_lora": value})]).config
        assert read.sample.sample_lora == expected
        stored = tmp_path / "a.toml"
        stored.write_text(to_toml(read), encoding="utf-8")
        assert read_layers(cls, [Layer(read_toml(stored))]).config == read
    option = options_of(cls)["sample_lora"]
    assert option.read(option.text(expected)) == expected  # what a form shows
    words = [word for file in expected for word in ("--sample_lora", file)]
    assert train_script.read_flags(cls, words)[0].get("sample_lora", []) == [*expected]


def test_every_file_of_several_is_checked():
    files = ["a.safetensors:much", "b.safetensors:0", "c.safetensors", "c.safetensors:0.5", "d.safetensors=1"]
    reading = read_layers(config_class("flux_train_network"), [Layer({"sample_lora": files})])
    said = [str(problem) for problem in reading.problems]
    assert len(said) == 3 and not any(problem.fix for problem in reading.problems)
    for part in ("has the strength 'much'", "names c.safetensors twice", "write d.safetensors:1"):
        assert any(part in line for line in said)
    notes = read_layers(config_class("flux_train_network"), [Layer({"sample_lora": files[1:3]})]).notes
    assert any("strength of 0, so b.safetensors" in str(note) for note in notes)


@pytest.mark.parametrize("option", ["sample_lora", "assistant_lora"])
def test_a_strength_of_zero_is_remarked_on(option):
    for text, count in (("a.safetensors:0", 1), ("a.safetensors:0.1", 0), ("a.safetensors", 0), (None, 0)):
        notes = read_layers(config_class("flux_train_network"), [Layer({option: text})]).notes
        said = f"{option} has a strength of 0, so a.safetensors changes nothing"
        assert len([note for note in notes if str(note).startswith(said)]) == count


@pytest.mark.parametrize("written", ["a.safetensors:0.8", "my cat.ckpt:1"])
def test_the_commands_answer_the_spelling_of_options_with_their_own(written):
    with pytest.raises(ConfigError, match="follows an equals sign here: write " + written.replace(":", "=")):
        weighted_file(written)


def test_one_noise_level_is_remarked_on_without_a_lora_for_one_step():
    for lora, count in ((None, 1), ("a.safetensors", 0)):
        options = {"sample_sigmas": [1.0], "sample_lora": lora}
        notes = read_layers(config_class("flux_train_network"), [Layer(options)]).notes
        assert len([note for note in notes if "has a single noise level" in str(note)]) == count
