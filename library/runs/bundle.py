"""A support bundle: what is needed to diagnose a failed run, without private data.

Settings are shown by name; of their values only numbers, switches and words from a fixed list. Log lines that quote a
caption or prompt are removed; of a line that names a user's file, only the part before it is kept.
"""

import io
import json
import zipfile
from collections import deque
from collections.abc import Iterator

from library.config.json_types import JsonObject
from library.runs import layout, reader, redaction

README = """This is a support bundle of one training. Read it before you share it: it is plain text.

run.json         the script, the machine, the state, and the settings (names, numbers and switches)
progress.jsonl   the newest steps, phases, graphs and saves
log.txt          the end of the log, and log-trainer.txt where the page started the run
doctor.json      what `kohya doctor` says of this machine

Left out on purpose: captions, prompts, images and their names, model and folder names, tokens, keys, your name, and the
name of this computer. <...> stands where something was taken out.
"""
BUNDLED_FACTS = (
    "script",
    "title",
    "state",
    "step",
    "total_steps",
    "epochs",
    "seed",
    "versions",
    "hardware",
    "compile",
    "devices",
    "from",
    "started",
    "ended",
    "heartbeat",
    "phase",
    "peak_memory_gb",
    "peak_ram_gb",
    "lost_seconds",
    "data",
    "previews",
)
EVENTS = {
    "step": (
        "step",
        "epoch",
        "loss",
        "avr_loss",
        "lr",
        "grad_norm",
        "s_it",
        "eta",
        "data_s",
        "transfer_s",
        "compute_s",
        "memory_gb",
    ),
    "phase": ("name", "done", "total"),
    "compile": ("step", "block", "graph", "forward", "seconds", "reason", "cache_hits", "failed", "total"),
    "takeover": ("step", "seconds", "pauses"),
    "saved": ("step", "bytes", "ok", "text"),
    "sample": ("step", "number"),
    "preview": ("step", "pictures", "seconds", "share"),
    "validation": ("step", "epoch", "when", "loss", "divergence"),
    "early_stop": ("step", "best_step", "best_loss"),
    "warning": ("text",),
    "error": ("text",),
}
NEWEST = 3000  # newest events to include
LINES, BYTES = 2000, 400_000  # limits of the log's end


def bundle_run(run: reader.RecordedRun, doctor: str = "") -> bytes:
    """Return the zip file of a run; `doctor` is the output of `kohya doctor --json`."""
    clean = redaction.redactor_for(run)
    parts = {
        "README.txt": README,
        "run.json": layout.dump(_redacted_facts(run, clean), indent=1) + "\n",
        "progress.jsonl": "".join(f"{json.dumps(event, default=str)}\n" for event in _events(run, clean)),
        "log.txt": clean.text(reader.tail(run.folder, LINES, BYTES)),
        "doctor.json": clean.text(doctor),
    }
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in parts.items():
            if content.strip():
                file.writestr(name, content)
    return packed.getvalue()


def _redacted_facts(run: reader.RecordedRun, clean: "redaction.Redactor") -> JsonObject:
    facts = {name: clean.inside(run.facts[name]) for name in BUNDLED_FACTS if name in run.facts}
    facts["state"], facts["error"] = run.state, clean.text(run.error or "")
    return {**facts, "config": redaction.redacted_settings(run.facts.get("config") or {})}


def _events(run: reader.RecordedRun, clean: "redaction.Redactor") -> Iterator[JsonObject]:
    newest = deque((event for event, _ in reader.new_events(run.folder) if event), NEWEST)
    for event in newest:
        kind = event.get("kind")
        if names := EVENTS.get(str(kind)):
            yield {"t": event.get("t"), "kind": kind, **{n: clean.inside(event[n]) for n in names if n in event}}
