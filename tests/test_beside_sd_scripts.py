"""benchmarks/beside_sd_scripts.py: the sizes it sets in sd-scripts, the curves it reads, and its pictures."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from benchmarks import beside_pictures, beside_sd_scripts, paired_draws, sd_scripts_small
from benchmarks.beside_pictures import OURS, THEIRS
from benchmarks.small_model import networks
from library.demo import zorb


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The small models' files, untrained, without the words of the emoji."""
    folder, names = tmp_path_factory.mktemp("small"), ["red apple", "cat face"]
    for family, write in networks.WRITERS.items():
        (folder / family).mkdir()
        vae = networks.random_of(networks.AUTOENCODERS[family].vae().state_dict(), 9)
        write(folder / family, vae, names)
    return folder


def test_sizes_of_flux_are_those_of_its_files(written):
    shapes = {path.stem: sd_scripts_small.shapes_of(path) for path in (written / "flux").glob("*.safetensors")}
    assert sd_scripts_small.flux_sizes(shapes["flux1-dev"]) == {
        "in_channels": 64,
        "vec_in_dim": 64,
        "context_in_dim": 128,
        "hidden_size": 256,
        "mlp_ratio": 4.0,
        "num_heads": 8,
        "depth": networks.FLUX.double_blocks,
        "depth_single_blocks": networks.FLUX.single_blocks,
        "axes_dim": [4, 14, 14],
    }
    assert sd_scripts_small.autoencoder_sizes(shapes["ae"]) == {"ch": 32, "ch_mult": [1, 2, 2, 2], "z_channels": 16}
    t5 = sd_scripts_small.t5_sizes(shapes["t5xxl"])
    assert (t5["d_model"], t5["d_ff"], t5["d_kv"], t5["num_heads"], t5["num_layers"]) == (128, 256, 32, 4, 2)
    clip = sd_scripts_small.clip_sizes(shapes["clip_l"])
    assert (clip["hidden_size"], clip["num_hidden_layers"], clip["num_attention_heads"]) == (64, 2, 1)


def test_sizes_of_sdxl_are_those_of_its_file(written):
    shapes = sd_scripts_small.shapes_of(written / "sdxl" / "sdxl.safetensors")
    assert sd_scripts_small.unet_sizes(shapes) == {
        "widths": list(networks.SDXL.unet),
        "depths": list(networks.SDXL.depth),
        "middle": networks.SDXL.depth[-1],
        "text": networks.SDXL.clip_l + networks.SDXL.clip_g,
        "time": 4 * networks.SDXL.unet[0],
        "pooled": networks.SDXL.clip_g + 6 * 256,
    }
    vae = sd_scripts_small.autoencoder_sizes(shapes, sd_scripts_small.VAE)
    assert vae == {"ch": 32, "ch_mult": [1, 2, 2, 2], "z_channels": 4}
    clip_g = sd_scripts_small.open_clip_sizes(shapes, sd_scripts_small.CLIP_G)
    assert (clip_g["hidden_size"], clip_g["num_hidden_layers"], clip_g["projection_dim"]) == (128, 2, 128)
    assert sd_scripts_small.clip_sizes(shapes, sd_scripts_small.CLIP_L)["hidden_size"] == 64


def test_the_last_but_one_state_stands_where_the_full_encoder_has_it():
    output = {"hidden_states": tuple("abc")}
    sd_scripts_small.count_as_full(None, None, output)
    assert output["hidden_states"][11:] == ("b", "c") and len(output["hidden_states"]) == 13


def test_both_trainers_losses_are_read_step_by_step(tmp_path):
    theirs, mine = tmp_path / "losses.jsonl", tmp_path / "progress.jsonl"
    theirs.write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "loss": 0.25}\n', encoding="utf-8")
    lines = [{"kind": "phase", "loss": 9}, {"kind": "step", "step": 1, "loss": 0.5, "avr_loss": 7}]
    mine.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    assert beside_sd_scripts.read_losses(theirs) == [(1, 0.5), (2, 0.25)]
    assert beside_sd_scripts.read_losses(mine) == [(1, 0.5)]
    assert beside_sd_scripts.read_losses(tmp_path / "none.jsonl") == []


