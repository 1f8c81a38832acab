"""The tab Try it: images with LoRAs, embeddings and LLLite side by side; samples of runs in the same way."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import gradio as gr
from starlette.responses import Response

from kohya_gui.form.form import SettingsForm
from kohya_gui.form.prompts import NUMBERS, PROMPT_SUFFIXES, PROMPTS_OPTION
from kohya_gui.form.requested import of_tab, requested_submission
from kohya_gui.panel import samples
from kohya_gui.panel.resumed_samples import RunSample, existing_samples, with_resumed
from kohya_gui.sampling import comparing
from kohya_gui.server import paths, picker
from kohya_gui.server.json_api import NO_SUCH_CHOICE, NOT_OF_THE_PAGE, ApiRequest, Handler, ImageHandler
from kohya_gui.tools.commands import job_status, lora_row, refuse_second
from library import families
from library.config import ineffective
from library.config.building import Layer, build_config, read_layers
from library.config.formats import read_toml, to_toml
from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import ConfigError, Message
from library.config.run_config import RunConfig
from library.config.schema import flatten_sections, options_of
from library.families import RUNS, config_class
from library.files import write_atomic
from library.jobs import jobs
from library.runs import dates, layout, reader, resume
from library.sampling import plan, prompt_rows, prompts
from library.sampling.recorded_prompts import recorded_prompt

SAMPLE_KIND = "sample"
LEARNED = (".safetensors", ".pt", ".ckpt")  # endings of files that can be tried
GUIDE = "controlnet_image"
IMAGE_LABELS = {"control_image_path": "Reference image", "control_image_mask_path": "Mask", GUIDE: "Control image"}
GUIDANCE = "guidance_scale"
OWN_SEED = "--d "  # before the seed of a single prompt, as in a prompt file
MAX_LISTED = 20  # runs listed; comparisons are limited by the number of stored jobs
GENERATED_FOLDER_LABEL = "Folder for images"  # of the field in sampling.html
GENERATED_FOLDER = ("kohya", "generated")  # below the first root, unless another folder is chosen
TAB, RUN, JOB = "tab:", "run:", "job:"  # prefixes of the names of choices


class SamplingTab:
    """The tab, and the handlers of its script's requests. Create it inside `gr.Blocks`."""

    def __init__(self, forms: Mapping[str, SettingsForm], titles: Mapping[str, str], roots: Sequence[Path]) -> None:
        self.forms, self.titles, self.roots = forms, titles, roots
        self.comparison = comparing.FileComparison(roots)
        gr.HTML(self._markup(), js_on_load="window.kohya.mountSampling(element)", apply_default_css=False)

    @property
    def handlers(self) -> dict[str, Handler]:
        """Handlers of requests from the page's scripts."""
        return {
            "sampling_choices": self.choices,
            "sampling_run": self.of_run,
            "sampling_form": self.of_form,
            "sampling_begin": self.begin,
            "sampling_sheet": self.sheet,
            **self.comparison.handlers,
        }

    @property
    def image_handlers(self) -> dict[str, ImageHandler]:
        return {"generated": self.show, **self.comparison.image_handlers}

    def choices(self, request: ApiRequest) -> JsonObject:
        """Return the models that can be sampled, and the sheets that can be shown; the request has no parameters."""
        runs = sorted(reader.runs(), key=lambda run: float(run.facts.get("started") or 0), reverse=True)[:MAX_LISTED]
        forms = [[TAB + tab, Message("The {name} form", name=title)] for tab, title in self.titles.items()]
        done = [job for job in jobs.jobs_of_kinds(SAMPLE_KIND) if self._has_images(job)]
        when = [dates.moment(job.started, "%H:%M:%S") for job in done]
        generated = [[JOB + job.id, Message("Images of {time}", time=at)] for job, at in zip(done, when, strict=True)]
        listed = [[RUN + run.id, Message("Run {run}", run=comparing.title_of(run))] for run in runs]
        sampled = [entry for run, entry in zip(runs, listed, strict=True) if _has_samples(run)]
        return {"models": [*forms, *listed], "sheets": [*generated, *sampled]}

    def of_run(self, request: ApiRequest) -> JsonObject:
        """Return the files that a run has saved, in order, its sample prompts, and the fields that all of these
        share."""
        run = reader.existing_run(request.text("run"))
        events = reader.progress(run.folder).update().events
        folder = str(run.facts.get("folder") or ".")  # the folder it was started in, for relative paths
        files = dict.fromkeys(Path(folder, str(event.get("file") or "")) for event in events.get("saved", ()))
        weight_files = [str(path) for path in files if path.suffix in LEARNED and path.is_file()]
        settings = _run_settings(run)
        # A resumed run that has made none yet begins with the prompts of the one that it continues.
        newest_samples = events.get("sample") or [sample.event for sample in with_resumed(run)]
        seeds = {
            str(event.get("prompt") or ""): samples.seed_of_event(event) for event in newest_samples
        }  # of the newest ones
        prompts_of_file, fields = self._rows(settings)
        images = _shared_fields([prompt_rows.row_of_prompt(recorded_prompt(event)) for event in newest_samples])
        return {
            "files": weight_files,
            "prompts": [*_with_seeds(seeds)] or prompts_of_file,
            "fields": _size_of_samples(run) | _shared_seed(seeds) | images | fields,
            "takes": _takes(_drafted(run, settings)),
        }

    def of_form(self, request: ApiRequest) -> JsonObject:
        """Return the sample prompts of a form, and the fields that all share."""
        form, submission = requested_submission(self.forms, request, "form")
        prompts_of_form, fields = self._rows(submission.values)
        takes = _takes(form.lenient_config(submission))
        return {"files": [], "prompts": prompts_of_form, "fields": fields, "takes": takes}

    def _rows(self, values: JsonMapping) -> tuple[list[str], dict[str, str]]:
        """Return the prompts of the prompt file that these values name, and the fields that are the same for all of
        them."""
        try:
            rows = prompt_rows.prompt_rows_of_file(
                paths.file(str(values.get(PROMPTS_OPTION) or ""), self.roots, PROMPT_SUFFIXES, PROMPTS_OPTION)
            )
        except (ConfigError, OSError):  # missing or unreadable, which its own form reports
            return [], {}
        return [row["prompt"] for row in rows], _shared_fields(rows)

    def begin(self, request: ApiRequest) -> JsonObject:
        """Start generating. Problems of the form are reported first."""
        refuse_second(SAMPLE_KIND)
        config, word = self._config(request)
        loras = [self._lora(line) for line in request.texts("loras") if line.strip()]
        compare, strengths = request.choice("compare", plan.COMPARE), _parse_strengths(request.text("strengths", "1"))
        for name, label in IMAGE_LABELS.items():
            for image in str(request.values("fields").get(name) or "").split(prompt_rows.BETWEEN):
                if image.strip():
                    paths.existing_file(image.strip(), self.roots, samples.IMAGES, label)
        lines = _prompt_file_lines(request)
        columns = plan.plan_columns(compare, loras, strengths)
        plan.check_image_count(len(columns), [prompts.parse_line(line) for line in lines])
        folder = paths.allowed_path(request.text("folder"), self.roots, GENERATED_FOLDER_LABEL, is_new=True)
        place = jobs.new(SAMPLE_KIND)
        write_atomic(place / f"{config.script}.toml", to_toml(config))
        write_atomic(place / "prompts.txt", "\n".join(lines) + "\n")
        words = [
            SAMPLE_KIND,
            str(place / f"{config.script}.toml"),
            f"--prompts={place / 'prompts.txt'}",
            f"--out={folder}",
            f"--compare={compare}",
            f"--strengths={', '.join(f'{strength:g}' for strength in strengths)}",
            *(f"--lora={path}={strength:g}" for path, strength in loras),
            *[f"--word={word}"] * bool(word),
        ]
        return {"job": job_status(jobs.start_job(SAMPLE_KIND, words, place))}

    def sheet(self, request: ApiRequest) -> JsonObject:
        """Return images in rows and columns: of a comparison, or of a run's samples by prompt and step."""
        name = request.text("name")
        if name.startswith(RUN):
            return _build_sample_sheet(reader.existing_run(name.removeprefix(RUN)))
        job = jobs.find_job(name.removeprefix(JOB))
        result = job.result
        rows, seeds = enumerate(result.get("files") or []), dict(enumerate(result.get("seeds") or []))
        cells = [
            [
                _pair("own/generated?" + urlencode({"job": job.id, "row": row, "column": column}), "&small=1")
                | {"seed": seeds.get(row)}
                if self._exists(file)
                else None
                for column, file in enumerate(files)
            ]
            for row, files in rows
        ]
        return {
            "columns": [comparing.column_title(title) for title in result.get("columns") or []],
            "rows": result.get("rows") or [],
            "cells": cells,
            "folder": result.get("folder") or "",
        }

    def _has_images(self, job: jobs.BackgroundJob) -> bool:
        return any(self._exists(file) for files in job.result.get("files") or [] for file in files)

    def _exists(self, file: str | None) -> bool:
        """Whether an image of a comparison is still there, and may be shown."""
        try:
            return bool(file and paths.existing_file(file, self.roots, samples.IMAGES))
        except ConfigError:
            return False

    def show(self, query: Mapping[str, str]) -> Response:
        """Return an image of a comparison by its position; nothing else can be requested."""
        try:
            files = jobs.find_job(query.get("job")).result["files"]
            path = paths.existing_file(files[int(query["row"])][int(query["column"])], self.roots, samples.IMAGES)
        except (KeyError, ValueError, IndexError, TypeError):
            raise ConfigError("There is no such image.") from None
        return samples.serve_image(path, bool(query.get("small")))

    def _config(self, request: ApiRequest) -> tuple[RunConfig, str]:
        """Return the part of a form's or a run's config that a comparison needs, and its trained word."""
        name = request.text("model")
        if name.startswith(RUN):
            run = reader.existing_run(name.removeprefix(RUN))
            script, values = str(run.facts.get("script")), _run_settings(run)
            if script not in RUNS:
                raise ConfigError(NO_SUCH_CHOICE)
            kind = config_class(script)
        else:
            form = of_tab(self.forms, name.removeprefix(TAB))
            submission = form.parse_submission(request.text("form"))
            kind, values = form.configs[submission.family], submission.values
        sampled = config_class(families.lora_script(kind.family))
        config = build_config(sampled, plan.sampling_values(kind, values), notes=[])
        if not config.model.pretrained_model_name_or_path:
            raise ConfigError(
                "The {titles} form names no base model: fill that in first.",
                titles=self.titles.get(name.removeprefix(TAB), name),
            )
        paths.allow(config, self.roots)
        return config, str(values.get("token_string") or "")

    def _lora(self, line: str) -> tuple[Path, float]:
        path, _, number = line.rpartition("=")
        return paths.existing_file(path, self.roots, LEARNED, "Files"), _parse_strength(number)

    def _markup(self) -> str:
        numbers = "".join(
            f'<div class="field"><label for="sampling-{name}">{label}</label>'
            f'<input id="sampling-{name}" data-prompt="{name}" inputmode="decimal" spellcheck="false"'
            f' autocomplete="off"><small>{escape(str(about))}</small></div>'
            for name, label, about in NUMBERS
        )
        return (
            Path(__file__)
            .with_suffix(".html")
            .read_text(encoding="utf-8")
            .replace("[numbers]", numbers)
            .replace("[comparing]", comparing.comparison_html())
            .replace("[row]", lora_row("sampling-lora", "learned", "File"))
            .replace("[browse-reference]", picker.browse_button("control_image_path", "Reference image", "file"))
            .replace("[browse-mask]", picker.browse_button("control_image_mask_path", "Mask", "file"))
            .replace("[browse-guide]", picker.browse_button(GUIDE, "Control image", "file"))
            .replace("[browse]", picker.browse_button("folder", GENERATED_FOLDER_LABEL, "folder"))
            .replace("[folder]", escape(str(self.roots[0].joinpath(*GENERATED_FOLDER))))
        )


