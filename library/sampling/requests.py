"""Conversion of a prompt to a sampler's request."""

from dataclasses import replace
from typing import Any

from PIL import Image

from library.data import pixels
from library.families.base import SampleRequest
from library.sampling import masks
from library.sampling.prompts import Prompt


def imageless_request(prompt: Prompt) -> SampleRequest:
    """Return the sampler's request for a prompt, but for its images. What the prompt leaves open is as usual."""
    named: dict[str, Any] = {"width": prompt.width, "height": prompt.height, "steps": prompt.sample_steps}
    named |= {"scale": prompt.scale, "guidance": prompt.guidance_scale, "seed": prompt.seed}
    named["shift"] = prompt.flow_shift or None  # 0 would end sampling at the first step
    named |= {"sigmas": prompt.sample_sigmas, "sampler_name": prompt.sample_sampler}
    filled = {name: value for name, value in named.items() if value is not None}
    return SampleRequest(prompt.prompt, prompt.negative_prompt or "", **filled)


def request_of(prompt: Prompt, how: pixels.Decoding) -> SampleRequest:
    """Return the sampler's request for a prompt with its defaults filled in; reads its images."""
    controls = tuple(Image.fromarray(pixels.read_pixels(path, how)) for path in prompt.control_image_path or ())
    return replace(imageless_request(prompt), controls=controls, mask=masks.mask_of(prompt, how))
