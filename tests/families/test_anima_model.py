"""Anima's networks against sd-scripts', diffusers' and transformers', with the same weights."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from library.families.anima import keys, random
from library.families.anima.model import Block
from library.families.base import SampleRequest
from library.families.shared import qwen_vae_names
from library.families.shared.packing import pack, unpack_channels_last
from tests.families import alike, wide

CAPTIONS = ["a photo of a red circle", "two small cats sit on a wooden table, best quality, masterpiece"]
GOLDEN = json.loads((Path(__file__).parents[1] / "golden/anima_losses.json").read_text(encoding="utf-8"))


def family(files, script="anima_train_network", **values):
    options = {"pretrained_model_name_or_path": files["anima"], "qwen3": files["text_encoder"], "vae": files["vae"]}
    options |= {"network_train_unet_only": True} if script.endswith("_network") else {}
    options |= random.TINY_OPTIONS | values
    return alike.configured(script, options)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return random.write_random_model(tmp_path_factory.mktemp("anima"), dtype=torch.float32)


@pytest.fixture(scope="module")
def own(files):
    own_family = family(files)
    return own_family, own_family.load(torch.float32)


@pytest.mark.parametrize("case", GOLDEN)
def test_losses_and_gradients_equal_those_of_sd_scripts(files, own, case):
    """AnimaNetworkTrainer of sd-scripts (commit 48d368f) was run on these very files, with noise and timesteps drawn
    from the same seed; `gradient` is the length of that of all weights."""
    expected, parts = GOLDEN[case], own[1]
    own_family = family(files, **expected["options"])
    with torch.no_grad():
        text = own_family.text(parts, CAPTIONS)
    if case == "dropped":
        first = own_family.text_cache.without_caption({name: tensor[0].numpy() for name, tensor in text.items()})
        text = {name: torch.stack((torch.from_numpy(first[name]), tensor[1])) for name, tensor in text.items()}
        with torch.no_grad():
            empty = own_family.text(parts, ["", CAPTIONS[1]])
        assert all(torch.equal(text[name], empty[name]) for name in text)
    latents = torch.randn(2, 16, 8, 12, generator=torch.Generator().manual_seed(7))
    noised = own_family.noised(latents, torch.Generator().manual_seed(11))
    torch.testing.assert_close(noised.timesteps, torch.tensor(expected["timesteps"]), rtol=1e-5, atol=1e-6)
    denoiser = parts.denoiser.requires_grad_(True)
    answer = own_family.predict(denoiser, noised, text, torch.zeros(2, 6))
    loss = ((answer - noised.target).square().mean((1, 2, 3)) * noised.weight).mean()
    loss.backward()
    length = sum(p.grad.square().sum() for p in denoiser.parameters() if p.grad is not None).sqrt()
    denoiser.zero_grad(set_to_none=True)
    denoiser.requires_grad_(False)
    torch.testing.assert_close(loss.item(), expected["loss"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(length.item(), expected["gradient"], rtol=1e-4, atol=1e-5)


def in_diffusers(tensors):
    """Our tensors under diffusers' names: of the transformer, and of the adapter."""
    outside = {new: old for old, new in keys.OUTSIDE_OF_BLOCKS.items()}
    inside = {new: old for old, new in keys.INSIDE.items()}
    apart = {"transformer": {}, "text_conditioner": {}}
    for name, tensor in tensors.items():
        path, _, ending = name.rpartition(".")
        if path.startswith("llm_adapter."):
            apart["text_conditioner"][name.removeprefix("llm_adapter.")] = tensor
        elif path.startswith("blocks."):
            _, number, within = path.split(".", 2)
            apart["transformer"][f"transformer_blocks.{number}.{inside[within]}.{ending}"] = tensor
        else:
            apart["transformer"][f"{outside[path]}.{ending}"] = tensor
    return apart


