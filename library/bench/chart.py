"""A benchmark result as an image: bars per setting, grouped by part and size. Writes SVG itself, so needs
no package.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from library.bench import report
from library.config.json_types import JsonMapping
from library.config.problems import Message, MessageLike

Row = JsonMapping
WIDTH, NAME_WIDTH, VALUE, BAR, GAP, TOP = 860, 210, 240, 18, 6, 64
COLOURS = {
    "ground": "#ffffff",
    "text": "#1d1d1b",
    "quiet": "#5c5c56",
    "bar": "#a9a4ee",
    "best": "#4338ca",
    "edge": "#dededa",
}
DARK = {
    "ground": "#1c1c1b",
    "text": "#eeeeeb",
    "quiet": "#a8a8a0",
    "bar": "#55519c",
    "best": "#a5a0fb",
    "edge": "#363633",
}


@dataclass(frozen=True)
class Bar:
    """One measurement as a bar: its length and that of the line to the 90th percentile, as shares of the longest."""

    name: MessageLike
    row: Row
    share: float
    far: float
    best: bool  # the fastest of several settings


def groups(result: JsonMapping) -> list[tuple[MessageLike, list[Bar]]]:
    """Return the measured rows by part and size; parts measured with one setting share a group at the end."""
    # The whole step comes first, as it matters most.
    rows_by_group: dict[tuple[bool, str, int], list[Row]] = {}
    for row in report.measured_rows(result):
        rows_by_group.setdefault((row["part"] != report.STEP, row["part"], row.get("resolution") or 0), []).append(row)
    grouped: list[tuple[MessageLike, list[Bar]]] = []
    single: list[tuple[MessageLike, Row]] = []
    for (_, part, size), rows in sorted(rows_by_group.items(), key=lambda group: group[0]):
        title = Message("{part} at {size}", part=part_title(part), size=size) if size else part_title(part)
        if len(rows) == 1 and part != report.STEP:
            single.append((title, rows[0]))
        else:
            grouped.append((title, _bars([(row["candidate"], row) for row in rows], compared=len(rows) > 1)))
    return [*grouped, (Message("Other parts"), _bars(single, compared=False))] if single else grouped


def _bars(rows: Sequence[tuple[MessageLike, Row]], compared: bool) -> list[Bar]:
    # An outlier among the 90th percentiles must not flatten all other bars.
    longest = min(max(row["ms"]["p90"] for _, row in rows), 1.5 * max(row["ms"]["p50"] for _, row in rows))
    quickest = min(row["ms"]["p50"] for _, row in rows)

    def share(row: Row, percentile: str) -> float:
        return round(min(1.0, row["ms"][percentile] / longest), 4)

    return [
        Bar(name, row, share(row, "p50"), share(row, "p90"), compared and row["ms"]["p50"] == quickest)
        for name, row in rows
    ]


def part_title(part: str) -> MessageLike:
    titles = {report.STEP: "Training step", report.ENCODE: "VAE, encoding", report.DECODE: "VAE, decoding"}
    return Message(titles[part]) if part in titles else part[:1].upper() + part[1:]


def svg(result: JsonMapping) -> str:
    """Return the image, for light and dark themes."""
    parts, y = [], TOP
    for title, bars in groups(result):
        parts.append(f'<text x="0" y="{y + 14}" class="group">{escape(str(title))}</text>')
        y += 24
        for bar in bars:
            parts.append(_bar_svg(bar, y))
            y += BAR + GAP
        y += 14
    lines = report.heading(result)
    head = (
        f'<text x="0" y="16" class="title">{escape(str(lines[0]))}</text>'
        f'<text x="0" y="36" class="quiet">{escape(str(lines[1]))}; median, and the line to the 90th percentile</text>'
    )
    wide = WIDTH + 32
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-16 -8 {wide} {y + 16}" width="{wide}" role="img">'
        f"<style>{_chart_style()}</style>"
        f'<rect x="-16" y="-8" width="{wide}" height="{y + 16}" class="ground"/>{head}{"".join(parts)}</svg>\n'
    )


def _bar_svg(bar: Bar, y: int) -> str:
    room, row = WIDTH - NAME_WIDTH - VALUE, bar.row
    wide, far, middle = room * bar.share, room * bar.far, y + BAR / 2
    value = report.milliseconds(row["ms"]["p50"])
    details = f", {row['peak_gb']:.1f} GB" + (f", MFU {row['mfu']:.0%}" if "mfu" in row else "")
    return (
        f'<text x="{NAME_WIDTH - 10}" y="{y + 14}" class="name">{escape(str(bar.name))}</text>'
        f'<rect x="{NAME_WIDTH}" y="{y}" width="{wide:.1f}" height="{BAR}" rx="3" '
        f'class="{"best" if bar.best else "bar"}"/>'
        f'<line x1="{NAME_WIDTH + wide:.1f}" x2="{NAME_WIDTH + far:.1f}" y1="{middle}" y2="{middle}"/>'
        f'<text x="{NAME_WIDTH + far + 8:.1f}" y="{y + 14}">{value}<tspan class="quiet">{details}</tspan></text>'
    )


def _chart_style() -> str:
    def colours(of: Mapping[str, str]) -> str:
        return (
            f"text{{fill:{of['text']}}}.quiet{{fill:{of['quiet']}}}.ground{{fill:{of['ground']}}}"
            f".bar{{fill:{of['bar']}}}.best{{fill:{of['best']}}}line{{stroke:{of['quiet']}}}"
        )

    return (
        "text{font:13px system-ui,sans-serif}.title{font-size:16px;font-weight:600}.group{font-weight:600}"
        f".name{{text-anchor:end}}{colours(COLOURS)}@media(prefers-color-scheme:dark){{{colours(DARK)}}}"
    )
