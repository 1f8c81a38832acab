"""Forms of the page for masks: the options of `kohya mask` with titles and labels."""

from library.jobs.forms import CommandForms
from library.masking.shell import parser

FORMS = CommandForms(
    "mask",
    parser,
    {"model": "Segmentation model", "alpha": "Transparency"},
    {
        "folder": "Images",
        "model": "Model",
        "words": "What to learn",
        "threshold": "Threshold",
        "existing": "Images with a mask",
        "outside": "Rest of the image",
        "invert": "Invert",
        "into": "Write into",
    },
    frozenset({"masks"}),
)
