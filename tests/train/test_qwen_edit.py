"""Qwen-Image-Edit trains with one to three reference images: caches, graphs, resumes, 8 bits, whole, mistakes."""

import math

import pytest
import torch
from PIL import Image as Pillow
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from library.adapter_files import verify
from library.config.problems import ConfigError
from library.demo import files, summary
from library.families import recognition
from library.families.qwen_image.facts import INDEX
from library.sampling import caption_prompts
from library.tools import extract, merge
from tests.training import config_of, pictures, problems_and_remarks, train

LORA, FULL = "qwen_image_edit_qwen_image_train_network", "qwen_image_edit_qwen_image_train"
DISK = {"cache_latents_to_disk": True, "cache_text_encoder_outputs_to_disk": True}
SIZES = ((64, 64), (64, 64), (128, 64), (64, 128))


@pytest.fixture(scope="module")
def edit(tmp_path_factory):
    """The demo of the newest one."""
    return files.prepare_demo(tmp_path_factory.mktemp("edit_demo"), ("qwen_image_edit",))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Four images with one, two or three reference images of two sizes."""
    place = tmp_path_factory.mktemp("edit_data")
    images = pictures(place, SIZES, repeats=1) / "1_zorb toy"
    (place / "shown").mkdir()
    for number in range(len(SIZES)):
        with Pillow.open(images / f"{number}.png") as image:
            for reference in range(1 + number % 3):
                size = ((64, 64), (96, 64))[reference % 2]
                name = f"{number}.png" if number % 3 == 0 else f"{number}_{reference}.png"
                image.rotate(90 * (1 + reference)).resize(size).save(place / "shown" / name)
    text = "[[datasets]]\nresolution = 96\nenable_bucket = true\nmin_bucket_reso = 64\nbatch_size = 1\n"
    text += f"caption_extension = '.txt'\n[[datasets.subsets]]\nimage_dir = '{images}'\n"
    for name, more in {"own": "no_resize_control = true\n", "same": ""}.items():
        (place / f"{name}.toml").write_text(f"{text}control_directory = '{place / 'shown'}'\n{more}")
    shown = " ".join(f"--ci {place / 'shown' / f'2_{number}.png'}" for number in range(3))
    (place / "prompts.txt").write_text(f"a toy --w 64 --h 64 --s 2 --d 1 {shown}\n")
    return place


@pytest.fixture
def run(edit, data, tmp_path):
    """Train, each time into a folder of its own."""
    count = iter(range(100))

    def start(script=LORA, kind="own", **values):
        options = {
            "dataset_config": data / f"{kind}.toml",
            "train_data_dir": None,
            "control_directory": None,
            "seed": 5,
        }
        options |= {"output_dir": tmp_path / f"run{next(count)}", "max_train_steps": 4, **DISK}
        return train(config_of(edit, script, **options | values))

    return start


def test_samples_from_captions_show_the_model_the_references(run, monkeypatch):
    monkeypatch.setattr(caption_prompts, "MAX_STEPS", 1)
    outcome = run(sample_from_captions=2, sample_at_first=True, max_train_steps=1)
    assert len(outcome.events("sample")) == 6 and not outcome.events("sample_failed")


def test_a_lora_learns_from_one_to_three_references(run, data, edit):
    """Caches, the predicted graph, an exact resume, the file and the tools."""
    many = {"save_every_n_steps": 2, "save_state": True, "output_name": "m"}
    eager = run(sample_prompts=data / "prompts.txt", sample_at_first=True, **many)
    assert len(set(eager.losses)) == 4 and all(map(math.isfinite, eager.losses))
    assert len(list((eager.file.parent / "sample").glob("*.png"))) == 2  # before the training, and after it

    images = data / "1_zorb toy"
    with safe_open(images / "2_0128x0064_qie.safetensors", "pt") as file:
        assert file.metadata()["architecture"] == "qwen_image"
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert shapes == {
        "latents_1x8x16_float32": (16, 1, 8, 16),
        "latents_control_0_1x8x8_float32": (16, 1, 8, 8),
        "latents_control_1_1x8x12_float32": (16, 1, 8, 12),
        "latents_control_2_1x8x8_float32": (16, 1, 8, 8),
    }
    texts = {number: load_file(images / f"{number}_qie_te.safetensors") for number in range(3)}
    lengths = [tuple(text["varlen_vl_embed_float32"].shape)[0] for text in texts.values()]
    assert lengths[0] < lengths[1] < lengths[2], "each picture has its tokens in the prompt"

    before = {path: path.stat().st_mtime_ns for path in images.glob("*_qie*")}
    compiled = run(compile=True, compile_backend="eager")
    assert {path: path.stat().st_mtime_ns for path in images.glob("*_qie*")} == before, "caches are used again"
    told = compiled.facts["compile"]
    assert told["graphs"] == told["predicted"] and told["num_graphs"] == 1 and told["recompiles"] == 0
    assert compiled.losses == pytest.approx(eager.losses, rel=1e-4)
    resumed = run(resume=eager.file.parent / "m-step00000002-state")
    assert resumed.losses == eager.losses[2:]

    base = edit.models["qwen_image_edit"]["qwen_image"]
    fits, wrong = summary.check_lora_layers(eager.file, config_of(edit, LORA))
    assert fits > 0 and not wrong
    with safe_open(eager.file, "pt") as file:
        assert file.metadata()["ss_base_model_version"] == "qwen_image_edit"
        assert file.metadata()["modelspec.architecture"] == "Qwen-Image-Edit-2511/lora"
    merged = merge.merge_into_checkpoint(base, [(eager.file, 1.0)], eager.file.with_name("merged.safetensors"))
    assert INDEX in load_file(merged.path) and not verify.verify_lora(eager.file, base).problems
    choices = extract.ExtractOptions(rank=4, min_diff=0)
    back = extract.extract_lora(merged.path, base, eager.file.with_name("back.safetensors"), choices=choices)
    assert back.modules and load_file(back.path).keys() < eager.tensors().keys(), "the last block's text is not used"

    with Pillow.open(data / "shown" / "0.png") as image:
        image.rotate(180).save(data / "shown" / "0.png")
    run(max_train_steps=1)
    changed = [path.name for path, when in before.items() if path.stat().st_mtime_ns != when]
    assert sorted(changed) == ["0_0064x0064_qie.safetensors", "0_qie_te.safetensors"], "the caption saw it, too"


def test_the_whole_model_learns_and_its_file_says_what_it_is(run):
    outcome = run(FULL, "same", max_train_steps=2, learning_rate=1e-4, save_precision="float")
    assert all(map(math.isfinite, outcome.losses))
    assert INDEX in outcome.tensors()
    description = recognition.recognise_file(outcome.file)
    assert description.words == "a Qwen-Image-Edit-2511 transformer"
    assert dict(description.options) == {"model_version": "edit-2511", "cache_text_encoder_outputs": True}


def test_older_ones_learn_in_eight_bits_with_swapped_blocks(run, edit, tmp_path):
    """Their files have no mark; each batch has one reference, which is as large as its image."""
    tensors = load_file(edit.models["qwen_image_edit"]["qwen_image"])
    path = tmp_path / "plain.safetensors"
    save_file({name: tensor for name, tensor in tensors.items() if name != INDEX}, path)
    options = {"pretrained_model_name_or_path": path, "model_version": "edit-2509", "max_train_steps": 2}
    eager = run(kind="same", **options)
    swapped = run(kind="same", blocks_to_swap=2, gradient_checkpointing=True, **options)
    assert swapped.losses == pytest.approx(eager.losses, rel=1e-5)
    small = run(kind="same", fp8_base=True, mixed_precision="bf16", **options)
    assert all(map(math.isfinite, small.losses))


def sentences(edit, data, **values):
    options = {"dataset_config": data / "own.toml", "train_data_dir": None, "control_directory": None}
    options |= {"output_dir": data / "out"}
    return " / ".join(map(str, problems_and_remarks(config_of(edit, LORA, **options | values))[0]))


def test_mistakes_are_one_sentence_before_anything_is_loaded(edit, data, tmp_path):
    assert sentences(edit, data) == ""
    said = sentences(edit, data, model_version="edit")
    assert "is Qwen-Image-Edit-2511: set model_version = edit-2511" in said
    plain = {name: tensor for name, tensor in load_file(edit.models["qwen_image_edit"]["qwen_image"]).items()}
    save_file({n: t for n, t in plain.items() if n != INDEX}, tmp_path / "plain.safetensors")
    older = {"pretrained_model_name_or_path": tmp_path / "plain.safetensors"}
    said = sentences(edit, data, model_version="edit", **older)
    assert said.count(" / ") == 1 and "has 2 reference images, and this model takes 1 at most" in said
    blind = {
        name: t for name, t in load_file(edit.models["qwen_image_edit"]["text_encoder"]).items() if "visual" not in name
    }
    save_file(blind, tmp_path / "blind.safetensors")
    said = sentences(edit, data, text_encoder=tmp_path / "blind.safetensors")
    assert said.count(" / ") == 0 and "expected the Qwen2.5-VL text encoder with its vision part" in said
    with pytest.raises(ConfigError, match="cache_text_encoder_outputs must be on"):
        sentences(edit, data, cache_text_encoder_outputs=False)
    text = (data / "own.toml").read_text()
    (tmp_path / "bare.toml").write_text("\n".join(line for line in text.splitlines() if "control" not in line))
    said = sentences(edit, data, dataset_config=tmp_path / "bare.toml")
    assert "control_directory is not set for" in said
    (tmp_path / "flipped.toml").write_text(f"{text}flip_aug = true\n")
    said = sentences(edit, data, dataset_config=tmp_path / "flipped.toml")
    assert "flip_aug cannot be used with control_directory" in said
    assert "control_directory is for" in sentences(edit, data, model_version="original", **older)
    assert torch.equal(plain[INDEX], torch.zeros(0))
