"""The tools as forms of the page: the options of `kohya tools`, with titles and labels."""

from library.jobs.forms import CommandForms
from library.tools.shell import build_tools_parser

FORMS = CommandForms(
    "tools",
    build_tools_parser,
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
    # Options without use in a form: results are always new files, and are shown as text.
    frozenset({"json", "in_place", "yes"}),
)
