"""The files, as others see them: names and sizes at full size, diffusers' readers, the real families."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from library import families, methods
from library.config.building import build_config
from library.families.flux.model import Flux, Sizes
from library.families.flux.options import FluxLora
from library.families.sdxl.keys import adapter_name
from library.families.sdxl.options import SdxlLora, SdxlTrain
from library.families.shared.unet_names import Layout

GOLDEN = Path(__file__).parents[1] / "golden" / "sd_scripts_lora_keys.tsv"


def golden(title):
    rows, inside = {}, False
    for line in GOLDEN.read_text(encoding="utf-8").splitlines():
        inside = title in line if line.startswith("#") else inside
        if inside and line.startswith("lora_"):
            name, *sizes = line.split("\t")
            rows[name] = tuple(int(size) for size in sizes if size.isdigit())
    return rows


def clip(width, layers, heads, projected=False):
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "projection_dim": width}
    config = CLIPTextConfig(num_hidden_layers=layers, num_attention_heads=heads, **sizes)
    return (CLIPTextModelWithProjection if projected else CLIPTextModel)(config)


def parts(denoiser, **encoders):
    return SimpleNamespace(denoiser=denoiser, vae=None, encoders=encoders)


def sdxl_parts():
    from diffusers import UNet2DConditionModel

    with torch.device("meta"):
        unet = UNet2DConditionModel(
            block_out_channels=(320, 640, 1280),
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            transformer_layers_per_block=(1, 2, 10),
            attention_head_dim=(5, 10, 20),
            cross_attention_dim=2048,
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=256,
            projection_class_embeddings_input_dim=2816,
        )
        return parts(unet, clip_l=clip(768, 12, 12), clip_g=clip(1280, 32, 20, projected=True))


class SdxlNames:
    adapter_targets = ("Transformer2DModel",)
    text_adapter_targets = ("CLIPAttention", "CLIPSdpaAttention", "CLIPMLP")

    def adapter_name(self, part, path):
        return adapter_name(part, path, Layout())


def sizes(method):
    return {n: (a.lora_down.weight.shape[1], a.lora_up.weight.shape[0]) for n, a in method.adapters.items()}


def test_sdxl_adapters_at_full_size():
    config = build_config(SdxlLora, {"network_dim": 8, "network_args": ["conv_dim=4", "conv_alpha=2"]}, notes=[])
    actual = methods.attach_method(sdxl_parts(), SdxlNames(), config)
    plain, extra = golden("SDXL networks.lora default"), golden("SDXL extra modules")
    assert len(plain) == 986 and len(extra) == 66
    actual_sizes = sizes(actual)
    assert actual_sizes.keys() == plain.keys() | extra.keys() and plain.items() <= actual_sizes.items()
    ranks = {name: actual.adapters[name].spec.rank for name in extra}
    assert all(rank == (8 if "emb_layers" in n or "skip" in n else 4) for n, rank in ranks.items())
    assert actual.adapters["lora_unet_input_blocks_3_0_op"].lora_down.weight.shape == (4, 320, 3, 3)


def test_sdxl_blocks_at_full_size():
    dims = ",".join(str(i) for i in range(23))
    args = [f"block_dims={dims}", "mid_lr_weight=0,0,0", "up_lr_weight=linear"]
    config = build_config(
        SdxlLora, {"learning_rate": 1e-3, "network_args": args, "network_train_unet_only": True}, notes=[]
    )
    actual = methods.attach_method(sdxl_parts(), SdxlNames(), config)
    assert actual.adapters["lora_unet_input_blocks_4_1_proj_in"].spec.rank == 5
    assert actual.adapters["lora_unet_output_blocks_5_1_proj_in"].spec.rank == 18
    assert not any("middle_block" in name or "output_blocks_0_" in name for name in actual.adapters)
    rates = {g["name"]: g["lr"] for g in actual.groups()}
    assert rates["unet_block5"] == 1e-3 and rates["unet_block17"] == pytest.approx(0.5e-3)


def test_flux_adapters_at_full_size():
    with torch.device("meta"):
        denoiser = Flux(Sizes(64, 64, 768, 4096, 3072, 128, 12288, 19, 38, True))
        encoder = clip(768, 12, 12)
    config = build_config(FluxLora, {}, notes=[])
    family = families.family_for(config)
    assert sizes(methods.attach_method(parts(denoiser, clip_l=encoder), family, config)) == golden(
        "FLUX.1 networks.lora_flux"
    )


def test_diffusers_knows_every_key_of_a_flux_file():
    from diffusers.loaders.lora_conversion_utils import _convert_kohya_flux_lora_to_diffusers

    state = {}
    for name, (inputs, outputs) in golden("FLUX.1 networks.lora_flux").items():
        state[f"{name}.lora_down.weight"] = torch.ones(1, inputs)
        state[f"{name}.lora_up.weight"] = torch.ones(outputs, 1)
        state[f"{name}.alpha"] = torch.tensor(1)
    actual = _convert_kohya_flux_lora_to_diffusers(state)
    assert not any("lora_unet" in key or "lora_te" in key for key in actual)
    # A double block has 14 matrices in diffusers' tree, a single one 6: q, k, v (and the MLP) are apart there.
    denoiser = {key.rsplit(".lora_", 1)[0] for key in actual if key.startswith("transformer.")}
    assert len(denoiser) == 19 * 14 + 38 * 6
    assert sum(key.startswith("text_encoder.") for key in actual) == 72 * 2


@pytest.fixture(scope="module")
def tiny_sdxl(tmp_path_factory):
    from library.families.sdxl import random

    return random.write_random_model(tmp_path_factory.mktemp("sdxl"), dtype=torch.float32)


def loaded(path, cls=SdxlLora, **values):
    config = build_config(cls, {"pretrained_model_name_or_path": str(path), "learning_rate": 1e-3, **values}, notes=[])
    family = families.family_for(config)
    return config, family, family.load(torch.float32)


def asked(unet):
    torch.manual_seed(5)
    width = unet.config.cross_attention_dim
    time_ids = unet.config.addition_time_embed_dim * 6
    conditions = {
        "text_embeds": torch.randn(1, unet.config.projection_class_embeddings_input_dim - time_ids),
        "time_ids": torch.ones(1, 6),
    }
    latents, text = torch.randn(1, 4, 16, 16), torch.randn(1, 7, width)
    with torch.no_grad():
        return unet(latents, torch.tensor([500.0]), text, added_cond_kwargs=conditions).sample


def test_diffusers_reads_an_sdxl_file_and_generates_the_same(tiny_sdxl):
    from diffusers import StableDiffusionXLPipeline

    config, family, model = loaded(tiny_sdxl, network_dim=3, network_alpha=2.0, network_args=["conv_dim=2"])
    method = methods.attach_method(model, family, config)
    before = asked(model.denoiser)
    with torch.no_grad():
        for p in method.parameters():
            p.normal_(std=0.05)
    expected, state = asked(model.denoiser), method.state_dict()
    assert not torch.allclose(before, expected, atol=1e-3)

    unet = loaded(tiny_sdxl)[2].denoiser
    converted, alphas = StableDiffusionXLPipeline.lora_state_dict(dict(state), unet_config=unet.config)
    count = sum(key.endswith("lora_down.weight") for key in state)
    assert len(alphas) == count and len(converted) == 2 * count
    StableDiffusionXLPipeline.load_lora_into_unet(converted, alphas, unet)
    torch.testing.assert_close(asked(unet), expected, rtol=1e-3, atol=1e-4)


def test_names_of_diffusers_trees_are_read(tiny_sdxl):
    config, family, model = loaded(tiny_sdxl, network_dim=3, network_train_unet_only=True)
    method = methods.attach_method(model, family, config)
    renamed = {
        f"{method.places[name].alias}.{key}": torch.ones_like(tensor)
        for name, adapter in method.adapters.items()
        for key, tensor in adapter.tensors().items()
    }
    assert any(key.startswith("lora_unet_down_blocks_1_attentions_0") for key in renamed)
    assert not method.load_state_dict(renamed)
    assert all(bool((t == 1).all()) for t in method.state_dict().values())


def test_the_whole_of_sdxl_learns_in_groups(tiny_sdxl):
    lrs = ",".join(["1e-4", *["0"] * 9, *["3e-4"] * 13])
    values = {"block_lr": lrs, "train_text_encoder": True, "learning_rate_te1": 2e-5, "learning_rate_te2": 0}
    config, family, model = loaded(tiny_sdxl, SdxlTrain, **values)
    method = methods.attach_method(model, family, config)
    assert method.trained_parts == {"denoiser": True, "clip_l": True, "clip_g": False}
    rates = {g["name"]: g["lr"] for g in method.groups()}
    assert rates["block0"] == 1e-4 and rates["block22"] == 3e-4 and rates["text_encoder1"] == 2e-5
    assert not any(f"block{i}" in rates for i in range(1, 10))
    frozen = {n for n, p in model.denoiser.named_parameters() if not p.requires_grad}
    assert "conv_in.weight" in frozen and all(n.startswith(("conv_in", "down_blocks")) for n in frozen)
    frozen = [
        n.removeprefix("text_model.") for n, p in model.encoders["clip_l"].named_parameters() if not p.requires_grad
    ]
    assert frozen and all(n.startswith(("encoder.layers.1.", "final_layer_norm.")) for n in frozen)
    assert not any(p.requires_grad for p in [*model.vae.parameters(), *model.encoders["clip_g"].parameters()])
    assert len({id(p) for p in method.parameters()}) == len(method.parameters())
    half = method.state_dict(torch.float16)
    assert {t.dtype for t in half.values() if t.is_floating_point()} == {torch.float16}
    assert any(k.startswith("first_stage_model.") for k in half)


def test_the_denoiser_alone_learns_by_default(tiny_sdxl):
    config, family, model = loaded(tiny_sdxl, SdxlTrain)
    method = methods.attach_method(model, family, config)
    assert [(g["name"], g["lr"]) for g in method.groups()] == [("unet", 1e-3)]
    assert method.trained_parts == {"denoiser": True, "clip_l": False, "clip_g": False}
    assert len(method.parameters()) == len(list(model.denoiser.parameters()))
    bare, model.denoiser = model.denoiser, torch.nn.ModuleDict({"module": model.denoiser})  # as when distributed
    taken = {name: tensor.clone() for name, tensor in method.snapshot().items()}
    assert len(taken) == len(method.parameters()) and "denoiser.conv_in.weight" in taken
    with torch.no_grad():
        method.parameters()[0].add_(1)
    method.restore(taken)
    assert all(torch.equal(t, taken[n]) for n, t in method.snapshot().items())
    assert "model.diffusion_model.input_blocks.0.0.weight" in method.state_dict()
    model.denoiser = bare
    method.train()
    assert model.denoiser.training and not model.encoders["clip_l"].training


def test_lycoris_names_and_layers_are_those_of_lora(tiny_sdxl):
    pytest.importorskip("lycoris")
    options = {"network_dim": 3, "network_args": ["conv_dim=2"]}
    config, family, model = loaded(tiny_sdxl, **options)
    expected = set(methods.attach_method(model, family, config).adapters)
    options |= {"network_module": "lycoris.kohya", "network_args": ["conv_dim=2", "algo=lokr"]}
    config, family, model = loaded(tiny_sdxl, **options)
    assert {key.split(".")[0] for key in methods.attach_method(model, family, config).state_dict()} == expected
