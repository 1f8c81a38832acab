"""Base models for a form: those on this computer, and downloads from the Hugging Face Hub with all parts they need."""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from kohya_gui.form.form import SettingsForm
from kohya_gui.form.requested import requested_family, requested_submission
from kohya_gui.i18n.sentences import data
from kohya_gui.server import paths
from kohya_gui.server.json_api import NOT_OF_THE_PAGE, ApiRequest, Handler
from kohya_gui.tools.commands import job_status, refuse_second
from library import families
from library.config.building import find_missing
from library.config.hub_names import repository_of
from library.config.json_types import JsonObject
from library.config.problems import ConfigError, Message, Problem, option_name
from library.downloads import finding, hub
from library.families.facts import HubModel
from library.files import free_space, names_apart
from library.jobs import jobs
from library.runs import keys

MODELS_FOLDER = ("kohya", "models")  # below the first root, unless another folder is chosen
DOWNLOAD_FOLDER_LABEL = "Download into"  # of the field in models.js
MAX_FILES = 12  # files in one download


def download_button(label: str) -> str:
    """Return the button below a base model's field."""
    about = Message("Find or download a model: {label}", label=label)
    return (
        f'<button type="button" class="find-models" aria-label="{about}"{data(about)}>'
        "<span>Find or download a model</span></button>"
    )


