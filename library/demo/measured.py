"""The gain by compiling full-size models on a GPU, from the measurements in docs/measured."""

import json
from collections.abc import Iterator
from pathlib import Path

from library import families
from library.config.json_types import JsonObject

MEASURED_FOLDER = Path(__file__).resolve().parents[2] / "docs" / "measured"


def gain(family: str, folder: Path = MEASURED_FOLDER) -> str:
    """Describe the newest figures of a LoRA step with checkpointing, eager and compiled, with their file.

    Without any, refer to the documentation of figures.
    """
    title = families.facts_of(family).title
    for path in sorted(folder.glob("*.json"), reverse=True):
        measurements = json.loads(path.read_text(encoding="utf-8"))
        eager = min(_step_rows(measurements, family, compiled=False), default=None)
        fast = min(_step_rows(measurements, family, compiled=True), default=None)
        if eager and fast:
            note = measurements["machine"].get("note", "")
            return (
                f"On an {measurements['machine']['gpu']} a step of full-size {title} took {eager[1]:.3g} s eagerly "
                f"({eager[2]}) and {fast[1]:.3g} s compiled ({fast[2]}): docs/measured/{path.name}."
                + (f" {note}" if title in note else "")
            )
    return "docs/dev/performance.md says what compiling gives with full-size models on a GPU."


def _step_rows(measurements: JsonObject, family: str, compiled: bool) -> Iterator[tuple[int, float, str]]:
    """Return number of settings, seconds per step and settings of each row; the fewest settings show
    compiling alone.
    """
    for row in measurements["rows"]:
        settings = [word.strip() for word in row["how"].split(",")]
        is_ours = (row["trainer"], row["family"], row["method"], row["batch"]) == ("here", family, "lora", 1)
        if is_ours and "checkpointing" in settings and ("compile" in settings) == compiled:
            yield len(settings), row["s_it"], row["how"]
