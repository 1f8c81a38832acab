"""What is counted is written with `counted`, or with templates for one and for several: never "1 modules"."""

import ast
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from tests import source

ROOTS = ("library", "kohya_gui")
NOUNS = (
    "adapters",
    "batches",
    "blocks",
    "captions",
    "concepts",
    "datasets",
    "entries",
    "epochs",
    "files",
    "folders",
    "graphs",
    "groups",
    "images",
    "keys",
    "layers",
    "lines",
    "masks",
    "modules",
    "parts",
    "processes",
    "prompts",
    "rows",
    "runs",
    "settings",
    "steps",
    "tensors",
    "tokens",
    "trainings",
    "values",
    "vectors",
)
VERBS = ("is", "has", "was", "needs")
# Of "3 of {count} images" there are several, and so of what is named here.
FIXED = re.compile(
    r"(?<!of )(?<!of its )(?<!of the )"
    rf"(\{{\w+\}} (of )?({'|'.join(NOUNS)})|\{{count\}} (?!({'|'.join(VERBS)})\b)[a-z]+s)\b"
)
SEVERAL = {
    **dict.fromkeys(
        (
            "{number} {name} blocks",
            "{count} steps",
            "{images} in {buckets}, {batches} per epoch: {steps} ",
            "{x} batches",
        ),
        "the other template beside it is for one",
    ),
    # Limits, which are larger, and what is only said of more than one.
    ": {path} names images in {count} folders": "of more than the limit of 100,000",
    "{folder} holds {most} folders": "a limit",
    "{most} trainings wait already": "a limit",
    "{count} images are too many at once": "of more than the limit of 200",
    "give 2 to {most} values": "a limit",
    "{least} to {most} images are usual": "a range",
    "the token must have {bits} bits": "128 and 22",
    ": {epochs} epochs are {total} steps": "of more than the limit of 100 million",
    "= {limit}: blocks need {needed} graphs": "of more than the limit, which is at least 1",
    "each image is trained at {count} sizes": "of more than one",
    "{count} blocks swapped": "presets swap several",
    "up to {count} encodings, {variants} variants": "of more than one",
    "{count} casts and copies outside": "from 50 on",
    "an epoch would have {seen} images": "it is far too many",
    "The CPU waits for the GPU {count} times": "from 2 on",
    "Waiting dominates: the GPU is idle for {share} of a step, as": "of many waits",
    "The GPU is idle for {share} of a step, while the CPU starts": "a step starts thousands",
    "{count} trainings are in the queue": "of several values",
    "Steps read {x} tokens": "captions have 75 and more",
    "needs {num_blocks} values separated by commas": "a model has many blocks",
    # What is put in is no number, or two of them.
    "{word} blocks": "a kind of blocks",
    "{sizes} of batches by resolution": "counted sizes",
    "timed over {x} and {x} steps": "two numbers",
    "Compiling did not pay here: {x} steps per second": "a rate",
    "The first steps run without compiled blocks": "counted graphs of blocks",
    "{name} is made of {count} tensors, and this model has no such layers": "one tensor would be the layer itself",
    "the model answers with {count} tags, and {tags} has {known}": "a tagger knows thousands",
    "{count} cut after {tokens} tokens, the first is that of {path}": "the limits of models, 77 and more",
}


def texts(nodes: Collection[ast.AST]) -> Iterator[tuple[int, str]]:
    """The lines and templates of a module; what an f-string puts in is {x}, and docstrings are left out."""
    left_out = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    calls = [node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    left_out |= {id(node.args[1]) for node in calls if node.func.id == "ngettext"}  # the template for more than one
    for node in nodes:
        if id(node) in left_out:
            continue
        if isinstance(node, ast.JoinedStr):
            parts = [str(part.value) if isinstance(part, ast.Constant) else "{x}" for part in node.values]
            yield node.lineno, "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def test_nothing_is_counted_with_a_plural_that_stays():
    root, wrong, used = Path(source.ROOT), [], set()
    for folder in ROOTS:
        for path in sorted((root / folder).rglob("*.py")):
            for line, text in texts(source.nodes(path)):
                starts = [start for start in SEVERAL if text.startswith(start)]
                used.update(starts)
                if FIXED.search(text) and not starts:
                    wrong.append(f"{path.relative_to(root)}:{line}: {text}")
    assert not wrong, "write counted(count, noun): " + "\n".join(wrong)
    assert used >= SEVERAL.keys()
