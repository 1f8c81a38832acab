"""Write docs/speed.svg and the tables in README.md, docs/choose-a-model.md, docs/presets.md, docs/recipes.md and
docs/dev/performance.md from docs/measured/*.json and the presets: `python -m benchmarks.figure`.

A file of measurements is `{"machine": {...}, "rows": [...]}`. The machine has `gpu`, `processor`, `cores`, `torch` and
optionally a `note` on how to read its figures. A row has `family` (the name of its folder), `method` (lora, finetune,
dreambooth), `preset` (such as sdxl/lora-12gb, or null), `trainer` (sd-scripts or here), `how` (the settings, at most 45
characters), `batch`, `s_it` (seconds per step), `gpu_gib`, `compile_s`, `gpu_busy_s` (seconds per step; both null if
not measured), `shown` (true for the rows of the figure), and optionally a `note` on its figures.
"""

import json
import re
from html import escape
from pathlib import Path
from typing import Any

from library import families
from library.config.formats import read_toml
from library.recipes import recipe_files
from library.recipes.recipe_files import PURPOSES

PROJECT_ROOT = Path(__file__).resolve().parent.parent
FIGURE = PROJECT_ROOT / "docs" / "speed.svg"
README = PROJECT_ROOT / "README.md"
CHOOSING = PROJECT_ROOT / "docs" / "choose-a-model.md"
PRESETS_PAGE = PROJECT_ROOT / "docs" / "presets.md"
PERFORMANCE = PROJECT_ROOT / "docs" / "dev" / "performance.md"
RECIPES = PROJECT_ROOT / "docs" / "recipes.md"
TABLE = re.compile(r"(<!-- presets -->\n).*?(<!-- /presets -->)", re.DOTALL)
TITLES = {facts.name: facts.title for facts in families.all_families()}
METHODS = {
    "lora": "LoRA",
    "finetune": "fine-tune",
    "dreambooth": "DreamBooth",
    "lllite": "LLLite",
    "textual-inversion": "textual inversion",
}
PICTURE_WIDTH, BAR, ROW_HEIGHT = 480, 12, 40  # units of the SVG; a phone shows about 360 of them
LIGHT = {"ground": "#ffffff", "ink": "#1f2328", "quiet": "#59636e", "theirs": "#8c959f", "ours": "#2da44e"}
DARK = {"ground": "#0d1117", "ink": "#f0f6fc", "quiet": "#9198a1", "theirs": "#6e7681", "ours": "#3fb950"}

Measured = dict[str, Any]


def main() -> None:
    """Write the figure and the tables."""
    from library.files import write_atomic

    measurements = load_measurements()
    write_atomic(FIGURE, figure(newest(measurements)))
    for page, lines in document_tables(measurements).items():
        write_atomic(page, with_table(page.read_text(encoding="utf-8"), lines))
        print(f"wrote the table of presets in {page}")
    print(f"wrote {FIGURE}")


def document_tables(measurements: list[Measured]) -> dict[Path, list[str]]:
    """Return the lines of the preset table in each document."""
    return {
        README: by_family(measurements),
        CHOOSING: overview(measurements),
        PRESETS_PAGE: presets_table(measurements),
        PERFORMANCE: figures(measurements),
        RECIPES: recipes(),
    }


def load_measurements() -> list[Measured]:
    paths = sorted((PROJECT_ROOT / "docs" / "measured").glob("*.json"), key=lambda path: path.stem, reverse=True)
    return [json.loads(path.read_text(encoding="utf-8")) | {"file": path.name} for path in paths]


def newest(measurements: list[Measured]) -> Measured:
    return next(
        measurement
        for measurement in measurements
        if {row["trainer"] for row in measurement["rows"] if row.get("shown")} >= {"sd-scripts"}
    )