def _run_settings(run: reader.RecordedRun) -> JsonObject:
    """Return the settings that a run was started with. Runs started in a shell have no TOML, and may have relative
    paths."""
    if (path := run.folder / layout.TOML).is_file():
        return read_toml(path)
    start_folder = Path(str(run.facts.get("folder") or ""))
    settings = {name: value for name, value in flatten_sections(resume.run_settings(run)).items() if value is not None}
    return {name: _with_paths_found(start_folder, value) for name, value in settings.items()}


def _with_paths_found(folder: Path, value: Any) -> Any:
    """Return a value with full paths of the files in a folder that it names: one, several, or one with a strength."""
    if isinstance(value, list):
        return [_with_paths_found(folder, item) for item in value]
    if not isinstance(value, str) or not value:
        return value
    if (folder / value).exists():
        return str(folder / value)
    name, colon, strength = value.rpartition(":")
    return f"{folder / name}:{strength}" if colon and name and (folder / name).is_file() else value


def _drafted(run: reader.RecordedRun, settings: JsonMapping) -> RunConfig | None:
    """Return the config of a run, as far as its settings can be read; None for a script that is not there any more."""
    script = str(run.facts.get("script"))
    return read_layers(config_class(script), [Layer(settings)]).config if script in RUNS else None


def _takes(config: RunConfig | None) -> list[str]:
    """Return the fields that affect a model: images that it reads, and guidance that it was distilled with. All for an
    unknown model."""
    if config is None:
        return [*IMAGE_LABELS, GUIDANCE]
    use = config.control_images
    does = {
        "control_image_path": use.most > 0 or use.inpaints,
        "control_image_mask_path": use.inpaints,
        GUIDE: any(other.kind == "lllite" and other.family == config.family for other in map(config_class, RUNS)),
        GUIDANCE: f"sample_{GUIDANCE}" in options_of(type(config)).keys() - ineffective.of_model(config).keys(),
    }
    return [name for name, has_effect in does.items() if has_effect]


