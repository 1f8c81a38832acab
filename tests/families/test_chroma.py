"""Chroma: FLUX.1's blocks, steered by an approximator and by words that are masked, against diffusers' model of it."""

import shutil

import pytest
import torch

from library.config import ineffective
from library.config.problems import ConfigError
from library.families import recognition
from library.families.base import SampleRequest
from library.families.flux import random
from library.families.flux.model import Flux, Sizes
from library.families.shared import t5
from tests import double_stream, flux_files
from tests.families import test_flux_model as flux_model
from tests.families import wide
from tests.families.flux import family, step
from tests.families.test_flux_files import same

MODEL = "pretrained_model_name_or_path"
SIZES = flux_model.sizes(guidance=False, vector_channels=0, approximator=(64, 32, 2))


def oracle(model):
    diffusers = pytest.importorskip("diffusers")
    config = flux_files.diffusers_config(model.state_dict())
    other = getattr(diffusers, config.pop("_class_name"))(**config)
    other.load_state_dict(double_stream.flux_to_diffusers(model.state_dict()), strict=True)
    other.distilled_guidance_layer.requires_grad_(False)
    return other


def test_outputs_and_gradients_equal_those_of_diffusers():
    """Its mask has to be given as booleans: as numbers, which its pipeline gives, they are added to the scores."""
    ours = flux_model.made(SIZES)
    theirs = oracle(ours)
    mine, other = ({**flux_model.inputs(ours.sizes), "y": None} for _ in range(2))
    for inputs in (mine, other):
        inputs["img"].requires_grad_(), inputs["txt"].requires_grad_()
    text_mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    out = ours(**mine, txt_attention_mask=text_mask)
    expected = theirs(
        hidden_states=other["img"],
        encoder_hidden_states=other["txt"],
        timestep=other["timesteps"],
        img_ids=other["img_ids"],
        txt_ids=other["txt_ids"],
        attention_mask=ours.joint_mask(text_mask, mine["img"]),
        return_dict=False,
    )[0]
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    (out * direction).sum().backward()
    (expected * direction).sum().backward()
    for name in ("img", "txt"):
        torch.testing.assert_close(mine[name].grad, other[name].grad, rtol=1e-3, atol=1e-4, msg=name)
    zeros = {name: torch.zeros_like(p) for name, p in theirs.named_parameters()}
    grads = {name: zeros[name] if p.grad is None else p.grad for name, p in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        if name.startswith("distilled_guidance_layer."):
            assert parameter.grad is None
        else:
            torch.testing.assert_close(
                parameter.grad, double_stream.flux_to_bfl(grads)[name], rtol=1e-3, atol=1e-4, msg=name
            )


def test_full_size_has_the_parameters_of_chroma1():
    full = Sizes(64, 64, 0, 4096, 3072, 128, 12288, 19, 38, False, (64, 5120, 5))
    with torch.device("meta"):
        model = Flux(full)
    assert sum(p.numel() for p in model.parameters()) == 8_899_983_424
    assert Sizes.of({name: tuple(t.shape) for name, t in model.state_dict().items()}) == full
    layers = [path for path, m in model.named_modules() if "_blocks." in path and isinstance(m, torch.nn.Linear)]
    assert len(layers) == 228 and not any("mod" in path for path in layers)


@pytest.fixture(scope="module")
def chroma(files, tmp_path_factory):
    paths = random.write_random_model(tmp_path_factory.mktemp("chroma"), sizes=random.VARIANTS["chroma"])
    return {**paths, "clip_l": None}


def chroma_family(chroma, **values):
    return family(chroma, **{"model_type": "chroma", "apply_t5_attn_mask": True, **values})


def test_every_layout_loads_alike_without_clip(chroma, tmp_path):
    tensors = flux_files.load(chroma["flux"])
    prefixed = {f"model.diffusion_model.{name}": tensor for name, tensor in tensors.items()}
    for path in (
        chroma["flux"],
        flux_files.save(prefixed, tmp_path / "prefixed.safetensors"),
        flux_files.write_diffusers(chroma["flux"], tmp_path / "folder"),
    ):
        model = chroma_family(chroma, pretrained_model_name_or_path=path)
        assert not list(model.problems())
        parts = model.load(torch.float32)
        assert set(parts.encoders) == {"t5xxl"}
        same(parts.denoiser.state_dict(), {name: tensor.float() for name, tensor in tensors.items()})
    assert (model.architecture, model.base_model_version, model.text_length) == ("chroma", "chroma", 512)
    description = recognition.recognise_file(chroma["flux"])
    assert description[:2] == ("flux", "a Chroma transformer") and description.options["model_type"] == "chroma"


def test_a_whole_diffusers_folder_has_t5_where_flux_has_clip(chroma, tmp_path):
    whole = flux_files.write_diffusers(chroma["flux"], tmp_path).parent
    parts = chroma_family(chroma).load(torch.float32)
    parts.encoders["t5xxl"].save_pretrained(whole / "text_encoder")
    parts.vae.save_pretrained(whole / "vae")
    shutil.copytree(chroma["tokenizer"], whole / "tokenizer")
    model = chroma_family(chroma, pretrained_model_name_or_path=whole, t5xxl=None, ae=None)
    assert not list(model.problems())
    assert recognition.recognise_file(whole)[0] == "flux"
    same(model.load(torch.float32).encoders["t5xxl"].state_dict(), parts.encoders["t5xxl"].state_dict())


def test_what_is_wrong_is_reported_before_loading(files, chroma, tmp_path):
    """Another relative's file, with the value that fits; what is no relative; a file that ends too soon."""
    (problem,) = chroma_family(chroma, pretrained_model_name_or_path=files["flux"]).problems()
    assert "is a FLUX.1 transformer: use model_type = flux" in str(problem) and problem.fix == {"model_type": "flux"}
    (problem,) = family(files, pretrained_model_name_or_path=chroma["flux"]).problems()
    assert "is a Chroma transformer: use model_type = chroma" in str(problem) and problem.fix == {
        "model_type": "chroma"
    }
    pixels = flux_files.load(chroma["flux"]) | {"nerf_image_embedder.embedder.0.weight": torch.zeros(64, 67)}
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(chroma["flux"].read_bytes()[:-100])
    for option, path, words in (
        (
            MODEL,
            flux_files.save(pixels, tmp_path / "radiance.safetensors"),
            "is Chroma Radiance, which works on pixels",
        ),
        (MODEL, cut, "was cut short"),
        (MODEL, chroma["t5xxl"], "is a T5 text encoder; expected a Chroma transformer (Chroma1-HD.safetensors"),
        ("t5xxl", files["clip_l"], "is a CLIP text encoder; expected the T5-XXL text encoder"),
        ("ae", chroma["t5xxl"], "is a T5 text encoder; expected the FLUX.1 autoencoder"),
    ):
        (problem,) = chroma_family(chroma, **{option: path}).problems()
        assert words in str(problem) and problem.option == option
    with pytest.raises(ConfigError, match="apply_t5_attn_mask must be on with model_type = chroma"):
        chroma_family(chroma, apply_t5_attn_mask=False)
    idle_options = ineffective.ineffective_options(
        chroma_family(chroma, clip_l=files["clip_l"], guidance_scale=1.0).config
    )
    assert str(idle_options["clip_l"]) == "there is no CLIP-L in Chroma"
    assert str(idle_options["guidance_scale"]) == "there is no guidance in Chroma"
    assert not {"guidance_scale", "clip_l"} & ineffective.ineffective_options(family(files).config).keys()


def test_the_words_and_one_token_of_padding_are_seen(chroma):
    """What T5 makes of padding does not reach the answer, but for one token; cut lengths keep that one."""
    model = chroma_family(chroma, t5xxl_max_token_length=16)
    parts = model.load(torch.float32)
    noised, text = step(model, parts, ("red", "a blue square"))
    assert set(text) == set(model.text_cache.keys) and not text["l_pooled"].any()
    lengths = text["t5_attn_mask"].sum(1).tolist()
    mask = model.conditions(text, (4, 6), torch.device("cpu"))["txt_attention_mask"]
    assert mask.sum(1).tolist() == [length + 1 for length in lengths]
    expected = model.predict(parts.denoiser, noised, text, None)
    for at, alike in ((lengths[0], False), (lengths[0] + 1, True)):
        other = text["t5_out"].clone()
        other[0, at] += 1
        answer = model.predict(parts.denoiser, noised, text | {"t5_out": other}, None)
        assert torch.allclose(answer, expected, atol=1e-6) == alike
    long = chroma_family(chroma, t5xxl_train_length="longest", cache_text_encoder_outputs=True)
    words = " ".join(["a"] * 62)
    count = int(t5.t5_tokens(parts.tokenizers["t5xxl"], [words], 512)[1].sum())
    words += " a" * (64 - count)  # exactly as many tokens as a length of text may have
    assert long.train_text_length(parts, [words]) == 128


def test_previews_equal_the_diffusers_pipeline(chroma):
    """With the mask that the pipeline means: see the test of the outputs."""
    import diffusers

    model = chroma_family(chroma, t5xxl_max_token_length=16)
    parts = model.load(torch.float32)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15, base_image_seq_len=256, max_image_seq_len=4096
    )
    pipeline = diffusers.ChromaPipeline(scheduler, parts.vae, None, None, oracle(parts.denoiser))
    pipeline.set_progress_bar_config(disable=True)
    pipeline._prepare_attention_mask = lambda batch_size, sequence_length, dtype, attention_mask: torch.cat(
        [attention_mask.bool(), torch.ones(batch_size, sequence_length, dtype=torch.bool)], dim=1
    )
    sampler = model.sampler(parts)
    request = SampleRequest("a red circle", "blurred", 96, 64, steps=4, scale=4.0, seed=3)
    with torch.no_grad():
        text = sampler.text([request], torch.device("cpu"))
        masks = model.conditions(text, (4, 6), torch.device("cpu"))["txt_attention_mask"]
        ours = sampler.denoised([request], text, (4, 6))
        theirs = pipeline(
            prompt_embeds=text["t5_out"][1:],
            prompt_attention_mask=masks[1:],
            negative_prompt_embeds=text["t5_out"][:1],
            negative_prompt_attention_mask=masks[:1],
            latents=torch.randn(1, 24, 64, generator=torch.Generator().manual_seed(3)),
            height=64,
            width=96,
            num_inference_steps=4,
            guidance_scale=4.0,
            output_type="latent",
        ).images
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    assert (model.sample_defaults["sample_steps"], model.sample_defaults["scale"]) == (25, 4.0)


def test_blocks_of_full_width_answer_as_diffusers_do():
    """One of each kind, 3072 wide with heads of 128, where tests elsewhere have 64 and 32."""
    import diffusers

    torch.manual_seed(0)
    with torch.device("meta"):
        ours = Flux(Sizes(64, 64, 0, 32, 3072, 128, 12288, 1, 1, False, (64, 64, 1)))
        config = flux_files.diffusers_config(ours.state_dict())
        theirs = getattr(diffusers, config.pop("_class_name"))(**config)
    wide.filled(ours)
    theirs.load_state_dict(double_stream.flux_to_diffusers(ours.state_dict()), assign=True)
    made = diffusers.models.transformers.transformer_chroma.ChromaCombinedTimestepTextProjEmbeddings(16, 17)
    theirs.time_text_embed = made  # its table is no weight, and was left on the meta device
    inputs = flux_model.inputs(ours.sizes, 2, 3, 4, batch=1)
    with torch.no_grad():
        out = ours(**{**inputs, "y": None})
        expected = theirs(inputs["img"], inputs["txt"], inputs["timesteps"], inputs["img_ids"], inputs["txt_ids"])[0]
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-4)
