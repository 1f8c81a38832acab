"""The Lab: checks this machine, times the training of a model, and profiles a step.

Each button runs a command in a separate process; lab.js shows the results in its files, even after a reload of the
page.
"""

import re
import time
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

import gradio as gr

from kohya_gui.form import compile_summary
from kohya_gui.form.form import SettingsForm, shown_value
from kohya_gui.form.requested import of_tab
from kohya_gui.i18n.sentences import data
from kohya_gui.panel.html import STATES
from kohya_gui.server import paths
from kohya_gui.server.json_api import ApiRequest, Handler
from library import families
from library.bench import chart, report
from library.config.formats import to_toml
from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import ConfigError, Message, MessageLike, join_messages, ngettext
from library.config.schema import options_of
from library.files import write_atomic
from library.jobs import jobs
from library.measuring import candidates
from library.runs import dates, gpu_slots, reader

MODELS = {
    f"{family.name}-{size}": (Message(about, family=family.title), ["--family", family.name, "--size", size])
    for size, about in (("full", "{family}, full size, random weights"), ("tiny", "{family}, tiny, to try it out"))
    for family in families.all_families()
}
EXTENTS = {
    "step": ("The training step", ["--part", "step"]),
    "all": ("Text encoders, VAE, blocks and step", []),
    "sample": ("Generating images", ["--part", "sample"]),
}
BENCH_CHOICES = {"usual": ("The usual settings", []), "every": ("All settings", ["--candidate", "all"])}
JOB_TITLES = {
    "doctor": "Check of this machine",
    "bench": "Speed test",
    "profile": "Profile of a step",
    "cache": "Compiled code",
}
MAX_LISTED = 12
SIZES_PATTERN = re.compile(r"[0-9]{2,4}( *, *[0-9]{2,4}){0,5}")


class LabTab:
    """The tab, and the handlers of its script's requests."""

    def __init__(self, forms: Mapping[str, SettingsForm], titles: Mapping[str, str], roots: Sequence[Path]) -> None:
        self.forms, self.titles, self.roots = forms, titles, roots
        gr.HTML(self._markup(), js_on_load="window.kohya.mountLab(element)", apply_default_css=False)

    @property
    def handlers(self) -> dict[str, Handler]:
        return {"lab": self.look, "lab-start": self.start, "lab-stop": self.stop, "lab-apply": self.apply}

    # ---- requests of the script

    def look(self, request: ApiRequest) -> JsonObject:
        """Return the list of measurements, and the selected one: the newest if none is named."""
        measurements = jobs.jobs_of_kinds(*JOB_TITLES)[:MAX_LISTED]
        chosen = next(
            (job for job in measurements if job.id == request.text("job")), measurements[0] if measurements else None
        )
        listed = [{"id": job.id, "title": job_title(job), "busy": job.active} for job in measurements]
        tabs = [[tab, name] for tab, name in self.titles.items()]
        return {"jobs": listed, "tabs": tabs, "shown": view(chosen) if chosen else None}

    def start(self, request: ApiRequest) -> JsonObject:
        """Start a measurement."""
        kind = request.choice("kind", JOB_TITLES)
        plain = {"doctor": ["doctor"], "cache": ["cache", *["--clean"] * request.flag("clean")]}
        return {"job": begun(kind, plain.get(kind) or self._command(kind, request))}

    def stop(self, request: ApiRequest) -> JsonObject:
        return {"job": jobs.stop_job(jobs.find_job(request.text("job")), at_once=True).id}

    def apply(self, request: ApiRequest) -> JsonObject:
        """Return the best options of a measurement, as values of a tab's fields."""
        tab, job = request.text("tab"), jobs.find_job(request.text("job"))
        options = advised_options(job, request.number("number"))
        configs = of_tab(self.forms, tab).configs.values()
        form_options = {name: option for config in configs for name, option in options_of(config).items()}
        values = {
            name: shown_value(form_options[name], value) for name, value in options.items() if name in form_options
        }
        if not values:
            raise ConfigError("This measurement recommends no settings that the form has.")
        set_to = ", ".join(f"{name} = {str(options[name]).lower()}" for name in values)
        return {
            "tab": tab,
            "values": values,
            "said": Message("Now in the form of {tab}: {set_to}.", tab=self.titles[tab], set_to=set_to),
        }

    def _command(self, kind: str, request: ApiRequest) -> list[str]:
        """Return the command line of a bench or a profile. Values from the browser only select among known ones."""
        model = request.choice("model", (*MODELS, *self.forms))
        sizes, batch = request.text("sizes").strip(), request.number("batch", 1, 64)
        extent, ways = request.choice("extent", EXTENTS, "step"), request.choice("ways", BENCH_CHOICES, "usual")
        sides = [int(side) for side in sizes.split(",")] if SIZES_PATTERN.fullmatch(sizes) else []
        if sizes and not (sides and all(64 <= side <= 8192 and side % 64 == 0 for side in sides)):
            raise ConfigError(
                "Image sizes: write multiples of 64 from 64 to 8192, separated by commas, such as 512, 1024."
            )
        if batch < 1 and model in MODELS:  # a form has its own, so the field is locked
            raise ConfigError("Batch size: this must be at least 1.")
        command = ["bench", *(MODELS[model][1] if model in MODELS else self._written(model, request))]
        resolutions = sizes.replace(" ", "").split(",")[: 1 if kind == "profile" else None]  # a profile takes one size
        command += ["--resolution", ",".join(resolutions)] if sizes else []
        command += ["--batch", str(batch)] if model in MODELS else []
        return (
            [*command, "--profile"] if kind == "profile" else [*command, *EXTENTS[extent][1], *BENCH_CHOICES[ways][1]]
        )

    def _written(self, tab: str, request: ApiRequest) -> list[str]:
        """Return a form as a TOML file for the command; its model has to exist, its images need not."""
        config, _ = self.forms[tab].collect(self.forms[tab].parse_submission(request.text("form")))
        if not config.model.pretrained_model_name_or_path:
            raise ConfigError("The {titles} form names no base model: fill that in first.", titles=self.titles[tab])
        paths.allow(config, self.roots)
        path = jobs.jobs_folder() / "form.toml"
        write_atomic(path, to_toml(config))
        return [str(path), "--script", config.script]

    def _markup(self) -> str:
        forms: dict[str, MessageLike] = {
            tab: Message("The {name} form", name=name) for tab, name in self.titles.items()
        }
        models = {**{name: text for name, (text, _) in MODELS.items()}, **forms}
        size = "full" if gpu_slots.devices() != (gpu_slots.CPU,) else "tiny"
        usual = next(name for name in MODELS if name.endswith(size))
        return (
            Path(__file__)
            .with_suffix(".html")
            .read_text(encoding="utf-8")
            .replace("[models]", _choices(models, usual))
            .replace("[extents]", _choices({name: text for name, (text, _) in EXTENTS.items()}))
            .replace("[ways]", _choices({name: text for name, (text, _) in BENCH_CHOICES.items()}))
        )


