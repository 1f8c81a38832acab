"""Drawing with embeddings and LLLite: what they change, what they leave, and what is refused."""

from dataclasses import replace

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from library import families, methods
from library.cli.launch import script_of_toml
from library.config.building import build_config
from library.config.problems import ConfigError
from library.methods.applied_files import AppliedFiles
from library.sampling import plan, shell
from library.sampling.generate import generate
from library.sampling.prompts import Prompt
from tests.training import config_of, shallow  # noqa: F401

ZORB = Prompt("a zorb, red", width=64, height=64, seed=3, sample_steps=1)
WORD, CONTROL = "sdxl_train_textual_inversion", "sdxl_train_control_net_lllite"


def quiet(message, done, total):
    """A report that nobody reads."""


@pytest.fixture(scope="module")
def config(shallow):  # noqa: F811
    return shell.read_sample_config(
        shallow.configs["sdxl_train_network"], {"mixed_precision": "no"}, script_of_toml
    ).config


@pytest.fixture(scope="module")
def files(shallow, tmp_path_factory):  # noqa: F811
    """An embedding of two vectors whose file says its word, the same as .pt, and LLLite that changes the images."""
    folder = tmp_path_factory.mktemp("files")
    chance = torch.Generator().manual_seed(1)
    config = config_of(shallow, CONTROL, network_dim=4, cond_emb_dim=8)
    family = families.family_for(config)
    parts = family.load(torch.float32)
    widths = {name: encoder.get_input_embeddings().weight.shape[1] for name, encoder in parts.encoders.items()}
    vectors = {name: torch.randn(2, width, generator=chance) for name, width in widths.items()}
    save_file(vectors, folder / "e.safetensors", {"modelspec.trigger_phrase": "zorb"})
    torch.save(vectors, folder / "zorb.pt")
    method = methods.attach_method(parts, family, config)
    learned = {name: torch.randn(p.shape, generator=chance) * 0.2 for name, p in method.named().items()}
    save_file(learned, folder / "c.safetensors")
    Image.linear_gradient("L").resize((64, 64)).convert("RGB").save(folder / "edges.png")
    return folder


def sampled(config, folder, columns, prompt=ZORB, word=""):
    sheet = generate(config, columns, [prompt], folder, quiet, word=word)
    return [Image.open(name) for name in sheet.files[0]]


def test_a_word_is_sampled_where_its_file_is_used(config, files, tmp_path):
    columns = [
        plan.Column("", ((files / name, strength),))
        for name, strength in (("e.safetensors", 0.0), ("e.safetensors", 1.0), ("zorb.pt", 1.0))
    ]
    columns = [plan.Column("", ()), *columns]
    bare, off, by_metadata, by_name = sampled(config, tmp_path / "o", columns)
    assert bare.tobytes() == off.tobytes() != by_metadata.tobytes() == by_name.tobytes()
    assert by_metadata.text["parameters"].startswith("a zorb, red\n")  # no tag of a LoRA
    (named,) = sampled(config, tmp_path / "n", [columns[3]], replace(ZORB, prompt="a glim, red"), "glim")
    (unnamed,) = sampled(config, tmp_path / "u", [columns[0]], replace(ZORB, prompt="a glim, red"))
    assert named.tobytes() != unnamed.tobytes()


def test_what_is_read_is_what_a_training_reads(config, files, shallow):  # noqa: F811
    family = families.family_for(config)
    parts = family.load(torch.float32)
    applied = AppliedFiles(parts, family)
    for name in ("e.safetensors", "zorb.pt"):
        applied.add(files / name)
    applied.set({files / "e.safetensors": 1.0})
    assert applied.words.with_tokens("a zorbs, red") == "a zorbs, red" and applied.changes_text
    text = applied.words.with_tokens("A Zorb, red")
    learned = config_of(shallow, WORD, weights=files / "zorb.pt", num_vectors_per_token=2, token_string="zorb")
    other = families.family_for(learned)
    trained = other.load(torch.float32)
    methods.attach_method(trained, other, learned)
    with torch.no_grad():
        here, there = family.text(parts, [text]), other.text(trained, ["a zorb zorb1, red"])
    assert all(torch.equal(value, there[name]) for name, value in here.items())


def test_a_control_image_is_followed_as_strongly_as_asked(config, files, tmp_path):
    file, guided = files / "c.safetensors", replace(ZORB, controlnet_image=str(files / "edges.png"))
    columns = plan.plan_columns("strengths", [(file, 1.0)], [0.0, 0.5, 1.0])
    off, half, whole = sampled(config, tmp_path / "o", columns, guided)
    (bare,) = sampled(config, tmp_path / "b", [plan.Column("", ())])
    assert bare.tobytes() == off.tobytes() and len({strength.tobytes() for strength in (off, half, whole)}) == 3
    family = families.family_for(config)
    parts = family.load(torch.float32)
    applied = AppliedFiles(parts, family)
    twice = files / "twice.safetensors"
    save_file(load_file(file), twice)
    for path in (file, twice):
        applied.add(path)
    layer = next(m for m in parts.denoiser.modules() if type(m).__name__ == "AppliedControl")
    layer.picture.pixels = torch.randn(1, 3, 64, 64)
    places = layer.conditioning1(layer.picture.pixels)[0, 0].numel()
    x = torch.randn(1, places, layer.down[0].in_features)
    with torch.no_grad():
        applied.set({file: 1.0})
        strength = layer(x)
        applied.set({twice: 1.0})
        torch.testing.assert_close(layer(x), strength)
        applied.set({})
        assert torch.equal(layer(x), layer.layer.layer(x)) and not torch.equal(layer(x), strength)


def test_files_and_images_that_do_not_fit_are_sentences(config, files, tmp_path):
    save_file({"clip_l": torch.zeros(2, 3), "clip_g": torch.zeros(2, 3)}, tmp_path / "odd.safetensors")
    torch.save({"emb_params": torch.zeros(2, 768)}, tmp_path / "sd1.pt")
    save_file({"lllite_unet_nowhere.down.0.weight": torch.zeros(2, 3)}, tmp_path / "lll.safetensors")
    family = families.family_for(config)
    parts = family.load(torch.float32)
    for name, said in (
        ("odd.safetensors", "embedding for another model"),
        ("sd1.pt", "embedding for another model"),
        ("lll.safetensors", "another model: it has no layer"),
        ("gone.pt", "not exist"),
    ):
        with pytest.raises(ConfigError, match=said):
            AppliedFiles(parts, family).add(tmp_path / name)
    control, guided = plan.Column("", ((files / "c.safetensors", 1.0),)), replace(ZORB, controlnet_image="gone.png")
    for column, prompt, said in (
        (control, ZORB, "choose one, in a prompt file"),
        (control, guided, "does not exist"),
        (plan.Column("", ()), guided, "only LLLite follows"),
    ):
        with pytest.raises(ConfigError, match=said):
            sampled(config, tmp_path / "o", [column], prompt)


def test_other_families_say_that_they_have_no_such_files(shallow, files):  # noqa: F811
    kind = families.config_class("flux_train_network")
    family = families.family_for(build_config(kind, shell.read_toml(shallow.configs["flux_train_network"]), notes=[]))
    parts = family.load(torch.float32)
    with pytest.raises(ConfigError, match="this model cannot follow"):
        AppliedFiles(parts, family).add(files / "c.safetensors")
