"""The gallery of sample images: the step and prompt of each, and the images by the page's own routes."""

import contextlib
import html
import io
import mimetypes
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from PIL import Image
from starlette.responses import Response

from kohya_gui.i18n.sentences import data
from kohya_gui.panel import history
from kohya_gui.panel.resumed_samples import RunSample, existing_samples, own_samples
from kohya_gui.server import paths
from library.config.json_types import JsonMapping, as_float
from library.config.problems import ConfigError, Message, MessageLike, counted
from library.runs import reader, written_files
from library.runs.sample_sheet import arrange_samples, draw_sheet
from library.sampling.recorded_prompts import recorded_prompt

IMAGES = written_files.SAMPLE_ENDINGS
THUMBNAIL_SIDE = 192  # pixels of a thumbnail's longer side
MAX_PIXELS, MAX_BYTES = 40_000_000, 60_000_000
MAX_SAMPLES = 60  # the newest of each prompt
CACHE_HEADERS = {
    "cache-control": "private, max-age=86400",
    "content-security-policy": "default-src 'none'",
    "content-encoding": "identity",  # images do not get smaller
}


def gallery(run: reader.RecordedRun, progress: reader.RunProgress) -> str:
    """Return all samples of a run and of those that it continues, a row for each prompt, the newest first. A click
    compares two of a row (samples.js). A prompt that a resume has changed is a row of its own."""
    rows: dict[tuple[int, str], list[RunSample]] = {}
    for sample in existing_samples(run):
        number, prompt = (sample.event.get(name) for name in ("number", "prompt"))
        rows.setdefault((int(as_float(number)), str(prompt or "")), []).append(sample)
    if not rows:
        return ""
    shown = "".join(_row(*of, samples) for of, samples in sorted(rows.items(), key=lambda row: row[0][0]))
    title = (
        "<h3><span>Samples <small>Click one to compare it with another step.</small></span>"
        f'<button type="button" class="try" data-try="{html.escape(run.id)}">Side by side</button></h3>'
    )
    about = (_judgement_html(progress) if run.active else "") + _cost_html(progress, run.active)
    return f'<section class="samples">{title}{about}{shown}</section>'


def _judgement_html(progress: reader.RunProgress) -> str:
    """Return the newest verdict on the samples: noise, or still like the base model's."""
    verdicts = [event for event in progress.events.get("warning", ()) if event.get("about") == "samples"]
    if not verdicts:
        return ""
    words = history.event_words(verdicts[-1])
    sentence = words.capitalized() if isinstance(words, Message) else words
    return f'<p class="judged" role="alert"{data(sentence)}>{html.escape(str(sentence))}</p>'


def _cost_html(progress: reader.RunProgress, active: bool) -> str:
    """Return the time of the newest set of samples, and the share of all."""
    event = next(reversed(progress.events.get("preview", ())), {})
    images, seconds, share = (event.get(name) for name in ("pictures", "seconds", "share"))
    if not all(isinstance(number, int | float) for number in (images, seconds, share)):
        return ""
    template = "{pictures} in {seconds} s; samples took {share} of the training"
    sentence = Message(
        "{pictures} in {seconds} s; samples took {share} of the training so far" if active else template,
        pictures=counted(int(as_float(images)), "sample image"),
        seconds=f"{seconds:.1f}",
        share=f"{share:.0%}",
    )
    return f'<p class="cost"{data(sentence)}>{html.escape(str(sentence))}</p>'


def learned_html(run: reader.RecordedRun, progress: reader.RunProgress) -> str:
    """Return the samples of an ended run at the start, halfway and at the end, as one image."""
    sheet = None if run.active else arrange_samples([sample.event for sample in existing_samples(run)])
    if sheet is None:
        return ""
    width, height = sheet.size
    address = html.escape("own/learned?" + urlencode({"run": run.id}))
    clear = html.escape("own/learned?" + urlencode({"run": run.id, "clear": 1}))
    about = "The samples at the start, halfway and at the end of the training"
    return (
        f'<section class="learned"><h3>What it has learned <a href="{address}" download="{html.escape(run.id)}.png">'
        f'Save this image</a></h3>{_judgement_html(progress)}<img src="{clear}" alt="{about}"'
        f' width="{width}" height="{height}" loading="lazy" decoding="async"></section>'
    )


