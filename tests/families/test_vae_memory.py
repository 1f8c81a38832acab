"""Pictures that do not fit into memory at once are encoded and decoded in tiles, with the result of the whole."""

import functools
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.autoencoders.autoencoder_kl_flux2 import AutoencoderKLFlux2
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import AutoencoderKLQwenImage

from library.demo.small_model import SMALL_MODELS_FOLDER
from library.families.shared import autoencoder, vae_memory, vae_tiles
from library.families.shared.qwen_vae import ImageVAE
from library.families.shared.sampler import Sampler

HEIGHT, WIDTH = 192, 136
TILE = 32 * WIDTH * 24  # values; six tiles or more of all but the smallest layers
WIDTHS = (16, 32, 32, 32)
BLOCKS = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
BLOCKS |= {"block_out_channels": WIDTHS, "layers_per_block": 2, "norm_num_groups": 8}


def small_flux():
    return autoencoder.load_autoencoder(SMALL_MODELS_FOLDER / "flux" / "ae.safetensors", torch.float32, (1.0, 0.0))


def sdxl():
    return AutoencoderKL(latent_channels=4, **BLOCKS)


VAES: dict[str, Any] = {
    "trained": small_flux,
    "SDXL": sdxl,
    "FLUX.1": lambda: AutoencoderKL(latent_channels=16, use_quant_conv=False, use_post_quant_conv=False, **BLOCKS),
    "FLUX.2": lambda: AutoencoderKLFlux2(**BLOCKS),
    "Qwen-Image": lambda: ImageVAE(AutoencoderKLQwenImage(base_dim=8, dim_mult=[1, 2, 4, 4], num_res_blocks=2)),
}


@functools.cache
def vae_of(kind) -> Any:
    torch.manual_seed(0)
    return VAES[kind]().eval().requires_grad_(False)


