"""SDXL's names at full size: nothing is allocated, all networks are on the meta device."""

from pathlib import Path

import pytest
import torch
from torch import nn

from library.families.sdxl import keys
from library.families.shared import unet as shared_unet
from library.families.shared import unet_names

GOLDEN = Path(__file__).parents[1] / "golden" / "sd_scripts_lora_keys.tsv"


@pytest.fixture(scope="module")
def unet():
    from diffusers import UNet2DConditionModel

    with torch.device("meta"):
        return UNet2DConditionModel(
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


@pytest.fixture(scope="module")
def encoders():
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    clip_l = CLIPTextConfig(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12)
    clip_g = CLIPTextConfig(
        hidden_size=1280, intermediate_size=5120, num_hidden_layers=32, num_attention_heads=20, projection_dim=1280
    )
    with torch.device("meta"):
        return {"clip_l": CLIPTextModel(clip_l), "clip_g": CLIPTextModelWithProjection(clip_g)}


def golden(title: str = "# SDXL networks.lora default") -> dict[str, tuple[int, ...]]:
    """Adapter names with in and out sizes, of the table under this title."""
    rows, inside = {}, False
    for line in GOLDEN.read_text(encoding="utf-8").splitlines():
        inside = line.startswith(title) if line.startswith("#") else inside
        if inside and line.startswith("lora_"):
            name, *sizes = line.split("\t")
            rows[name] = tuple(int(size) for size in sizes if size.isdigit())
    return rows


def test_the_unet_has_the_single_files_names(unet):
    names = keys.SDXL_FILE.to_single("denoiser", unet.state_dict())
    assert len(names) == 1680
    assert names["model.diffusion_model.input_blocks.0.0.weight"].shape == (320, 4, 3, 3)
    assert names["model.diffusion_model.input_blocks.3.0.op.bias"].shape == (320,)
    assert names["model.diffusion_model.input_blocks.4.0.skip_connection.weight"].shape == (640, 320, 1, 1)
    assert names["model.diffusion_model.middle_block.1.transformer_blocks.9.ff.net.0.proj.weight"].shape == (
        10240,
        1280,
    )
    assert names["model.diffusion_model.output_blocks.2.2.conv.weight"].shape == (1280, 1280, 3, 3)
    assert names["model.diffusion_model.output_blocks.8.0.out_layers.3.weight"].shape == (320, 320, 3, 3)
    assert names["model.diffusion_model.label_emb.0.0.weight"].shape == (1280, 2816)
    assert names["model.diffusion_model.out.2.bias"].shape == (4,)


def test_names_go_there_and_back(unet):
    single = keys.SDXL_FILE.to_single("denoiser", unet.state_dict())
    prefix = keys.SINGLE_FILE_PREFIXES["denoiser"]
    back = keys.SDXL_FILE.to_diffusers("denoiser", {name.removeprefix(prefix): t for name, t in single.items()})
    assert {name: t.shape for name, t in back.items()} == {name: t.shape for name, t in unet.state_dict().items()}


def test_sizes_of_the_real_unet_are_read_from_its_tensors(unet):
    config = shared_unet.unet_config({name: tuple(t.shape) for name, t in unet.state_dict().items()})
    assert config.pop("sample_size") == 128
    for name, value in config.items():
        theirs = unet.config[name]
        assert (tuple(theirs) if isinstance(theirs, list) else theirs) == value, name


def test_text_encoders_have_the_single_files_names(encoders):
    from library.families.shared import clip

    clip_l = keys.SDXL_FILE.to_single("clip_l", clip.clip_tensors(encoders["clip_l"]))
    clip_g = keys.SDXL_FILE.to_single("clip_g", clip.clip_tensors(encoders["clip_g"]))
    assert (len(clip_l), len(clip_g)) == (196, 389)  # 197 and 390 with position_ids and logit_scale
    first = "conditioner.embedders.0.transformer.text_model.encoder.layers.11.self_attn.q_proj.weight"
    assert clip_l[first].shape == (768, 768)
    last = "conditioner.embedders.1.model.transformer.resblocks.31.attn.in_proj_weight"
    assert clip_g[last].shape == (3840, 1280)
    assert clip_g["conditioner.embedders.1.model.positional_embedding"].shape == (77, 1280)


def test_the_vae_has_the_single_files_names():
    from diffusers import AutoencoderKL

    with torch.device("meta"):
        vae = AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=(128, 256, 512, 512),
            layers_per_block=2,
        )
    names = keys.SDXL_FILE.to_single("vae", vae.state_dict())
    assert len(names) == 248
    assert names["first_stage_model.encoder.mid.attn_1.q.weight"].shape == (512, 512, 1, 1)
    assert names["first_stage_model.decoder.up.3.upsample.conv.weight"].shape == (512, 512, 3, 3)
    assert names["first_stage_model.decoder.up.0.block.0.nin_shortcut.weight"].shape == (128, 256, 1, 1)
    assert names["first_stage_model.encoder.norm_out.weight"].shape == (512,)


