"""Options that name code: only classes of the expected kind are called, and a check imports nothing unlisted."""

import json
import os
import sys

import pytest

from kohya_gui.server import allowed_folders, paths
from kohya_gui.server.allowed_folders import AllowedFolders, Roots
from kohya_gui.server.json_api import ApiRequest, refused
from library import families, packages
from library.check import preflight
from library.config import code_bases, code_names
from library.config.building import build_config
from library.config.problems import ConfigError
from library.config.schema import options_of
from library.families import config_class
from library.methods import lycoris
from library.optim import lr_schedule, names, optimizers
from tests.unlisted_code import write_package

SCRIPTS = [script for facts in families.all_families() for script in facts.scripts]
SDXL = config_class("sdxl_train_network")
OFFERED = [f"{one.module}.{one.name}" for one in names.SPECS.values() if packages.is_installed(one.package)]
NO_CLASSES = (
    "pydoc.pipepager",
    "threading.Thread",
    "subprocess.Popen",
    "os.getpid",
    "builtins.eval",
    "torch.hub.load",
    "torch.nn.Linear",
    "transformers.optimization.get_scheduler",
    "torch.optim",
    "torch.optim.swa_utils.AveragedModel",
    "runpy.run_path",
    "library.__main__.x",
    "torch.optim.Optimizer",
    "torch.optim.lr_scheduler.LRScheduler",
)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package that nobody lists, which leaves a mark when it is imported."""
    mark = tmp_path / "mark"
    write_package(tmp_path / "site", "own_package", mark)
    monkeypatch.syspath_prepend(tmp_path / "site")
    yield mark
    for name in [name for name in sys.modules if name.split(".")[0] == "own_package"]:
        del sys.modules[name]


def config(**options):
    return build_config(SDXL, options, notes=[])


def optimizer_problems(option, name):
    return [
        str(problem)
        for problem in optimizers.find_optimizer_problems(config(**{option: name}))
        if problem.option == option
    ]


@pytest.mark.parametrize("option", ["optimizer_type", "lr_scheduler_type"])
@pytest.mark.parametrize("name", NO_CLASSES)
def test_what_is_no_class_of_the_kind_is_refused_by_the_check(option, name):
    (problem,) = optimizer_problems(option, name)
    assert option in problem and ("AdamW" in problem or "LinearLR" in problem or "not installed" in problem)


def test_a_shell_command_of_a_config_is_not_run(tmp_path):
    made = config(
        lr_scheduler_type="pydoc.pipepager",
        lr_scheduler_args=[f"cmd='touch {tmp_path / 'pwned'}'"],
        optimizer_type="SGD",
    )
    import torch

    with pytest.raises(ConfigError, match="lr_scheduler_type pydoc.pipepager"):
        lr_schedule.make_schedule(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1), made, 10)
    assert not (tmp_path / "pwned").exists()


def test_a_check_imports_nothing_that_is_not_listed_and_a_training_only_what_fits(package):
    for option, name in (("optimizer_type", "Own"), ("lr_scheduler_type", "Schedule")):
        assert not optimizer_problems(option, f"own_package.classes.{name}")
    for option, name in (("optimizer_type", "Schedule"), ("lr_scheduler_type", "Own"), ("optimizer_type", "Other")):
        (said,) = optimizer_problems(option, f"own_package.classes.{name}")
        assert "is not a subclass of" in said
    assert any(
        "is a function" in problem for problem in optimizer_problems("optimizer_type", "own_package.classes.function")
    )
    assert any(
        "did you mean Own" in problem for problem in optimizer_problems("optimizer_type", "own_package.classes.Owm")
    )
    assert [*lycoris.find_lycoris_problems(config(network_module="own_package.nothing"))]
    assert not package.exists() and "own_package" not in sys.modules
    preflight.load_named_code(
        config(optimizer_type="own_package.classes.Own", lr_scheduler_type="own_package.classes.Schedule")
    )
    assert package.exists()
    with pytest.raises(ConfigError, match="Made is not a subclass of Optimizer"):
        preflight.load_named_code(config(optimizer_type="own_package.classes.Made"))
    with pytest.raises(ConfigError, match="has no create_network"):
        preflight.load_named_code(config(network_module="own_package.classes"))


KINDS = """
import torch
from torch import optim as tools
from torch.optim import lr_scheduler
from torch.optim.adam import Adam as Known
from typing import Generic, TypeVar
from .more import Far, hidden
from .stars import *
import own_package.more as whole
T = TypeVar("T")
try:
    from torch.optim import SGD as Maybe
except ImportError:
    Maybe = None
