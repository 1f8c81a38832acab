"""What a data set proposes to generate: captions of its images, each with the size at which its image is trained."""

import random
from typing import NamedTuple

from library.config.problems import ConfigError
from library.config.run_config import RunConfig
from library.data import finding


class Proposal(NamedTuple):
    """What to generate, and how large in pixels."""

    caption: str
    width: int
    height: int


def proposals(config: RunConfig, most: int) -> list[Proposal]:
    """Up to `most` captions of the images that a config names, by chance. ConfigError where there is none."""
    found = finding.survey(config, keep=False)
    captioned = [image for image in found.images.items if image.caption.strip() and not image.is_reg]
    if not captioned:
        raise ConfigError(*found.problems or ["The images have no captions: write them in the tab Data set first."])
    chosen = random.sample(captioned, min(most, len(captioned)))
    return [Proposal(" ".join(image.caption.split()), *image.fit.bucket) for image in chosen]
