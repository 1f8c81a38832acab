"""Sample images of a Stable Diffusion with the networks of a training, without a pipeline or changes of global random
state.
"""

import inspect
import types
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import diffusers
import numpy as np
import torch
from diffusers.schedulers.scheduling_lms_discrete import LMSDiscreteScheduler  # its public name requires scipy
from numpy.polynomial import Polynomial
from PIL import Image
from torch import Tensor

from library.config.problems import ConfigError, Problem
from library.families.base import SampleRequest
from library.families.shared.clip_conditions import count_chunks
from library.families.shared.sampler import Sampler, per_sample, sample_generator
from library.objectives import diffusion
from library.objectives.base import NoisedBatch

if TYPE_CHECKING:
    from library.families.shared.unet_family import UnetFamily

MIN_SIGNAL = 2**-24  # as in diffusers' rescaled schedules
MAX_CHUNKS = 3  # maximum chunks of 75 tokens per prompt
# --sample_sampler -> the scheduler's class in diffusers, and changes of its defaults.
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
    "lcm": ("LCMScheduler", {}),
}
DRAWING = ("EulerAncestralDiscreteScheduler", "KDPM2AncestralDiscreteScheduler", "LCMScheduler")  # noise at each step
LCM_STEPS = 50  # of the distillation of LCM
RENOISING = ("lcm",)  # samplers that predict the image at each step, and add new noise
SAMPLERS |= {f"k_{name}": SAMPLERS[name] for name in ("lms", "euler", "euler_a", "dpm_2", "dpm_2_a")}


def scheduler(name: str | None, v_prediction: bool, terminal_zero: bool = False) -> Any:
    """Return a diffusers scheduler on the training's schedule.

    `terminal_zero`: use the rescaled schedule of zero_terminal_snr, starting with its last step, pure noise.
    """
    # Latents exceed [-1, 1], so they are not clipped.
    if (name or "ddim") not in SAMPLERS:
        raise ConfigError(
            Problem(
                "sample_sampler", ": {name} is not one of {samplers}", name=repr(name), samplers=", ".join(SAMPLERS)
            )
        )
    kind, changes = SAMPLERS[name or "ddim"]
    cls = _lms() if kind == "LMSDiscreteScheduler" else getattr(diffusers, kind)
    cls = _with_drawn_noise(cls) if kind in DRAWING else cls
    options = {
        "num_train_timesteps": diffusion.STEPS,
        "beta_start": diffusion.BETA_START,
        "beta_end": diffusion.BETA_END,
        "beta_schedule": "scaled_linear",
        "prediction_type": "v_prediction" if v_prediction else "epsilon",
        "clip_sample": False,
    }
    if terminal_zero:
        options |= {"trained_betas": rescaled_betas(), "timestep_spacing": "trailing"}
    parameters = inspect.signature(cls.__init__).parameters
    return cls(**{name: value for name, value in (options | changes).items() if name in parameters})


def set_noise_levels(steps: Any, request: SampleRequest) -> int:
    """Set a scheduler's steps: those of the request's sigmas, else its own. Returns how many there are."""
    # They stay on the host, where the scheduler computes with single numbers.
    if not request.sigmas:
        # LCM takes its steps from those of a distillation, and refuses to take more than there are.
        own = {"original_inference_steps": max(request.steps, LCM_STEPS)} if request.sampler_name in RENOISING else {}
        steps.set_timesteps(request.steps, **own)
        # Near 1000 steps, rounding may repeat a level, and multistep samplers would divide by the distance of the two.
        taken = request.steps
        while not _falls_steadily(steps):
            taken -= 1
            steps.set_timesteps(taken, **own)
        return taken
    if request.sampler_name in RENOISING:
        alphas = steps.alphas_cumprod.double()
        levels = ((1 - alphas) / alphas).log().numpy() / 2
        positions = np.interp(np.log(request.sigmas), levels, np.arange(len(levels)))
        steps.set_timesteps(timesteps=positions.round().astype(int).tolist())
    else:
        steps.set_timesteps(sigmas=[*request.sigmas, 0.0])
    return len(request.sigmas)


def _falls_steadily(steps: Any) -> bool:
    """Return whether each sigma of a scheduler is below the one before; those that predict twice repeat theirs."""
    sigmas = getattr(steps, "sigmas", None)
    return sigmas is None or steps.order > 1 or bool((sigmas.diff() < 0).all())


def rescaled_betas() -> list[float]:
    """Return the betas of the schedule with zero terminal SNR. The last step keeps the least signal that sigmas can
    express, as a sigma without signal would be infinite.
    """
    alpha_bar = diffusion.alphas(terminal_zero=True).double().clamp(min=MIN_SIGNAL)
    return (1 - alpha_bar / torch.cat((torch.ones(1), alpha_bar[:-1]))).tolist()


def _lms() -> type:
    """Return LMS with exactly integrated coefficients."""

    # They are polynomials, so scipy is not needed.
    class Lms(LMSDiscreteScheduler):
        def get_lms_coefficient(self, order: int, t: int, current_order: int) -> float:
            sigmas = {at: float(self.sigmas[at]) for at in range(t - order + 1, t + 2)}
            product = Polynomial([1.0])
            for k in range(order):
                if k != current_order:
                    gap = sigmas[t - current_order] - sigmas[t - k]
                    product = product * Polynomial([-sigmas[t - k] / gap, 1.0 / gap])
            integral = product.integ()
            return integral(sigmas[t + 1]) - integral(sigmas[t])

    return Lms


