"""LoRA files that a training wrote, in diffusers: every key finds its place, and the answers are those of training."""

import pytest
import torch
from safetensors.torch import load_file

from library import families, methods
from library.demo import summary
from library.families.flux import random as flux_random
from tests import double_stream, flux_files
from tests.training import config_of, train

CAPTIONS = ["zorb toy, red"]
SIZE = torch.tensor([[64.0, 64.0, 0.0, 0.0, 64.0, 64.0]])


@pytest.fixture(scope="module")
def trained(demo, squares, tmp_path_factory):
    """A LoRA of each family, with text encoders that learned, and the config that it was trained with."""
    outcomes = {}
    for family in ("sdxl", "flux"):
        values = {"train_data_dir": squares, "output_dir": tmp_path_factory.mktemp(family), "learning_rate": 2e-2}
        values |= {"network_train_unet_only": False, "cache_text_encoder_outputs": False, "network_alpha": 4}
        config = config_of(demo, families.lora_script(family), **values)
        outcomes[family] = config, train(config).file
    return outcomes


def ours(config, file=None):
    """Our networks, with the file's adapters in them if there is one; and the family."""
    from library.config.building import replace_options

    config = replace_options(config, network_weights=str(file) if file else None, save_precision=None)
    family = families.family_for(config)
    parts = family.load(torch.float32)
    if file:
        methods.attach_method(parts, family, config).train(False)
    return family, parts


def noised(family, parts):
    generator = torch.Generator().manual_seed(1)
    latents = family.latents(parts, torch.zeros(1, 3, 64, 64), torch.Generator().manual_seed(0))
    return family.noised(torch.randn(latents.shape, generator=generator), generator)


@torch.no_grad()
def answers(family, parts):
    """The captions' encodings and the denoiser's answer."""
    text = family.text(parts, CAPTIONS)
    return text, family.predict(parts.denoiser, noised(family, parts), text, SIZE)


def closely(first, other, base):
    """Equal up to rounding, and different from what it was without adapters."""
    torch.testing.assert_close(first, other, rtol=1e-3, atol=1e-3 * float(base.std()))
    assert (first - base).abs().max() > 0.02 * base.std()


def test_sdxl_through_load_lora_weights(trained, caplog):
    from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline

    config, file = trained["sdxl"]
    base = answers(*ours(config))
    expected = answers(*ours(config, file))
    family, parts = ours(config)
    pipe = StableDiffusionXLPipeline(
        vae=parts.vae,
        text_encoder=parts.encoders["clip_l"],
        text_encoder_2=parts.encoders["clip_g"],
        tokenizer=parts.tokenizers["clip_l"],
        tokenizer_2=parts.tokenizers["clip_g"],
        unet=parts.denoiser,
        scheduler=EulerDiscreteScheduler(),
    )
    pipe.load_lora_weights(str(file.parent), weight_name=file.name)
    loaded = sum(
        name.endswith("lora_A.default_0.weight")
        for net in (pipe.unet, pipe.text_encoder, pipe.text_encoder_2)
        for name, _ in net.named_parameters()
    )
    assert loaded == sum(name.endswith(".lora_down.weight") for name in load_file(file))
    assert not [r for r in caplog.records if r.levelname in ("WARNING", "ERROR") and "key" in r.message]
    text, answer = answers(family, parts)
    for name in ("hidden_state1", "hidden_state2", "pool2"):
        closely(text[name], expected[0][name], base[0][name])
    closely(answer, expected[1], base[1])


