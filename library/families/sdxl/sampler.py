"""Sample images of SDXL with the parts of a training, without a pipeline and without touching global random state."""

import inspect
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from library.config.schema import ConfigError
from library.families.base import Noised, Parts
from library.families.sdxl import conditions
from library.objectives import diffusion

LONGEST = 3  # chunks of 75 tokens that a prompt may have
# --sample_sampler -> the scheduler's class in diffusers, and what differs from its defaults.
SAMPLERS: dict[str, tuple[str, dict]] = {
    "ddim": ("DDIMScheduler", {}),
    "pndm": ("PNDMScheduler", {"skip_prk_steps": True}),
    "lms": ("LMSDiscreteScheduler", {}),
    "euler": ("EulerDiscreteScheduler", {}),
    "euler_a": ("EulerAncestralDiscreteScheduler", {}),
    "heun": ("HeunDiscreteScheduler", {}),
    "dpm_2": ("KDPM2DiscreteScheduler", {}),
    "dpm_2_a": ("KDPM2AncestralDiscreteScheduler", {}),
    "dpmsolver": ("DPMSolverMultistepScheduler", {"algorithm_type": "dpmsolver", "final_sigmas_type": "sigma_min"}),
    "dpmsolver++": ("DPMSolverMultistepScheduler", {"algorithm_type": "dpmsolver++"}),
    "dpmsingle": ("DPMSolverSinglestepScheduler", {"lower_order_final": True}),
}
SAMPLERS |= {f"k_{name}": SAMPLERS[name] for name in ("lms", "euler", "euler_a", "dpm_2", "dpm_2_a")}


