"""Conversion of a prompt to a sampler's request."""

from typing import Any

from PIL import Image

from library.data import pixels
from library.families.base import SampleRequest
from library.sampling.prompts import Prompt


def request_of(prompt: Prompt, how: pixels.Decoding) -> SampleRequest:
    """Return the sampler's request for a prompt with its defaults filled in; reads its images."""
    filled: dict[str, Any] = {"width": prompt.width, "height": prompt.height, "steps": prompt.sample_steps}
    filled |= {"scale": prompt.scale, "guidance": prompt.guidance_scale, "seed": prompt.seed}
    filled["shift"] = prompt.flow_shift or None  # 0 would end sampling at the first step
    filled["sigmas"] = prompt.sample_sigmas or ()
    filled["controls"] = tuple(
        Image.fromarray(pixels.read_pixels(path, how)) for path in prompt.control_image_path or ()
    )
    mask = prompt.control_image_mask_path
    filled["mask"] = Image.fromarray(pixels.read_mask(mask, how)) if mask else None
    return SampleRequest(prompt.prompt, prompt.negative_prompt or "", **filled, sampler_name=prompt.sample_sampler)