def figure(measurement: Measured) -> str:
    """Return bars of seconds per step, by model and batch size; the filled part of a bar is the GPU's busy time."""
    shown = [row for row in measurement["rows"] if row.get("shown")]
    parts, y = [], 30
    for text in _wrapped(machine_line(measurement["machine"])):
        parts.append(f'<text x="0" y="{y + 16}" class="quiet">{escape(text)}</text>')
        y += 16
    y += 14
    for family, method, batch in dict.fromkeys((r["family"], r["method"], r["batch"]) for r in shown):
        rows = [r for r in shown if (r["family"], r["method"], r["batch"]) == (family, method, batch)]
        longest = max(row["s_it"] for row in rows)
        title = f"{TITLES[family]} {METHODS[method]}, batch size {batch}"
        parts.append(f'<text x="0" y="{y + 14}" class="group">{escape(title)}</text>')
        y += 26
        theirs = next((row for row in rows if row["trainer"] != "here"), None)
        for row in rows:
            parts.append(_bar_svg(row, y, row["s_it"] / longest, theirs))
            y += ROW_HEIGHT
        y += 10
    below = _wrapped(_how_to_read(measurement, shown))
    parts += [f'<text x="0" y="{y + 8 + 16 * at}" class="quiet">{escape(text)}</text>' for at, text in enumerate(below)]
    high = y + 16 * len(below) + 4
    about = "; ".join(
        f"{TITLES[r['family']]}, batch {r['batch']}, {_trainer_name(r)}: {r['s_it']:.3g} s" for r in shown
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-12 0 {PICTURE_WIDTH + 24} {high}" '
        f'width="{PICTURE_WIDTH + 24}" '
        f'height="{high}" role="img" aria-labelledby="title desc">'
        f'<title id="title">Seconds per training step beside sd-scripts, on one '
        f"{escape(measurement['machine']['gpu'])}</title>"
        f'<desc id="desc">{escape(about)}.</desc><style>{_figure_style()}</style>'
        f'<rect x="-12" width="{PICTURE_WIDTH + 24}" height="{high}" class="ground"/>'
        f'<text x="0" y="26" class="head">Seconds per training step (shorter is better)</text>'
        f"{''.join(parts)}</svg>\n"
    )


def _bar_svg(row: Measured, y: int, share: float, theirs: Measured | None = None) -> str:
    """Return one row: name and figures above its bar, and after the bar the speedup over `theirs`."""
    kind, long = "theirs" if row["trainer"] == "sd-scripts" else "ours", max(2, round(share * PICTURE_WIDTH))
    busy = row.get("gpu_busy_s")
    filled = round(long * min(1.0, busy / row["s_it"])) if busy else long
    label = f"{row['s_it']:.3f} s, {row['gpu_gib']:.1f} GiB" + (f", busy {busy:.3f} s" if busy else "")
    gain = ""
    if theirs and row["trainer"] == "here":
        gain = f'<text x="{long + 8}" y="{y + 29}" class="quiet">{factors(theirs, row)}</text>'
    outline = f'<rect x="0" y="{y + 19}" width="{long}" height="{BAR}" rx="2" class="{kind} open"/>' if busy else ""
    return (
        f'<text x="0" y="{y + 13}">{escape(_trainer_name(row))}</text>'
        f'<text x="{PICTURE_WIDTH}" y="{y + 13}" class="value">{label}</text>{outline}'
        f'<rect x="0" y="{y + 19}" width="{filled}" height="{BAR}" rx="2" class="{kind}"/>{gain}'
    )


def factors(theirs: Measured, ours: Measured) -> str:
    wall, busy = speedups(theirs, ours)
    return f"{_times(wall)}; busy {_times(busy)}"


def _times(factor: float | None) -> str:
    if factor is None:
        return "not measured"
    return f"{factor:.2f} x" if factor < 1.5 else f"{factor:.1f} x"


