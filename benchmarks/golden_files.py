"""The output of a case in golden.py, as digests, numbers and texts that are equal in every run."""

import hashlib
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

Json: TypeAlias = "str | int | float | bool | list[Json] | dict[str, Json] | None"
Options: TypeAlias = dict[str, Json]


LOOSE = "texts"  # may differ
# Different in every run: times, durations, memory sizes, random ids, the program's version, and the order of a set that
# diffusers writes as a list.
UNSTEADY = re.compile(
    r"^(t|s_it|eta|bytes|total|(.*/)?seconds|cache_hits|id|started|ended|heartbeat|pid|process_start|boot|since_boot|"
    r"host|versions|hardware|folder|lost_seconds|share|modelspec\.date|modelspec\.implementation_version|ss_session_id|"
    r"ss_training_(started|finished)_at|ss_sd_scripts_commit_hash|_use_default_values|.*_s|.*_gb)$"
)


class Failed(Exception):
    """A case could not be completed."""


@dataclass(frozen=True)
class Place:
    """The folders of one run of a case; normalises the text of its files."""

    tree: Path
    inputs: Path
    work: Path
    compiled: Path

    def text(self, raw: str) -> str:
        """Return `raw` without folders, times and run ids."""
        for folder, name in ((self.work, "WORK"), (self.inputs, "INPUTS"), (self.tree, "TREE")):
            raw = raw.replace(str(folder), name)
        raw = re.sub(r"-\d{8}-\d{6}-[0-9a-f]{4}\b", "-RUN", raw)
        raw = re.sub(r"\b20\d\d-\d\d-\d\d[ T]\d\d:\d\d:\d\d\b", "TIME", raw)
        return re.sub(r"\b20\d{12}\b|(?<=_)20\d{12}(?=_)", "TIME", raw)

    def steady(self, value: Json) -> Json:
        """Return a JSON value without the parts that differ in every run."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.steady(part) for part in value]
        if isinstance(value, dict):
            return {self.text(key): self.steady(part) for key, part in value.items() if not UNSTEADY.match(key)}
        return value

    def environment(self) -> dict[str, str]:
        """Return the environment of a process limited to this tree, one thread, no network and no user folder."""
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith(("KOHYA_", "ACCELERATE_"))},
            "PYTHONPATH": str(self.tree),
            "PYTHONIOENCODING": "utf-8",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "KOHYA_HOME": str(self.work / "home"),
            "HF_HOME": str(self.work / "huggingface"),
            "HF_HUB_OFFLINE": "1",
            "GRADIO_ANALYTICS_ENABLED": "False",
            "TORCHINDUCTOR_CACHE_DIR": str(self.compiled),
            "COLUMNS": "120",
        }

    def run(self, arguments: Sequence[str | Path], may_fail: bool = False) -> subprocess.CompletedProcess[str]:
        """Run this Python with arguments. Raises Failed, with the end of its output, on failure."""
        command = [sys.executable, *map(str, arguments)]
        done = subprocess.run(
            command,
            cwd=self.work,
            env=self.environment(),
            capture_output=True,
            encoding="utf-8",
            check=False,
        )
        if done.returncode and not may_fail:
            raise Failed(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        return done

    def kohya(self) -> list[str]:
        """Return the Python arguments that run this tree's console command."""
        project = tomllib.loads((self.tree / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        module, function = project["scripts"]["kohya"].split(":")
        return ["-c", f"import sys; from {module} import {function} as main; sys.exit(main())"]


def collect_outputs(place: Place) -> dict[str, Json]:
    """Return all files below out/, images/ and logs/ as digests and numbers."""
    outputs: dict[str, dict[str, Json]] = {}
    for path in sorted(path for top in ("out", "images", "logs") for path in (place.work / top).rglob("*")):
        if path.is_dir():
            continue
        name = place.text(path.relative_to(place.work).as_posix())
        if "tfevents" in name:
            losses = outputs.setdefault("losses", {})
            losses[f"{name.split('/')[-2]} {len(losses) + 1}"] = scalars(path)
        elif path.name == "progress.jsonl":
            outputs.setdefault("record", {})[name], outputs.setdefault(LOOSE, {})[name] = noted_events(path, place)
        elif path.name == "log.txt":
            continue  # console output, with times
        elif not (name.startswith("images/") and path.suffix in (".png", ".txt")):
            category = "record" if path.name == "run.json" else "caches" if path.suffix == ".npz" else "files"
            outputs.setdefault(category, {})[name] = READERS_BY_SUFFIX.get(path.suffix, digest_file)(path, place)
    return {category: dict(values) for category, values in outputs.items()}


# ---- reading files


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def safetensors(path: Path, place: Place) -> Json:
    """Return tensors by key, as type, shape and digest, and the metadata."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8 : 8 + size]), raw[8 + size :]
    # Leave out the hash of bytes at a fixed offset: times in the metadata shift the data.
    metadata = {k: v for k, v in header.pop("__metadata__", {}).items() if k != "sshs_legacy_hash"}
    tensors: dict[str, Json] = {
        key: f"{tensor['dtype']} {tensor['shape']} {digest(data[slice(*tensor['data_offsets'])])}"
        for key, tensor in header.items()
    }
    return {"metadata": place.steady(metadata), "tensors": tensors}


def pickled(path: Path, place: Place) -> Json:
    """Return the tensors of a torch.save file without running code from it."""
    import torch

    def summed(value: object) -> Json:
        if isinstance(value, torch.Tensor):
            data = value.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
            return f"{value.dtype} {list(value.shape)} {digest(data)}"
        if isinstance(value, dict):
            return {str(key): summed(part) for key, part in value.items() if not UNSTEADY.match(str(key))}
        if isinstance(value, (list, tuple)):
            return [summed(part) for part in value] if len(value) < 100 else digest(repr(value).encode())
        return place.text(repr(value))

    return summed(torch.load(path, map_location="cpu", weights_only=True))


def arrays(path: Path, place: Place) -> Json:
    """Return the arrays of a cache by key."""
    import numpy as np

    with np.load(path) as stored:
        parts = {key: stored[key] for key in stored.files}
    return {
        key: place.text(str(value))
        if value.dtype.kind == "U"
        else f"{value.dtype} {list(value.shape)} {digest(value.tobytes())}"
        for key, value in parts.items()
    }


def picture(path: Path, place: Place) -> Json:
    """Return the pixels of a preview and the text in its file."""
    from PIL import Image

    with Image.open(path) as image:
        about = {str(key): place.text(str(value)) for key, value in image.info.items()}
        return {"pixels": f"{image.mode} {list(image.size)} {digest(image.tobytes())}", "info": {**about}}


def parse_json_file(path: Path, place: Place) -> Json:
    content = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(content, dict) and isinstance(texts := content.get("texts"), list):
        # Durations depend on the machine's load.
        content["texts"] = [text for text in texts if text.get("at", [])[:1] != ["lost_seconds"]]
        content = {name: value for name, value in content.items() if name != "texts" or value}
    return place.steady(content)


def digest_file(path: Path, place: Place) -> Json:
    return digest(path.read_bytes())


READERS_BY_SUFFIX: dict[str, Callable[[Path, Place], Json]] = {
    ".safetensors": safetensors,
    ".npz": arrays,
    ".png": picture,
    ".json": parse_json_file,
    ".bin": pickled,
    ".pt": pickled,
    ".ckpt": pickled,
}


def scalars(path: Path) -> dict[str, Json]:
    """Return the values of a TensorBoard file by name and step."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    out: dict[str, Json] = {}
    for event in EventFileLoader(str(path)).Load():
        for value in event.summary.value:
            if value.HasField("tensor") and not re.search(r"_s$|_gb$|second|memory", value.tag):
                array = make_ndarray(value.tensor)
                out[f"{value.tag} {event.step}"] = float(array) if array.dtype.kind == "f" and array.ndim == 0 else None
    return out


def noted_events(path: Path, place: Place) -> tuple[Json, Json]:
    """Return the events of a run's record: numbers by kind, and each sentence once."""
    numbers: list[Json] = []
    sentences: dict[str, None] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        texts = {key: event.pop(key) for key in ("text", "name") if key in event}
        sentences |= {f"{event['kind']}: {place.text(str(text))}": None for text in texts.values()}
        if event["kind"] not in ("phase", "warning", "note"):
            numbers.append(place.steady(event))
    return numbers, list(sentences)