def begun(kind: str, arguments: Sequence[str]) -> str:
    """Start a command, and return the job's id.

    Raises ConfigError while another measurement or a training is running, as both would slow each other down.
    """
    if busy := next((job for job in jobs.jobs_of_kinds(*JOB_TITLES) if job.active), None):
        raise ConfigError(
            "{title} is still running: stop it, or wait until it has ended", title=Message(JOB_TITLES[busy.kind])
        )
    if kind != "doctor" and (training := reader.active()):
        raise ConfigError(
            "{run} is training, and both would slow each other down: wait until it has ended", run=training.name
        )
    return jobs.start_job(kind, arguments).id


# ---- a measurement, prepared for display


def job_title(job: jobs.BackgroundJob) -> Message:
    """Return kind, time and subject, for the list."""
    when = dates.moment(job.started)
    subject = report.subject_title(job.result.get("subject", {}))
    return join_messages([piece for piece in (JOB_TITLES.get(job.kind, job.kind), when, subject) if piece], " · ")


def view(job: jobs.BackgroundJob) -> JsonObject:
    """Return a measurement for display: words and shares, so that the script only has to show them."""
    word, mood = STATES.get(job.state, (job.state, "calm"))
    end = job.facts.get("ended") or (time.time() if job.active else 0)
    log = job.log_end if job.state in ("failed", "interrupted") else reader.LogEnd("", "")
    shown = {
        "id": job.id,
        "kind": job.kind,
        "title": JOB_TITLES.get(job.kind, job.kind),
        "state": word,
        "mood": mood,
        "busy": job.active,
        "error": job.error,
        "doing": {"text": "Starting" if job.active else "", "done": 0, "total": 0, **job.doing},
        "took": compile_summary.rounded_duration(max(0.0, end - job.started)),
        "log": log.text,
        "longer_log": log.longer_file,
    }
    result = job.result
    body = {"bench": bench_bars, "profile": profile_details, "doctor": doctor, "cache": compiled_code}.get(
        str(result.get("kind"))
    )
    shown_body = body(result) if body else None
    if shown_body and job.kind == "bench" and job.active:  # unmeasured settings may be faster
        shown_body |= {"verdict": "", "apply": False}
    return {**shown, "body": shown_body, "folder": str(job.folder)}


