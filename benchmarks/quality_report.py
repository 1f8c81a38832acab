"""The results of benchmarks/quality.py: figures of a run, their comparison over seeds, tables and charts.

An image is described by histograms of its colours and of its edge directions, so that the place of the subject does not
matter. Two images of the same prompt and noise are compared as blurred pixels.
"""

import base64
import io
import itertools
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

Row = dict[str, Any]
KEY = ("family", "method", "setting", "seed")  # identifies a run
Prompts = Sequence[tuple[str, Sequence[Image.Image]]]  # each with reference drawings, if there are any
LEVELS, DIRECTIONS, BLUR = 4, 8, 8  # per channel; of edges; side in pixels of the averaged squares
ERRORS = 2  # standard errors that a difference must exceed
# A figure of a run, its title in tables, and its decimals; less is better in all of them.
FIGURES = (
    ("held_out", "held-out loss", 5),
    ("distance", "distance of the new subject", 3),
    ("moved", "old subjects", 4),
)
REPORT_COLOURS = ("#4338ca", "#c2410c", "#15803d", "#b91c1c", "#0e7490", "#a16207", "#7e22ce", "#475569")


# ---- the rows


def collect(folder: Path, pictures: int) -> Row:
    """Return the figures of a run from its record in an output folder, with its sample images side by side."""
    (progress,) = folder.glob("runs/*/progress.jsonl")
    events = [json.loads(line) for line in progress.read_text(encoding="utf-8").splitlines()]
    steps = {event["step"]: event["loss"] for event in events if event["kind"] == "step"}
    held_out = [[event["step"], event["loss"]] for event in events if event["kind"] == "validation"]
    figures: Row = {"losses": list(steps.values()), "held_out": held_out}
    figures["by_timestep"] = [event["by_timestep"] for event in events if event["kind"] == "validation"][-1]
    samples = [event for event in events if event["kind"] == "sample"]
    for name, wanted in (("pictures", max(steps)), ("before", 0)):
        files = {event["number"]: event["file"] for event in samples if event["step"] == wanted}
        if len(files) == pictures:
            figures[name] = pack([Image.open(files[number]).convert("RGB") for number in sorted(files)])
    if "pictures" not in figures:
        raise ValueError("samples are missing")
    return figures


def pack(pictures: Sequence[Image.Image]) -> str:
    """Return images of one size side by side, as text."""
    stored = io.BytesIO()
    strip = Image.fromarray(np.concatenate([np.asarray(picture) for picture in pictures], 1))
    strip.save(stored, "WEBP", quality=90)  # its errors are far below the differences between seeds
    return base64.b64encode(stored.getvalue()).decode()


def unpack(text: str) -> list[Image.Image]:
    """Return the square images of a text by `pack`."""
    strip = Image.open(io.BytesIO(base64.b64decode(text))).convert("RGB")
    side = strip.height
    return [strip.crop((left, 0, left + side, side)) for left in range(0, strip.width, side)]


