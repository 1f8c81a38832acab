"""Shell commands as forms of the page: filled in, started as processes, watched, stopped."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

import gradio as gr

from kohya_gui.i18n.sentences import data
from kohya_gui.server import paths, picker
from kohya_gui.server.json_api import ApiRequest, Handler
from library import families
from library.captioning.forms import FORMS as CAPTION
from library.config.choice_words import word_of_choice
from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import ConfigError, Message, require_choice
from library.downloads import model_folder
from library.jobs import jobs
from library.jobs.forms import CommandField, CommandForm, CommandForms
from library.masking.files import usual_folder
from library.masking.forms import FORMS as MASK
from library.runs import dates, reader
from library.tools.forms import FORMS
from library.tools.forms import FORMS as TOOLS

COMMANDS: dict[str, CommandForms] = {"tools": TOOLS, "caption": CAPTION, "mask": MASK}
MAX_PROCESSES = {"tools": 3}  # at once; other kinds run alone, as two models captioning one folder would mix
MAX_LISTED = 6
TITLES = {command: forms.titles for command, forms in COMMANDS.items()} | {
    "models": {"get": "Download"},
    "sample": {},
    "compare": {},
    "caching": {},
    "cache": {"latents": "Cache of images", "text": "Cache of captions"},
}
OTHER_TITLES = {"sample": "Generate", "compare": "Compare", "demo": "Demo"}  # of commands without subcommands
WEIGHTS_SUFFIX = ".safetensors"


class ToolCommands:
    """Handlers for commands and their processes."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = roots

    @property
    def handlers(self) -> dict[str, Handler]:
        """Handlers of requests from the page's scripts."""
        return {
            "command_begin": self.begin,
            "command_read": self.read,
            "command_stop": self.stop,
            "command_list": self.list,
        }

    def begin(self, request: ApiRequest) -> JsonObject:
        """Start the command of a form."""
        forms, name = _forms(request), request.text("name")
        words = forms.words(name, _placed_beside(forms, name, request.values("values")), self.guard)
        if forms is MASK:  # writes beside the named folder
            paths.allowed_path(str(usual_folder(Path(words[2]))), self.roots, "mask folder", is_new=True)
        refuse_second(forms.command)
        refuse_same_file(forms.command, words)
        return job_status(jobs.start_job(forms.command, words))

    def read(self, request: ApiRequest) -> JsonObject:
        return job_status(jobs.find_job(request.text("id")))

    def stop(self, request: ApiRequest) -> JsonObject:
        # The second request kills the process.
        return job_status(jobs.stop_job(jobs.find_job(request.text("id"))))

    def list(self, request: ApiRequest) -> JsonObject:
        """Return the last processes of a command, the newest first."""
        command = request.text("command")
        kind = command if command in TITLES else _forms(request).command
        return {"jobs": [job_status(job) for job in jobs.jobs_of_kinds(kind)[:MAX_LISTED]]}

    def guard(self, text: str, kind: str, label: str) -> Path | str:
        """Return a path of a form, checked by the guard; an id of a model on the hub unchanged."""
        if kind == "model" and model_folder.is_repository(text):
            return text
        if kind in ("folder", "model"):
            try:
                return paths.existing_folder(text, self.roots, label)
            except ConfigError:
                if kind == "folder" or Path(text).name != text:
                    raise
                template = "{label}: {name} is neither a folder nor a Hugging Face id such as owner/name"
                raise ConfigError(template, label=label, name=text) from None
        if kind == "new":
            path = paths.file(text, self.roots, (WEIGHTS_SUFFIX,), label, is_new=True)
            if path.exists():
                raise ConfigError(
                    "{label}: {path} exists already and is not overwritten; choose another name", label=label, path=path
                )
            return path
        path = paths.allowed_path(text, self.roots, label)
        if not path.exists():
            raise ConfigError("{label}: {path} does not exist", label=label, path=path)
        return path