@pytest.fixture(scope="module")
def theirs(own):
    """diffusers' transformer and conditioner with the same weights."""
    from diffusers import AnimaTextConditioner, CosmosTransformer3DModel
    from diffusers.models.transformers import transformer_cosmos

    # torchvision is not installed: it would only resize a mask of zeros.
    resize = SimpleNamespace(resize=lambda mask, size, **_: mask.new_zeros(*mask.shape[:2], *size))
    modes = SimpleNamespace(NEAREST=0)
    transformer_cosmos.transforms = SimpleNamespace(functional=resize, InterpolationMode=modes)
    sizes = own[1].denoiser.sizes
    transformer = CosmosTransformer3DModel(
        in_channels=16,
        out_channels=16,
        num_attention_heads=2,
        attention_head_dim=32,
        num_layers=3,
        text_embed_dim=32,
        adaln_lora_dim=16,
        max_size=(128, 240, 240),
        rope_scale=(1.0, 4.0, 4.0),
        extra_pos_embed_type=None,
    )
    conditioner = AnimaTextConditioner(
        source_dim=48,
        target_dim=32,
        model_dim=32,
        num_layers=2,
        num_attention_heads=2,
        target_vocab_size=sizes.adapter.words,
        min_sequence_length=64,
    )
    tensors = in_diffusers(own[1].denoiser.state_dict())
    transformer.load_state_dict(tensors["transformer"], strict=True)
    conditioner.load_state_dict(tensors["text_conditioner"], strict=True)
    return transformer.eval(), conditioner.eval()


@pytest.mark.parametrize("size", [(4, 6), (3, 5)])
def test_the_denoiser_and_its_gradients_equal_diffusers(own, theirs, size):
    anima, parts = own
    transformer, conditioner = theirs
    with torch.no_grad():
        text = anima.text(parts, CAPTIONS)
    latents = torch.randn(2, 16, 2 * size[0], 2 * size[1], requires_grad=True)
    times = torch.tensor([0.3, 0.9])
    ours = unpack_channels_last(parts.denoiser(pack(latents), size, *text.values(), times), *size)
    (gradient,) = torch.autograd.grad(ours.square().mean(), latents)
    context = conditioner(text["prompt_embeds"], text["t5_input_ids"], text["t5_attn_mask"], text["attn_mask"])
    mask = torch.zeros(1, 1, *latents.shape[-2:])
    answer = transformer(latents[:, :, None], times, context, padding_mask=mask, return_dict=False)[0][:, :, 0]
    (expected,) = torch.autograd.grad(answer.square().mean(), latents)
    torch.testing.assert_close(ours, answer, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


def test_a_block_of_full_width_equals_diffusers():
    from diffusers.models.transformers.transformer_cosmos import CosmosRotaryPosEmbed, CosmosTransformerBlock

    sizes = random.anima_shape(random.FULL, 8)
    assert sizes.axes == (44, 42, 42) and abs(sizes.theta - 42870.94) < 0.01
    with torch.device("meta"):
        block, theirs = Block(sizes), CosmosTransformerBlock(16, 128, 1024, adaln_lora_dim=256, qk_norm="rms_norm")
    wide.filled(block)
    inside = {new: old for old, new in keys.INSIDE.items()}
    named = {name.rpartition(".")[::2]: tensor for name, tensor in block.state_dict().items()}
    renamed = {f"{inside[path]}.{end}": tensor for (path, end), tensor in named.items()}
    theirs.load_state_dict(renamed, strict=True, assign=True)
    x, temb, shared, context = (torch.randn(1, *shape) for shape in ((6, 2048), (2048,), (6144,), (5, 1024)))
    model = torch.nn.Module()
    model.sizes, model._tables = sizes, random.Anima(random.anima_shape(random.TINY, 8))._tables
    pe = random.Anima.positions(model, 2, 3, torch.device("cpu"))
    rope = CosmosRotaryPosEmbed(128, (128, 240, 240), (1, 2, 2), rope_scale=(1.0, 4.0, 4.0))(
        torch.zeros(1, 16, 1, 4, 6)
    )
    with torch.no_grad():
        ours = block(x, temb, shared, context, pe)
        expected = theirs(x, context, temb[:, None], shared[:, None], rope)
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-4)


