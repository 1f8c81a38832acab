"""Prompts of sample images before a model is loaded: what is missing, cannot be read, or does not do what it says."""

from collections.abc import Iterator

from library.config.problems import ConfigError, Problem
from library.config.run_config import RunConfig
from library.data import pixels
from library.families.base import Family
from library.outputs import prompts


def idle_prompts(config: RunConfig, family: Family) -> list[Problem]:
    """What of the sample prompts has no effect, or is not generated as it is written."""
    if not (path := config.sample.sample_prompts):
        return []
    about = config.control_images, config.shifts_samples, family.sample_multiple
    return [*_unasked(config), *prompts.notes(path, *about)]


def _unasked(config: RunConfig) -> Iterator[Problem]:
    """Prompts of sample images that nothing says when to generate."""
    if not config.sample.scheduled:
        yield Problem("sample_prompts",
            ": samples are generated only when somebody asks for them; set sample_every_n_epochs, "
            "sample_every_n_steps or sample_at_first")  # fmt: skip


def unusable_prompts(config: RunConfig) -> Iterator[Problem]:
    """Samples without a prompt file, and a file that cannot be read, or names images that cannot."""
    sample = config.sample
    if sample.scheduled and not sample.sample_prompts:
        off = {"sample_every_n_steps": None, "sample_every_n_epochs": None, "sample_at_first": False}
        template = ": sample images are asked for, but there is no prompt file; give one, or switch them off"
        yield Problem("sample_prompts", template, fix=off)
    if sample.sample_prompts:
        try:
            yield from prompts.unreadable(sample.sample_prompts, config.control_images, pixels.check_file)
        except ConfigError as e:
            yield from e.problems