def speedups(theirs: Measured, ours: Measured) -> tuple[float, float | None]:
    busy = [row.get("gpu_busy_s") for row in (theirs, ours)]
    return theirs["s_it"] / ours["s_it"], busy[0] / busy[1] if busy[0] and busy[1] else None


def _trainer_name(row: Measured) -> str:
    return f"{'sd-scripts' if row['trainer'] == 'sd-scripts' else 'here'}: {row['how']}"


def machine_line(measurement: Measured) -> str:
    processor = f"{measurement['cores']} cores of {measurement['processor'] or 'a processor that was not recorded'}"
    return f"{measurement['gpu']}, {processor}, torch {measurement['torch']}"


def _how_to_read(measurement: Measured, shown: list[Measured]) -> str:
    """Return the sentences that explain the bars."""
    busy = "The filled part of a bar is the time in which the GPU was busy."
    if not all(row.get("gpu_busy_s") for row in shown):
        busy = "Where a bar shows no GPU busy time, it was not measured."
    if not any(row.get("gpu_busy_s") for row in shown):
        busy = "The GPU's busy time was not measured."
    return (
        f"{measurement['machine'].get('note', '')} {busy} x: sd-scripts' time over this trainer's; "
        "busy: the same for the "
        "GPU's busy time. GiB: the most GPU memory in use."
    ).strip()


def _wrapped(text: str, most: int = 74) -> list[str]:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) > most:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def _figure_style() -> str:
    def colours(of: dict[str, str]) -> str:
        return (
            f".ground{{fill:{of['ground']}}}text{{fill:{of['ink']}}}.quiet{{fill:{of['quiet']}}}"
            f".theirs{{fill:{of['theirs']};stroke:{of['theirs']}}}.ours{{fill:{of['ours']};stroke:{of['ours']}}}"
        )

    return (
        "text{font:13px system-ui,sans-serif}.head{font-size:17px;font-weight:600}.group{font-weight:600}"
        ".quiet{font-size:12px}.value{text-anchor:end}"
        f"{colours(LIGHT)}.open{{fill:none}}@media(prefers-color-scheme:dark){{{colours(DARK)}.open{{fill:none}}}}"
    )


def with_table(text: str, lines: list[str]) -> str:
    return TABLE.sub(lambda match: match[1] + "\n".join(lines) + "\n" + match[2], text)


def by_family(measurements: list[Measured]) -> list[str]:
    """Return a row for each family: the memory its presets need, and its speed beside another trainer."""
    lines = [
        "| | LoRA from | fastest LoRA preset | fine-tune from | compared with | faster: wall time | GPU busy time |",
        "|---|---|---|---|---|---|---|",
    ]
    machines: dict[str, list[str]] = {}
    for family, title in TITLES.items():
        cells = [
            _smallest(family, "lora", measurements),
            _fastest(family, measurements),
            _smallest(family, "finetune", measurements),
        ]
        beside = comparison(family, measurements)
        if beside:
            measurement, theirs, ours = beside
            wall, busy = speedups(theirs, ours)
            cells += [f"{theirs['trainer']}: {theirs['how']}", _times(wall), _times(busy)]
            machine = measurement["machine"]
            where = f"{machine['gpu']} with {machine['cores']} cores of {machine['processor']}"
            machines.setdefault(where, []).append(title)
        else:
            cells += ["none measured", "", ""]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    measured_on = [f"{_listed(titles)} on {name}" for name, titles in machines.items()]
    return [*lines, "", "Compared on one GPU:", *(f"- {line}" for line in measured_on)]


def _listed(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]


