"""The training, from a config to a file."""

from pathlib import Path
from typing import Any


def train(config: Any) -> Path:
    """Train what `config` describes and return the file that came of it. ConfigError lists everything to fix first."""
    from library.train import console, preflight, save
    from library.train.story import tell

    console.listen(config.log)
    save.tidy(config)
    remarks = preflight.check(config)
    return tell(config, remarks)
