"""TensorBoard and Weights & Biases: the numbers of the run's record under upstream's names."""

import importlib.util
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from library.config.json_types import JsonMapping, JsonObject
from library.config.outside_files import load_toml
from library.config.problems import ConfigError, Message, Problem
from library.config.run_config import RunConfig
from library.config.schema import option_values, options_of

logger = logging.getLogger(__name__)
WANDB = {"name", "entity", "group", "job_type", "tags", "notes", "mode", "id", "resume"}  # permitted keys of [wandb]


class Trackers:
    """Additional destinations of curves besides the run's folder; none without `logging_dir` and W&B."""

    def __init__(self, config: RunConfig, folder: Path, warn: Callable[[Message], None]) -> None:
        """`warn` gets a sentence when a tracker fails; it is not used any more then, and the training continues."""
        log, self._warn = config.log, warn
        names = {"all": ("tensorboard", "wandb"), None: ("tensorboard",)}.get(log.log_with, (log.log_with,))
        self._network = config.adapters
        self._last: JsonMapping = {}
        self._board = self._wandb = None
        if "tensorboard" in names and log.logging_dir:
            self._board = self._opened("TensorBoard", lambda: self._open_board(config))
        if "wandb" in names:
            self._wandb = self._opened("Weights & Biases", lambda: self._open_wandb(config, folder))

    @property
    def open(self) -> bool:
        return bool(self._board or self._wandb)

    def log(self, line: JsonMapping) -> None:
        """Write one step."""
        if self._last and line["epoch"] != self._last["epoch"]:
            self._epoch_ended()
        self._last = line
        numbers = self._tags(line)
        self._log(numbers, line["step"])
        self._to_wandb(numbers, line["step"])

    def validated(self, when: str, number: int, loss: float, divergence: float) -> None:
        """Write the loss on held-out images, at the end of a "step" or an "epoch" of this number."""
        numbers = {f"loss/validation/{when}_average": loss, f"loss/validation/{when}_divergence": divergence}
        self._log(numbers, number)
        step = self._last["step"] if self._last else None
        self._to_wandb(numbers | ({"epoch": number} if when == "epoch" else {}), step)

    def image(self, name: str, image: Any, step: int) -> None:
        if self._wandb:
            self._to_wandb({name: image}, step, images=True)

    def close(self) -> None:
        """Flush and close."""
        if self._last:
            self._epoch_ended()
        try:
            if self._board:
                self._board.close()
        except Exception as error:
            self._failed("TensorBoard", error)
        try:
            if self._wandb:
                self._wandb.finish()
        except Exception as error:
            self._failed("Weights & Biases", error)

    def _log(self, numbers: dict[str, float], step: int) -> None:
        """Write points of TensorBoard's curves."""
        # A full disk ends the curves, but must not end the training.
        try:
            for name, value in numbers.items() if self._board else ():
                board = self._board
                if board:
                    board.add_scalar(name, value, step)
        except Exception as error:
            self._board = None
            self._failed("TensorBoard", error)

    def _to_wandb(self, values: Mapping[str, Any], step: int | None, images: bool = False) -> None:
        """Write numbers or images to Weights & Biases; nothing more after an error, such as of its network."""
        if not self._wandb:
            return
        try:
            if images:
                import wandb

                values = {name: wandb.Image(image) for name, image in values.items()}
            self._wandb.log(values, step=step)
        except Exception as error:
            self._wandb = None
            self._failed("Weights & Biases", error)

    def _opened(self, tracker: str, opening: Callable[[], Any]) -> Any:
        try:
            return opening()
        except Exception as error:
            self._failed(tracker, error)

    def _failed(self, tracker: str, error: Exception) -> None:
        logger.debug("logging failed", exc_info=True)
        why = str(error).strip() or type(error).__name__
        self._warn(
            Message("nothing more is logged to {tracker} ({why}); the training continues", tracker=tracker, why=why)
        )

    def _tags(self, line: JsonMapping) -> dict[str, float]:
        loss = {"loss": line["loss"]}
        if self._network:
            loss = {"loss/current": line["loss"], "loss/average": line["avr_loss"]}
        rates = {f"lr/{name}": rate for name, rate in _tracked_rates(line["lr"], self._network).items()}
        norm = {"norm/grad_norm": line["grad_norm"]} if "grad_norm" in line else {}
        return loss | rates | norm | {name: value for name, value in line.items() if "/" in name}

    def _epoch_ended(self) -> None:
        """Write the average loss of the last line's epoch, over epochs."""
        name, epoch = "loss/epoch_average" if self._network else "loss/epoch", self._last["epoch"]
        self._log({name: self._last["avr_loss"]}, epoch)
        # W&B uses one axis for all metrics without their own.
        self._to_wandb({name: self._last["avr_loss"], "epoch": epoch}, self._last["step"])

    def _open_board(self, config: RunConfig) -> Any:
        from torch.utils.tensorboard import SummaryWriter, summary

        log = config.log
        run = (log.log_prefix or "") + time.strftime("%Y%m%d%H%M%S")
        project = log.log_tracker_name or ("network_train" if self._network else "finetuning")
        board = SummaryWriter(str(Path(log.logging_dir or "") / run / project))
        if log.log_config:  # into this run; `add_hparams` would create another one
            writer: Any = board._get_file_writer()
            for part in summary.hparams(tracker_settings(config), {}):
                writer.add_summary(part)
        return board

    def _open_wandb(self, config: RunConfig, folder: Path) -> Any:
        import wandb

        log = config.log
        if log.wandb_api_key:
            os.environ["WANDB_API_KEY"] = log.wandb_api_key
        arguments: JsonObject = {"name": log.wandb_run_name} if log.wandb_run_name else {}
        if log.log_tracker_config:
            arguments = load_toml(log.log_tracker_config).get("wandb", {})
        project = log.log_tracker_name or ("network_train" if self._network else "finetuning")
        if log.log_config:
            arguments = {"config": tracker_settings(config), **arguments}
        return wandb.init(project=project, dir=str(folder), **arguments)