def comparison(family: str, measurements: list[Measured]) -> tuple[Measured, Measured, Measured] | None:
    """Return another trainer's fastest LoRA step and our fastest in no more GPU memory, both from one file: the newest
    with busy times of both, or else the newest. If the rival's memory was not measured, whole trainings are
    compared."""
    pairs = []
    for measurement in measurements:
        rows = [r for r in measurement["rows"] if (r["family"], r["method"], r["batch"]) == (family, "lora", 1)]
        if rivals := [r for r in rows if r["trainer"] != "here"]:
            theirs = min(rivals, key=lambda r: r["s_it"])
            limit = theirs["gpu_gib"]
            fair = [r for r in rows if r["trainer"] == "here" and (r["gpu_gib"] <= limit if limit else "steps" in r)]
            pairs += [(measurement, theirs, min(fair, key=lambda r: r["s_it"]))] if fair else []
    return next((pair for pair in pairs if speedups(*pair[1:])[1]), pairs[0] if pairs else None)


def _smallest(family: str, kind: str, measurements: list[Measured]) -> str:
    """Return the smallest GPU that has a preset, with the preset's measured seconds per step."""
    paths = _of_family(family, kind)
    if not paths:
        return "not measured"
    path = min(paths, key=_gigabytes)
    match = _measurement(f"{family}/{path.stem}", measurements)
    return f"{_gigabytes(path)} GB" + (f": {match[1]['s_it']:.2f} s" if match else ", not measured")


def _fastest(family: str, measurements: list[Measured]) -> str:
    timed = []
    for path in _of_family(family, "lora"):
        if match := _measurement(f"{family}/{path.stem}", measurements):
            timed.append((match[1]["s_it"], _gigabytes(path)))
    return f"{min(timed)[1]} GB: {min(timed)[0]:.2f} s" if timed else ""


def _of_family(family: str, kind: str) -> list[Path]:
    return [path for path in _presets() if path.parent.name == family and re.fullmatch(rf"{kind}-\d+gb", path.stem)]


def overview(measurements: list[Measured]) -> list[str]:
    """Return a row for each model and kind of training, with its preset's seconds per step for each GPU size."""
    cells: dict[str, dict[int, str]] = {}
    for path in _presets():
        title = path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ").partition(":")[0].rpartition(" on ")[0]
        if not (size := _gigabytes(path)):
            continue
        result = _measurement(f"{path.parent.name}/{path.stem}", measurements)
        times = ""
        if result and (theirs := _theirs(*result, size)):
            times = f" ({factors(theirs, result[1])})"
        cells.setdefault(title, {})[size] = f"{result[1]['s_it']:.2f} s{times}" if result else "yes"
    sizes = sorted({size for row in cells.values() for size in row})
    lines = [f"| | {' | '.join(f'{size} GB' for size in sizes)} |", f"|---|{'---|' * len(sizes)}"]
    return lines + [f"| {title} | {' | '.join(row.get(size, '') for size in sizes)} |" for title, row in cells.items()]


def presets_table(measurements: list[Measured]) -> list[str]:
    """Return a row for each preset: its GPU, its settings and its measurements."""
    lines = ["| preset | GPU memory | what it sets | measured |", "|---|---|---|---|"]
    for path in _presets():
        _, _, details = path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ").partition(": ")
        name, size = f"{path.parent.name}/{path.stem}", _gigabytes(path)
        sets, _, figures = details.removesuffix(".").partition("; ")
        memory = f"{size} GB" if size else "any"
        lines.append(f"| `{name}` | {memory} | {sets} | {_result(name, size, measurements) or figures} |")
    return lines


def figures(measurements: list[Measured]) -> list[str]:
    """Return a row for each measured preset, with all figures and their file."""
    lines = ["| preset | s | busy | GiB | compile s | measured | |", "|---|---|---|---|---|---|---|"]
    for path in _presets():
        name = f"{path.parent.name}/{path.stem}"
        if not (result := _measurement(name, measurements)):
            continue
        measurement, row = result
        busy, compiling = (row.get(key) for key in ("gpu_busy_s", "compile_s"))
        file = measurement["file"]
        lines.append(
            f"| `{name}` | {row['s_it']:.3f} | {f'{busy:.3f}' if busy else ''} | {row['gpu_gib']:.1f} "
            f"| {f'{compiling:.0f}' if compiling else ''} | [{file[:10]}](../measured/{file}) "
            f"| {row.get('note', '')} |"
        )
    return lines


