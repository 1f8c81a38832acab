"""Kontext and Fill train on pairs and masks: cached or not, adapters or all, compiled, swapped, in 8 bits, resumed."""

import contextlib
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image as Pillow
from safetensors.torch import load_file, safe_open

from library.adapter_files import verify
from library.comparing import compute
from library.config.problems import ConfigError
from library.data import augment, control_pixels, finding
from library.data.pixels import AS_STORED
from library.demo import main, summary
from library.runs import foreground
from library.sampling import caption_prompts, requests
from library.sampling.prompts import Prompt
from library.sampling.recorded_prompts import images_by_field, recorded_prompt
from library.tools import convert, extract, merge, resize
from tests import fork_server
from tests.training import config_of, pictures, problems_and_remarks, train

LORA, FULL = "flux_train_network", "flux_train"
DISK = {
    "cache_latents": True,
    "cache_latents_to_disk": True,
    "cache_text_encoder_outputs": True,
    "cache_text_encoder_outputs_to_disk": True,
    "network_train_unet_only": True,
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Three shapes of images, with a reference each in one of two sizes, and a mask."""
    place = tmp_path_factory.mktemp("pairs")
    sizes = ((64, 64), (64, 64), (128, 64), (128, 64), (64, 128))
    images = pictures(place, sizes, repeats=1) / "1_zorb toy"
    (place / "second").mkdir()
    (place / "masks").mkdir()
    for number, size in enumerate(sizes):
        shape = ((64, 64), (96, 64))[number % 2]
        with Pillow.open(images / f"{number}.png") as image:
            image.rotate(180).resize(shape).save(place / "second" / f"{number}.png")
        mask = np.zeros(size[::-1], np.uint8)
        mask[:, : size[0] // 2] = 255
        Pillow.fromarray(mask).save(place / "masks" / f"{number}.png")
    references = f"control_directory = '{place / 'second'}'\n"
    own = f"{references}no_resize_control = true\n"
    masks = f"conditioning_data_dir = '{place / 'masks'}'\n"
    for name, more in {"kontext": references, "own": own, "fill": masks, "bare": ""}.items():
        text = "[[datasets]]\nresolution = 96\nenable_bucket = true\nmin_bucket_reso = 64\nbatch_size = 2\n"
        text += f"caption_extension = '.txt'\n[[datasets.subsets]]\nimage_dir = '{images}'\n{more}"
        (place / f"{name}.toml").write_text(text)
    (place / "prompts.txt").write_text(
        f"a toy --w 64 --h 64 --s 2 --d 1 --ci {place / 'second' / '0.png'}\n"
        f"a toy --w 64 --h 64 --s 2 --d 1 --ci {images / '0.png'} --cim {place / 'masks' / '0.png'}\n"
    )
    return place


@pytest.fixture(scope="session")
def fill_model(tmp_path_factory):
    """A tiny Fill transformer."""
    from library.families.flux import random

    return random.write_random_model(tmp_path_factory.mktemp("fill"), sizes=random.VARIANTS["fill"])["flux"]


@pytest.fixture
def run(demo, pairs, fill_model, tmp_path):
    """Train, each time into a folder of its own."""
    count = iter(range(100))

    def start(kind, script=LORA, data=None, **values):
        options = {"dataset_config": pairs / f"{data or kind}.toml", "train_data_dir": None, "model_type": kind}
        options |= {"output_dir": tmp_path / f"run{next(count)}", "seed": 5, "network_dropout": 0.0}
        values = options | values
        if script == FULL:
            values = {name: value for name, value in values.items() if not name.startswith("network_")}
        if kind == "fill":
            values["pretrained_model_name_or_path"] = fill_model
        return train(config_of(demo, script, **values))

    return start


def use_tools(outcome, base):
    """Merge a LoRA, verify it, get it back from the merged model, resize it, and convert it to other names and back."""
    merged = merge.merge_into_checkpoint(base, [(outcome.file, 1.0)], outcome.file.with_name("merged.safetensors"))
    assert merged.modules == len({name.split(".")[0] for name in outcome.tensors()})
    assert not verify.verify_lora(outcome.file, base).problems
    assert load_file(merged.path).keys() == load_file(base).keys()
    choices = extract.ExtractOptions(rank=8, min_diff=0)
    back = extract.extract_lora(merged.path, base, outcome.file.with_name("back.safetensors"), choices=choices)
    assert any("single_blocks_0_linear1" in name for name in load_file(back.path))
    small = resize.resize_lora(
        outcome.file, outcome.file.with_name("small.safetensors"), choices=resize.ResizeOptions(rank=2)
    )
    assert {new for _, new in small.ranks.values()} <= {1, 2}
    there = convert.convert_lora(outcome.file, outcome.file.with_name("there.safetensors"), to="diffusers")
    assert any(name.startswith("transformer.single_transformer_blocks.0.") for name in load_file(there))
    again = convert.convert_lora(there, outcome.file.with_name("again.safetensors"), to="kohya")
    assert load_file(again).keys() == outcome.tensors().keys()


@pytest.mark.parametrize("kind", ["kontext", "fill"])
def test_a_lora_learns_samples_and_loads_in_diffusers(run, pairs, demo, fill_model, kind):
    outcome = run(kind, sample_prompts=pairs / "prompts.txt", sample_at_first=True, max_train_steps=3, **DISK)
    assert len(outcome.losses) == 3 and all(map(math.isfinite, outcome.losses))
    assert len(list((outcome.file.parent / "sample").glob("*.png"))) == 4  # two before the training, two after it
    model = {"pretrained_model_name_or_path": fill_model} if kind == "fill" else {}
    use_tools(outcome, fill_model if kind == "fill" else demo.models["flux"]["flux"])
    exclude = ["exclude_patterns=['.*(img_mod|txt_mod|modulation).*']"]  # as files of musubi-tuner have it
    own = run(kind, max_train_steps=1, network_args=exclude, learning_rate=1e-2, **DISK)
    more = run(kind, max_train_steps=1, network_args=exclude, learning_rate=1e-12, network_weights=own.file, **DISK)
    assert not any("_mod" in name for name in own.tensors()) and own.tensors().keys() == more.tensors().keys()
    assert all(torch.allclose(tensor, own.tensors()[name], atol=1e-6) for name, tensor in more.tensors().items())
    fits, wrong = summary.check_lora_layers(outcome.file, config_of(demo, LORA, **model))
    assert fits > 0 and not wrong
    with safe_open(outcome.file, "pt") as file:
        assert file.metadata()["ss_base_model_version"] == {"kontext": "flux_kontext", "fill": "flux_fill"}[kind]
    caches = {path.name for path in (pairs / "1_zorb toy").glob("0*")}
    if kind == "kontext":
        assert {"0_0064x0064_fk.safetensors", "0_fk_te.safetensors"} <= caches
        text = load_file(pairs / "1_zorb toy" / "0_fk_te.safetensors")
        assert {name: tuple(array.shape) for name, array in text.items()} == {
            "t5_vec_float32": (32, 64),
            "clip_l_pooler_float32": (64,),
        }
    else:
        assert {"0_0064x0064_flux.npz", "0_flux_te.npz"} <= caches


@pytest.mark.parametrize("kind", ["kontext", "fill"])
def test_samples_from_captions_show_the_model_the_images_that_it_needs(run, monkeypatch, kind):
    monkeypatch.setattr(caption_prompts, "MAX_STEPS", 1)
    outcome = run(kind, sample_from_captions=1, sample_at_first=True, max_train_steps=1, **DISK)
    made = outcome.events("sample")
    assert len(made) == 4 and not outcome.events("sample_failed")
    # Who generates them again, as to compare files, has to show the model the same images.
    for prompt in map(recorded_prompt, made):
        assert prompt.prompt and all(map(os.path.isfile, prompt.control_image_path))
        assert (prompt.control_image_mask_path is not None) == (kind == "fill")


def half_transparent(images, place):
    """A copy of images, transparent in their right half."""
    place.mkdir()
    for path in images.glob("*.png"):
        with Pillow.open(path) as image:
            alpha = np.zeros(image.size[::-1], np.uint8)
            alpha[:, : image.width // 2] = 255
            image.putalpha(Pillow.fromarray(alpha))
            image.save(place / path.name)
        shutil.copy(path.with_suffix(".txt"), place)
    return place


@pytest.mark.parametrize("source", ["file", "alpha", "drawn", "held out"])
def test_prompts_from_captions_paint_what_the_training_masks(pairs, demo, fill_model, tmp_path, source):
    """Wherever the masks come from; the same each time, in training and in comparisons of its files."""
    place, values = pairs / ("fill.toml" if source == "file" else "bare.toml"), {}
    if source == "alpha":
        images = half_transparent(pairs / "1_zorb toy", tmp_path / "cut")
        place = tmp_path / "cut.toml"
        text = (pairs / "bare.toml").read_text().replace(str(pairs / "1_zorb toy"), str(images))
        place.write_text(f"{text}alpha_mask = true\n")
    elif source != "file":
        values = {"random_masks": 3} | ({"validation_split": 0.4} if source == "held out" else {})
    config = config_of(
        demo,
        LORA,
        **{"dataset_config": place, "train_data_dir": None, "model_type": "fill", "sample_from_captions": 2, **values},
        pretrained_model_name_or_path=fill_model,
    )
    images = finding.survey_data(config, keep=False).images
    known = {image.path: image for image in (images.validation if source == "held out" else images).items}
    of_files = compute.caption_prompts(images, config.control_images)
    for prompt in (*caption_prompts.prompts_from(images, config), *of_files):
        (path,) = prompt.control_image_path
        control = known[path].controls[0]  # of a held-out image if there are any
        region = control_pixels.inpainting_region(control, augment.middle(control.fit), None)
        mask = requests.request_of(recorded_prompt({"prompt": "a", "images": images_by_field(prompt)}), AS_STORED).mask
        drawn = np.asarray(mask.resize(control.fit.bucket)) >= 128
        assert 0 < drawn.mean() < 1 and (drawn == (region.numpy() > 0)).mean() > 0.95


def test_a_damaged_record_of_a_mask_is_one_sentence(pairs):
    prompt = Prompt("a", control_image_path=(str(pairs / "1_zorb toy" / "0.png"),))
    for text in ("", "0", "0 0x64", "1 99999x99999", "x"):
        with pytest.raises(ConfigError, match="no mask") if text else contextlib.nullcontext():
            assert requests.request_of(replace(prompt, training_mask=text), AS_STORED).mask is None


@pytest.mark.parametrize("kind", ["kontext", "fill"])
def test_the_whole_model_learns(run, kind):
    outcome = run(kind, FULL, max_train_steps=2, learning_rate=1e-4)
    assert len(set(outcome.losses)) == 2 and all(map(math.isfinite, outcome.losses))
    assert outcome.tensors()["img_in.weight"].shape[1] == {"kontext": 64, "fill": 384}[kind]


def test_sizes_of_images_and_references_need_the_predicted_graphs(run):
    """Four pairs of sizes, one graph for each kind of block; losses as without compiling, and with swapped blocks."""
    eager = run("kontext", data="own", **DISK)
    compiled = run("kontext", data="own", compile=True, compile_backend="eager", **DISK)
    told = compiled.facts["compile"]
    assert told["graphs"] == told["predicted"] and told["recompiles"] == 0 and len(told["graphs"]) == 2, told
    assert compiled.losses == pytest.approx(eager.losses, rel=1e-3)
    swapped = run("kontext", data="own", blocks_to_swap=2, gradient_checkpointing=True, **DISK)
    assert swapped.losses == pytest.approx(eager.losses, rel=1e-5)


# The first one encodes the images: in float32, as convolutions in bf16 take nine seconds on a CPU.
@pytest.mark.parametrize(
    "values",
    [
        {"int8_base": True},
        {"fp8_base": True, "mixed_precision": "bf16"},
        {"network_module": "lycoris.kohya", "network_args": ["algo=lokr"]},
    ],
)
def test_eight_bits_and_lycoris(run, values):
    outcome = run("kontext", max_train_steps=2, **DISK, **values)
    assert all(map(math.isfinite, outcome.losses)) and len(outcome.losses) == 2


@pytest.mark.parametrize("options", [DISK, {"data": "bare", "random_masks": 3}])
def test_a_resumed_training_goes_on_as_it_would_have(run, options):
    straight = run("fill", max_train_steps=4, save_every_n_steps=2, save_state=True, output_name="m", **options)
    state = straight.file.parent / "m-step00000002-state"
    resumed = run("fill", max_train_steps=4, resume=state, **options)
    assert resumed.losses == straight.losses[2:]
    assert all(torch.equal(tensor, resumed.tensors()[name]) for name, tensor in straight.tensors().items())


def sentences(demo, pairs, **values):
    options = {"dataset_config": pairs / "kontext.toml", "train_data_dir": None, "output_dir": pairs / "out"}
    return " / ".join(map(str, problems_and_remarks(config_of(demo, LORA, **options | values))[0]))


def test_mistakes_are_one_sentence_before_anything_is_loaded(demo, pairs, fill_model, tmp_path):
    assert "control_directory is for models with reference images" in sentences(demo, pairs)
    (tmp_path / "p.txt").write_text(f"a toy --ci nowhere.png\na toy --ci {tmp_path / 'p.txt'}\n")
    said = sentences(demo, pairs, model_type="kontext", sample_prompts=tmp_path / "p.txt")
    for kind, folder in (("kontext", "second"), ("fill", "masks")):
        shutil.copytree(pairs / folder, tmp_path / folder)
        text = (pairs / f"{kind}.toml").read_text().replace(str(pairs / folder), str(tmp_path / folder))
        (tmp_path / f"{kind}.toml").write_text(text)
    (tmp_path / "second" / "1.png").unlink()
    Pillow.new("L", (48, 48)).save(tmp_path / "masks" / "1.png")
    said_of = sentences(demo, pairs, model_type="kontext", dataset_config=tmp_path / "kontext.toml")
    assert said_of.count(" / ") == 0 and "has no reference image of 1 image: " in said_of
    (tmp_path / "second" / "1.png").write_bytes((pairs / "second" / "1.png").read_bytes()[:80])
    said_of = sentences(demo, pairs, model_type="kontext", dataset_config=tmp_path / "kontext.toml")
    assert (
        said_of.count(" / ") == 0 and "1 image cannot be decoded" in said_of and str(Path("second", "1.png")) in said_of
    )
    fill = {"model_type": "fill", "pretrained_model_name_or_path": fill_model}
    said_of = sentences(demo, pairs, **fill, dataset_config=tmp_path / "fill.toml")
    assert said_of.count(" / ") == 0 and "1.png is 48x48, but its image is 64x64" in said_of
    (tmp_path / "masks" / "1.png").write_bytes((pairs / "masks" / "1.png").read_bytes()[:60])
    said_of = sentences(demo, pairs, **fill, dataset_config=tmp_path / "fill.toml")
    assert (
        said_of.count(" / ") == 0 and "1 image cannot be decoded" in said_of and str(Path("masks", "1.png")) in said_of
    )
    (tmp_path / "masks" / "1.png").write_text("no image")
    said_of = sentences(demo, pairs, **fill, dataset_config=tmp_path / "fill.toml")
    assert said_of.count(" / ") == 0 and "1.png cannot be read as an image" in said_of
    bare = sentences(
        demo, pairs, model_type="fill", dataset_config=pairs / "bare.toml", pretrained_model_name_or_path=fill_model
    )
    assert "there is no mask of what is to be painted for 5 images: " in bare and "random_masks" in bare
    assert said.count("sample_prompts") == 2 and "names an image that does not exist: nowhere.png" in said
    assert f"names an image that cannot be read: {tmp_path / 'p.txt'} (" in said
    (tmp_path / "torn.png").write_bytes((pairs / "second" / "0.png").read_bytes()[:60])
    (tmp_path / "p.txt").write_text(f"a toy --ci {tmp_path / 'torn.png'}\n")
    said = sentences(demo, pairs, model_type="kontext", sample_prompts=tmp_path / "p.txt")
    assert "p.txt names an image that cannot be read" in said and "truncated" in said


@pytest.mark.parametrize("name", ["kontext", "fill"])
def test_the_demo_makes_models_and_pairs_for_them(name, tmp_path, capsys, monkeypatch):
    def forked(arguments, variables):
        process = fork_server.start(arguments[1:], **variables)
        print(process.communicate()[0])
        return process.returncode

    monkeypatch.setattr(foreground, "run_in_foreground", forked)
    assert main(["--family", name, "--out", str(tmp_path / "demo"), "--steps", "2", "--no-compile"]) == 0
    assert f"LoRA for FLUX.1 {name.title()}, 2 steps" in capsys.readouterr().out
    text = (tmp_path / "demo" / f"{name}_flux_train_network.toml").read_text(encoding="utf-8")
    assert f'model_type = "{name}"' in text
