"""What a model makes of the options of its prompts."""

from torch import nn

from library.config import ineffective
from library.config.run_config import ControlUse, RunConfig
from library.families.base import Family, ModelComponents, SampleRequest
from library.families.shared.sampler import Sampler
from library.sampling import few_steps
from library.sampling.prompt_checks import PromptUse

# Options of a config that decide for all prompts, by the field of a prompt.
OPTIONS = {"guidance_scale": "sample_guidance_scale", "sample_sampler": "sample_sampler", "flow_shift": "sample_shift"}


def prompt_use(config: RunConfig, family: Family, images: ControlUse) -> PromptUse:
    """Return how the prompts of a config are used; `images` says what images the model is shown."""
    reasons, sampler = ineffective.of_model(config), idle_sampler(family)
    usual = few_steps.prompt_defaults(config, family.sample_defaults).get("scale")

    def reads_negative(scale: float | None) -> bool:
        chosen = usual if scale is None else scale
        return sampler.is_guided(SampleRequest("") if chosen is None else SampleRequest("", scale=chosen))

    idle = {name: reasons[option] for name, option in OPTIONS.items() if option in reasons}
    return PromptUse(images, family.sample_multiple, idle, reads_negative)


def idle_sampler(family: Family) -> Sampler:
    """Return a family's sampler without networks, which knows sizes and guidance."""
    return family.sampler(ModelComponents(nn.Identity(), None, {}, {}))
