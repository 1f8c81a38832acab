"""Captioning as forms of the page: the options of `kohya caption`, under titles and labels that read well."""

from library.captioning.shell import parser
from library.runs.job_forms import Forms

FORMS = Forms(
    "caption",
    parser,
    {"wd14": "WD14 tagger", "hf": "Hugging Face captioner"},
    {"folder": "Images", "model": "Model folder", "extension": "Caption ending", "existing": "Images with a caption",
     "prefix": "In front", "suffix": "At the end", "general": "Threshold", "character": "Threshold for characters",
     "undesired": "Never write", "rating": "With rating", "underscores": "Keep underscores",
     "max_tokens": "Most tokens"},
)  # fmt: skip
