"""Sample images of the toy: steps of DDIM."""

from torch import Tensor

from library.families.base import SampleRequest
from library.families.shared.sampler import Sampler, seeded_noise
from library.objectives import diffusion


class ToySampler(Sampler):
    """Without guidance."""

    def is_guided(self, request: SampleRequest) -> bool:
        return False

    def decoder_input(self, latents: Tensor) -> Tensor:
        return latents / self.family.objective.scale

    def latents(self, *requests: SampleRequest) -> Tensor:
        """Denoise from seeded noise, all in one batch."""
        from diffusers import DDIMScheduler

        model = self.denoiser
        device = model.patches.weight.device
        steps = DDIMScheduler(
            diffusion.STEPS, diffusion.BETA_START, diffusion.BETA_END, "scaled_linear", clip_sample=False
        )
        steps.set_timesteps(requests[0].steps, device=device)
        height, width = self.size(requests[0])
        noise = seeded_noise(requests, model.channels, height // 8, width // 8)
        latents, words = noise.to(device), self.text(requests, device)["words"]
        for t in steps.timesteps:
            answer = model(latents, t.view(1).expand(len(requests)).to(device), words).float()
            latents = steps.step(answer, t, latents, return_dict=False)[0]
        return latents
