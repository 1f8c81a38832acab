"""The rows of sample prompts in a form: loaded from its prompt file, saved to it, proposed from captions."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from kohya_gui.form import kept_file
from kohya_gui.form.form import SettingsForm, Submission, attributes, condition
from kohya_gui.server import paths, picker
from kohya_gui.server.json_api import ApiRequest
from library import families
from library.config.json_types import JsonObject
from library.config.outside_files import read_text
from library.config.problems import ConfigError, Message, Problem
from library.curation.proposals import proposals
from library.files import clear_errors, write_atomic
from library.sampling import prompt_rows
from library.sampling.prompts import SAMPLERS

OPTION = "sample_prompts"
READ = (".txt", ".toml", ".json")
MAX_PROPOSED = 8  # captions proposed at once
MAX_ROWS = 200  # rows
# Fields of a row besides the prompts: name in the file, label, help.
NUMBERS = (
    ("width", "Width", "Pixels; empty is the default of the model family."),
    ("height", "Height", "Pixels; empty is the default of the model family."),
    ("sample_steps", "Steps", "Denoising steps; more take longer."),
    ("scale", "CFG scale", "How strongly the prompt is followed; 1 leaves the negative prompt out, twice as fast."),
    ("guidance_scale", "Guidance", "Of models that were distilled with guidance, such as dev: 3.5 is usual."),
    ("seed", "Seed", "The same seed gives the same noise each time; empty is another one each time."),
)
# Fields that name images for models that take some: name in the file, label, help.
IMAGES = (
    (
        "control_image_path",
        "Reference image",
        "A file that the model is shown; several are divided by semicolons.",
    ),
    ("control_image_mask_path", "Mask", "A file: what is bright in it is painted."),
)
# The same for trainings that learn to follow an image.
GUIDE = "controlnet_image", "Control image", "A file that is followed. Empty: the plain model."


def prompts_section(guided: bool = False) -> str:
    """The start of the section of sample images, which prompts.js fills. `guided`: the training learns to follow an
    image."""
    numbers = "".join(
        f'<label><span>{label}</span><input data-prompt="{name}" inputmode="decimal" spellcheck="false"'
        f' autocomplete="off" title="{escape(about)}"></label>'
        for name, label, about in NUMBERS
    )
    samplers = "".join(f'<option value="{name}">{name}</option>' for name in SAMPLERS)
    numbers += (
        f'<label><span>Sampler</span><select data-prompt="sample_sampler"><option value="">as below</option>{samplers}'
        "</select></label>"
    )
    numbers += "".join(_image(*image) for image in IMAGES)
    numbers += _file_field(*GUIDE) if guided else ""
    return (
        '<div class="prompts wide"><h4>Sample prompts</h4>'
        "<p>An image is generated from each prompt at regular intervals; without prompts, from some of the captions."
        " Changes take effect from the next time, also in a training that is running.</p>"
        '<ol></ol><template><li><textarea data-prompt="prompt" rows="2" aria-label="Prompt"'
        ' placeholder="What to generate"></textarea><textarea data-prompt="negative_prompt" rows="1"'
        ' aria-label="Negative prompt" placeholder="What to leave out"></textarea>'
        f'<div class="numbers">{numbers}</div><div class="row-buttons">'
        '<button type="button" data-row="copy">Copy</button><button type="button" data-row="remove">Remove</button>'
        "</div></li></template>"
        '<div class="row-buttons"><button type="button" data-row="add">Add a prompt</button>'
        '<button type="button" data-row="captions">From captions</button></div>'
        '<ul class="captions" hidden></ul><p class="file" role="status"></p></div>'
    )


def _image(name: str, label: str, about: str) -> str:
    """A field that names an image, for the families that take one."""
    taking = [known for known in families.every() if name in known.prompt_images]
    shown_with: dict[str, tuple[str, ...]] = {}
    for option, values in (pair for known in taking for pair in known.prompt_images[name].items()):
        shown_with[option] = (*shown_with.get(option, ()), *values)
    only = " ".join(f"only-{known.name}" for known in taking)
    return _file_field(name, label, about, f" {only}", attributes({"data-shown-with": condition(shown_with)}))


def _file_field(name: str, label: str, about: str, only: str = "", shown: str = "") -> str:
    """A field that names an image: `only` are more of its classes, `shown` an attribute that controls when it is
    visible."""
    return (
        f'<label class="image{only}"{shown}><span>{label}</span>'
        f'<input data-prompt="{name}" spellcheck="false" autocomplete="off" title="{escape(about)}">'
        f"{picker.button(name, label, 'file')}</label>"
    )


def load_rows(sent: ApiRequest, roots: Sequence[Path]) -> JsonObject:
    """The rows of a prompt file; none if it does not exist yet."""
    path = paths.file(sent.text("file"), roots, READ, OPTION)
    if not path.exists():
        return {"rows": [], "known": ""}
    kept_file.check_size(path, OPTION)
    return {"rows": prompt_rows.rows(path), "known": kept_file.state(path)}


def save_rows(form: SettingsForm, given: Submission, sent: ApiRequest, roots: Sequence[Path]) -> JsonObject:
    """Save rows to the prompt file: the one that the form names, or a new one beside the result.

    A file of another format is left alone, and a .txt file is saved beside it. A file that was changed since the rows
    were loaded is not overwritten.
    """
    rows = _rows(sent)
    named = sent.text("file").strip()
    path = paths.file(named, roots, READ, OPTION) if named else _new(form, given, roots)
    known = sent.text("known")
    if path.suffix.lower() != ".txt":
        path, known = kept_file.free(path.with_suffix(".txt")), ""
    before = ""
    if path.exists():
        kept_file.check_size(path, OPTION)
        kept_file.check_unchanged(path, known, OPTION)
        before = read_text(path).removeprefix("\ufeff")
    text = prompt_rows.text(rows, before)
    with clear_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text)
    return {"file": str(path), "known": kept_file.state(path), "said": Message("Saved in {path}.", path=path)}


def captions(form: SettingsForm, given: Submission, roots: Sequence[Path]) -> JsonObject:
    """Some captions of the form's images, each with the size at which its image is trained."""
    config = form.lenient_config(given)
    paths.allow(config, roots)
    return {
        "captions": [
            {"prompt": one.caption, "width": str(one.width), "height": str(one.height)}
            for one in proposals(config, MAX_PROPOSED)
        ]
    }


def _rows(sent: ApiRequest) -> list[dict[str, str]]:
    found = sent.fields.get("rows")
    if not isinstance(found, list) or len(found) > MAX_ROWS or not all(map(_is_row, found)):
        raise ConfigError("this is not what the page sends: load it again")
    return found


def _is_row(row: object) -> bool:
    known = (*prompt_rows.LETTER, "prompt", prompt_rows.REST)
    return (
        isinstance(row, dict)
        and isinstance(row.get("prompt"), str)
        and all(name in known and isinstance(value, str) for name, value in row.items())
    )


def _new(form: SettingsForm, given: Submission, roots: Sequence[Path]) -> Path:
    """A file beside the result of the training that does not exist yet."""
    config = form.lenient_config(given)
    if not config.save.output_dir:
        raise ConfigError(Problem("output_dir", "is not set: choose it first, the prompts are kept there"))
    name = f"{config.save.output_name or 'sample'}-prompts.txt"
    return kept_file.free(paths.file(str(kept_file.beside_result(config, roots) / name), roots, READ, "output_dir"))
