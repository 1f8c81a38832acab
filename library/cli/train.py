"""Run a training from its config to its file: report every problem first, then run the loop."""

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from library.check import preflight
from library.config import building
from library.config.environment import first_process
from library.config.problems import ConfigError, Message, Problem, raise_if_any
from library.config.run_config import RunConfig
from library.config.sections import Log
from library.outputs import hub, paths, written_paths
from library.runs import locking
from library.train.loop import run_training

CHATTY = ("httpx", "urllib3", "filelock", "PIL", "matplotlib", "fsspec", "asyncio")
_OURS: list[logging.Handler] = []

LOCK_TIMEOUT = 0.5  # seconds to wait for a training that is just ending


def train(config: RunConfig, notes: Sequence[Problem] | None = None, began: float = 0) -> Path | None:
    """Train what `config` describes and return the resulting file. ConfigError lists everything to fix first.

    `notes` are remarks from reading the config, which go into the run's record; None computes them again. `began` is
    the start of the process in seconds since 1970. With `debug_dataset` the data is printed, and nothing is trained.
    """
    listen(config.log)
    if config.data.debug_dataset:
        return preflight.print_dataset(config)
    config = hub.fetched(config)
    paths.tidy(config)
    remarks = preflight.check_before_training(config)
    preflight.load_named_code(config)
    with hold_output_name(config):
        return run_training(config, remarks, building.config_notes(config) if notes is None else notes, began)


def listen(log: Log) -> None:
    """Send log messages to the console, or to `console_log_file`, from `console_log_level` on.

    With `console_log_simple` the bare message goes to stdout, as older tools expect. Raises ConfigError for a file that
    cannot be written.
    """
    if log.console_log_file:
        handler: logging.Handler = _log_file(log.console_log_file)
    else:
        handler = logging.StreamHandler(sys.stdout if log.console_log_simple else sys.stderr)
    plain = "%(message)s"
    handler.setFormatter(logging.Formatter(plain if log.console_log_simple else "%(asctime)s %(levelname)s " + plain))
    root = logging.getLogger()
    root.setLevel(log.console_log_level or "INFO")
    for earlier in _OURS:  # handlers of an earlier training in this process would print every line twice
        root.removeHandler(earlier)
        earlier.close()
    _OURS[:] = [handler]
    root.addHandler(handler)
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="torch.utils.tensorboard")
    # Caused by diffusers' cached check of PyTorch's version, which never changes.
    warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cache`")
    # The first product of a backward pass runs in a thread without a CUDA context, which PyTorch then creates.
    warnings.filterwarnings("ignore", message="Attempting to run cuBLAS, but there was no current CUDA context")
    logging.captureWarnings(True)


def _log_file(path: str) -> logging.FileHandler:
    """Return the handler of `console_log_file`, in a folder that need not exist. Raises ConfigError."""
    raise_if_any(written_paths.written_file_problems("console_log_file", path))
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        return logging.FileHandler(path, encoding="utf-8")
    except OSError as e:
        raise ConfigError(written_paths.unwritable("console_log_file", path, e.strerror or str(e))) from e


@contextlib.contextmanager
def hold_output_name(config: RunConfig) -> Iterator[None]:
    """Hold the output name of a training by a lock in its output folder, which ends with the process.

    Raises ConfigError if another training holds it or has written such files since the check. Only the first process
    takes the lock. On a file system without locks nothing is held.
    """
    if not config.save.output_dir or not first_process():
        yield
        return
    names = paths.output_names(config)
    # The extension is left out, as files of other formats have states of the same name.
    lock_file = names.folder / f".{names.last.name.removesuffix(names.extension)}.lock"
    with contextlib.ExitStack() as stack:
        holds_lock: bool | None = None
        with contextlib.suppress(OSError, NotImplementedError):  # a disk without locks or write permission
            holds_lock = stack.enter_context(locking.hold_lock(lock_file, LOCK_TIMEOUT))
        if holds_lock is False:
            template = ": a training that writes these files is {state}; stop it, or choose another name"
            raise ConfigError(
                Problem("output_name", template, state=Message("running"), fix=paths.free_output_name(config))
            )
        try:
            if written := [*paths.find_output_problems(config)]:  # by a training that ended after our check
                raise ConfigError(*written)
            yield
        finally:
            # While it is held, so that nobody's lock is removed; Windows removes it itself. Where the disk is away, how
            # the training ended counts.
            if holds_lock and os.name != "nt":
                with contextlib.suppress(OSError):
                    lock_file.unlink()