def recipes() -> list[str]:
    """Return a row for each recipe: its family and purpose, images, steps, rate, rank and alpha."""
    lines = ["| | purpose | images | each seen | steps | rate | rank / alpha |", "|---|---|---|---|---|---|---|"]
    for family, title in TITLES.items():
        for recipe in recipe_files.of_family(family)[0]:
            named = PURPOSES.get(recipe.purpose, "any")
            ranks = sorted({rank for path in _presets() if (rank := _rank(path, recipe))})
            size = f"{recipe.rank or ranks[0]} / {recipe.options['network_alpha']:g}" if ranks else "-"
            least, most = recipe.images
            lines.append(
                f"| {title} {METHODS[recipe.kind]} | {named} | {least} to {most:,} | {recipe.steps_per_image} times "
                f"| {recipe.least_steps:,} to {recipe.most_steps:,} | {recipe.options['learning_rate']:g} | {size} |"
            )
    return lines


def _rank(path: Path, recipe: recipe_files.Recipe) -> int:
    """Return the rank of a preset that a recipe names; 0 for others."""
    options = read_toml(path)
    fits = path.stem.partition("-")[0] == recipe.kind and recipe in recipe_files.of_family(path.parent.name)[0]
    return int(options.get("network_dim", 0)) if fits and recipe.fits(options) else 0


def _presets() -> list[Path]:
    """Return the presets of all families: SDXL first, then by family, adapters first, then by kind and memory."""
    paths = [path for path in (PROJECT_ROOT / "presets").glob("*/*.toml") if path.parent.name in TITLES]
    order = list(TITLES)
    return sorted(
        paths,
        key=lambda path: (
            order.index(path.parent.name),
            not path.stem.startswith("lora"),
            path.stem.rpartition("-")[0],
            _gigabytes(path),
        ),
    )


def _gigabytes(path: Path) -> int:
    """Return a preset's GPU memory from its name or else its title; 0 if the title says that it was not measured."""
    title = path.read_text(encoding="utf-8").splitlines()[0]
    match = re.search(r"-(\d+)gb$", path.stem) or re.search(r"(\d+) GB", title)
    if not match and title.endswith("; not measured."):
        return 0
    if not match:
        raise ValueError(f"{path}: neither its name nor its title states the GPU memory")
    return int(match[1])


def _measurement(name: str, measurements: list[Measured]) -> tuple[Measured, Measured] | None:
    return next(
        (
            (measurement, row)
            for measurement in measurements
            for row in measurement["rows"]
            if row.get("preset") == name
        ),
        None,
    )


def _theirs(measurement: Measured, row: Measured, size: int) -> Measured | None:
    """Return the fastest sd-scripts run of the same file in the same memory."""
    like = [r for r in measurement["rows"] if all(r[key] == row[key] for key in ("family", "method", "batch"))]
    theirs = [r for r in like if r["trainer"] == "sd-scripts" and r["gpu_gib"] <= size]
    return min(theirs, key=lambda r: r["s_it"]) if theirs else None


def _result(name: str, size: int, measurements: list[Measured]) -> str:
    """Return a preset's measurements beside those of sd-scripts; empty if there are none, which its first line then
    says."""
    if not (result := _measurement(name, measurements)):
        return ""
    measurement, row = result
    theirs = _theirs(measurement, row, size)
    beside = f" (sd-scripts: {theirs['s_it']:.3g} s)" if theirs else ""
    compiling = f", {row['compile_s']:.0f} s of compiling" if row.get("compile_s") else ""
    return (
        f"{row['s_it']:.3g} s per step{beside}, batch size {row['batch']}, {row['gpu_gib']:.1f} GiB{compiling}, "
        f"{measurement['machine']['gpu']}"
    )


if __name__ == "__main__":
    main()
