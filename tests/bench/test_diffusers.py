"""Transformers of diffusers by their class: what each is called with is found by itself, or requested in a sentence."""

import json

import pytest
import torch

from library.bench import prepared_model
from library.bench.diffusers import model as diffusers_model
from library.cli import main
from library.measuring import candidates

CPU = torch.device("cpu")
HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
ROPE = {"num_layers": 1, "joint_attention_dim": 32, "axes_dims_rope": [4, 4, 8], "in_channels": 4, **HEADS}
HUNYUAN = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 10,
    "num_layers": 1,
    "num_single_layers": 1,
    "num_refiner_layers": 1,
    "patch_size": 1,
    "patch_size_t": 1,
    "text_embed_dim": 16,
    "pooled_projection_dim": 8,
    "rope_axes_dim": [2, 4, 4],
}
LUMINA = {
    "sample_size": 16,
    "in_channels": 4,
    "hidden_size": 24,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "num_attention_heads": 3,
    "num_kv_heads": 1,
    "multiple_of": 16,
    "axes_dim_rope": [4, 2, 2],
    "cap_feat_dim": 8,
}
SANA = {
    "patch_size": 1,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 1,
    "num_cross_attention_heads": 2,
    "attention_head_dim": 4,
    "num_attention_heads": 2,
    "cross_attention_head_dim": 4,
    "cross_attention_dim": 8,
    "caption_channels": 12,
    "sample_size": 32,
}
COGVIDEO = {
    **HEADS,
    "in_channels": 4,
    "out_channels": 4,
    "time_embed_dim": 2,
    "text_embed_dim": 8,
    "num_layers": 1,
    "sample_width": 32,
    "sample_height": 32,
    "sample_frames": 9,
    "max_text_seq_length": 8,
    "use_rotary_positional_embeddings": True,
}
ZIMAGE = {
    "in_channels": 4,
    "dim": 16,
    "n_layers": 1,
    "n_refiner_layers": 1,
    "n_heads": 1,
    "n_kv_heads": 2,
    "cap_feat_dim": 16,
    "axes_dims": [8, 4, 4],
    "axes_lens": [256, 32, 32],
}


def made(name, config, **inputs):
    return diffusers_model.DiffusersSubject(name, config, {"compile_backend": "eager"}, {"text_length": 8, **inputs})


@pytest.mark.parametrize(
    ("name", "config", "layout", "kinds"),
    [
        ("FluxTransformer2DModel", {**ROPE, "pooled_projection_dim": 32, "num_single_layers": 1}, "tokens", 2),
        ("Flux2Transformer2DModel", {**ROPE, "axes_dims_rope": [4, 4, 4, 4], "num_single_layers": 1}, "tokens", 2),
        ("HunyuanVideoTransformer3DModel", HUNYUAN, "video", 3),
        (
            "LTXVideoTransformer3DModel",
            {
                **HEADS,
                "in_channels": 8,
                "out_channels": 8,
                "cross_attention_dim": 32,
                "num_layers": 1,
                "caption_channels": 16,
            },
            "tokens",
            1,
        ),
        ("SanaTransformer2DModel", SANA, "image", 1),
        ("CogVideoXTransformer3DModel", COGVIDEO, "frames", 1),
        ("ZImageTransformer2DModel", ZIMAGE, "list", 1),
        (
            "PixArtTransformer2DModel",
            {
                **HEADS,
                "in_channels": 4,
                "out_channels": 8,
                "num_layers": 1,
                "cross_attention_dim": 32,
                "caption_channels": 12,
                "sample_size": 32,
            },
            "image",
            1,
        ),
    ],
)
def test_what_a_class_is_called_with_is_found(name, config, layout, kinds):
    inputs = made(name, config, frames=3)
    assert inputs.inputs.layout == layout and len(inputs.block_classes) == kinds


def test_a_model_that_asks_for_numbers_is_counted_by_running_it():
    subject = made("Lumina2Transformer2DModel", LUMINA)
    config = subject.config(candidates.BASELINE_CHANGES)
    made_one = subject.make(config, CPU)
    counted = prepared_model.count_step(subject, made_one, config, 128)
    assert counted.step and counted.block_flops["Lumina2TransformerBlock"]
    assert all(p.grad is None for p in made_one.components.denoiser.parameters())
    with prepared_model.open_prepared(subject, config, CPU, 128, made_one) as ready:
        ready.block(*counted.blocks["Lumina2TransformerBlock"])()
        assert ready.step().isfinite()


@pytest.mark.parametrize(
    ("name", "config", "more", "words"),
    [
        (
            "OmniGenTransformer2DModel",
            {"hidden_size": 16, "num_attention_heads": 4},
            [],
            "cannot be made from this config (TypeError",
        ),
        (
            "StableCascadeUNet",
            {"conditioning_dim": 64, "in_channels": 4, "out_channels": 4},
            [],
            "is called with timestep_ratio, whose shape is not known here: give it with --input timestep_ratio=1,16,64",
        ),
        ("SanaTransformer2DModel", SANA, ["--input", "wheels=4"], "--input wheels: SanaTransformer2DModel is called"),
        ("SanaTransformer2DModel", SANA, ["--input", "encoder_hidden_states=1,8,7"], "cannot be called with"),
        ("AutoencoderKL", {}, [], "AutoencoderKL has no repeated blocks with Linear layers"),
    ],
)
def test_what_cannot_be_measured_is_reported_once_and_in_a_sentence(name, config, more, words, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ["bench", "--diffusers", name, "--config", str(tmp_path / "config.json"), "--device", "cpu", *more]
    assert main.main([*arguments, "--out", str(tmp_path / "out")]) == 1
    told = capsys.readouterr().err
    assert words in told and "Traceback" not in told and len(told.strip().splitlines()) == 1