def _tracked_rates(rates: Mapping[str, float], network: bool) -> dict[str, float]:
    """Return learning rates under upstream's names. For networks each appears twice: by name, and by group number.

    The first group has no number if it is a text encoder's.
    """
    if not network:
        return dict(rates)
    # Upstream has an extra space after a text encoder's number.
    tracked = {re.sub(r"(textencoder \d)", r"\1 ", name): rate for name, rate in rates.items()}
    for number, name in enumerate(name for name in rates if not name.startswith("d*lr/")):
        if number == 0 and name.startswith("textencoder"):
            tracked["textencoder"] = rates[name]
            continue
        tracked[f"group{number}"] = rates[name]
        if f"d*lr/{name}" in rates:
            tracked[f"d*lr/group{number}"] = rates[f"d*lr/{name}"]
    return tracked


def find_tracker_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield problems that prevent writing the curves."""
    log = config.log
    if log.log_with in ("wandb", "all") and importlib.util.find_spec("wandb") is None:
        yield Problem("log_with", ": wandb is not installed; run: pip install wandb")
    if log.log_tracker_config:
        try:
            wandb_options = load_toml(log.log_tracker_config).get("wandb", {})
            unknown = sorted(wandb_options.keys() - WANDB) if isinstance(wandb_options, dict) else ["wandb"]
            for key in unknown:  # some make wandb open files, others are already set
                yield Problem(
                    "log_tracker_config",
                    ": {key} is not passed on to W&B; known are {names}",
                    key=key,
                    names=", ".join(sorted(WANDB)),
                )
        except ConfigError as e:
            yield from (Problem("log_tracker_config", ": {why}", why=why) for why in e.problems)


def tracker_settings(config: RunConfig) -> dict[str, bool | int | float | str]:
    """Return the options of a run for a tracker, without files, folders and keys."""
    options = options_of(type(config))
    public = {
        name: value
        for name, value in option_values(config).items()
        if options[name].kind not in ("file", "files", "folder", "secret")
    }
    plain = {name: v if isinstance(v, bool | int | float) else options[name].text(v) for name, v in public.items()}
    return {name: value for name, value in plain.items() if value != ""}
