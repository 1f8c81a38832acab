"""Benchmark results as sentences and as a table. Loads no torch, as the page uses it, too."""

import math
from collections.abc import Iterable, Sequence

from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import Message, MessageLike, counted, join_messages

Row = JsonMapping
ENCODERS, ENCODE, DECODE, BLOCKS, STEP = STEP_PARTS = ("encoders", "vae-encode", "vae-decode", "blocks", "step")
SAMPLE = "sample"  # only on request: generating images is no part of a step
UNEVEN = 1.35  # p90 / p50 from which times count as unsteady
NEAR = 1.03  # times within this ratio count as equal; then the smaller memory decides


def compute_rates(flops: int | None, milliseconds: float, matmul: JsonMapping) -> JsonObject:
    """Return FLOPs of a measurement, TFLOP/s, and the share of the measured matrix product rate (MFU)."""
    if not flops:
        return {}
    tflops = flops / milliseconds / 1e9  # per second, in 10^12
    share = {"mfu": round(tflops / matmul["tflops"], 4)} if matmul.get("tflops") else {}
    return {"flops": flops, "tflops": round(tflops, 4 if tflops < 1 else 1), **share}


def measured_rows(result: JsonMapping, part: str = "", resolution: int | None = None) -> list[Row]:
    rows = [row for row in result.get("results", ()) if row.get("status") == "ok"]
    return [r for r in rows if (not part or r["part"] == part) and resolution in (None, r.get("resolution"))]


def best(result: JsonMapping) -> JsonObject | None:
    """Return the candidate that is fastest over all its measured sizes; None without any.

    Only candidates that worked at the most sizes are compared. Of equally fast ones the one with the least memory wins.
    """
    times: dict[str, dict[int, Row]] = {}
    for row in measured_rows(result, STEP):
        times.setdefault(row["candidate"], {})[row["resolution"]] = row
    if not times:
        return None
    max_sizes = max(map(len, times.values()))
    full = {name: rows for name, rows in times.items() if len(rows) == max_sizes}
    # The geometric mean, in which no size outweighs the others.
    pace = {name: math.prod(r["ms"]["p50"] for r in rows.values()) ** (1 / max_sizes) for name, rows in full.items()}
    quickest = min(pace.values())
    close = [name for name, value in pace.items() if value <= quickest * NEAR]
    name = min(close, key=lambda n: (max(r["peak_gb"] for r in full[n].values()), pace[n]))
    candidate = result.get("candidates", {}).get(name, {})
    return {"candidate": name, "options": candidate.get("options", {}), "sentence": compare_with_first(result, name)}


def compare_with_first(result: JsonMapping, name: str) -> Message:
    """Compare the best candidate with the first, size by size."""
    base = next(iter(result.get("candidates", {})), name)
    sizes = []
    for row in measured_rows(result, STEP):
        if row["candidate"] != name:
            continue
        current = {
            "time": milliseconds(row["ms"]["p50"]),
            "size": row["resolution"],
            "memory": f"{row['peak_gb']:.1f} GB",
        }
        first_row = next((r for r in measured_rows(result, STEP, row["resolution"]) if r["candidate"] == base), None)
        if first_row is None or name == base:
            sizes.append(Message("{time} a step at {size} with {memory}", **current))
            continue
        baseline = {"before": milliseconds(first_row["ms"]["p50"]), "earlier": f"{first_row['peak_gb']:.1f} GB"}
        times = f"{first_row['ms']['p50'] / row['ms']['p50']:.2f}"
        template = "{time} a step at {size} instead of {before} ({times} times as fast), {memory} instead of {earlier}"
        if current["memory"] == baseline["earlier"]:
            template = "{time} a step at {size} instead of {before} ({times} times as fast), {memory}"
            del baseline["earlier"]
        compared = Message(template, times=times, **current, **baseline)
        sizes.append(_with_break_even(compared, row, first_row))
    if name == base:
        return Message("Fastest: {variant}: {sizes}.", variant=name, sizes=join_messages(sizes, "; "))
    return Message(
        "Fastest: {variant}, compared with {baseline}: {sizes}.",
        variant=name,
        baseline=base,
        sizes=join_messages(sizes, "; "),
    )


def _with_break_even(compared: Message, row: Row, first_row: Row) -> Message:
    """Append to a comparison after how many steps compiling has paid off."""
    spent, gain = row.get("compile", {}).get("seconds", 0.0), (first_row["ms"]["p50"] - row["ms"]["p50"]) / 1000
    if not spent or gain <= 0:
        return compared
    template = "{compared}, compiled in {seconds} s, which are saved after {steps}"
    return Message(template, compared=compared, seconds=f"{spent:.0f}", steps=counted(math.ceil(spent / gain), "step"))


def row_title(row: Row) -> str:
    return " ".join(str(row[key]) for key in ("part", "resolution", "candidate") if row.get(key) is not None)


