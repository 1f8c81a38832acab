"""The rows of sample prompts in a form: loaded from its prompt file, saved to it, proposed from captions."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from kohya_gui.form import kept_file
from kohya_gui.form.form import SettingsForm, Submission, attributes, condition
from kohya_gui.server import paths, picker
from kohya_gui.server.json_api import NOT_OF_THE_PAGE, ApiRequest
from library import families
from library.config.json_types import JsonObject
from library.config.outside_files import read_outside_text
from library.config.problems import ConfigError, Problem
from library.curation.proposals import proposals
from library.sampling import prompt_rows
from library.sampling.prompts import SAMPLERS

PROMPTS_OPTION = "sample_prompts"
PROMPT_SUFFIXES = (".txt", ".toml", ".json")
MAX_PROPOSED = 8  # captions proposed at once
MAX_ROWS = 200
# Fields of a row besides the prompts: name in the file, label, help.
NUMBERS = (
    ("width", "Width", "In pixels. Empty: the default of the model family."),
    ("height", "Height", "In pixels. Empty: the default of the model family."),
    ("sample_steps", "Steps", "Denoising steps; more take longer."),
    ("scale", "CFG scale", "How strongly the prompt is followed; 1 leaves the negative prompt out, twice as fast."),
    ("guidance_scale", "Guidance", "For models that were distilled with guidance, such as dev: 3.5 is usual."),
    ("seed", "Seed", "The same seed gives the same noise. Empty: new noise each time."),
)
# Fields that name images for models that take some: name in the file, label, help.
IMAGES = (
    (
        "control_image_path",
        "Reference image",
        "A reference image; separate several files with semicolons.",
    ),
    ("control_image_mask_path", "Mask", "The model paints the mask's bright areas; without a mask, the whole image."),
)
# The same field for trainings that learn to follow an image.
GUIDE = "controlnet_image", "Control image", "The control image that the result follows. Empty: the plain model."


def prompts_section(guided: bool = False) -> str:
    """Return the start of the section of sample images, which prompts.js fills. `guided`: the training learns to follow
    an image."""
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
    numbers += "".join(_image_field_html(*image) for image in IMAGES)
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


def _image_field_html(name: str, label: str, about: str) -> str:
    """Return a field that names an image, for the families that take one."""
    taking_families = [family for family in families.all_families() if name in family.prompt_images]
    shown_with: dict[str, tuple[str, ...]] = {}
    for option, values in (pair for family in taking_families for pair in family.prompt_images[name].items()):
        shown_with[option] = (*shown_with.get(option, ()), *values)
    only = " ".join(f"only-{family.name}" for family in taking_families)
    return _file_field(name, label, about, f" {only}", attributes({"data-shown-with": condition(shown_with)}))


def _file_field(name: str, label: str, about: str, only: str = "", shown: str = "") -> str:
    """Return a field that names an image: `only` are more of its classes, `shown` an attribute that controls when it is
    visible."""
    return (
        f'<label class="image{only}"{shown}><span>{label}</span>'
        f'<input data-prompt="{name}" spellcheck="false" autocomplete="off" title="{escape(about)}">'
        f"{picker.browse_button(name, label, 'file')}</label>"
    )


def load_rows(request: ApiRequest, roots: Sequence[Path]) -> JsonObject:
    """Return the rows of a prompt file; none if it does not exist yet."""
    path = paths.file(request.text("file"), roots, PROMPT_SUFFIXES, PROMPTS_OPTION)
    if not path.exists():
        return {"rows": [], "known": ""}
    kept_file.check_editable(path, PROMPTS_OPTION)
    return {"rows": prompt_rows.prompt_rows_of_file(path), "known": kept_file.file_state(path)}


def save_rows(form: SettingsForm, submission: Submission, request: ApiRequest, roots: Sequence[Path]) -> JsonObject:
    """Save rows to the prompt file: the one that the form names, or a new one beside the result.

    A file of another format is left alone, and a .txt file is saved beside it. A file that was changed since the rows
    were loaded is not overwritten.
    """
    rows = _rows(request)
    named = request.text("file").strip()
    path = paths.file(named, roots, PROMPT_SUFFIXES, PROMPTS_OPTION) if named else _new(form, submission, roots)
    state = request.text("known")
    if path.suffix.lower() != ".txt":
        path, state = kept_file.free_path(path.with_suffix(".txt")), ""
    before = ""
    if path.exists():
        kept_file.check_editable(path, PROMPTS_OPTION)
        kept_file.check_unchanged(path, state, PROMPTS_OPTION)
        before = read_outside_text(path).removeprefix("\ufeff")
    text = prompt_rows.rows_as_text(rows, before)
    return kept_file.save(path, text)


def some_captions(form: SettingsForm, submission: Submission, roots: Sequence[Path]) -> JsonObject:
    """Return some captions of the form's images, each with the size at which its image is trained."""
    config = form.lenient_config(submission)
    paths.allow(config, roots)
    return {
        "captions": [
            {"prompt": proposal.caption, "width": str(proposal.width), "height": str(proposal.height)}
            for proposal in proposals(config, MAX_PROPOSED)
        ]
    }


def _rows(request: ApiRequest) -> list[dict[str, str]]:
    rows = request.fields.get("rows")
    if not isinstance(rows, list) or len(rows) > MAX_ROWS or not all(map(_is_row, rows)):
        raise ConfigError(NOT_OF_THE_PAGE)
    return rows


def _is_row(row: object) -> bool:
    field_names = (*prompt_rows.LETTER, "prompt", prompt_rows.REST)
    return (
        isinstance(row, dict)
        and isinstance(row.get("prompt"), str)
        and all(name in field_names and isinstance(value, str) for name, value in row.items())
    )


def _new(form: SettingsForm, submission: Submission, roots: Sequence[Path]) -> Path:
    """Return a file beside the result of the training that does not exist yet."""
    config = form.lenient_config(submission)
    if not config.save.output_dir:
        raise ConfigError(Problem("output_dir", "is not set: choose it first, the prompts are kept there"))
    name = f"{config.save.output_name or 'sample'}-prompts.txt"
    return kept_file.free_path(
        paths.file(str(kept_file.beside_result(config, roots) / name), roots, PROMPT_SUFFIXES, "output_dir")
    )