def sizes_of(module: nn.Module) -> tuple[int, int]:
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    return module.in_channels, module.out_channels


def adapted(network: nn.Module, classes: tuple[str, ...]):
    """Paths of the linear layers and 1x1 convolutions inside modules of these classes."""
    for path, module in network.named_modules():
        if type(module).__name__ in classes:
            for inside, layer in module.named_modules():
                is_matrix = isinstance(layer, nn.Linear) or isinstance(layer, nn.Conv2d) and layer.kernel_size == (1, 1)
                if is_matrix:
                    yield f"{path}.{inside}", layer


def test_adapters_of_the_unet_have_kohyas_names_and_sizes(unet):
    layout = unet_names.Layout()
    actual = {
        keys.adapter_name("denoiser", path, layout): sizes_of(layer)
        for path, layer in adapted(unet, ("Transformer2DModel",))
    }
    assert len(actual) == 722
    assert actual == {name: sizes for name, sizes in golden().items() if name.startswith("lora_unet_")}


@pytest.mark.parametrize(("part", "prefix", "count"), [("clip_l", "lora_te1_", 72), ("clip_g", "lora_te2_", 192)])
def test_adapters_of_the_encoders_have_kohyas_names_and_sizes(encoders, part, prefix, count):
    actual = {
        keys.adapter_name(part, path, unet_names.Layout()): sizes_of(layer)
        for path, layer in adapted(encoders[part], ("CLIPAttention", "CLIPMLP"))
    }
    assert len(actual) == count
    assert actual == {name: sizes for name, sizes in golden().items() if name.startswith(prefix)}


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("down_blocks.0.resnets.0.conv1", "lora_unet_input_blocks_1_0_in_layers_2"),
        ("down_blocks.0.downsamplers.0.conv", "lora_unet_input_blocks_3_0_op"),
        ("up_blocks.0.upsamplers.0.conv", "lora_unet_output_blocks_2_2_conv"),
        ("up_blocks.2.resnets.2.conv_shortcut", "lora_unet_output_blocks_8_0_skip_connection"),
        ("mid_block.resnets.1.time_emb_proj", "lora_unet_middle_block_2_emb_layers_1"),
        ("add_embedding.linear_2", "lora_unet_label_emb_0_2"),
    ],
)
def test_convolutions_have_kohyas_names(path, name):
    assert keys.adapter_name("denoiser", path, unet_names.Layout()) == name


def test_convolution_targets_add_66_modules(unet):
    targets = ("ResnetBlock2D", "Downsample2D", "Upsample2D")
    actual = set()
    for path, module in unet.named_modules():
        if type(module).__name__ in targets:
            layers = (inside for inside, layer in module.named_modules() if isinstance(layer, nn.Linear | nn.Conv2d))
            actual |= {keys.adapter_name("denoiser", f"{path}.{inside}", unet_names.Layout()) for inside in layers}
    assert len(actual) == 66
    assert actual == set(golden("# SDXL extra modules"))
