"""Options of ControlNet-LLLite: a small network beside a frozen model that follows control images."""

from collections.abc import Iterator
from dataclasses import dataclass

from library.config.problems import Problem
from library.config.reading import LARGEST_RANK
from library.config.run_config import RunConfig
from library.config.schema import opt
from library.config.sections.adapters import AdapterData
from library.config.sections.learning import Optim


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlData(AdapterData):
    """The images, each with a control image."""

    conditioning_data_dir: str | None = opt(
        None, "The folder of control images, named and sized like the images.", label="Control images", kind="folder"
    )

    def missing(self, run: RunConfig) -> Iterator[Problem]:
        """Require control images."""
        yield from AdapterData.missing(self, run)
        if not self.conditioning_data_dir and not self.dataset_config:
            yield Problem("conditioning_data_dir", "is not set: choose the folder of control images")

    def check(self, run: RunConfig) -> Iterator[Problem]:
        """Reject options that would separate an image from its control image."""
        yield from AdapterData.check(self, run)
        if self.masked_loss:
            yield Problem(
                "masked_loss",
                "cannot be used here: conditioning_data_dir holds control images, not masks",
                fix={"masked_loss": False},
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Control:
    """The small network that is trained."""

    cond_emb_dim: int | None = opt(
        None,
        "Channels that describe the control image. 32 is usual.",
        label="Control channels",
        min=2,
        ceiling=LARGEST_RANK,
    )
    network_dim: int | None = opt(
        None,
        "The width of the small networks. 64 is usual; half of it suits depth images.",
        label="Network width",
        min=1,
        ceiling=LARGEST_RANK,
    )
    network_dropout: float | None = opt(
        None, "The share of the network dropped in each step. 0.1 helps against overfitting.", min=0.0, max=1.0
    )
    network_weights: str | None = opt(None, "An LLLite file to continue from.", label="Continue from", kind="file")

    def missing(self, run: RunConfig) -> Iterator[Problem]:
        """Require both sizes, which have no default upstream either."""
        for name, usual in (("cond_emb_dim", 32), ("network_dim", 64)):
            if not getattr(self, name):
                yield Problem(name, "is not set: {usual} is usual", usual=usual, fix={name: usual})

    def check(self, run: RunConfig) -> Iterator[Problem]:
        if self.network_dropout == 1:
            yield Problem("network_dropout", "must be below 1: at 1 nothing would be trained")


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlOptim(Optim):
    """Like `Optim`, with the usual learning rate of networks that follow an image."""

    learning_rate: float = opt(2e-6, "2e-4 is usual, 1 for Prodigy. Lower it if images are distorted.", min=0.0)