def bench_bars(result: JsonMapping) -> JsonObject:
    """Return bars for each part and size, the whole step first, and the verdict."""
    best = result.get("best") or {}
    failed = [row for row in result["results"] if row["status"] != "ok"]
    return {
        "heading": report.heading(result),
        "verdict": best.get("sentence", ""),
        "apply": bool(best.get("options")),
        "groups": [
            {"title": name, "rows": [_bar_as_json(result, bar) for bar in bars]} for name, bars in chart.groups(result)
        ],
        "notes": [report.measurement_line(row) for row in failed] + report.noise_warning(result),
        "about": [[name, c["about"]] for name, c in result.get("candidates", {}).items()],
    }


def _bar_as_json(result: JsonMapping, bar: chart.Bar) -> JsonObject:
    row = bar.row
    return {
        "name": bar.name,
        "isVariant": bar.name == row["candidate"],
        "share": bar.share,
        "far": bar.far,
        "best": bar.best,
        "p50": report.milliseconds(row["ms"]["p50"]),
        "p90": report.milliseconds(row["ms"]["p90"]),
        "speed": report.speed(result, row),
        "memory": f"{row['peak_gb']:.1f} GB",
        "mfu": f"{row['mfu']:.0%}" if "mfu" in row else "",
        "compiled": report.compiled_summary(row),
    }


def profile_details(result: JsonMapping) -> JsonObject:
    """Return where the time goes, the verdict, and the longest operations."""
    counts = [ngettext("{count} cast", "{count} casts", result["casts"])]
    template = "A step takes {time}; {counts}"
    shares = {}
    if result.get("idle") is not None:
        template, shares = "A step takes {time}, the GPU idle for {share}; {counts}", {"share": f"{result['idle']:.0%}"}
        counts = [
            ngettext("{count} kernel launch", "{count} kernel launches", result["launches"]),
            ngettext("{count} wait for the GPU", "{count} waits for the GPU", result["syncs"]),
            ngettext("{count} value read from the GPU", "{count} values read from the GPU", result["reads"]),
            *counts,
        ]
    where = Message("{variant} at {size}", variant=result["way"]["name"], size=result["resolution"])
    step = Message(template, time=report.milliseconds(result["step_ms"]), counts=join_messages(counts), **shares)
    return {
        "heading": [*report.heading(result), where],
        "step": step,
        "kinds": [{"name": name, "share": share} for name, share in result["kinds"].items()],
        "verdict": [{"text": v["text"], "options": _flags_text(v["options"])} for v in result["verdict"]],
        "operations": [
            [o["name"], o["kind"], f"{o['calls']:g}", f"{o['ms']:.3g}", f"{o['share']:.1%}"]
            for o in result["operations"][:15]
        ],
    }


def doctor(result: JsonMapping) -> JsonObject:
    """Return the findings, with the recommended settings last."""
    findings = result["findings"]
    healthy = "This machine can train." if result["healthy"] else "This machine cannot train: fix the lines marked ✗."
    return {
        "verdict": healthy if result.get("finished") else "",
        "findings": [{"topic": f["topic"], "verdict": f["verdict"], "text": f["text"]} for f in findings],
        "apply": any(f["topic"] == "settings" for f in findings),
    }


def compiled_code(result: JsonMapping) -> JsonObject:
    """Return the contents of the compile cache."""
    total = sum(folder["bytes"] for folder in result["kept"])
    template = "{size} GB of compiled code in {folder}"
    sizes = {"size": f"{total / 1e9:.2f}", "folder": result["folder"]}
    if result["removed"]:
        template = "{removed} GB removed; {size} GB of compiled code in {folder}"
        sizes["removed"] = f"{result['removed'] / 1e9:.2f}"
    return {
        "verdict": Message(template, **sizes),
        "rows": [[f["name"], f"{f['bytes'] / 1e9:.2f} GB", dates.date(f["used"])] for f in result["kept"]],
    }


def advised_options(job: jobs.BackgroundJob, number: int) -> JsonObject:
    """Return the options that a measurement recommends; for a profile, those of the finding with this number."""
    result = job.result
    if result.get("kind") == "bench":
        best = (result.get("best") or {}).get("candidate", "")
        # Do not trust the file: only known settings go into a form.
        return candidates.NAMED[best].chosen() if best in candidates.NAMED else {}
    if result.get("kind") == "profile":
        options = result["verdict"][number]["options"] if number < len(result["verdict"]) else {}
        return dict(options)
    if result.get("kind") == "doctor":
        return next((dict(f["data"]["options"]) for f in result["findings"] if f["topic"] == "settings"), {})
    return {}


def _flags_text(options: JsonMapping) -> str:
    return ", ".join(f"{name} = {str(value).lower()}" for name, value in options.items())


def _choices(texts: Mapping[str, MessageLike], chosen: str = "") -> str:
    return "".join(
        f'<option value="{name}"{" selected" * (name == chosen)}{data(text)}>{escape(str(text))}</option>'
        for name, text in texts.items()
    )