def _row(number: int, words: str, samples: list[RunSample]) -> str:
    prompt = words or Message("Prompt {number}", number=number + 1)
    images = "".join(_sample_html(sample, prompt) for sample in reversed(samples[-MAX_SAMPLES:]))
    images += _original_html(samples[-1], prompt)
    prompt_html = html.escape(str(prompt))
    return f'<p title="{prompt_html}"{data(prompt)}>{prompt_html}</p><div class="strip" role="group">{images}</div>'


def _sample_html(sample: RunSample, prompt: MessageLike) -> str:
    step = sample.step
    template = "Sample of step {step}: {prompt}" if step else "Sample of the base model: {prompt}"
    about = Message(template, **({"step": step} if step else {}), prompt=prompt)
    title = Message("Step {step}", step=step) if step else Message("Base model")
    seed = seed_of_event(sample.event)
    of_seed = "" if seed is None else Message("Seed {seed}", seed=seed)
    large = html.escape(sample_address(sample.run.id, sample.place))
    small = f"{large}?small=true"
    return (
        f'<button type="button" class="sample" data-step="{step}" data-large="{large}"'
        f' aria-label="{html.escape(str(about))}"'
        f' title="{of_seed}"{data(about, title, of_seed)}>'
        f'<img src="{small}" alt="" loading="lazy" decoding="async"><span>{title}</span></button>'
    )


def _original_html(sample: RunSample, prompt: MessageLike) -> str:
    """Return the image that the samples of a row were made from, to be compared with them; "" without one."""
    if not recorded_prompt(sample.event).control_image_path:
        return ""
    about, title = Message("Original image: {prompt}", prompt=prompt), Message("Original")
    large = html.escape("own/original?" + urlencode({"run": sample.run.id, "place": sample.place}))
    small = f"{large}&amp;small=1"
    return (
        f'<button type="button" class="sample original" data-step="-1" data-large="{large}"'
        f' aria-label="{html.escape(str(about))}"{data(about, title)}>'
        f'<img src="{small}" alt="" loading="lazy" decoding="async"><span>{title}</span></button>'
    )


def show_original(query: Mapping[str, str], roots: Sequence[Path]) -> Response:
    """Return the first image that a sample was made from; nothing if the page may not read it, or if it is gone."""
    try:
        run = reader.find_run(str(query.get("run") or ""))
        event = reader.progress(run.folder).update().events["sample"][max(0, int(query.get("place") or 0))]
        shown = recorded_prompt(event).control_image_path or ()
        path = Path(str(run.facts.get("folder") or "."), shown[0])
    except (KeyError, ValueError, IndexError):
        raise ConfigError("There is no such image.") from None
    try:
        return serve_image(paths.existing_file(str(path), roots, IMAGES, "image"), bool(query.get("small")))
    except ConfigError:
        return Response(status_code=204)  # the page then removes its place (samples.js)


def seed_of_event(event: JsonMapping) -> int | None:
    """Return the seed of a sample's event; records of earlier versions have none."""
    seed = event.get("seed")
    return seed if isinstance(seed, int) else None


def sample_address(run_id: str, place: int) -> str:
    """Return the address of a sample, relative to the page's."""
    return f"api/v1/runs/{quote(run_id, safe='')}/samples/{place}"


def serve_sample(run_id: str, place: int | str, small: bool) -> Response:
    """Serve an image by its run and its index among that run's samples or "newest"; nothing else can be requested."""
    try:
        run = reader.find_run(run_id)
        path = sample_file(run, _newest(run) if isinstance(place, str) else place)
    except (KeyError, ValueError, IndexError):
        raise ConfigError("There is no such image.") from None
    return serve_image(path, small)