def picture(height=HEIGHT, width=WIDTH, count=1):
    """Smooth above, noise below: the statistics of its tiles differ much from those of the whole."""
    torch.manual_seed(1)
    pixels = torch.linspace(-1, 1, height)[:, None].expand(count, 3, height, width).clone()
    pixels[:, :, height // 2 :] = torch.rand(count, 3, height - height // 2, width) * 2 - 1
    return pixels


def encoded(vae, pixels):
    return vae_memory._encode_whole(vae, pixels)


def decoded(vae, latents):
    return vae.decode(latents, return_dict=False)[0]


def latents_of(vae):
    values = encoded(vae, picture())
    return values if isinstance(vae, ImageVAE) else values.chunk(2, dim=1)[0]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(vae_tiles, "TILE_VALUES", TILE)
    monkeypatch.setattr(vae_memory, "SMALL", 0)
    vae_memory._did_not_fit.clear()


@pytest.mark.parametrize("kind", VAES)
def test_decoded_tiles_have_no_seams_and_the_pixels_of_the_whole(kind):
    vae = vae_of(kind)
    latents = latents_of(vae)
    whole, tiled = decoded(vae, latents), vae_tiles.decode_in_tiles(vae, latents)
    assert whole.shape == tiled.shape == (1, 3, HEIGHT, WIDTH) and whole.std() > 0.05
    assert_equal(whole, tiled, kind)
    steps = whole.diff(dim=-2), tiled.diff(dim=-2)  # from one row to the next, across all seams
    assert_equal(*steps, kind)


@pytest.mark.parametrize("kind", VAES)
def test_encoded_tiles_have_the_latents_of_the_whole(kind):
    vae = vae_of(kind)
    whole, tiled = encoded(vae, picture()), vae_tiles.encode_in_tiles(vae, picture())
    assert whole.shape == tiled.shape and whole.std() > 0.05
    assert_equal(whole, tiled, kind)


def assert_equal(whole, tiled, kind):
    """Within rounding of float32: the largest difference, and the mean. One grey level of 256 is 8e-3."""
    difference = (whole - tiled).abs()
    exact = kind == "Qwen-Image"  # its norms see one position, so not even the order of sums differs
    assert difference.max() <= (0 if exact else 1e-4) and difference.mean() <= (0 if exact else 5e-6)


@pytest.mark.parametrize("kind", ["SDXL", "FLUX.2"])
def test_norms_of_tiles_alone_would_show_seams(kind):
    """diffusers' own tiling, which blends tiles with norms of their own, is far outside of the bound above."""
    vae = vae_of(kind)
    latents = latents_of(vae)
    vae.tile_latent_min_size, vae.tile_sample_min_size = 8, 64
    whole, tiled = decoded(vae, latents), vae.tiled_decode(latents).sample
    assert (whole - tiled).abs().max() > 0.05


@pytest.mark.parametrize("kind", ["SDXL", "Qwen-Image"])
def test_16_bit_tiles_differ_from_the_whole_no_more_than_16_bits_do(kind):
    vae = VAES[kind]().eval().requires_grad_(False)
    latents = latents_of(vae)
    reference = decoded(vae, latents)
    vae.to(torch.bfloat16)
    whole, tiled = (run(vae, latents.bfloat16()).float() for run in (decoded, vae_tiles.decode_in_tiles))
    assert (tiled - reference).abs().mean() <= 1.1 * (whole - reference).abs().mean()


@pytest.mark.parametrize("kind", ["SDXL", "Qwen-Image"])
@pytest.mark.parametrize("run", [vae_tiles.decode_in_tiles, vae_tiles.encode_in_tiles])
def test_no_convolution_makes_more_than_a_tile(kind, run):
    vae, sizes = vae_of(kind), []
    hooks = [
        module.register_forward_hook(lambda _module, _input, output: sizes.append(output.numel()))
        for module in vae.modules()
        if isinstance(module, torch.nn.Conv2d | torch.nn.Conv3d)
    ]
    inputs = latents_of(vae) if run is vae_tiles.decode_in_tiles else picture()
    sizes.clear()
    run(vae, inputs)
    tiled = max(sizes)
    sizes.clear()
    (decoded if run is vae_tiles.decode_in_tiles else encoded)(vae, inputs)
    for hook in hooks:
        hook.remove()
    assert tiled < max(sizes) * (0.8 if kind == "Qwen-Image" else 0.4)  # the former reads more rows around a tile


@pytest.mark.parametrize("kind", ["SDXL", "Qwen-Image"])
def test_no_tile_waits_for_the_device(kind, monkeypatch):
    """On PyTorch's "meta" device, whatever the host wants to read fails."""
    monkeypatch.setattr(vae_tiles, "_empty", lambda shape, like, on_host: like.new_empty(shape))
    vae = VAES[kind]().to("meta")
    assert vae_tiles.decode_in_tiles(vae, latents_of(vae_of(kind)).to("meta")).shape == (1, 3, HEIGHT, WIDTH)
    assert vae_tiles.encode_in_tiles(vae, picture().to("meta")).shape == encoded(vae_of(kind), picture()).shape


def test_without_pinned_memory_activations_wait_in_any():
    like: Any = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float16)  # a build without CUDA cannot pin
    if not torch.cuda.is_available():
        assert not vae_tiles._empty((2, 3, 4), like, on_host=True).is_pinned()


# ---- running out of memory


class Short:
    """Raises the error of a GPU without memory for more than `room` values; calls the method with fewer."""

    def __init__(self, method, room):
        self.method, self.room, self.seen = method, room, []

    def __call__(self, values, *more, **named):
        self.seen.append(tuple(values.shape))
        if values.numel() > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self.method(values, *more, **named)


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.WARNING, logger=vae_memory.__name__)
    return lambda: [record.getMessage() for record in caplog.records if record.name == vae_memory.__name__]


