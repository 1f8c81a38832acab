"""Caching from the form: encode images or captions now, so that a training finds them cached."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from kohya_gui.form.form import SettingsForm
from kohya_gui.server import paths
from kohya_gui.server.json_api import ApiRequest, Handler
from kohya_gui.tools.commands import job_status
from library.check.isolated import environment
from library.config.building import Layer, missing, read_layers
from library.config.formats import to_toml
from library.config.json_types import JsonObject
from library.config.problems import ConfigError
from library.config.schema import options
from library.files import write_atomic
from library.jobs import job as jobs
from library.runs import gpu_slots

KIND = "caching"
BUTTON = '<button type="button" class="caches" data-kind="{kind}">Make this cache now</button>'
# The option that stores such a cache on disk, and the options that are off while caching.
WANTED: dict[str, tuple[str, tuple[str, ...]]] = {
    "latents": ("cache_latents_to_disk", ("cache_text_encoder_outputs", "cache_text_encoder_outputs_to_disk")),
    "text": ("cache_text_encoder_outputs_to_disk", ("cache_latents", "cache_latents_to_disk")),
}
BUTTONS = {option: BUTTON.format(kind=kind) for kind, (option, _) in WANTED.items()}


class CacheApi:
    """Handlers for the forms of all training tabs."""

    def __init__(self, forms: Mapping[str, SettingsForm], roots: Sequence[Path]) -> None:
        self.forms, self.roots = forms, roots

    @property
    def handlers(self) -> dict[str, Handler]:
        """Handlers of requests from the page's scripts."""
        return {"caches": self.begin}

    def begin(self, sent: ApiRequest) -> JsonObject:
        """Start caching the form's data in separate processes."""
        form, kind = self.forms.get(sent.text("tab")), sent.text("kind")
        if form is None or kind not in WANTED:
            raise ConfigError("there is no such tab: load the page again")
        given = form.parse_submission(sent.text("sent"))
        known, (keeps, off) = options(form.configs[given.family]), WANTED[kind]
        chosen = {keeps: True, **dict.fromkeys(off, False)}
        values = {**given.values, **{name: value for name, value in chosen.items() if name in known}}
        reading = read_layers(form.configs[given.family], [Layer(values)])
        lacking = [one for one in missing(reading.config) if one.option != "output_dir"]
        problems = [*reading.problems, *gpu_slots.problems(given.launch), *lacking]
        reading = paths.allowed(replace(reading, problems=problems), self.roots)
        if reading.problems:
            raise ConfigError(*reading.problems)
        if working := [job.id for job in jobs.every(KIND) if job.active]:
            raise ConfigError("{title} is still running: stop it, or wait until it has ended", title=working[0])
        folder, config = jobs.new(KIND), reading.config
        data = Path(config.data.train_data_dir or config.data.dataset_config or "images").name
        toml = write_atomic(folder / f"{data}-{config.script}.toml", to_toml(config))
        launch = [f"--{name}={given.launch[name]}" for name in ("num_processes", "gpu_ids") if given.launch.get(name)]
        launch += ["--cpu"] if given.launch.get("cpu") in (True, "true") else []
        return job_status(jobs.start(KIND, ["cache", kind, str(toml), *launch], folder, environment(given.launch)))