def test_matrices_in_fp8_become_float32(tmp_path):
    (tmp_path / "sdxl").mkdir()
    weight = torch.tensor([[1.5, -0.25]]).to(torch.float8_e4m3fn)
    save_file({"a": weight, "b": torch.ones(2, dtype=torch.bfloat16)}, tmp_path / "sdxl" / "sdxl.safetensors")
    files = beside_sd_scripts.model_files(tmp_path, "sdxl", tmp_path / "to")
    from safetensors.torch import load_file

    tensors = load_file(files["pretrained_model_name_or_path"])
    assert tensors["a"].tolist() == [[1.5, -0.25]] and {tensor.dtype for tensor in tensors.values()} == {torch.float32}


def test_a_running_mean_follows_the_curve():
    curve = [(step, float(step % 2)) for step in range(1, 101)]
    mean = beside_pictures.running_mean(curve)
    assert [step for step, _ in mean] == [step for step, _ in curve]
    assert all(0.4 < loss < 0.6 for _, loss in mean[20:80])


def test_a_summary_compares_means_and_steps():
    curves = {OURS: [(1, 1.0), (2, 0.5)], THEIRS: [(1, 1.0), (2, 0.75)]}
    summary = beside_sd_scripts.summary(curves)
    assert summary[OURS]["mean"] == 0.75 and summary["largest difference of a step"] == 0.25


def test_training_pictures_are_a_dozen_with_captions(tmp_path):
    folder = beside_pictures.draw_training_pictures(tmp_path / "pictures")
    captions = {file.read_text(encoding="utf-8") for file in folder.glob("*.txt")}
    assert len([*folder.glob("*.png")]) == 12 and "zorb emoji on a blue ground" in captions
    shown = [np.asarray(Image.open(path)) for path in folder.glob("*.png")]
    assert all(picture.shape == (128, 128, 3) and (picture == zorb.BODY).all(-1).any() for picture in shown)
    assert len({picture.tobytes() for picture in shown}) == 12
    assert not any(prompt in captions for prompt in beside_sd_scripts.COMPARED_PROMPTS[1:])


def test_samples_stand_side_by_side(tmp_path):
    folder, rows = tmp_path / "sample", {}
    folder.mkdir()
    for step in ("e000000", "000002"):
        for number in range(4):
            Image.new("RGB", (128, 128), (255, 0, 0)).save(folder / f"lora_{step}_{number:02d}_20261127190143_1.png")
    for name in (OURS, THEIRS):
        rows[name] = {"samples": beside_sd_scripts.samples(folder)}
    sheet = np.asarray(beside_sd_scripts.sample_sheet(rows))
    red = (sheet == (255, 0, 0)).all(-1)
    assert red.sum() == 16 * 128 * 128


def test_curves_are_drawn_in_both_colours():
    curves = {name: [(step, 1 / step) for step in range(1, 60)] for name in (OURS, THEIRS)}
    curves[THEIRS] = [(step, loss + 0.2) for step, loss in curves[THEIRS]]
    curve_picture = np.asarray(beside_pictures.curves_picture({"FLUX.1": curves, "SDXL": curves}))
    assert curve_picture.shape[0] == 2 * beside_pictures.HIGH
    for colour in beside_pictures.COLOURS.values():
        assert (curve_picture == colour).all(-1).sum() > 200


def test_paired_draws_are_the_same_in_two_trainers():
    originals = torch.randn, torch.randn_like, torch.randint
    draws = []
    try:
        for other in (False, True):
            torch.randn, torch.randn_like, torch.randint = originals
            paired_draws.install()
            like = torch.zeros(2, 3)
            first = torch.randn_like(like) if other else torch.randn((2, 3), generator=torch.Generator())
            draws.append((first, torch.randn(2, 3), torch.randint(0, 1000, (4,), device="cpu")))
    finally:
        torch.randn, torch.randn_like, torch.randint = originals
    assert all(torch.equal(left, two) for left, two in zip(*draws, strict=True))
    assert not torch.equal(draws[0][0], draws[0][1])
