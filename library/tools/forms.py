"""The tools as forms of the page: the options of `kohya tools`, under titles and labels that read well."""

from library.jobs.forms import CommandForms
from library.tools.shell import parser

FORMS = CommandForms(
    "tools",
    parser,
    {
        "merge": "Merge",
        "extract": "Extract",
        "resize": "Resize",
        "convert": "Convert names",
        "verify": "Verify",
        "metadata": "Metadata",
    },
    {
        "loras": "LoRA files",
        "lora": "LoRA file",
        "out": "New file",
        "base": "Base model",
        "tuned": "Tuned model",
        "dtype": "Stored as",
        "conv_rank": "Rank of convolutions",
        "min_diff": "Smallest difference",
        "to": "Names",
        "trained_on": "Trained on",
        "verbose": "List every module",
    },
    # What a form has no use for: results are always new files, and are shown as text.
    frozenset({"json", "in_place", "yes"}),
)
