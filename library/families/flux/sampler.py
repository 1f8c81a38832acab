"""Preview images of FLUX.1: Euler steps along the straight path, from seeded noise to an image."""

import secrets
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from library.families.base import Parts
from library.families.flux import packing
from library.objectives import flow

SIDE = 16  # pixels of one token


class Preview:
    """Draws images with a training's parts, where they are and in the mode they are in.

    The caller sets evaluation mode, autocast and devices, so that compiled graphs are reused rather than made again.
    No random state but its own generator's is touched.
    """

    def __init__(self, family: Any, parts: Parts):
        self.family, self.parts = family, parts
        self._known: dict[tuple[str, str], dict[str, Tensor]] = {}

    @property
    def denoiser(self) -> Any:
        """The network itself: a distributed wrapper would wait for the other processes."""
        return getattr(self.parts.denoiser, "module", self.parts.denoiser)

    def remember(self, prompts: Iterable[tuple[str, str]]) -> None:
        """Encode pairs of prompt and negative prompt now, for when the text encoders will have left."""
        with torch.no_grad():
            for prompt, negative in prompts:
                said = self.family.text(self.parts, [negative, prompt])
                self._known[prompt, negative] = {name: tensor.cpu() for name, tensor in said.items()}

    @torch.no_grad()
    def __call__(  # noqa: PLR0913 - what a prompt line may say
        self,
        prompt: str,
        negative: str | None = None,
        width: int = 512,
        height: int = 512,
        steps: int = 20,
        scale: float = 1.0,
        guidance: float = 3.5,
        seed: int | None = None,
        sampler_name: str | None = None,
    ) -> Any:
        """Draw one image, a PIL.Image. Sizes are cut to multiples of 16, at least 64; a seed of None is a new one.

        With a `scale` other than 1 the negative prompt is steered away from, both in one batch. FLUX.1 has one sampler,
        whatever `sampler_name` says.
        """
        height, width = (max(64, side // SIDE * SIDE) // SIDE for side in (height, width))
        text = self.text(prompt, negative or "", guided=scale != 1.0)
        seed = secrets.randbelow(2**32) if seed is None else seed
        tokens = self.drawn(text, (height, width), steps, scale, guidance, seed)
        return image(self.decoded(packing.unpack(tokens, height, width)))

    def text(self, prompt: str, negative: str, guided: bool) -> dict[str, Tensor]:
        """The text of [negative, prompt], or of the prompt alone when nothing is steered away from."""
        said = self._known.get((prompt, negative))
        if said is None:
            said = self.family.text(self.parts, [negative, prompt])
        device = self.denoiser.img_in.weight.device
        return {name: tensor[0 if guided else 1 :].to(device) for name, tensor in said.items()}

    def drawn(  # noqa: PLR0913 - one value of a prompt line each
        self, text: dict[str, Tensor], size: tuple[int, int], steps: int, scale: float, guidance: float, seed: int
    ) -> Tensor:
        """Denoise seeded noise; `size` counts tokens. Returns packed latents, float32 [1, h * w, 4 C]."""
        model = self.denoiser
        count, device = len(text["l_pooled"]), model.img_in.weight.device
        generator = torch.Generator().manual_seed(seed)  # on the host: the same image on every machine
        tokens = torch.randn(1, size[0] * size[1], model.sizes.in_channels, generator=generator).to(device)
        fixed = self.family.conditions(text, size, device) | {"guidance": torch.full((count,), guidance, device=device)}
        sigmas = flow.schedule(steps, size[0] * size[1], shift=model.sizes.guidance)
        for now, after in zip(sigmas, sigmas[1:], strict=False):
            times = torch.full((count,), now, device=device)
            velocity = model(img=tokens.expand(count, -1, -1), timesteps=times, **fixed).float()
            if count == 2:
                velocity = velocity[:1] + (velocity[1:] - velocity[:1]) * scale
            tokens = tokens + (after - now) * velocity
        return tokens

    def decoded(self, latents: Tensor) -> Tensor:
        """Latents in the cache's convention -> pixels [3, H, W] in [0, 1]; the autoencoder comes here and goes back."""
        vae = self.parts.vae
        first = next(vae.parameters())
        home, dtype = first.device, first.dtype
        vae.to(latents.device)
        with torch.autocast(latents.device.type, enabled=False):
            raw = latents / self.family.scale + self.family.shift
            pixels = vae.decode(raw.to(dtype), return_dict=False)[0]
        vae.to(home)
        return (pixels[0].float() / 2 + 0.5).clamp(0, 1)


def image(pixels: Tensor) -> Any:
    """Pixels [3, H, W] in [0, 1] -> PIL.Image."""
    from PIL import Image

    return Image.fromarray((pixels * 255).round().to(torch.uint8).permute(1, 2, 0).cpu().numpy())