@dataclass(frozen=True)
class Wish:
    """One image to draw. Sizes are cut to multiples of 8, at least 64; a seed of None is a new one each time."""

    prompt: str
    negative: str = ""
    width: int = 512
    height: int = 512
    steps: int = 30
    scale: float = 7.5  # classifier-free guidance; 1 draws without the negative prompt
    guidance: float | None = None  # FLUX only
    seed: int | None = None
    sampler_name: str | None = None

    def size(self) -> tuple[int, int]:
        """Height and width that the VAE can have."""
        return max(64, self.height // 8 * 8), max(64, self.width // 8 * 8)


def scheduler(name: str | None, v_prediction: bool) -> Any:
    """A diffusers scheduler on the schedule of the training. Latents are not clipped to [-1, 1]: they exceed it."""
    import diffusers

    if (name or "ddim") not in SAMPLERS:
        raise ConfigError(f"sample_sampler: {name!r} is not one of {', '.join(SAMPLERS)}")
    kind, changes = SAMPLERS[name or "ddim"]
    cls = _lms() if kind == "LMSDiscreteScheduler" else getattr(diffusers, kind)
    options = {
        "num_train_timesteps": diffusion.STEPS,
        "beta_start": diffusion.BETA_START,
        "beta_end": diffusion.BETA_END,
        "beta_schedule": "scaled_linear",
        "prediction_type": "v_prediction" if v_prediction else "epsilon",
        "clip_sample": False,
    }
    known = inspect.signature(cls.__init__).parameters
    return cls(**{name: value for name, value in (options | changes).items() if name in known})


def _lms() -> type:
    """LMS with its coefficients integrated exactly: they are polynomials, so scipy is not needed for them."""
    from diffusers.schedulers.scheduling_lms_discrete import LMSDiscreteScheduler
    from numpy.polynomial import Polynomial

    class Lms(LMSDiscreteScheduler):
        def get_lms_coefficient(self, order: int, t: int, current_order: int) -> float:
            sigmas = [float(s) for s in self.sigmas]
            product = Polynomial([1.0])
            for k in range(order):
                if k != current_order:
                    gap = sigmas[t - current_order] - sigmas[t - k]
                    product = product * Polynomial([-sigmas[t - k] / gap, 1.0 / gap])
            whole = product.integ()
            return whole(sigmas[t + 1]) - whole(sigmas[t])

    return Lms


class Preview:
    """Draws images with a training's parts, where they are and in the mode they are in.

    The caller sets evaluation mode and autocast, so that compiled graphs are reused rather than made again.
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
        for prompt, negative in prompts:
            said = conditions.for_prompts(self.parts, [negative, prompt], LONGEST)
            self._known[prompt, negative] = {name: tensor.cpu() for name, tensor in said.items()}

    def __call__(self, *wish: Any, **wishes: Any) -> Any:
        """Draw one image, a PIL.Image; the arguments are the fields of Wish, in order or by name."""
        with torch.no_grad():
            latents = self.latents(Wish(*wish, **wishes))
            pixels = self.decoded(latents)
        return _image(pixels)

    def latents(self, wish: Wish) -> Tensor:
        """Denoise from seeded noise, both prompts in one batch; float32 [1, 4, h, w] in the model's units."""
        denoiser = self.denoiser
        device = denoiser.conv_in.weight.device
        generator = torch.Generator().manual_seed(secrets.randbelow(2**32) if wish.seed is None else wish.seed)
        height, width = wish.size()
        text = self.text(wish, device)
        sizes = torch.tensor([[height, width, 0, 0, height, width]], dtype=torch.float32, device=device)
        steps = scheduler(wish.sampler_name, self.family.config.model.v_parameterization)
        steps.set_timesteps(wish.steps, device=device)
        channels = denoiser.config.in_channels
        latents = torch.randn((1, channels, height // 8, width // 8), generator=generator).to(device)
        latents = latents * steps.init_noise_sigma
        extra = {"generator": generator} if "generator" in inspect.signature(steps.step).parameters else {}
        for t in steps.timesteps:
            answer = self.answer(steps.scale_model_input(latents, t), t, text, sizes)
            if len(answer) == 2:
                answer = answer[:1] + (answer[1:] - answer[:1]) * wish.scale
            latents = steps.step(answer, t, latents, **extra, return_dict=False)[0]
        return latents

    def text(self, wish: Wish, device: torch.device) -> dict[str, Tensor]:
        """The conditions of [negative, prompt], or of the prompt alone when nothing is guided away from."""
        said = self._known.get((wish.prompt, wish.negative))
        if said is None:
            said = conditions.for_prompts(self.parts, [wish.negative, wish.prompt], LONGEST)
        return {name: tensor[0 if wish.scale > 1 else 1 :].to(device) for name, tensor in said.items()}

    def answer(self, latents: Tensor, timestep: Tensor, text: dict[str, Tensor], sizes: Tensor) -> Tensor:
        """The denoiser's prediction for every prompt, from the same latents."""
        count = len(text["pool2"])
        seen = latents.float().expand(count, -1, -1, -1)
        times = timestep.to(latents.device, torch.float32).expand(count)
        noised = Noised(latents=seen, timesteps=times, target=seen, weight=times, sigmas=None, huber_c=None)
        return self.family.predict(self.denoiser, noised, text, sizes.expand(count, -1))

    def decoded(self, latents: Tensor) -> Tensor:
        """Latents -> pixels [3, H, W] in [0, 1]. The VAE comes to the latents' device for this and goes back."""
        vae = self.parts.vae
        home = next(vae.parameters()).device
        vae.to(latents.device)
        with torch.autocast(latents.device.type, enabled=False):
            raw = (latents / self.family.objective.scale).to(next(vae.parameters()).dtype)
            pixels = vae.decode(raw, return_dict=False)[0]
        vae.to(home)
        return (pixels[0].float() / 2 + 0.5).clamp(0, 1)


def _image(pixels: Tensor) -> Any:
    from PIL import Image

    return Image.fromarray((pixels * 255).round().to(torch.uint8).permute(1, 2, 0).cpu().numpy())