def _placed_beside(forms: CommandForms, name: str, values: JsonMapping) -> JsonMapping:
    """Return the values of a form, with a new file that has only a name put beside the first file that is read."""
    form = forms.all().get(name)
    fields = form.fields if form else ()
    new = next((field.name for field in fields if field.kind == "new"), "")
    text = str(values.get(new) or "").strip()
    read = (str(values.get(field.name) or "").strip() for field in fields if field.kind in ("file", "files", "model"))
    first = next(filter(None, read), "").split("\n")[0].strip("\"' ")
    is_name_alone = text.lower().endswith(WEIGHTS_SUFFIX) and not set(text) & set("/\\~\"'")
    return {**values, new: str(Path(first).parent / text)} if first and is_name_alone else values


def title_of(job: jobs.BackgroundJob) -> str:
    """Return a job's title on the page."""
    command, name, *_ = *job.facts.get("arguments", ()), "", ""
    return OTHER_TITLES.get(command) or TITLES.get(command, {}).get(name, name)


def refuse_second(kind: str) -> None:
    """Raise ConfigError while as many jobs of a kind run as may run at once."""
    running = [job for job in jobs.jobs_of_kinds(kind) if job.active]
    if len(running) >= MAX_PROCESSES.get(kind, 1):
        raise ConfigError(
            "{title} is still running: stop it, or wait until it has ended", title=Message(title_of(running[0]))
        )


def refuse_same_file(kind: str, words: Sequence[str]) -> None:
    """Raise ConfigError for a new file that a running job of this kind writes, such as after a double click."""
    new_file = _new_file(words)
    writing = (job for job in jobs.jobs_of_kinds(kind) if job.active and new_file)
    if any(_new_file(job.facts.get("arguments", ())) == new_file for job in writing):
        raise ConfigError("{path} is being written already: wait until that has ended, or stop it", path=new_file)


def _new_file(words: Sequence[str]) -> str:
    return next((word.removeprefix("--out=") for word in words if word.startswith("--out=")), "")


def _run_name(run_id: str) -> str:
    try:
        return reader.find_run(run_id).name
    except KeyError:
        return run_id


def job_status(job: jobs.BackgroundJob) -> JsonObject:
    """Return a job as JSON for the page."""
    command, name, *words = *job.facts.get("arguments", ()), "", ""
    out, log = _new_file(words), job.log_end
    about = out or next((word for word in words if word and not word.startswith("--")), "")
    about = _run_name(name) if command == "compare" else about
    result = job.result if job.kind in ("tools", "sample") else {}
    return {
        "id": job.id,
        "title": title_of(job),
        "state": job.state,
        "error": COMMANDS[command].labelled(name, job.error) if command in COMMANDS else job.error,
        "log": log.text,
        "longer_log": log.longer_file,
        "text": "",
        "done": 0,
        "total": 0,
        **job.doing,
        "out": out,
        "bytes": job.kind == "models" or "." in str(job.doing.get("text", "")),  # it names a file being downloaded
        "problems": result.get("problems", []),
        "warnings": result.get("warnings", []),
        "about": Path(about).name,
        "when": dates.moment(job.started),
    }


def _forms(request: ApiRequest) -> CommandForms:
    name = request.text("command")
    require_choice("command", name, COMMANDS)
    return COMMANDS[name]


# ---- forms as HTML


def forms_html(forms: CommandForms, left_out: Sequence[str] = ()) -> str:
    """Return every form of a command; all but the first are hidden, and a row of choices switches."""
    all_forms = forms.all()
    radios = "".join(
        f'<label><input type="radio" name="{forms.command}-which" value="{name}"{" checked" * (at == 0)}>'
        f"<span>{escape(form.title)}</span></label>"
        for at, (name, form) in enumerate(all_forms.items())
    )
    forms_markup = "".join(_form(forms.command, form, at > 0, left_out) for at, form in enumerate(all_forms.values()))
    return (
        f'<div class="commands" data-command="{forms.command}"><fieldset class="family which">'
        f"<legend>{forms.command.capitalize()}</legend>{radios}</fieldset>{forms_markup}</div>"
    )


