"""benchmarks/beside_rivals.py: the sizes it sets in rivals, the options of its cases, and how it compares."""

import json

import pytest
import torch

from benchmarks import beside_rivals, musubi_small, paired_draws, sd_scripts_small
from library import families
from library.config.building import build_config
from library.families.krea_2 import random as krea_2
from library.families.sd15 import random as sd15


def test_sizes_of_krea_2_are_those_of_the_published_model():
    denoiser = krea_2.make_networks(krea_2.FULL).denoiser()
    shapes = {name: tuple(tensor.shape) for name, tensor in denoiser.state_dict().items()}
    text = {"txtdim": 2560, "txtheads": 20, "txtkvheads": 20, "txtlayers": 12}
    image = {"features": 6144, "heads": 48, "kvheads": 12, "layers": 28, "channels": 16, "tdim": 256}
    assert musubi_small.krea_2_sizes(shapes) == text | image


def test_sizes_of_sd15_are_those_of_its_file(tmp_path):
    shapes = sd_scripts_small.shapes_of(sd15.write_random_model(tmp_path))
    assert sd_scripts_small.sd15_widths(shapes) == sd15.TINY.unet
    vae = sd_scripts_small.autoencoder_sizes(shapes, sd_scripts_small.VAE)
    assert vae == {"ch": 32, "ch_mult": [1, 1, 1, 1], "z_channels": 4}
    clip = sd_scripts_small.clip_sizes(shapes, sd_scripts_small.CLIP_SD15)
    assert (clip["hidden_size"], clip["num_hidden_layers"]) == (sd15.TINY.text, sd15.TINY.text_layers)


def test_losses_of_both_trainers_are_read_step_by_step(tmp_path):
    theirs, mine = tmp_path / "losses.jsonl", tmp_path / "progress.jsonl"
    theirs.write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "loss": 0.25}\n', encoding="utf-8")
    lines = [{"kind": "phase", "loss": 9}, {"kind": "step", "step": 1, "loss": 0.5, "avr_loss": 7}]
    mine.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    assert beside_rivals.read_losses(theirs) == [(1, 0.5), (2, 0.25)]
    assert beside_rivals.read_losses(mine) == [(1, 0.5)]
    assert beside_rivals.read_losses(tmp_path / "none.jsonl") == []


@pytest.mark.parametrize("name", beside_rivals.CASES)
def test_every_case_is_a_config_of_this_trainer_without_a_remark(name):
    case, notes = beside_rivals.CASES[name], []
    options = beside_rivals.COMMON | case.options | case.own
    config = build_config(families.config_class(case.script), options, notes=notes)
    assert notes == [] and families.family_for(config).name == case.family
    assert (beside_rivals.PROJECT_ROOT / "benchmarks" / case.launcher).is_file()


def test_a_dimension_of_frames_does_not_change_the_draws(monkeypatch):
    for name in ("randn", "randn_like", "randint"):
        monkeypatch.setattr(torch, name, getattr(torch, name))
    randn, drawn = torch.randn, []
    for shape in ((1, 4, 8, 8), (1, 4, 1, 8, 8)):
        torch.randn = randn
        paired_draws.install()
        drawn.append([torch.randn_like(torch.zeros(shape)).flatten() for _ in range(2)])
    assert all(map(torch.equal, *drawn)) and not torch.equal(*drawn[0])


def test_results_are_compared_relative_to_what_was_learnt():
    start = {"a": torch.zeros(2), "b": torch.ones(1)}
    theirs, mine = {**start, "a": torch.tensor([3.0, 4.0])}, {"a": torch.tensor([3.0, 4.5]), "b": torch.ones(1)}
    row = beside_rivals.change_difference({**mine, "c": torch.ones(1)}, theirs, start)
    assert row == {"learnt": pytest.approx(0.1), "tensors": 2, "only here": ["c"], "only there": []}
    assert beside_rivals.loss_difference([(1, 2.0), (2, 1.1)], [(1, 2.0), (2, 1.0)]) == pytest.approx(0.1)
    row |= {"alike": "", "loss": 1e-7}
    failed = {"alike": "0.001 added to sigma", "failed": "see log"}
    assert [*beside_rivals.table({"krea_2": [row, failed]}, 8)][2:] == [
        "| krea_2 | krea_2_train_network | musubi | 8 | 1.0e-07 | 1.0e-01 | 2, 1 only here |",
        "| krea_2 | krea_2_train_network | musubi, without 0.001 added to sigma | 8 | failed: see log |  |  |",
    ]


def test_the_image_of_a_case_has_caches_that_musubi_tuner_reads(tmp_path):
    options = beside_rivals.make_inputs(beside_rivals.CASES["krea_2"], tmp_path / "inputs")
    (folder,) = (tmp_path / "inputs" / "images").iterdir()
    assert sorted(path.suffix for path in folder.iterdir()) == [".png", ".safetensors", ".safetensors", ".txt"]
    shapes = sd_scripts_small.shapes_of(folder / "01_kr2_te.safetensors")
    caption = (folder / "01.txt").read_text(encoding="utf-8")
    assert shapes == {"varlen_krea2_vl_embed_float32": (len(caption), 2, 48)}
    json.dumps(options)


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
