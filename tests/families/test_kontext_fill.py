"""Kontext and Fill against diffusers: the same transformer input, the same answer and gradients, the same preview."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from library.families.base import SampleRequest
from library.families.flux import control_tokens, random
from library.families.flux.facts import FACTS
from library.families.shared import packing
from tests import double_stream, flux_files
from tests.families import flux
from tests.families.flux import family
from tests.families.flux import files as files  # noqa: PLC0414 - a fixture

SMALL = {"t5xxl_max_token_length": 16}


@pytest.fixture(scope="module")
def fill_files(files, tmp_path_factory):
    """The tiny FLUX.1 with a transformer that reads 384 channels."""
    place = tmp_path_factory.mktemp("fill")
    denoiser = random.make_networks(random.VARIANTS["fill"]).denoiser()
    shapes = [(name, tuple(tensor.shape)) for name, tensor in denoiser.state_dict().items()]
    tensors = random.random_networks.random_weights(shapes, 5, torch.bfloat16)
    save_file(tensors, place / "flux1-fill.safetensors")
    return {**files, "flux": place / "flux1-fill.safetensors"}


@pytest.fixture(scope="module")
def kontext(files):
    of = family(files, model_type="kontext", **SMALL)
    return of, of.load(torch.float32)


@pytest.fixture(scope="module")
def fill(fill_files):
    of = family(fill_files, model_type="fill", **SMALL)
    return of, of.load(torch.float32)


def picture(size, seed=0):
    coarse = np.random.default_rng(seed).integers(0, 255, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)


def pipeline(cls, of, parts):
    """A diffusers pipeline with our weights; what its transformer is called with is kept in `calls`."""
    import diffusers

    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15, base_image_seq_len=256, max_image_seq_len=4096
    )
    config = flux_files.diffusers_config(parts.denoiser.state_dict())
    config.pop("_class_name")
    config["out_channels"] = parts.denoiser.sizes.out_channels
    transformer = diffusers.FluxTransformer2DModel(**config)
    transformer.load_state_dict(double_stream.flux_to_diffusers(parts.denoiser.state_dict()))
    pipe = getattr(diffusers, cls)(
        scheduler=scheduler,
        vae=parts.vae,
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        transformer=transformer,
    )
    pipe.set_progress_bar_config(disable=True)
    pipe.calls = []
    transformer.register_forward_pre_hook(lambda _, __, inputs: pipe.calls.append(inputs), with_kwargs=True)
    return pipe


def noise(width, height, seed=3):
    return torch.randn(1, width * height // 256, 64, generator=torch.Generator().manual_seed(seed))


def both(of, parts, cls, request, **given):
    """Our packed preview and the pipeline's, for the same noise."""
    theirs = pipeline(cls, of, parts)
    with torch.no_grad():
        text = of.text(parts, ["a red circle"])
        sampler = of.sampler(parts)
        controls = sampler.controls(request, torch.device("cpu"))
        ours = sampler.denoised([request], text, (request.height // 16, request.width // 16), controls)
        answer = theirs(
            prompt_embeds=text["t5_out"],
            pooled_prompt_embeds=text["l_pooled"],
            latents=noise(request.width, request.height),
            height=request.height,
            width=request.width,
            num_inference_steps=request.steps,
            guidance_scale=request.guidance,
            output_type="latent",
            **given,
        ).images
    torch.testing.assert_close(ours, answer, rtol=1e-3, atol=1e-3)
    return theirs, controls, text


def caught(parts, call):
    """What our denoiser is called with."""
    arguments = {}
    hook = parts.denoiser.register_forward_pre_hook(lambda _, __, inputs: arguments.update(inputs), with_kwargs=True)
    try:
        answer = call()
    finally:
        hook.remove()
    return arguments, answer


def same_step(of, parts, theirs, controls, text, size):
    """A training step hands our denoiser what the pipeline handed theirs; answers and gradients are equal."""
    first = theirs.calls[0]
    parts.denoiser.requires_grad_(True)
    latents = random_latents(size)
    noised = of.noised(latents, torch.Generator().manual_seed(0), torch.tensor([0.6]))
    model_inputs, ours = caught(parts, lambda: of.predict(parts.denoiser, noised, text, torch.ones(1, 6), controls))
    inputs = first["hidden_states"].shape
    assert model_inputs["img"].shape == inputs and torch.equal(model_inputs["img_ids"], first["img_ids"])
    tokens = size[0] * size[1] // 256
    torch.testing.assert_close(
        model_inputs["img"][:, tokens:], first["hidden_states"][:, tokens:], atol=2e-3, rtol=2e-3
    )
    torch.testing.assert_close(model_inputs["img"][..., 64:], first["hidden_states"][..., 64:], atol=2e-3, rtol=2e-3)

    model = theirs.transformer
    answer = model(
        **{**first, "hidden_states": model_inputs["img"], "timestep": noised.timesteps, "return_dict": False}
    )[0][:, :tokens]
    height, width = size[1] // 16, size[0] // 16
    expected = packing.unpack(answer, height, width)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    ours.square().mean().backward()
    expected.square().mean().backward()
    gradients = {name: p.grad for name, p in parts.denoiser.named_parameters() if p.grad is not None}
    theirs_by_name = double_stream.flux_to_bfl(
        {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in model.named_parameters()}
    )
    parts.denoiser.zero_grad()
    assert len(gradients) == len(theirs_by_name)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, theirs_by_name[name], rtol=2e-3, atol=1e-6)


def random_latents(size):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(1, 16, size[1] // 8, size[0] // 8, generator=generator)


def test_kontext_reads_and_samples_what_the_diffusers_pipeline_does(kontext, monkeypatch):
    of, parts = kontext
    of.config = replace(of.config, model=replace(of.config.model, guidance_scale=2.5))
    reference = picture((96, 64))
    monkeypatch.setattr(control_tokens, "reference_size", lambda size, area: size)  # as with _auto_resize = False
    request = SampleRequest("", width=96, height=64, steps=3, scale=1.0, guidance=2.5, seed=3, controls=(reference,))
    theirs, controls, text = both(
        of, parts, "FluxKontextPipeline", request, image=reference, _auto_resize=False, max_area=96 * 64
    )
    assert theirs.calls[0]["hidden_states"].shape[1] == 2 * 24
    same_step(of, parts, theirs, controls, text, (96, 64))


def test_references_of_another_size_have_positions_of_their_own(kontext):
    of, parts = kontext
    small, other = random_latents((96, 64)), random_latents((48, 80))
    noised = of.noised(small, torch.Generator().manual_seed(0), torch.tensor([0.6]))
    with torch.no_grad():
        text = of.text(parts, ["a red circle"])
        inputs, answer = caught(
            parts, lambda: of.predict(parts.denoiser, noised, text, torch.ones(1, 6), [other, other.flip(-1)])
        )
        again = of.predict(parts.denoiser, noised, text, torch.ones(1, 6), [other.flip(-1), other])
    assert answer.shape == small.shape and not torch.allclose(answer, again)
    ids = inputs["img_ids"]
    assert [len(ids[ids[:, 0] == number]) for number in (0, 1, 2)] == [24, 15, 15]
    assert ids[24:39, 1:].amax(0).tolist() == [4, 2] and ids[24].tolist() == [1, 0, 0]


def test_sizes_of_references_are_kontexts_own_at_a_megapixel():
    from diffusers.pipelines.flux.pipeline_flux_kontext import PREFERRED_KONTEXT_RESOLUTIONS

    assert set(control_tokens.KONTEXT_SHAPES) == set(PREFERRED_KONTEXT_RESOLUTIONS)
    assert control_tokens.reference_size((3000, 2000), 1024 * 1024) == (1248, 832)
    assert control_tokens.reference_size((500, 500), 512 * 512) == (512, 512)
    assert control_tokens.reference_size((640, 960), 512 * 512) == (416, 624)


def test_fill_reads_and_samples_what_the_diffusers_pipeline_does(fill, monkeypatch):
    from diffusers.models.autoencoders import vae

    monkeypatch.setattr(vae.DiagonalGaussianDistribution, "sample", lambda self, generator=None: self.mode())
    of, parts = fill
    of.config = replace(of.config, model=replace(of.config.model, guidance_scale=30.0))
    image, mask = picture((96, 64)), Image.new("L", (96, 64))
    mask.paste(255, (16, 8, 60, 40))
    request = SampleRequest(
        "", width=96, height=64, steps=3, scale=1.0, guidance=30.0, seed=3, controls=(image,), mask=mask
    )
    torch.manual_seed(0)
    theirs, controls, text = both(of, parts, "FluxFillPipeline", request, image=image, mask_image=mask)
    assert theirs.calls[0]["hidden_states"].shape == (1, 24, 384)
    assert torch.equal(theirs.calls[0]["hidden_states"][..., 128:], control_tokens.packed(controls, True)[0][..., 64:])
    same_step(of, parts, theirs, controls, text, (96, 64))
    assert of.sampler(parts)(replace(request, controls=(), mask=None)).size == (96, 64), "everything is painted"


def test_previews_show_their_reference(kontext):
    of, parts = kontext
    sampler = of.sampler(parts)
    request = SampleRequest("a red circle", "blurry", 96, 64, 2, 2.0, 2.5, 7, controls=(picture((50, 30)),))
    first = sampler(request)
    assert first.size == (96, 64) and sampler(request).tobytes() == first.tobytes()
    assert sampler(replace(request, controls=(picture((50, 30), 1),))).tobytes() != first.tobytes()
    assert sampler(replace(request, controls=())).tobytes() != first.tobytes()


def wrong(files, **values):
    return " / ".join(map(str, family(files, **SMALL, **values).problems()))


def test_files_say_which_relative_they_are_or_the_user_does(files, fill_files, tmp_path):
    assert FACTS.recognise(_header(fill_files["flux"])) == "a FLUX.1 Fill transformer"
    assert "is a FLUX.1 Fill transformer: use model_type = fill" in wrong(fill_files)
    assert "is a FLUX.1 transformer: use model_type = flux" in wrong(files, model_type="fill")
    assert not wrong(files, model_type="kontext") and not wrong(fill_files, model_type="fill")
    folder = flux_files.write_diffusers(fill_files["flux"], tmp_path / "whole")
    assert FACTS.recognise(_header(next(folder.glob("*.safetensors")), folder)).startswith("a FLUX.1 Fill transformer")

    depth = flux.random.make_networks(replace(random.TINY, inputs=2)).denoiser()
    shapes = {name: tuple(tensor.shape) for name, tensor in depth.state_dict().items()}
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "flux1-depth.safetensors")
    said = wrong({**files, "flux": tmp_path / "flux1-depth.safetensors"}, model_type="fill")
    assert "takes 128 channels (Depth, Canny), which is not trained here" in said


def _header(path, folder=None):
    from library.families.shared import weights

    if folder is None:
        return weights.header(path)
    return {
        name: shape for file in sorted(folder.glob("*.safetensors")) for name, shape in weights.header(file).items()
    }


def test_a_file_that_is_called_kontext_is_reported_and_not_guessed(files, tmp_path):
    path = tmp_path / "flux1-kontext-dev.safetensors"
    path.write_bytes(files["flux"].read_bytes())
    of = family({**files, "flux": path}, **SMALL)
    assert not list(of.problems())
    (note,) = (note for note in of.notes() if note.option == "model_type")
    assert note.fix == {"model_type": "kontext"} and "Kontext" in str(note)
    assert not list(family({**files, "flux": path}, model_type="kontext", **SMALL).notes())


def test_caches_of_kontext_are_musubi_tuners(files):
    of = family(files, model_type="kontext", **SMALL)
    assert (of.latent_cache.suffix, of.text_cache.suffix) == ("_fk.safetensors", "_fk_te.safetensors")
    assert of.text_cache.names == {"t5_out": "t5_vec", "l_pooled": "clip_l_pooler"}
    assert of.text_cache.keys == ("l_pooled", "t5_out") and of.text_lengths == {"t5_out": 16}
    assert (of.base_model_version, of.architecture) == ("flux_kontext", "flux-1-dev")
    masked = family(files, model_type="kontext", apply_t5_attn_mask=True, **SMALL)
    assert masked.text_cache.keys == ("l_pooled", "t5_out", "t5_attn_mask")
    assert family(files, model_type="fill", **SMALL).latent_cache.suffix == "_flux.npz"
