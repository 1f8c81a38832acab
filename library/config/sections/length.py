"""The length of a training, its seed, and validation."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from library.config.problems import Problem, option_name
from library.config.reading import parse_count, seed_or_random
from library.config.run_config import RunConfig
from library.config.schema import opt, option_values

ON_HUB = r"[\w.-]+/[\w.-]+/[^:]+(:[^:]*(:(model|dataset|space)?)?)?"  # a folder in a repository of Hugging Face
MAX_STEPS = 10**9  # maximum steps; three years at ten per second


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """The length of a training, and what it continues."""

    max_train_steps: int = opt(
        1600,
        "How long it trains: 1000 to 3000 suit 10 to 30 images. The page proposes a number.",
        label="Steps",
        min=1,
        ceiling=MAX_STEPS,
    )
    max_train_epochs: int | None = opt(
        None, "How often all images are trained. It replaces the number of steps.", label="Epochs", parse=parse_count
    )
    gradient_accumulation_steps: int = opt(
        1, "Batches per step. They need the memory of one.", label="Gradient accumulation", min=1, ceiling=1_000_000
    )
    seed: int | None = opt(
        None,
        "-1 or empty: random. Same seed, same training; exact unless compiled during first steps.",
        min=-(2**63),
        max=2**64 - 1,
        parse=seed_or_random,
    )
    early_stop_patience: int | None = opt(
        None,
        "End the training after N validations without a lower held-out loss.",
        label="Early stop patience",
        parse=parse_count,
        advanced=True,
    )
    resume: str | None = opt(None, "The folder of a saved state to continue from.", label="Resume from", kind="folder")
    resume_from_huggingface: bool = opt(
        False,
        "The state to resume is on Hugging Face: owner/repo/path.",
        label="Resume from Hugging Face",
        advanced=True,
    )

    @property
    def moved(self) -> bool:
        return False

    def check(self, run: RunConfig) -> Iterator[Problem]:
        """Require held-out images for early stopping, and a valid name of a state on the hub."""
        values = option_values(run)
        if self.early_stop_patience and not run.data.dataset_config and not values.get("validation_split"):
            yield _without_held_out("validation_split" in values)
        if self.resume_from_huggingface and not re.fullmatch(ON_HUB, self.resume or ""):
            yield Problem(
                "resume_from_huggingface",
                "needs {other}, written owner/repository/folder[:revision[:type]]",
                other=option_name("resume"),
                also="resume",
            )


def _without_held_out(has_share: bool) -> Problem:
    """Return the problem of early_stop_patience without held-out images; `has_share`: the run has an option for their
    share.
    """
    name, share = "early_stop_patience", "validation_split"
    if has_share:
        return Problem(name, "needs held-out images: set validation_split, such as 0.1", also=share, fix={share: 0.1})
    return Problem(
        name,
        "needs held-out images: describe the images in a dataset_config with validation_split",
        also="dataset_config",
        fix={name: None},
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Validation:
    """Images excluded from training, to measure the held-out loss."""

    validation_split: float = opt(
        0.0,
        "The share of images kept out of training to measure overfitting. 0.1 is usual.",
        label="Validation share",
        min=0.0,
        max=1.0,
    )
    validation_seed: int | None = opt(None, "Chooses these images and their noise. -1: as seed.", parse=seed_or_random)
    validate_every_n_steps: int | None = opt(
        None, "Validate every N steps.", label="Validate every N steps", parse=parse_count
    )
    validate_every_n_epochs: int | None = opt(
        None, "Validate every N epochs. Empty: every epoch.", label="Validate every N epochs", parse=parse_count
    )
    max_validation_steps: int | None = opt(
        None, "At most this many batches per validation. Empty: all.", label="Validation batches", parse=parse_count
    )
