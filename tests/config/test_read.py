"""No option is accepted and ignored: each is read where trainings are made, or is known to be idle, gone or pending."""

import ast
import itertools
import re

import pytest

from library import families
from library.config.building import build_config, config_notes
from library.config.ineffective import ineffective_options, remarks
from library.config.problems import ConfigError
from library.config.run_config import INEFFECTIVE_EVERYWHERE
from library.config.schema import options_of
from tests.config.test_runs import other
from tests.source import ROOT

DECLARED = [*(ROOT / "library/config/sections").glob("*.py"), *(ROOT / "library/families").glob("*/options.py")]
# What looks at options without a training: the forms, other trainers' files, presets of these, and what only advises.
BESIDE = (
    "library/config/",
    "library/bench/",
    "library/doctor/",
    "library/demo/",
    "library/setup/",
    "library/adapter_files/",
    "library/tools/",
    "library/jobs/",
    "library/runs/",
    "library/curation/",
)
WISHES_GRANTED = {"sdpa", "xformers"}  # attention is PyTorch's in any case; who asks for another is told
RULES = {"check", "notes", "missing"}  # of sections: they speak of options, and do nothing with them


def names_in(node):
    """Attributes that are read and words that may be handed to getattr; of f"save_last_n_{unit}" a pattern."""
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Load):
            yield part.attr
        elif isinstance(part, ast.Constant) and isinstance(part.value, str) and part.value.isidentifier():
            yield part.value
        elif isinstance(part, ast.JoinedStr):
            pieces = [piece.value if isinstance(piece, ast.Constant) else r"\w+" for piece in part.values]
            if "_" in "".join(pieces) and re.fullmatch(r"[a-z_\\+]+", "".join(pieces)):
                yield "".join(pieces)


def read_by_code():
    """Names that the trainer's own modules read."""
    read_names = set()
    for path in (ROOT / "library").rglob("*.py"):
        place = path.relative_to(ROOT).as_posix()
        if path not in DECLARED and not place.startswith(BESIDE):
            read_names |= set(names_in(ast.parse(path.read_text(encoding="utf-8"))))
    return read_names | set(names_in(ast.parse((ROOT / "library/config/dataset.py").read_text(encoding="utf-8"))))


def properties():
    """What sections derive from options: property -> names it reads."""
    for path in DECLARED:
        for cls in (
            node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)
        ):
            for node in cls.body:
                if isinstance(node, ast.FunctionDef) and node.name not in RULES:
                    yield node.name, set(names_in(node))


def test_every_option_is_read_somewhere_or_said_to_be_idle():
    read_names = read_by_code()
    derived = list(properties())
    for _ in range(3):  # a property may read another
        read_names |= set(itertools.chain(*(names for name, names in derived if name in read_names)))
    patterns = [re.compile(name) for name in read_names if "\\" in name]
    assert any(pattern.fullmatch("metadata_author") for pattern in patterns)
    for script in families.RUNS:
        cls = families.config_class(script)
        unread = (
            set(options_of(cls))
            - read_names
            - {*cls.ineffective, *INEFFECTIVE_EVERYWHERE, *cls.pending}
            - WISHES_GRANTED
        )
        unread = {name for name in unread if not any(pattern.fullmatch(name) for pattern in patterns)}
        assert not unread, f"{script} declares options that nothing reads: {', '.join(sorted(unread))}"


@pytest.mark.parametrize("script", families.RUNS)
def test_what_has_no_effect_is_reported_by_name(script):
    """Whatever the table of idle options knows of, and the attention that is always the same."""
    cls = families.config_class(script)
    sleeping = {name for name in ineffective_options(build_config(cls, {}, notes=[])) if name in options_of(cls)}
    for name in sleeping:
        try:
            config = build_config(cls, {name: other(options_of(cls)[name])}, notes=[])
        except ConfigError as e:  # what needs another option asks for it
            assert name in str(e)
            continue
        if name in ineffective_options(config):
            assert sum(str(line).startswith(f"{name} has no effect here: ") for line in remarks(config, [])) == 1, name
    assert any(
        "xformers is not used" in str(note) for note in config_notes(build_config(cls, {"xformers": True}, notes=[]))
    )
