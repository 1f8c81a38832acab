"""TensorBoard and Weights & Biases, fed with the numbers of the run's own record under upstream's names."""

import contextlib
import logging
import os
import time
import tomllib
from pathlib import Path
from typing import Any

from library.config.schema import ConfigError

logger = logging.getLogger(__name__)


class Trackers:
    """Wherever the curves go besides the run's folder. Without `logging_dir` and W&B: nowhere."""

    def __init__(self, config: Any, folder: Path) -> None:
        log = config.log
        wanted = {"all": ("tensorboard", "wandb"), None: ("tensorboard",)}.get(log.log_with, (log.log_with,))
        self._network, self._last = config.adapters, {}
        self._board = self._open_board(log) if "tensorboard" in wanted and log.logging_dir else None
        self._wandb = self._open_wandb(config, folder) if "wandb" in wanted else None

    def log(self, line: dict[str, Any]) -> None:
        """Write one step."""
        if self._last and line["epoch"] != self._last["epoch"]:
            self._epoch_ended()
        self._last = line
        numbers = self._tags(line)
        self._draw(numbers, line["step"])
        if self._wandb:
            self._wandb.log(numbers, step=line["step"])

    def validated(self, when: str, number: int, loss: float, divergence: float) -> None:
        """Write the loss on held back images, at the end of a "step" or an "epoch" of this number."""
        numbers = {f"loss/validation/{when}_average": loss, f"loss/validation/{when}_divergence": divergence}
        self._draw(numbers, number)
        if self._wandb:
            step = self._last["step"] if self._last else None
            self._wandb.log(numbers | ({"epoch": number} if when == "epoch" else {}), step=step)

    def image(self, name: str, picture: Any, step: int) -> None:
        """Write one sample image."""
        if self._wandb:
            import wandb

            self._wandb.log({name: wandb.Image(picture)}, step=step)

    def close(self) -> None:
        """Flush and end."""
        if self._last:
            self._epoch_ended()
        if self._board:
            with contextlib.suppress(OSError):
                self._board.close()
        if self._wandb:
            self._wandb.finish()

    def _draw(self, numbers: dict[str, float], step: int) -> None:
        """Points of TensorBoard's curves. On a full disk they end; the training shall not, for want of a curve."""
        try:
            for name, value in numbers.items() if self._board else ():
                board = self._board
                if board:
                    board.add_scalar(name, value, step)
        except OSError as e:
            self._board = None
            logger.warning("TensorBoard's curves end here: %s", e)

    def _tags(self, line: dict[str, Any]) -> dict[str, float]:
        loss = (
            {"loss/current": line["loss"], "loss/average": line["avr_loss"]}
            if self._network
            else {"loss": line["loss"]}
        )
        rates = {f"lr/{name}": rate for name, rate in line["lr"].items()}
        norm = {"norm/grad_norm": line["grad_norm"]} if "grad_norm" in line else {}
        return loss | rates | norm | {name: value for name, value in line.items() if "/" in name}

    def _epoch_ended(self) -> None:
        """The average loss of the epoch that the last line belongs to, over epochs."""
        name, epoch = "loss/epoch_average" if self._network else "loss/epoch", self._last["epoch"]
        self._draw({name: self._last["avr_loss"]}, epoch)
        if self._wandb:  # which has one axis for all that does not say otherwise
            self._wandb.log({name: self._last["avr_loss"], "epoch": epoch}, step=self._last["step"])

    def _open_board(self, log: Any) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        run = (log.log_prefix or "") + time.strftime("%Y%m%d%H%M%S")
        project = log.log_tracker_name or ("network_train" if self._network else "finetuning")
        return SummaryWriter(str(Path(log.logging_dir) / run / project))

    def _open_wandb(self, config: Any, folder: Path) -> Any:
        try:
            import wandb
        except ImportError:
            raise ConfigError("log_with: wandb is not installed; run: pip install wandb") from None
        log = config.log
        if log.wandb_api_key:
            os.environ["WANDB_API_KEY"] = log.wandb_api_key
        options: dict[str, Any] = {"name": log.wandb_run_name} if log.wandb_run_name else {}
        if log.log_tracker_config:
            options = tomllib.loads(Path(log.log_tracker_config).read_text(encoding="utf-8")).get("wandb", {})
        project = log.log_tracker_name or ("network_train" if self._network else "finetuning")
        return wandb.init(project=project, dir=str(folder), **options)