def serve_image(path: Path, small: bool) -> Response:
    """Serve an image that the page may show, whole or as a thumbnail."""
    body = thumbnail(path, path.stat().st_mtime_ns) if small else whole(path)
    kind = "image/jpeg" if small else mimetypes.guess_type(path.name)[0]
    return Response(body, media_type=kind or "application/octet-stream", headers=CACHE_HEADERS)


def _newest(run: reader.RecordedRun) -> int:
    """Return the place of the first prompt's image at the newest step that still has one; -1 if none is left."""
    existing = [sample for sample in own_samples(run) if sample.exists]
    steps = [sample.event.get("step") for sample in existing]
    return existing[steps.index(steps[-1])].place if existing else -1


def show_learned(query: Mapping[str, str]) -> Response:
    """Serve the sheet of a run's samples that shows what it has learned."""
    try:
        run = reader.find_run(str(query.get("run") or ""))
    except KeyError:
        raise ConfigError("There is no such image.") from None
    samples = existing_samples(run)
    sheet = arrange_samples([sample.event for sample in samples])
    if sheet is None:
        raise ConfigError("There is no such image.")

    def opened(place: int) -> Any:
        sample = samples[place]
        with (
            contextlib.suppress(ConfigError, ValueError, OSError),
            _open_sample(file_of_event(sample.run, sample.event)) as image,
        ):
            return image.convert("RGB")
        return None

    png = io.BytesIO()
    draw_sheet(sheet, opened, bool(query.get("clear"))).save(png, "PNG")
    return Response(png.getvalue(), media_type="image/png", headers=CACHE_HEADERS | {"cache-control": "no-cache"})


def sample_file(run: reader.RecordedRun, place: int) -> Path:
    """Return the file of a sample by its place among the run's events. Raises ValueError if it may not be shown."""
    if place < 0:
        raise ValueError("no such sample")
    return file_of_event(run, reader.progress(run.folder).update().events["sample"][place])


def file_of_event(run: reader.RecordedRun, event: JsonMapping) -> Path:
    """Return the file of a sample's event. Raises ValueError unless it is an image below the folder that its run writes
    to."""
    path = written_files.sample_file(run, event)
    if path is None:
        raise ValueError("no sample of this run")
    return path


def size_of_event(run: reader.RecordedRun, event: JsonMapping) -> tuple[int, int] | None:
    """Return the width and height of a sample's event; None if its file is gone or is not an image of this run."""
    try:
        with _open_sample(file_of_event(run, event)) as image:
            return image.width, image.height
    except (ConfigError, ValueError):
        return None


@lru_cache(maxsize=512)
def thumbnail(path: Path, changed: int) -> bytes:
    """Return a small JPEG of an image; `changed` is when its file was written. Raises ConfigError if it is not an
    image."""
    jpeg = io.BytesIO()
    with _open_sample(path) as image:
        image.draft("RGB", (THUMBNAIL_SIDE, THUMBNAIL_SIDE))  # a JPEG is then decoded at a fraction of its size
        small = image.convert("RGB")
        small.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE), Image.Resampling.LANCZOS)
        small.save(jpeg, "JPEG", quality=82)
    return jpeg.getvalue()


def whole(path: Path) -> bytes:
    with _open_sample(path):
        return path.read_bytes()


def _open_sample(path: Path) -> Any:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError("This image is too large to be shown.")
        image = Image.open(path, formats=("PNG", "JPEG", "WEBP"))
    except (OSError, ValueError, Image.DecompressionBombError):
        raise ConfigError("This image cannot be read.") from None
    if image.width * image.height > MAX_PIXELS:
        image.close()
        raise ConfigError("This image is too large to be shown.")
    return image
