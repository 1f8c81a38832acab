"""Caching from the form: encode images or captions now, so that a training finds them cached."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from kohya_gui.form.form import SettingsForm
from kohya_gui.form.requested import requested_submission
from kohya_gui.server import paths
from kohya_gui.server.json_api import ApiRequest, Handler
from kohya_gui.tools.commands import job_status, refuse_second
from library.check.check_process import environment_for_check
from library.config.building import Layer, find_missing, read_layers
from library.config.command import is_on_cpu
from library.config.formats import to_toml
from library.config.json_types import JsonObject
from library.config.problems import raise_if_any
from library.config.schema import options_of
from library.files import write_atomic
from library.jobs import jobs
from library.runs import gpu_slots

CACHING_KIND = "caching"
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
        return {"caches": self.begin}

    def begin(self, request: ApiRequest) -> JsonObject:
        """Start caching the form's data in separate processes."""
        (form, submission), kind = requested_submission(self.forms, request), request.choice("kind", WANTED)
        options, (keeps, off) = options_of(form.configs[submission.family]), WANTED[kind]
        chosen = {keeps: True, **dict.fromkeys(off, False)}
        values = {**submission.values, **{name: value for name, value in chosen.items() if name in options}}
        reading = read_layers(form.configs[submission.family], [Layer(values)])
        missing = [problem for problem in find_missing(reading.config) if problem.option != "output_dir"]
        problems = [*reading.problems, *gpu_slots.find_launch_problems(submission.launch), *missing]
        reading = paths.within_roots(replace(reading, problems=problems), self.roots)
        raise_if_any(reading.problems)
        refuse_second(CACHING_KIND)
        folder, config = jobs.new(CACHING_KIND), reading.config
        data = Path(config.data.train_data_dir or config.data.dataset_config or "images").name
        toml = write_atomic(folder / f"{data}-{config.script}.toml", to_toml(config))
        launch = [
            f"--{name}={submission.launch[name]}"
            for name in ("num_processes", "gpu_ids")
            if submission.launch.get(name)
        ]
        launch += ["--cpu"] if is_on_cpu(submission.launch) else []
        return job_status(
            jobs.start_job(
                CACHING_KIND, ["cache", kind, str(toml), *launch], folder, environment_for_check(submission.launch)
            )
        )
