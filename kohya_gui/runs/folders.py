"""Show a folder in the computer's own file manager."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from library.config.problems import ConfigError


def show_folder(folder: Path) -> None:
    """Open a folder. Raises ConfigError if it is gone, or if there is nothing to show it with."""
    if not folder.is_dir():
        raise ConfigError("The folder of this run is gone: {folder}", folder=folder)
    try:
        if sys.platform == "win32":
            os.startfile(folder)  # noqa: S606 - a folder that is known to be one
            return
        opener = "open" if sys.platform == "darwin" else shutil.which("xdg-open")
        if opener and (sys.platform == "darwin" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
            quiet = subprocess.DEVNULL
            subprocess.Popen([opener, str(folder)], stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)
            return
    except OSError as error:
        raise ConfigError("{folder} cannot be opened ({why}).", folder=folder, why=error.strerror or error) from error
    raise ConfigError("This computer has no desktop to show it on. The folder is {folder}", folder=folder)
