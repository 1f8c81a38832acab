"""Proposals of sample prompts from a data set: captions of its images, with the size of their bucket."""

import random
from typing import NamedTuple

from library.config.problems import ConfigError
from library.config.run_config import RunConfig
from library.data import finding


class Proposal(NamedTuple):
    """A prompt, and the size of its sample image in pixels."""

    caption: str
    width: int
    height: int


def proposals(config: RunConfig, limit: int) -> list[Proposal]:
    """Return up to `limit` random captions of the images that a config names. Raises ConfigError without any."""
    survey = finding.survey_data(config, keep=False)
    captioned = [image for image in survey.images.items if image.caption.strip() and not image.is_reg]
    if not captioned:
        raise ConfigError(*survey.problems or ["The images have no captions: write them in the Data tab first."])
    chosen = random.sample(captioned, min(limit, len(captioned)))
    return [Proposal(" ".join(image.caption.split()), *image.fit.bucket) for image in chosen]
