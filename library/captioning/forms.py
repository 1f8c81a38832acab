"""Forms of the page for captioning: the options of `kohya caption` with titles and labels."""

from library.captioning.describer import PROMPTS
from library.captioning.shell import MODELS, build_caption_parser
from library.jobs.forms import CommandForms

FORMS = CommandForms(
    "caption",
    build_caption_parser,
    {"wd14": "Tags (WD14 tagger)", "hf": "Sentences (vision language model)"},
    {
        "folder": "Images",
        "model": "Model",
        "extension": "Caption ending",
        "existing": "Images with a caption",
        "prefix": "In front",
        "suffix": "At the end",
        "general": "Threshold",
        "character": "Threshold for characters",
        "undesired": "Never write",
        "rating": "With rating",
        "underscores": "Keep underscores",
        "max_tokens": "Longest caption",
        "prompt": "Prompt",
    },
    suggestions={
        ("hf", "prompt"): PROMPTS,
        **{(way, "model"): {title: name for name, title in models.items()} for way, models in MODELS.items()},
    },
)