class ModelsApi:
    """Handlers for the dialog."""

    def __init__(self, forms: Mapping[str, SettingsForm], roots: Sequence[Path]) -> None:
        self.forms, self.roots = forms, roots

    @property
    def handlers(self) -> dict[str, Handler]:
        """Handlers of requests from the page's scripts."""
        return {
            "models": self.look,
            "models_hub": self.ask,
            "models_get": self.get,
            "models_token": self.token,
            "models_beside": self.beside,
        }

    def look(self, request: ApiRequest) -> JsonObject:
        """Return the models of a family on this computer, and the downloads offered. No request leaves this
        computer."""
        form, family = requested_family(self.forms, request)
        folder, named = self._folder(request), request.text("named")
        usable = [model for model in self._found(folder, named) if model.uses.get(family)]
        bases: list[JsonObject] = []
        parts: dict[str, list[JsonObject]] = {}
        for model, name in zip(usable, names_apart([model.path for model in usable]), strict=True):
            shown = {"path": str(model.path), "name": name, "size": model.size, "words": model.words}
            for option in model.uses[family]:
                if option == finding.MODEL_OPTION:
                    bases.append({**shown, "options": form.shown(family, model.options)})
                else:
                    parts.setdefault(option, []).append(shown)
        facts, places = families.facts_of(family), form.places(family)
        return {
            "title": facts.title,
            "folder": str(folder),
            "free": free_space(folder),
            "bases": bases,
            "parts": parts,
            "offers": [self._offer(model, form, family) for model in facts.hub_models],
            "repository": facts.hub_folder,
            "labels": {option: places[option][0] for option in (finding.MODEL_OPTION, *facts.part_options)},
            "busy": next((job.id for job in jobs.jobs_of_kinds("models") if job.active), ""),
        }

    def beside(self, request: ApiRequest) -> JsonObject:
        """Return the text encoders and VAE beside a base model, for the empty fields among them."""
        form, submission = requested_submission(self.forms, request)
        model = paths.allowed_path(
            str(submission.values.get(finding.MODEL_OPTION) or ""), self.roots, finding.MODEL_OPTION
        )
        missing = [problem.option for problem in find_missing(form.lenient_config(submission))]
        missing_parts = [name for name in families.facts_of(submission.family).part_options if name in missing]
        part_files = self._parts(model, submission.family, missing_parts)
        return {"values": {name: str(path) for name, path in part_files.items()}}

    def _parts(self, model: Path, family: str, options: list[str]) -> dict[str, Path]:
        """Return the files for these options: in the model's folder, or else in the folders beside it, as programs that
        sort models by kind have them."""
        part_files: dict[str, Path] = {}
        named = [file.path.rpartition("/")[2] for offer in families.facts_of(family).hub_models for file in offer.files]
        for folder in (model.parent, model.parent.parent):
            try:
                here = paths.allowed_path(str(folder), self.roots)
            except ConfigError:
                break
            still_missing = [name for name in options if name not in part_files]
            if not still_missing:
                break
            candidates = self._readable(finding.find_models([here], deepest=int(folder != model.parent)))
            for name in still_missing:
                fitting = [model.path for model in candidates if name in model.uses.get(family, ())]
                # If there are several, the one named like the offered download.
                fitting.sort(key=lambda path: (path.name not in named, path.name))
                part_files |= {name: fitting[0]} if fitting else {}
        return part_files

    def ask(self, request: ApiRequest) -> JsonObject:
        """Return the hub's answer about a repository, or about files: sizes, paths, and licences to accept."""
        folder = self._folder(request)
        if name := request.text("repository").strip():
            hub_files = [*hub.repository(repository_of(name) or name).files.values()]
            if not hub_files:
                raise ConfigError("{name} has no .safetensors file: choose another repository", name=name)
            return {
                "files": [
                    {"what": f"{file.repository}/{file.path}", "name": file.path, "size": file.size}
                    for file in hub_files
                ]
            }
        names = self._names(request)
        repositories = {name: hub.repository(name) for name in dict.fromkeys(_owner(text) for text in names)}
        files = []
        for text in names:
            file = repositories[_owner(text)].files.get(text.split("/", 2)[2])
            if file is None:
                raise ConfigError("{text} is not on the hub any more: choose another model", text=text)
            path = self._place(folder, file)
            files.append({"what": text, "size": file.size, "left": hub.still_needed(path, file), "path": str(path)})
        closed = [name for name, about in repositories.items() if about.closed]
        return {"files": files, "closed": closed, "free": free_space(folder), "token": bool(hub.token())}

    def get(self, request: ApiRequest) -> JsonObject:
        """Start a download. The target folder is checked first; the answer has the paths of the files."""
        refuse_second("models")
        folder, names = self._folder(request), self._names(request)
        for text in names:
            file = hub.RemoteFile(_owner(text), text.split("/", 2)[2], 0, "", "")
            self._place(folder, file)
        environment = {**os.environ, **keys.key_environment()}
        words = ["models", "get", f"--into={folder}", *names]
        return {"job": job_status(jobs.start_job("models", words, environment=environment))["id"]}

    def token(self, request: ApiRequest) -> JsonObject:
        """Store the token for the hub in the token file."""
        token = request.text("token").strip()
        if not token.isascii() or not token.isprintable() or " " in token or not 8 <= len(token) <= 200:
            raise ConfigError("This is not a token: copy one from https://huggingface.co/settings/tokens")
        keys.store_keys({"huggingface_token": token})
        template = "{name} is kept in {folder}, for you only, and is in no config."
        return {"said": Message(template, name=option_name("huggingface_token"), folder=keys.keys_file())}

    def _folder(self, request: ApiRequest) -> Path:
        """Return the folder for models: the one sent, or the default. It need not exist yet."""
        text = request.text("folder").strip() or str(self.roots[0].joinpath(*MODELS_FOLDER))
        path = paths.allowed_path(text, self.roots, DOWNLOAD_FOLDER_LABEL, is_new=True)
        if path.exists() and not path.is_dir():
            raise ConfigError(Problem(DOWNLOAD_FOLDER_LABEL, ": {path} is not a folder", path=path))
        return path

    def _place(self, folder: Path, file: hub.RemoteFile) -> Path:
        # With links resolved, as the target has to be inside the roots as well.
        return paths.allowed_path(str(hub.target_path(folder, file)), self.roots, DOWNLOAD_FOLDER_LABEL)

    def _names(self, request: ApiRequest) -> list[str]:
        names = list(dict.fromkeys(request.texts("files")))
        if not 0 < len(names) <= MAX_FILES or any(name.count("/") < 2 or name.startswith("-") for name in names):
            raise ConfigError(NOT_OF_THE_PAGE)
        return names

    def _found(self, folder: Path, named: str) -> list[finding.FoundModel]:
        """Return the models in the usual folders, in this folder and beside the named model, as far as the page may
        read them."""
        try:
            beside = finding.find_models([paths.allowed_path(named, self.roots).parent], deepest=0)
        except ConfigError:
            beside = []
        models = [*beside, *finding.find_models([folder, *finding.usual_folders(self.roots)])]
        return self._readable({model.path: model for model in models}.values())

    def _readable(self, models: Iterable[finding.FoundModel]) -> list[finding.FoundModel]:
        readable = []
        for model in models:
            try:
                paths.allowed_path(str(model.path), self.roots)
            except ConfigError:
                continue
            readable.append(model)
        return readable

    def _offer(self, model: HubModel, form: SettingsForm, family: str) -> JsonObject:
        files = [
            {
                "option": file.option,
                "what": f"{file.repository}/{file.path}",
                "size": file.size,
                "name": file.path.rpartition("/")[2],
            }
            for file in model.files
        ]
        return {"title": model.title, "options": form.shown(family, model.options), "files": files}


def _owner(text: str) -> str:
    return "/".join(text.split("/", 2)[:2])
