"""Forms of the page for masks: the options of `kohya mask` with titles and labels."""

from library.masking.shell import parser
from library.runs.job_forms import CommandForms

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
