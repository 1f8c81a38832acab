"""A bench as a picture: bars for each way, in groups by part and size. SVG written here, so that nothing is needed."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from library.bench import report

WIDTH, NAME, VALUE, BAR, GAP, TOP = 860, 210, 240, 18, 6, 64
COLOURS = {
    "ground": "#ffffff", "text": "#1d1d1b", "quiet": "#5c5c56", "bar": "#a9a4ee", "best": "#4338ca", "edge": "#dededa"
}  # fmt: skip
DARK = {
    "ground": "#1c1c1b", "text": "#eeeeeb", "quiet": "#a8a8a0", "bar": "#55519c", "best": "#a5a0fb", "edge": "#363633"
}  # fmt: skip


def groups(result: Mapping[str, Any]) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """The measured rows by part and size, the whole step first: what one wants to know."""
    found: dict[tuple[bool, str, int], list[Mapping[str, Any]]] = {}
    for row in report.of(result):
        found.setdefault((row["part"] != report.STEP, row["part"], row.get("resolution") or 0), []).append(row)
    ordered = sorted(found.items(), key=lambda group: group[0])
    return [(named(part) + (f" at {size}" if size else ""), rows) for (_, part, size), rows in ordered]


def scale(rows: Sequence[Mapping[str, Any]]) -> float:
    """The milliseconds of a bar of full length: one wild 90th percentile must not flatten all the rest."""
    middle, most = (max(row["ms"][which] for row in rows) for which in ("p50", "p90"))
    return min(most, 1.5 * middle)


def named(part: str) -> str:
    """A part in words."""
    known = {report.STEP: "Training step", "vae-encode": "VAE, encoding", "vae-decode": "VAE, decoding"}
    return known.get(part, part[:1].upper() + part[1:])


def svg(result: Mapping[str, Any]) -> str:
    """The picture, in light or dark as its viewer likes it."""
    parts, y = [], TOP
    for title, rows in groups(result):
        parts.append(f'<text x="0" y="{y + 14}" class="group">{escape(title)}</text>')
        y += 24
        longest = scale(rows)
        quickest = min(row["ms"]["p50"] for row in rows)
        for row in rows:
            parts.append(_bar(row, y, longest, len(rows) > 1 and row["ms"]["p50"] == quickest))
            y += BAR + GAP
        y += 14
    lines = report.heading(result)
    head = (
        f'<text x="0" y="16" class="title">{escape(lines[0])}</text>'
        f'<text x="0" y="36" class="quiet">{escape(lines[1])}; median, and the line to the 90th percentile</text>'
    )
    wide = WIDTH + 32
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-16 -8 {wide} {y + 16}" width="{wide}" role="img">'
        f"<style>{_style()}</style>"
        f'<rect x="-16" y="-8" width="{wide}" height="{y + 16}" class="ground"/>{head}{"".join(parts)}</svg>\n'
    )


def _bar(row: Mapping[str, Any], y: int, longest: float, is_best: bool) -> str:
    room = WIDTH - NAME - VALUE
    wide, far = (room * min(1.0, row["ms"][which] / longest) for which in ("p50", "p90"))
    middle = y + BAR / 2
    value = report.milliseconds(row["ms"]["p50"])
    more = f", {row['peak_gb']:.1f} GB" + (f", MFU {row['mfu']:.0%}" if "mfu" in row else "")
    return (
        f'<text x="{NAME - 10}" y="{y + 14}" class="name">{escape(row["candidate"])}</text>'
        f'<rect x="{NAME}" y="{y}" width="{wide:.1f}" height="{BAR}" rx="3" class="{"best" if is_best else "bar"}"/>'
        f'<line x1="{NAME + wide:.1f}" x2="{NAME + far:.1f}" y1="{middle}" y2="{middle}"/>'
        f'<text x="{NAME + far + 8:.1f}" y="{y + 14}">{value}<tspan class="quiet">{more}</tspan></text>'
    )


def _style() -> str:
    def colours(of: Mapping[str, str]) -> str:
        return (
            f"text{{fill:{of['text']}}}.quiet{{fill:{of['quiet']}}}.ground{{fill:{of['ground']}}}"
            f".bar{{fill:{of['bar']}}}.best{{fill:{of['best']}}}line{{stroke:{of['quiet']}}}"
        )

    return (
        "text{font:13px system-ui,sans-serif}.title{font-size:16px;font-weight:600}.group{font-weight:600}"
        f".name{{text-anchor:end}}{colours(COLOURS)}@media(prefers-color-scheme:dark){{{colours(DARK)}}}"
    )
