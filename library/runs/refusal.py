"""Record why a training fails before its record begins, and keep secrets out of all records. Imports quickly."""

import contextlib
import os
import time
from pathlib import Path

from library.config.json_types import JsonMapping
from library.config.problems import ConfigError
from library.runs import layout

ENVIRONMENT = ("WANDB_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")  # sources of secrets besides the config
SHORTEST = 6  # minimum characters; a shorter word is no secret, and hiding it would garble the text


class Secrets:
    """Removes this run's tokens and keys from texts before they are written."""

    def __init__(self, config: JsonMapping) -> None:
        sources = [layout.secrets_in(config), [os.environ.get(name, "") for name in ENVIRONMENT]]
        self._words = sorted(
            {word for words in sources for word in words if len(word) >= SHORTEST}, key=len, reverse=True
        )

    def redact(self, text: str) -> str:
        """Return the text without secrets."""
        for word in self._words:
            text = text.replace(word, "***")
        return text


def refuse(error: ConfigError) -> None:
    """Write the error of a training without a record into the folder prepared by the page, if any."""
    prepared = os.environ.get("KOHYA_RUN_DIR", "")
    facts = layout.load_facts(Path(prepared) / layout.RUN) if prepared else {}
    if facts.get("state") == "starting":
        ended = {"state": "failed", "error": error.said.changed(Secrets({}).redact), "ended": time.time()}
        with contextlib.suppress(OSError, ConfigError):  # on a full disk only the log has the error
            layout.store(Path(prepared) / layout.RUN, facts | ended)