class DrawnNoise:
    """The noise of all steps, drawn on the host as a scheduler would draw it, and copied to the device at once."""

    def __init__(self, generators: Sequence[torch.Generator], like: Tensor, steps: int) -> None:
        """`generators` has one for each sample of `like` [N, ...]."""
        shape = 1, *like.shape[1:]
        drawn = [
            torch.cat([torch.randn(shape, generator=generator, dtype=like.dtype) for generator in generators])
            for _ in range(steps)
        ]
        self._noise = iter(torch.stack(drawn).to(like.device).unbind())

    def __call__(self) -> Tensor:
        return next(self._noise)


def _with_drawn_noise(cls: type) -> type:
    """Return a scheduler class that also takes DrawnNoise as `generator`: copying noise in each step would wait."""
    step: Any = vars(cls)["step"]
    draw = step.__globals__["randn_tensor"]

    def drawn(*shape: Any, generator: Any, **options: Any) -> Tensor:
        return generator() if isinstance(generator, DrawnNoise) else draw(*shape, generator=generator, **options)

    functions = {**step.__globals__, "randn_tensor": drawn}
    drawing = types.FunctionType(step.__code__, functions, step.__name__, step.__defaults__, step.__closure__)
    return type(cls.__name__, (cls,), {"step": drawing, "takes_drawn_noise": True})


class UnetSampler(Sampler):
    """Denoises with the scheduler of sample_sampler."""

    family: "UnetFamily"

    def is_guided(self, request: SampleRequest) -> bool:
        return request.scale > 1

    def encode(self, prompts: list[str]) -> dict[str, Tensor]:
        """Encode prompts with emphasis, all padded to the chunks of the longest."""
        with torch.no_grad():
            return self.family.encode_captions(self.components, prompts, None, self._chunks(prompts), weighted=True)

    def _chunks(self, prompts: Sequence[str]) -> int:
        return count_chunks(next(iter(self.components.tokenizers.values())), prompts, MAX_CHUNKS)

    def batch_key(self, request: SampleRequest) -> Hashable:
        """Add the length of the text: the U-Net attends to its padding, too."""
        key = super().batch_key(request)
        return key and (key, self._chunks([request.negative, request.prompt]))

    def count_steps(self, request: SampleRequest) -> int:
        return self._schedule(request)[1]

    def count_passes(self, request: SampleRequest) -> int:
        return len(self._schedule(request)[0].timesteps)  # some samplers predict twice per step

    def _schedule(self, request: SampleRequest) -> tuple[Any, int]:
        """Return the scheduler of a request, with its steps, and how many these are."""
        config, name = self.family.config, request.sampler_name
        if request.sigmas and name not in RENOISING:
            name = "euler"  # the others have steps of their own
        steps = scheduler(name, config.model.v_parameterization, config.noise.zero_terminal_snr)
        return steps, set_noise_levels(steps, request)

    def latents(self, *requests: SampleRequest) -> Tensor:
        """Denoise from seeded noise, all prompts in one batch; float32 [N, 4, h, w] in the model's units."""
        denoiser, request, number = self.denoiser, requests[0], len(requests)
        device = denoiser.conv_in.weight.device
        generators = [sample_generator(request) for request in requests]
        height, width = self.size(request)
        texts = self.in_batches(self.text(requests, device))
        sizes = torch.tensor([[height, width, 0, 0, height, width]], dtype=torch.float32, device=device)
        steps, _ = self._schedule(request)
        times = steps.timesteps.float().to(device)
        channels = denoiser.config.in_channels
        shape = 1, channels, height // 8, width // 8
        latents = torch.cat([torch.randn(shape, generator=generator) for generator in generators]).to(device)
        latents, scales = latents * steps.init_noise_sigma, per_sample([request.scale for request in requests], latents)
        extra: dict[str, Any] = {}
        if "generator" in inspect.signature(steps.step).parameters:
            draws_ahead = getattr(steps, "takes_drawn_noise", False)
            extra["generator"] = DrawnNoise(generators, latents, len(times)) if draws_ahead else generators
        guide = [control_pixels(request.guide, (width, height), device)] if request.guide else []
        for t, time in zip(steps.timesteps, times.unbind(), strict=True):
            scaled = steps.scale_model_input(latents, t)
            prediction = torch.cat([self._predict(scaled, time, text, sizes, guide) for text in texts])
            if len(prediction) > number:
                prediction = prediction[:number] + (prediction[number:] - prediction[:number]) * scales
            latents = steps.step(prediction, t, latents, **extra, return_dict=False)[0]
        return latents

    def _predict(
        self, latents: Tensor, timestep: Tensor, text: dict[str, Tensor], sizes: Tensor, guide: list[Tensor]
    ) -> Tensor:
        """Return the denoiser's prediction for every prompt; a sample's prompts have the same latents."""
        count = len(next(iter(text.values())))
        batch = latents.float().expand(count // len(latents), *latents.shape).flatten(0, 1)
        times = timestep.expand(count)
        noised = NoisedBatch(latents=batch, timesteps=times, target=batch, weight=times)
        return self.family.predict(self.denoiser, noised, text, sizes.expand(count, -1), guide)

    def decoder_input(self, latents: Tensor) -> Tensor:
        return latents / self.family.objective.scale


def control_pixels(image: Image.Image, size: tuple[int, int], device: torch.device) -> Tensor:
    """Stretch a control image to (width, height); return pixels [1, 3, H, W] in -1..1."""
    stretched = np.asarray(image.convert("RGB").resize(size, Image.Resampling.LANCZOS), np.float32)
    return torch.from_numpy(stretched / 127.5 - 1).permute(2, 0, 1)[None].to(device)