def append(folder: Path, row: Row) -> None:
    with (folder / f"runs-{row['family']}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def read_rows(folder: Path) -> list[Row]:
    """Return the newest row of every run, preferring a result to a later failure; truncated lines are skipped."""
    rows: dict[tuple[Any, ...], Row] = {}
    for path in sorted(folder.glob("runs-*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            key = tuple(row[name] for name in KEY)
            if "failed" not in row or key not in rows:
                rows[key] = row
    return list(rows.values())


def warn_of_fp8(folders: Sequence[Path]) -> None:
    """Warn of a model stored in fp8, which fp8_base would not round again."""
    for path in sorted(file for folder in folders for file in folder.glob("*.safetensors")):
        with path.open("rb") as file:
            head = file.read(int.from_bytes(file.read(8), "little"))
        if b'"F8_E4M3"' in head:
            print(f"{path} is stored in fp8, so fp8_base rounds nothing: use the file from before `finish`")


# ---- comparing images


def describe(picture: Image.Image) -> np.ndarray:
    """Return the square roots of two histograms: colours, and edge directions weighted by strength."""
    pixels = np.asarray(picture.convert("RGB"), np.float32)
    levels = (pixels / 256 * LEVELS).astype(int)
    colours = np.bincount((levels @ np.array([LEVELS**2, LEVELS, 1])).ravel(), minlength=LEVELS**3)
    small = pixels.mean(2).reshape(pixels.shape[0] // 2, 2, pixels.shape[1] // 2, 2).mean((1, 3))
    down, right = np.gradient(small)
    turns = ((np.arctan2(down, right) / np.pi + 1) / 2 * DIRECTIONS).astype(int) % DIRECTIONS
    edges = np.bincount(turns.ravel(), weights=np.hypot(down, right).ravel(), minlength=DIRECTIONS)
    flat = small.size * 255 / 16  # makes images without edges differ from those with strong ones
    edges = np.append(edges, max(0.0, flat - edges.sum()))
    return np.concatenate([np.sqrt(counts / counts.sum() / 2) for counts in (colours, edges)])


def distance(picture: Image.Image, references: Sequence[Image.Image]) -> float:
    """Return the mean Hellinger distance of an image to others, 0 to 1."""
    own = describe(picture)
    return statistics.mean(float(np.linalg.norm(own - describe(other))) / 2**0.5 for other in references)


def difference(first: Image.Image, other: Image.Image) -> float:
    """Return the root mean squared difference of two blurred images, 0 to 1."""
    small = [
        np.asarray(picture.resize((picture.width // BLUR, picture.height // BLUR), Image.Resampling.BOX), np.float32)
        for picture in (first, other)
    ]
    return float(np.sqrt(((small[0] - small[1]) ** 2).mean())) / 255


def mean_difference(ones: Sequence[Image.Image], others: Sequence[Image.Image]) -> float:
    return statistics.mean(map(difference, ones, others))


# ---- comparing settings


@dataclass(frozen=True)
class SettingComparison:
    """The runs of a setting beside those of its yardstick: figures by seed."""

    family: str
    method: str
    setting: str
    figures: Mapping[str, Mapping[int, float]]
    against: Mapping[str, Mapping[int, float]]
    drift: Sequence[float] = ()  # differences from the yardstick's images of the same seed
    apart: Sequence[float] = ()  # differences between the yardstick's images of different seeds
    why: str = ""  # figures are missing

    def paired(self, name: str) -> list[float]:
        """Return the setting's figure minus the yardstick's for each common seed."""
        return [
            value - self.against[name][seed] for seed, value in self.figures[name].items() if seed in self.against[name]
        ]

    def verdict(self, name: str) -> str:
        """Return "worse" or "better" if a figure lies outside the yardstick's spread; "" otherwise, or with too few
        seeds.

        Outside: the mean difference at equal seeds exceeds both two of its standard errors and the yardstick's standard
        deviation.
        """
        apart = self.paired(name)
        if len(apart) < 2 or len(self.against[name]) < 2:
            return ""
        mean, error = statistics.mean(apart), statistics.stdev(apart) / len(apart) ** 0.5
        if abs(mean) <= max(ERRORS * error, statistics.stdev(self.against[name].values())):
            return ""
        return "worse" if mean > 0 else "better"

    @property
    def drifts(self) -> bool:
        return bool(self.drift and self.apart) and statistics.mean(self.drift) > statistics.mean(self.apart)


def compare(rows: Sequence[Row], prompts: Prompts, yardsticks: Mapping[str, str]) -> list[SettingComparison]:
    """Compare every setting of every family and method with its yardstick, in the order of `yardsticks`."""
    comparisons = []
    kinds = dict.fromkeys((row["family"], row["method"]) for row in rows)
    for family, method in kinds:
        own = [row for row in rows if (row["family"], row["method"]) == (family, method)]
        before = next((unpack(row["before"]) for row in own if "before" in row), None)
        figures = {name: figures_of(own, name, prompts, before) for name in yardsticks}
        pictures = {name: {row["seed"]: unpack(row["pictures"]) for row in succeeded(own, name)} for name in yardsticks}
        for name, yardstick in yardsticks.items():
            about = [row for row in own if row["setting"] == name]
            if about:
                theirs, why = pictures[yardstick], [row.get("left_out") or row.get("failed") for row in about]
                comparisons.append(
                    SettingComparison(
                        *(family, method, name, figures[name], figures[yardstick]),
                        drift=[
                            mean_difference(shown, theirs[seed])
                            for seed, shown in pictures[name].items()
                            if name != yardstick and seed in theirs
                        ],
                        apart=[mean_difference(*pair) for pair in itertools.combinations(theirs.values(), 2)],
                        why=next(filter(None, why), ""),
                    )
                )
    return comparisons


def succeeded(rows: Sequence[Row], setting: str) -> list[Row]:
    rows_of_setting = [row for row in rows if row["setting"] == setting and "pictures" in row]
    return sorted(rows_of_setting, key=lambda row: row["seed"])


def figures_of(
    rows: Sequence[Row], setting: str, prompts: Prompts, before: Sequence[Image.Image] | None
) -> dict[str, dict[int, float]]:
    """Return the figures of a setting by name and seed; `before` are the images of the untrained model."""
    figures: dict[str, dict[int, float]] = {name: {} for name, _, _ in FIGURES}
    for row in succeeded(rows, setting):
        seed, shown = row["seed"], unpack(row["pictures"])
        figures["held_out"][seed] = row["held_out"][-1][1]
        pairs = [(picture, drawings) for picture, (_, drawings) in zip(shown, prompts, strict=True) if drawings]
        figures["distance"][seed] = statistics.mean(distance(*pair) for pair in pairs)
        if before:
            old = [number for number, (_, drawings) in enumerate(prompts) if not drawings]
            figures["moved"][seed] = statistics.mean(difference(shown[number], before[number]) for number in old)
    return figures


def sentences(compared: Sequence[SettingComparison]) -> Iterator[str]:
    """Yield a sentence for each figure that is worse than the yardstick's spread, for docs and presets."""
    for comparison in compared:
        place = f"{comparison.family} {comparison.method}, {comparison.setting}"
        for name, title, decimals in FIGURES:
            if comparison.verdict(name) == "worse":
                own, theirs = (
                    statistics.mean(every[name].values()) for every in (comparison.figures, comparison.against)
                )
                spread = statistics.stdev(comparison.against[name].values())
                yield (
                    f"{place}: {title} {own:.{decimals}f} instead of {theirs:.{decimals}f}, "
                    f"{(own - theirs) / spread:.1f} times the yardstick's spread"
                )
        if comparison.drifts:
            yield f"{place}: its images are further from the yardstick's than those of another seed"


# ---- tables and charts


def write(folder: Path, prompts: Prompts, yardsticks: Mapping[str, str]) -> None:
    """Write quality.json, quality.md, quality.png and a sheet of samples for each family."""
    rows = read_rows(folder)
    compared = compare(rows, prompts, yardsticks)
    short_rows = [{name: value for name, value in row.items() if name not in ("pictures", "before")} for row in rows]
    (folder / "quality.json").write_text(json.dumps(short_rows, indent=1) + "\n", encoding="utf-8")
    text = "\n".join([*table(compared), "", *(f"- {line}" for line in sentences(compared)), ""])
    (folder / "quality.md").write_text(text, encoding="utf-8")
    print(text)
    if compared:
        figure(compared, rows).save(folder / "quality.png", optimize=True)
    for family in dict.fromkeys(row["family"] for row in rows):
        if picture := sheet([row for row in rows if row["family"] == family], prompts, yardsticks):
            picture.save(folder / f"samples-{family}.png", optimize=True)


def table(compared: Sequence[SettingComparison]) -> Iterator[str]:
    """Yield the Markdown table: mean ± standard deviation over seeds, and the figures outside the spread."""
    yield f"| | setting | seeds | {' | '.join(title for _, title, _ in FIGURES)} | drift | beyond the spread |"
    yield "|---|---|" + "---:|" * (2 + len(FIGURES)) + "---|"
    for comparison in compared:
        count = len(comparison.figures["held_out"])
        start = f"| {comparison.family} {comparison.method} | {comparison.setting} |"
        if not count:
            yield f"{start}{' |' * (len(FIGURES) + 2)} {comparison.why.replace('|', '/')} |"
            continue
        cells = [spread(comparison.figures[name].values(), decimals) for name, _, decimals in FIGURES]
        drift = spread(comparison.drift or comparison.apart, 3)
        verdicts = [f"{title}: {comparison.verdict(name)}" for name, title, _ in FIGURES if comparison.verdict(name)]
        verdicts += ["images: as another seed's"] * comparison.drifts + [comparison.why] * bool(comparison.why)
        yield f"{start} {count} | {' | '.join([*cells, drift])} | {'; '.join(verdicts)} |"


def spread(values: Any, decimals: int) -> str:
    """Return mean and standard deviation as text."""
    numbers = list(values)
    if not numbers:
        return ""
    more = f" ± {statistics.stdev(numbers):.{decimals}f}" if len(numbers) > 1 else ""
    return f"{statistics.mean(numbers):.{decimals}f}{more}"


def figure(compared: Sequence[SettingComparison], rows: Sequence[Row]) -> Image.Image:
    """Draw a row for each family and method: held-out losses and distances of all seeds, and loss curves."""
    kinds = list(dict.fromkeys((result.family, result.method) for result in compared))
    lines = {
        kind: [result for result in compared if (result.family, result.method) == kind and result.figures["held_out"]]
        for kind in kinds
    }
    heights = [60 + 22 * max(4, len(lines[kind])) for kind in kinds]
    image = Image.new("RGB", (1320, sum(heights)), "white")
    pen, top = ImageDraw.Draw(image), 0
    for kind, height in zip(kinds, heights, strict=True):
        pen.text((12, top + 8), " ".join(kind), fill="black", font=font(16))
        for number, result in enumerate(lines[kind]):
            pen.text((12, top + 38 + 22 * number), result.setting, fill="black", font=font(13))
        for column, (name, title, _) in enumerate(FIGURES[:2]):
            dots(pen, (140 + 370 * column, top), (name, title), lines[kind])
        names = [result.setting for result in lines[kind]]
        own = [row for row in rows if (row["family"], row["method"]) == kind]
        curves(pen, (900, top + 34, 1300, top + height - 26), own, names)
        top += height
    return image


def dots(
    pen: ImageDraw.ImageDraw, place: tuple[int, int], what: tuple[str, str], shown: Sequence[SettingComparison]
) -> None:
    """Draw a dot for each seed and a line at the mean; the band is the yardstick's mean and standard deviation."""
    (left, top), (name, title), wide = place, what, 330
    pen.text((left, top + 10), title, fill="#5c5c56", font=font(13))
    every = [value for result in shown for which in (result.figures, result.against) for value in which[name].values()]
    if not every:
        return
    low, high = min(every), max(every)

    def across(value: float) -> float:
        return left + 8 + (wide - 16) * (value - low) / ((high - low) or 1)

    for number, result in enumerate(shown):
        y, theirs = top + 46 + 22 * number, list(result.against[name].values())
        if len(theirs) > 1:
            middle, wide_by = statistics.mean(theirs), statistics.stdev(theirs)
            ends = [min(max(across(middle + sign * wide_by), left), left + wide) for sign in (-1, 1)]
            pen.rectangle((ends[0], y - 10, ends[1], y + 11), fill="#e8e7fb")
        colour = {"worse": "#b91c1c", "better": "#15803d"}.get(result.verdict(name), "#4338ca")
        for value in result.figures[name].values():
            pen.ellipse((across(value) - 3, y - 3, across(value) + 3, y + 3), outline=colour)
        mean = across(statistics.mean(result.figures[name].values()))
        pen.line((mean, y - 7, mean, y + 7), fill=colour, width=2)
    pen.text((left, top + 40 + 22 * len(shown)), f"{low:.4g} to {high:.4g}", fill="#5c5c56", font=font(11))


def curves(pen: ImageDraw.ImageDraw, box: tuple[int, int, int, int], rows: Sequence[Row], names: Sequence[str]) -> None:
    """Draw the training losses, averaged over seeds and a window of steps, one line per setting."""
    left, top, right, bottom = box
    lines = {}
    for name in names:
        every = np.array([row["losses"] for row in succeeded(rows, name)]).mean(0)
        window = max(1, len(every) // 12)
        lines[name] = np.convolve(every, np.ones(window) / window, "valid")
    if not lines:
        return
    low, high = min(line.min() for line in lines.values()), max(line.max() for line in lines.values())
    pen.text((left, top - 24), f"training loss, {low:.4g} to {high:.4g}", fill="#5c5c56", font=font(13))
    pen.rectangle(box, outline="#dededa")
    for number, line in enumerate(lines.values()):
        across = np.linspace(left, right, len(line))
        down = bottom - (line - low) / ((high - low) or 1) * (bottom - top)
        pen.line(list(zip(across, down, strict=True)), fill=REPORT_COLOURS[number % len(REPORT_COLOURS)], width=1)


def sheet(rows: Sequence[Row], prompts: Prompts, settings: Mapping[str, str]) -> Image.Image | None:
    """Draw the samples of a family: a row for each method and setting, the seeds side by side for each prompt."""
    seeds = sorted({row["seed"] for row in rows if "pictures" in row})[:3]
    lines: list[tuple[str, list[Image.Image | None]]] = []
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == method]
        if before := next((unpack(row["before"]) for row in own if "before" in row), None):
            lines.append((f"{method}: before", [picture for picture in before for _ in seeds]))
        for name in settings:
            shown = {row["seed"]: unpack(row["pictures"]) for row in succeeded(own, name)}
            if shown:
                every = [
                    shown[seed][number] if seed in shown else None for number in range(len(prompts)) for seed in seeds
                ]
                lines.append((f"{method}: {name}", every))
    if not lines:
        return None
    side, margin = 64, 140
    image = Image.new("RGB", (margin + side * len(prompts) * len(seeds), 24 + side * len(lines)), "white")
    pen = ImageDraw.Draw(image)
    for number, (prompt, _) in enumerate(prompts):
        text = prompt if len(seeds) > 1 else prompt[:10]
        pen.text((margin + number * side * len(seeds) + 2, 4), text, fill="black", font=font(10))
    for down, (name, pictures) in enumerate(lines):
        pen.text((4, 24 + side * down + side // 2 - 8), name, fill="black", font=font(12))
        for across, picture in enumerate(pictures):
            if picture:
                image.paste(
                    picture.resize((side, side), Image.Resampling.BOX), (margin + side * across, 24 + side * down)
                )
    return image


def font(size: int) -> Any:
    return ImageFont.load_default(size)
