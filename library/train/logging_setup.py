"""Log messages of the libraries that a training uses."""

import logging
import sys
import warnings

from library.config.sections import Log

CHATTY = ("httpx", "urllib3", "filelock", "PIL", "matplotlib", "fsspec", "asyncio")
_OURS: list[logging.Handler] = []


def listen(log: Log) -> None:
    """Send log messages to the console, or to `console_log_file`, from `console_log_level` on.

    With `console_log_simple` the bare message goes to stdout, as older tools expect.
    """
    if log.console_log_file:
        handler: logging.Handler = logging.FileHandler(log.console_log_file, encoding="utf-8")
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
