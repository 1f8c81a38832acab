"""What is counted is written with `counted`, or with templates for one and for several: never "1 modules"."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests import source

ROOTS = ("captioning", "data", "families", "methods", "outputs", "tools")
NOUNS = ("adapters", "blocks", "captions", "files", "folders", "images", "keys", "layers", "masks", "modules",
         "parts", "prompts", "steps", "tensors", "tokens", "vectors")  # fmt: skip
VERBS = ("is", "has", "was", "needs")
# Of "3 of {count} images" there are several, and so of what is named here.
FIXED = re.compile(
    r"(?<!of )(?<!of its )(?<!of the )"
    rf"(\{{\w+\}} (of )?({'|'.join(NOUNS)})|\{{count\}} (?!({'|'.join(VERBS)})\b)[a-z]+s)\b"
)
SEVERAL = {
    "{count} {ending} files": "the other template beside it is for one",
    "{name} is made of {count} tensors, and this model has no such layers": "one tensor would be the layer itself",
    "the model answers with {count} tags, and {tags} has {known}": "a tagger knows thousands",
    "{count} cut after {tokens} tokens, the first is that of {path}": "the limits of models, 77 and more",
}


def texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The lines and templates of a module; what an f-string puts in is {x}."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [str(one.value) if isinstance(one, ast.Constant) else "{x}" for one in node.values]
            yield node.lineno, "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def test_nothing_is_counted_with_a_plural_that_stays():
    root, wrong, used = Path(source.ROOT), [], set()
    for folder in ROOTS:
        for path in sorted((root / "library" / folder).rglob("*.py")):
            for line, text in texts(ast.parse(path.read_text(encoding="utf-8"))):
                known = next((start for start in SEVERAL if text.startswith(start)), "")
                used.add(known)
                if FIXED.search(text) and not known:
                    wrong.append(f"{path.relative_to(root)}:{line}: {text}")
    assert not wrong, "write counted(count, noun): " + "\n".join(wrong)
    assert used >= SEVERAL.keys()