def _form(command: str, form: CommandForm, hidden: bool, left_out: Sequence[str]) -> str:
    fields = "".join(
        _command_field_html(f"{command}-{form.name}", field) for field in form.fields if field.name not in left_out
    )
    about = form.about[:1].upper() + form.about[1:]
    return (
        f'<div class="command" data-name="{form.name}"{" hidden" * hidden}><p class="about">{escape(about)}.</p>'
        f'<div class="grid">{fields}</div></div>'
    )


def _command_field_html(start: str, field: CommandField) -> str:
    element, label = f"{start}-{field.name}", escape(field.label)
    word = field.help.split(" ", 1)[0].rstrip(",:;")
    help_text = field.help[:1].upper() + field.help[1:] if word.replace("'", "").isalpha() else field.help
    help_text = help_text.removesuffix(".") + "."
    about = f'<small id="{element}-help">{escape(help_text)}</small>'
    facts = f'id="{element}" data-field="{field.name}" data-kind="{field.kind}" aria-describedby="{element}-help"'
    required = " required" * field.required
    if field.kind == "flag":
        box = f'<input type="checkbox" {facts}>'
        return f'<div class="field check"><label>{box}<span>{label}</span></label>{about}</div>'
    wide = " wide" * (field.kind in WIDE_KINDS or bool(field.suggestions))
    top = f'<div class="field{required}{wide}"><label for="{element}">{label}</label>'
    if field.kind == "files":
        return f'{top}<div class="files" {facts} data-start="{element}">{lora_row(element)}</div>{about}</div>'
    if field.kind == "choice":
        unset = "" if field.default or field.required else '<option value="">As in the input</option>'
        chosen = "".join(
            f'<option value="{escape(c)}"{" selected" * (c == field.default)}>{escape(word_of_choice(c))}</option>'
            for c in field.choices
        )
        return f"{top}<select {facts}>{unset}{chosen}</select>{about}</div>"
    plain = 'spellcheck="false" autocomplete="off" autocapitalize="off"'
    if field.kind == "lines":
        return f'{top}<textarea rows="2" {facts} {plain} placeholder="One in each line"></textarea>{about}</div>'
    browse = picker.browse_button(field.name, field.label, "folder" if field.kind == "model" else field.kind)
    suggestions = "".join(
        f'<option value="{escape(s)}">{escape(title)}</option>' for title, s in field.suggestions.items()
    )
    ready = "Ready prompts" if field.kind == "text" else "Models to download"
    choose = f'<select data-fills="{element}" aria-label="{ready}">{suggestions}</select>' if suggestions else ""
    value = escape(field.default or next(iter(field.suggestions.values()), ""))
    where = ' placeholder="A name beside the first file, or a path"' * (field.kind == "new")
    return f'{top}{choose}<input {facts} {plain}{where} value="{value}">{browse}{about}</div>'


WIDE_KINDS = ("file", "folder", "model", "new", "files", "lines")


def lora_row(element: str, name: str = "lora", label: str = "LoRA file") -> str:
    """Return a LoRA file, or one described by `name` and `label`, and its weight: the first row of a list that
    grows."""
    return (
        f'<div class="file"><input id="{element}-first" aria-label="{label}" spellcheck="false" autocomplete="off">'
        + picker.browse_button(name, label, "file")
        + '<input class="weight" aria-label="Weight" value="1" size="4"></div>'
    )


class ToolsTab:
    """The tab. Create it inside `gr.Blocks`; commands.py and commands.js do all the work."""

    def __init__(self) -> None:
        gr.HTML(tools_tab_html(), js_on_load="window.kohya.mountCommands(element)", apply_default_css=False)


def tools_tab_html() -> str:
    """Return the tab as HTML."""
    template = "For finished LoRA files of {families}. Results are new files: nothing is ever overwritten."
    about = Message(template, families=families.titles())
    return (
        f'<div class="tools settings"><p class="lead"{data(about)}>{about}</p><div class="card">'
        f'{forms_html(FORMS)}<div class="bar-of"><button '
        'type="button" class="go" data-go>Run</button></div></div><div class="said-of" aria-live="polite"></div>'
        '<div class="jobs"></div></div>'
    )