def measurement_line(row: Row) -> str:
    """Return one measurement as a line."""
    name = row_title(row)
    if row["status"] != "ok":
        return f"{name}: {row['status']}, {row['why']}"
    mfu = f", {row['mfu']:.0%} of the matmul rate" if "mfu" in row else ""
    return (
        f"{name}: {milliseconds(row['ms']['p50'])} (p90 {milliseconds(row['ms']['p90'])}), {row['peak_gb']:.2f} GB{mfu}"
    )


def cells(result: JsonMapping) -> tuple[list[str], list[list[MessageLike]]]:
    """Return the table: titles, and a row of texts per measurement."""
    titles = ["part", "size", "variant", "p50", "p90", "speed", "memory", "TFLOP/s", "MFU", "compiled"]
    headings, rows = [], result.get("results", ())
    order = {part: number for number, part in enumerate(dict.fromkeys(row["part"] for row in rows))}
    for row in sorted(rows, key=lambda r: (order[r["part"]], r.get("resolution") or 0)):
        start = [row["part"], str(row.get("resolution") or ""), row.get("candidate", "")]
        if row["status"] != "ok":
            headings.append([*start, row["status"], *[""] * 6])
            continue
        headings.append(
            [
                *start,
                milliseconds(row["ms"]["p50"]),
                milliseconds(row["ms"]["p90"]),
                speed(result, row),
                f"{row['peak_gb']:.2f} GB",
                f"{row['tflops']:.4g}" if "tflops" in row else "",
                f"{row['mfu']:.1%}" if "mfu" in row else "",
                compiled_summary(row),
            ]
        )
    return titles, headings


def speed(result: JsonMapping, row: Row) -> str:
    same = measured_rows(result, row["part"], row.get("resolution"))
    return f"{same[0]['ms']['p50'] / row['ms']['p50']:.2f}x" if len(same) > 1 else ""


def compiled_summary(row: Row) -> MessageLike:
    """Return graphs and seconds of compiling."""
    compilation = row.get("compile")
    if not compilation:
        return ""
    template = "{graphs} in {seconds} s"
    if compilation["cache_hits"]:
        template = "{graphs} in {seconds} s, partly from the cache"
    return Message(
        template, graphs=counted(compilation["num_graphs"], "graph"), seconds=f"{compilation['seconds']:.1f}"
    )


def measurements_table(result: JsonMapping) -> str:
    """Return the measurements in columns, with the machine above and conclusions below."""
    titles, rows = cells(result)
    why = [f"{row_title(row)}: {row['why']}" for row in result["results"] if row["status"] != "ok"]
    lines = [*map(str, heading(result)), "", *align_columns([titles, *rows]), "", *why]
    if fastest := result.get("best"):
        lines.append(fastest["sentence"])
    lines += noise_warning(result)
    if not result.get("finished"):
        lines.append("It was stopped before its end.")
    return "\n".join(map(str, lines))


def noise_warning(result: JsonMapping) -> list[MessageLike]:
    """Return a warning if other programs disturbed the measurements."""
    rows = measured_rows(result)
    uneven = sum(row["ms"]["p90"] > UNEVEN * row["ms"]["p50"] for row in rows)
    if uneven * 3 < len(rows) or not rows:
        return []
    template = "Times varied by more than a third: another program used this machine; measure again when it is idle."
    return [Message(template)]


def subject_title(subject: JsonMapping) -> MessageLike:
    """Return what was measured: a model of random weights in a size, or the files of a training."""
    if subject.get("size") not in ("tiny", "full"):
        return str(subject.get("title", ""))
    template = "{model}, tiny size" if subject["size"] == "tiny" else "{model}, full size"
    return Message(template, model=str(subject["title"]).partition(",")[0])


def heading(result: JsonMapping) -> list[MessageLike]:
    """Return what was measured, and where."""
    subject, on, rate = result["subject"], result["machine"], result.get("matmul") or {}
    where = f"{on['name']}, torch {on['torch']}"
    if on["device"] == "cpu":
        where = join_messages([where, counted(on["threads"], "thread")])
    if rate.get("tflops"):
        rates = {"type": rate["dtype"], "rate": f"{rate['tflops']:g} TFLOP/s"}
        where = Message("{machine}; {type} matrix products: {rate}", machine=where, **rates)
    return [Message("{model}, batch {number}", model=subject_title(subject), number=subject["batch"]), where]


def align_columns(rows: Sequence[Sequence[MessageLike]]) -> Iterable[str]:
    """Format texts in columns of equal width."""
    plain = [[str(text) for text in row] for row in rows]
    widths = [max(len(row[i]) for row in plain) for i in range(len(plain[0]))]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in plain]


def milliseconds(value: float) -> str:
    return f"{value / 1000:.2f} s" if value >= 1000 else f"{value:.0f} ms" if value >= 100 else f"{value:.3g} ms"