@pytest.fixture(scope="module")
def pipeline(own, theirs, files):
    """The blocks of diffusers' pipeline with the same weights in its own networks."""
    from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler
    from diffusers.modular_pipelines.anima.modular_blocks_anima import AnimaAutoBlocks

    encoder = alike.qwen3_of(files["text_encoder"], 48, 2)
    vae = AutoencoderKLQwenImage(
        base_dim=8,
        dim_mult=[1, 2, 2, 2],
        num_res_blocks=1,
    )
    stored = load_file(files["vae"])
    vae.load_state_dict(
        {new: stored[old] for new, old in qwen_vae_names.plain_qwen_vae_names(stored).items()}, strict=True
    )
    pipe = AnimaAutoBlocks().init_pipeline()
    words = own[1].tokenizers
    words["t5"].pad_token, words["text_encoder"].pad_token = "<pad>", "<|endoftext|>"
    pipe.update_components(
        text_encoder=encoder,
        tokenizer=words["text_encoder"],
        t5_tokenizer=words["t5"],
        vae=vae.eval(),
        transformer=theirs[0],
        text_conditioner=theirs[1],
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.mark.parametrize("caption", [CAPTIONS[1], ""])
def test_captions_are_encoded_as_the_pipeline_does(own, pipeline, theirs, caption):
    from diffusers.modular_pipelines.anima.encoders import AnimaTextEncoderStep

    with torch.no_grad():
        actual = own[0].text(own[1], [caption])
        context = own[1].denoiser.llm_adapter(*actual.values())
        encoded = AnimaTextEncoderStep.encode_prompt(pipeline, caption, prepare_unconditional_embeds=False)
        expected = theirs[1](
            encoded["qwen_prompt_embeds"],
            encoded["t5_input_ids"],
            encoded["t5_attention_mask"],
            encoded["qwen_attention_mask"],
        )
    assert actual["attn_mask"].sum() == encoded["qwen_attention_mask"].sum()
    torch.testing.assert_close(context, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("scale", "steps", "shift"), [(4.0, 3, None), (1.0, 2, 1.5)])
def test_a_preview_equals_the_pipelines_image(own, pipeline, scale, steps, shift):
    from diffusers import FlowMatchEulerDiscreteScheduler

    request = SampleRequest(CAPTIONS[1], "blurry", width=96, height=64, steps=steps, scale=scale, seed=5, shift=shift)
    pipeline.update_components(scheduler=FlowMatchEulerDiscreteScheduler(shift=shift or 3.0))
    pipeline.guider.guidance_scale = scale
    with torch.no_grad():
        sampler = own[0].sampler(own[1])
        ours = sampler.decoded(sampler.latents(request))
        theirs = pipeline(
            prompt=CAPTIONS[1],
            negative_prompt="blurry",
            height=64,
            width=96,
            num_inference_steps=steps,
            generator=torch.Generator().manual_seed(5),
            output_type="pt",
            output="images",
        )[0]
    assert ours.std() > 0.01
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_a_saved_model_has_the_names_of_its_file(files, own):
    stored = load_file(files["anima"])
    saved = own[0].export(own[1])
    assert saved.keys() == stored.keys() and all(torch.equal(saved[name], stored[name]) for name in stored)
    assert {"net.x_embedder.proj.1.weight", "net.t_embedder.1.linear_1.weight", "net.llm_adapter.norm.weight"} <= {
        *saved
    }


def test_six_rates_divide_the_weights_as_sd_scripts_does(own):
    anima = own[0]
    groups = {name: anima.rate_names[anima.learning_rate_block(name)] for name, _ in own[1].denoiser.named_parameters()}
    assert groups["blocks.0.mlp.layer1.weight"] == "mlp" and groups["blocks.0.cross_attn.q_norm.weight"] == "cross_attn"
    assert groups["llm_adapter.blocks.0.self_attn.q_proj.weight"] == groups["llm_adapter.embed.weight"] == "llm_adapter"
    assert groups["blocks.1.adaln_modulation_mlp.2.weight"] == groups["final_layer.adaln_modulation.1.weight"] == "mod"
    assert groups["x_embedder.proj.1.weight"] == groups["t_embedding_norm.weight"] == "base"
