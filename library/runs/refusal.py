"""Why a training of the page ends before its record begins, and what no record may hold. Quick to import."""

import contextlib
import os
import time
from pathlib import Path

from library.config.json_types import JsonMapping
from library.config.problems import ConfigError, Text
from library.runs import layout

ENVIRONMENT = ("WANDB_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")  # where secrets come from besides the config
SHORTEST = 6  # characters; a shorter word is no secret, and hiding it would spoil the text


class Secrets:
    """Tokens and keys of this run, which no file of it may hold, whatever an error message quotes."""

    def __init__(self, config: JsonMapping) -> None:
        own = [layout.secrets_in(config), [os.environ.get(name, "") for name in ENVIRONMENT]]
        self._words = sorted({word for words in own for word in words if len(word) >= SHORTEST}, key=len, reverse=True)

    def out_of(self, text: str) -> str:
        """The text without them; made as before, where it was made of a template."""
        if isinstance(text, Text):
            return text.changed(self.out_of)
        for word in self._words:
            text = text.replace(word, "***")
        return text


def refuse(error: ConfigError) -> None:
    """Write down why a training ends before its record begins, where the page has prepared a folder for it."""
    prepared = os.environ.get("KOHYA_RUN_DIR", "")
    facts = layout.load(Path(prepared) / layout.RUN) if prepared else {}
    if facts.get("state") == "starting":
        ended = {"state": "failed", "error": Secrets({}).out_of(error.said), "ended": time.time()}
        with contextlib.suppress(OSError, ConfigError):  # a full disk: the log says it, too
            layout.store(Path(prepared) / layout.RUN, facts | ended)