def _shared_seed(seeds: Mapping[str, int | None]) -> dict[str, str]:
    """Return the seed of all prompts, if they have the same."""
    (seed,) = set(seeds.values()) if len(set(seeds.values())) == 1 else [None]
    return {} if seed is None else {"seed": str(seed)}


def _with_seeds(seeds: Mapping[str, int | None]) -> Iterator[str]:
    """Yield the prompts, each with its own seed if not all have the same."""
    for prompt, seed in seeds.items():
        if prompt:
            yield prompt if seed is None or _shared_seed(seeds) else f"{prompt} {OWN_SEED}{seed}"


def _with_own_seed(line: str) -> dict[str, str]:
    """Return the fields of a prompt, which may end with its own seed."""
    prompt, option, seed = line.rpartition(f" {OWN_SEED}")
    return {"prompt": prompt, "seed": seed} if option and seed.isdecimal() else {"prompt": line}


def _sample_events(run: reader.RecordedRun) -> Sequence[JsonObject]:
    return reader.progress(run.folder).update().events.get("sample", ())


def _shared_fields(rows: Sequence[prompt_rows.Row]) -> dict[str, str]:
    """Return the fields that are the same for all prompts."""
    first: prompt_rows.Row = rows[0] if rows else {}
    names = ("negative_prompt", *(name for name, *_ in NUMBERS), *IMAGE_LABELS)
    return {name: first[name] for name in names if name in first and all(row.get(name) == first[name] for row in rows)}