def test_a_batch_that_does_not_fit_is_encoded_image_by_image(monkeypatch, log):
    vae, pixels = vae_of("SDXL"), picture(64, 64, count=3)
    short = Short(vae.encode, pixels[:1].numel())
    monkeypatch.setattr(vae, "encode", short)
    expected = torch.cat([encoded(vae, image) for image in pixels.split(1)])
    short.seen.clear()
    for _ in range(2):
        assert torch.equal(autoencoder.encode(vae, pixels).parameters, expected)
    # Only the first time tries all at once.
    assert [shape[0] for shape in short.seen] == [3, *[1] * 6]
    assert log() == ["memory is too short to encode images at once, so they are encoded image by image"]


@pytest.mark.parametrize("kind", ["SDXL", "Qwen-Image"])
def test_an_image_that_does_not_fit_is_encoded_in_tiles(kind, monkeypatch, log):
    vae, pixels = vae_of(kind), picture(count=2)
    whole = encoded(vae, pixels)
    short = Short(vae.encode, room=1000)
    monkeypatch.setattr(vae, "encode", short)
    for _ in range(2):
        assert torch.allclose(vae_memory.encode(vae, pixels), whole, atol=1e-4)
    assert [shape[0] for shape in short.seen] == [2, 1]  # at once, the first alone, then never again
    assert log() == ["memory is too short to encode images image by image, so they are encoded in tiles"]
    smaller = pixels[:1, :, :64, :64]
    vae_memory.encode(vae, smaller)
    assert short.seen[-1] == smaller.shape  # a smaller picture may fit


def test_a_small_image_that_does_not_fit_raises_and_so_does_any_other_error(monkeypatch, log):
    vae = vae_of("SDXL")
    monkeypatch.setattr(vae_memory, "SMALL", 512 * 512)
    monkeypatch.setattr(vae, "encode", Short(vae.encode, room=0))
    with pytest.raises(torch.OutOfMemoryError):
        vae_memory.encode(vae, picture())
    monkeypatch.setattr(vae, "encode", lambda _: (_ for _ in ()).throw(RuntimeError("broken")))
    with pytest.raises(RuntimeError, match="broken"):
        vae_memory.encode(vae, picture(count=2))
    assert not log()


class Plain(Sampler):
    def latents(self, request):
        raise NotImplementedError

    def decoder_input(self, latents):
        return latents

    def is_guided(self, request):
        return False


def sampler_of(vae):
    components: Any = SimpleNamespace(vae=vae)
    return Plain(SimpleNamespace(sample_multiple=16), components)


@pytest.mark.parametrize("kind", ["SDXL", "Qwen-Image"])
def test_a_sample_that_does_not_fit_is_decoded_in_tiles(kind, monkeypatch):
    vae = vae_of(kind)
    latents, fits = latents_of(vae), sampler_of(vae)
    whole = fits.decoded(latents)
    short = sampler_of(vae)
    monkeypatch.setattr(vae, "decode", Short(vae.decode, room=0))
    assert torch.allclose(short.decoded(latents), whole, atol=1e-4)
    assert (fits.decoded_by, short.decoded_by) == ("", "tiles")


def test_without_memory_for_a_tile_the_cpu_decodes_and_the_last_error_is_raised(monkeypatch):
    vae, calls = vae_of("SDXL"), []

    def tiled(_vae, latents):
        calls.append(latents.device)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(vae, "decode", Short(vae.decode, room=0))
    monkeypatch.setattr(vae_tiles, "decode_in_tiles", tiled)
    sampler = sampler_of(vae)
    with pytest.raises(torch.OutOfMemoryError):
        sampler.decoded(torch.zeros(1, 4, 16, 16))
    assert len(calls) == 2  # on the device, then on the CPU
    monkeypatch.setattr(vae, "decode", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("broken")))
    with pytest.raises(RuntimeError, match="broken"):
        sampler.decoded(torch.zeros(1, 4, 16, 16))
    assert len(calls) == 2