def test_flux_through_the_converter(trained):
    """diffusers cuts fused layers at sizes written into it, so the tiny ones are padded; what comes out is loaded."""
    from diffusers import FluxTransformer2DModel

    config, file = trained["flux"]
    matched, wrong = summary.check_lora_layers(file, config)
    assert wrong == [] and matched
    family, parts = ours(config)
    base = answers(family, parts)
    with_adapters = ours(config, file)
    expected = answers(*with_adapters)

    stored = load_file(config.model.pretrained_model_name_or_path)
    settings = {k: v for k, v in flux_files.diffusers_config(stored).items() if not k.startswith("_")}
    other = FluxTransformer2DModel(**settings)
    other.load_state_dict({name: tensor.float() for name, tensor in double_stream.flux_to_diffusers(stored).items()})
    converted, _ = flux_random.convert_for_diffusers(load_file(file), config)
    other.load_lora_adapter({f"transformer.{name}": tensor for name, tensor in converted.items()}, prefix="transformer")
    assert sum(name.endswith("lora_A.default_0.weight") for name, _ in other.named_parameters()) == matched

    def diffusers_way(img, timesteps, guidance, **rest):
        return other(
            hidden_states=img,
            timestep=timesteps,
            guidance=guidance,
            encoder_hidden_states=rest["txt"],
            pooled_projections=rest["y"],
            txt_ids=rest["txt_ids"],
            img_ids=rest["img_ids"],
            return_dict=False,
        )[0]

    with torch.no_grad():
        answer = family.predict(diffusers_way, noised(family, parts), expected[0], SIZE)
    closely(answer, expected[1], base[1])


def test_the_text_encoder_of_flux(trained):
    from diffusers.loaders import FluxLoraLoaderMixin

    config, file = trained["flux"]
    tensors = {name: tensor for name, tensor in load_file(file).items() if name.startswith("lora_te1_")}
    family, parts = ours(config)
    base, expected = family.text(parts, CAPTIONS), answers(*ours(config, file))[0]
    converted = FluxLoraLoaderMixin.lora_state_dict(tensors)
    encoder = parts.encoders["clip_l"]
    FluxLoraLoaderMixin.load_lora_into_text_encoder(converted, None, encoder, prefix="text_encoder")
    loaded = [name for name, _ in encoder.named_parameters() if name.endswith("lora_A.default_0.weight")]
    assert len(loaded) == len(tensors) // 3
    with torch.no_grad():
        closely(family.text(parts, CAPTIONS)["l_pooled"], expected["l_pooled"], base["l_pooled"])


@pytest.mark.parametrize("family", ["sdxl", "flux"])
def test_the_check_of_the_demo_agrees(trained, family):
    """Of text encoders' adapters it says nothing; all others are matched."""
    config, file = trained[family]
    matched, wrong = summary.check_lora_layers(file, config)
    layers = sum(name.startswith("lora_unet") and name.endswith(".alpha") for name in load_file(file))
    assert wrong == [] and (matched == layers if family == "sdxl" else matched > layers)


@pytest.mark.parametrize("style", ["diffusers", "comfy"])
@pytest.mark.parametrize("family", ["sdxl", "flux"])
def test_files_of_other_programs_are_gone_on_with(trained, tmp_path, family, style):
    """In the names of diffusers (PEFT) and of ComfyUI's own tree: to learn on, for their ranks, to be merged."""
    from library.config.building import replace_options
    from library.tools.convert import convert_lora

    config, file = trained[family]
    other, expected = convert_lora(file, tmp_path / f"{style}.safetensors", to=style), load_file(file)
    kept = (family, style) == ("sdxl", "comfy")  # which reads kohya's own names
    assert any(name.startswith("lora_") for name in load_file(other)) == kept
    config = replace_options(config, save_precision=None)
    on = {"network_weights": str(other)}
    for values in (on, on | {"dim_from_weights": True, "network_dim": 99}):
        asked = replace_options(config, **values)
        of = families.family_for(asked)
        method = methods.attach_method(of.load(torch.float32), of, asked)
        tensors = method.state_dict()
        assert tensors.keys() == expected.keys()
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor.float(), expected[name].float(), rtol=1e-5, atol=1e-7)
    merged = replace_options(config, base_weights=[str(other)])
    of = families.family_for(merged)
    parts, plain = of.load(torch.float32), of.load(torch.float32)
    methods.attach_method(parts, of, merged)
    moved = [not torch.equal(a, b) for a, b in zip(weights(parts), weights(plain), strict=True)]
    assert sum(moved) == sum(bool(t.any()) for name, t in expected.items() if name.endswith("lora_up.weight"))


def weights(parts):
    """The matrices of what has adapters, with and without these."""
    for network in (parts.denoiser, *parts.encoders.values()):
        for name, parameter in network.named_parameters():
            if ".lora_" not in name and not name.startswith("lora_"):
                yield parameter
