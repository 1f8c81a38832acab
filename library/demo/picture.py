"""What the demo's LoRA has learned as one picture, from the samples that its run has generated."""

from pathlib import Path

from PIL import Image

from library.files import write_atomic
from library.runs import reader
from library.runs.sample_sheet import arrange_samples, draw_sheet


def write_picture(run: Path) -> list[str]:
    """Write the picture of the run in this folder beside its LoRA. Return lines that say where it is, or why there is
    none, and which samples failed."""
    facts, (events, _) = reader.run_at(run).facts, reader.read_events(run)
    samples = [event for event in events if event["kind"] == "sample"]
    failed = list(dict.fromkeys(str(event.get("text")) for event in events if event["kind"] == "sample_failed"))
    missing = [f"  Some samples could not be generated: {'; '.join(failed)}"] if failed else []
    sheet = arrange_samples(samples)
    if sheet is None:
        return ["There is no picture of what was learned, as the training left no samples to compare.", *missing]

    def opened(place: int) -> Image.Image | None:
        path = Path(str(facts.get("folder") or "."), str(samples[place].get("file")))
        try:
            with Image.open(path) as image:
                return image.convert("RGB")
        except OSError:
            return None

    path = Path(str(facts["output_dir"]), f"{facts['output_name']}.png")
    write_atomic(path, draw_sheet(sheet, opened).save)
    columns = "the base model, the LoRA halfway, and at the end" if len(sheet.steps) > 2 else "before and after"
    return [
        f"What it has learned, as a picture: {path}",
        f"  Each row is a prompt; the columns are {columns}.",
        *missing,
    ]