class Plain: pass
class Threads(__import__("threading").Thread): pass
class Mapped(dict): pass
class Whole(torch.optim.Optimizer): pass
class Part(tools.SGD): pass
class Rate(lr_scheduler.LRScheduler): pass
class Third(Known): pass
class Inner(Third, Plain): pass
class Typed(Generic[T]): pass
class Moved(Far): pass
class Aside(whole.Far): pass
class Guarded(Maybe): pass
class Starred(Star): pass
@hidden
class Decorated: pass
class Loop(Loop): pass
Alias = Part
"""
MORE = "from torch.optim import *\nclass Far(SGD): pass\ndef hidden(one): return one\n"
DERIVES = {
    "Plain": False,
    "Threads": None,
    "Mapped": False,
    "Whole": True,
    "Part": True,
    "Rate": False,
    "Third": True,
    "Inner": True,
    "Typed": False,
    "Moved": True,
    "Aside": True,
    "Guarded": True,
    "Starred": False,
    "Decorated": None,
    "Loop": None,
    "Alias": True,
    "hidden": False,
    "Nothing": None,
}


@pytest.mark.parametrize("name", DERIVES)
def test_what_a_class_derives_from_is_known_from_its_source(package, tmp_path, name):
    folder = tmp_path / "site" / "own_package"
    (folder / "kinds.py").write_text(KINDS)
    (folder / "more.py").write_text(MORE)
    (folder / "stars.py").write_text("class Star: pass\n")
    assert code_bases.derives("own_package.kinds", name, "Optimizer") is DERIVES[name]
    assert not package.exists() and "own_package" not in sys.modules


def test_every_class_that_is_offered_derives_from_what_its_option_expects():
    """By the files of its package as by the class itself, where that can be known."""
    for name in OFFERED:
        module, _, own = name.rpartition(".")
        assert code_names.why_not_class(module, own, "optimizer_type") == "", name


def test_only_listed_packages_are_advised_to_be_installed():
    for name in ("nope", "torchh", "pytorch_optimiser"):
        assert "pip install" not in str(packages.not_installed(name))
    assert "did you mean pytorch_optimizer" in str(packages.not_installed("pytorch_optimiser"))
    for name in packages.PACKAGE_NAMES:
        assert "pip install" in str(packages.not_installed(name))


def test_the_check_says_that_unlisted_code_will_run(package):
    notes = preflight.code_notes(config(optimizer_type="own_package.classes.Own"))
    assert [note.option for note in notes] == ["optimizer_type"] and not package.exists()


@pytest.mark.parametrize("script", SCRIPTS)
def test_from_the_page_unlisted_code_is_requested_once(script, package, tmp_path, monkeypatch):
    monkeypatch.setenv("KOHYA_HOME", str(tmp_path / "home"))
    kind, root = config_class(script), tmp_path
    asking, silent = Roots([root], asks=True), Roots([root])
    for option in code_names.code_options(kind):
        name = "other" if option == code_names.BACKEND else "own_package.classes"
        if option not in (code_names.BACKEND, *code_names.MODULES):
            name += {"optimizer_type": ".Own", "lr_scheduler_type": ".Schedule"}[option]
        monkeypatch.setattr(code_names, "why_not_network", lambda module: "")
        config = build_config(kind, {option: name}, notes=[])
        with pytest.raises(ConfigError, match="only in a training started in a shell"):
            paths.allow(config, silent)
        with pytest.raises(ConfigError) as said:
            paths.allow(config, asking)
        (wanted,) = refused(said.value)["allow"].values()
        assert wanted == f"code:{name}"
        AllowedFolders(asking).allow(ApiRequest({"folder": wanted}))
        paths.allow(config, asking)
        with pytest.raises(ConfigError, match="in a shell"):  # a page that is open to others does not count it
            paths.allow(config, silent)
        allowed_folders.allowed_file().unlink()
    assert not package.exists()


def test_what_is_allowed_keeps_folders_and_is_a_name_only(tmp_path, monkeypatch):
    monkeypatch.setenv("KOHYA_HOME", str(tmp_path / "home"))
    asks = AllowedFolders(Roots([tmp_path], asks=True))
    for wrong in ("code:", "code:os.system('x')", "code:a b", "code:" + "x" * 300, "code:../x"):
        with pytest.raises(ConfigError, match="not the name of code"):
            asks.allow(ApiRequest({"folder": wrong}))
    (tmp_path / "more").mkdir()
    asks.allow(ApiRequest({"folder": "code:a.B"}))
    asks.allow(ApiRequest({"folder": str(tmp_path.resolve() / "more")}))
    stored = json.loads(allowed_folders.allowed_file().read_text())
    assert stored == {"folders": [str(tmp_path.resolve() / "more")], "code": ["a.B"]}
    allowed_folders.allowed_file().write_text(json.dumps({"code": [1, "x y", "c.D"]}))
    os.utime(allowed_folders.allowed_file())
    assert allowed_folders.remembered_code() == ("c.D",)
    assert paths.code_problems(config(optimizer_type="os.system"), Roots([tmp_path], asks=True))[0].code == ""


def test_every_kind_of_code_is_known_by_its_kind():
    for script in SCRIPTS:
        options = options_of(config_class(script))
        named = {
            name
            for name in ("optimizer_type", "lr_scheduler_type", "network_module", "compile_backend")
            if name in options
        }
        assert set(code_names.code_options(config_class(script))) == named