def _has_samples(run: reader.RecordedRun) -> bool:
    return any(sample.exists for sample in with_resumed(run))


def _size_of_samples(run: reader.RecordedRun) -> dict[str, str]:
    """Return the size of a run's newest samples, if all have the same: a model trained at 512 draws worse at 1024."""
    events = _sample_events(run)
    newest = [event for event in events if event.get("step") == events[-1].get("step")]
    sizes = {samples.size_of_event(run, event) for event in newest}
    size = sizes.pop() if len(sizes) == 1 else None
    return {"width": str(size[0]), "height": str(size[1])} if size else {}


def _build_sample_sheet(run: reader.RecordedRun) -> JsonObject:
    """Return the samples of a run and of those that it continues: a row for each prompt, a column for each step. A
    prompt that a resume has changed is a row of its own."""
    samples_by_place = {
        (int(sample.event.get("number") or 0), str(sample.event.get("prompt") or ""), sample.step): sample
        for sample in existing_samples(run)
    }
    steps = sorted({step for *_, step in samples_by_place})
    rows = sorted(dict.fromkeys((number, prompt) for number, prompt, _ in samples_by_place), key=lambda row: row[0])
    cells = [[_cell(samples_by_place.get((*row, step))) for step in steps] for row in rows]
    titles = [Message("Step {step}", step=step) if step else Message("Base model") for step in steps]
    return {
        "columns": titles,
        "rows": [prompt for _, prompt in rows],
        "cells": cells,
        "folder": str(run.facts.get("output_dir") or ""),
    }


def _cell(sample: RunSample | None) -> JsonObject | None:
    if sample is None:
        return None
    pair = _pair(samples.sample_address(sample.run.id, sample.place), "?small=true")
    return pair | {"seed": samples.seed_of_event(sample.event)}


def _pair(address: str, small: str) -> JsonObject:
    """Return the addresses of an image, small and large."""
    return {"small": f"{address}{small}", "large": address}


def _prompt_file_lines(request: ApiRequest) -> list[str]:
    """Return the prompts as lines of a prompt file, each with the fields common to all."""
    fields = request.values("fields")
    field_names = {"negative_prompt", *IMAGE_LABELS, *(name for name, *_ in NUMBERS)}
    if fields.keys() - field_names or not all(isinstance(value, str) for value in fields.values()):
        raise ConfigError(NOT_OF_THE_PAGE)
    fields = {name: " ".join(value.split()) for name, value in fields.items() if value.strip()}
    lines = filter(None, map(str.strip, request.text("prompts").splitlines()))
    rows = [{**fields, **_with_own_seed(line)} for line in lines]
    return prompt_rows.rows_as_text(rows).splitlines() if rows else []


def _parse_strengths(text: str) -> list[float]:
    return [_parse_strength(part) for part in text.split(",") if part.strip()] or list(plan.STRENGTHS)


def _parse_strength(text: str) -> float:
    try:
        return float(text.strip() or 1)
    except ValueError:
        raise ConfigError("Strengths are numbers, such as 0.8.") from None
