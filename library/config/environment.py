"""What the environment says that PyTorch would end at while it is imported. No torch."""

import os
from pathlib import Path

from library.config.values import ConfigError

CACHE = "TORCHINDUCTOR_CACHE_DIR"


def check() -> None:
    """Raise ConfigError where the cache folder that is named cannot be made."""
    if not (wanted := os.environ.get(CACHE)):
        return
    try:
        Path(wanted).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"{CACHE}: {wanted} cannot be made ({error.strerror}), and PyTorch ends there"
        raise ConfigError(f"{why}; choose another folder, or unset it") from error


def forget() -> None:
    """Let PyTorch be loaded in this process all the same, to look for other mistakes."""
    os.environ.pop(CACHE, None)
