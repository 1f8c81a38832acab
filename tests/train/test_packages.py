"""Packages of optimizers that are not there, or do not load: what is said, where, and what is used instead."""

import json
import os
import sys
from pathlib import Path

import pytest

from kohya_gui.form import presets
from kohya_gui.i18n import texts
from library import packages
from library.config.building import build_config, working_fix
from library.config.problems import Message
from library.doctor import optional, report
from library.families import config_class
from library.optim import names, trial
from library.optim import optimizers as optim
from tests import source
from tests.packages import eight_bit, hide, spoil
from tests.training import script

LORA = config_class("sdxl_train_network")


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Nothing is remembered from before."""
    monkeypatch.setenv("KOHYA_HOME", str(tmp_path / "home"))
    return tmp_path


def lora(**values):
    return build_config(LORA, {"learning_rate": 1e-3, **values}, notes=[])


# ---- what is there


def test_the_command_is_for_this_python_and_the_tested_version(monkeypatch):
    version = packages.locked()["bitsandbytes"]
    assert packages.install_command("bitsandbytes").endswith(f" -m pip install bitsandbytes=={version}")
    assert sys.executable in packages.install_command("bitsandbytes")
    monkeypatch.setattr(sys, "executable", str(Path("/my folder/python")))
    said = packages.install_command("lycoris", "nowhere", again=True)
    assert said.endswith(
        f" -m pip install --force-reinstall --no-deps lycoris-lora=={packages.locked()['lycoris-lora']} nowhere"
    )
    assert ("'/my folder/python'" if os.name == "posix" else '"') in said


def test_each_is_installed_with_a_plain_set_up_and_locked():
    import tomllib

    wanted = tomllib.loads((source.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    for name in packages.PACKAGE_NAMES.values():
        assert any(line.startswith(name + ">=") for line in wanted) and name in packages.locked(), name


def test_what_works_is_remembered_and_not_tried_twice(home, monkeypatch):
    assert trial.package("lion_pytorch") == ""
    remembered = json.loads((home / "home" / "cache" / "packages.json").read_text())
    assert remembered["lion_pytorch"]["error"] == ""
    monkeypatch.setattr(packages, "examine_packages", lambda _: pytest.fail("tried again"))
    assert all(packages.loading_failure(module) == "" for module in packages.PACKAGE_NAMES)  # as pip has put them there


def test_a_package_that_ends_the_program_says_why(tmp_path, monkeypatch):
    """Lion prints a line and calls exit() where use_triton finds no Triton, which was shown as SystemExit: None."""
    monkeypatch.syspath_prepend(tmp_path)
    start = "import torch\nclass Lion(torch.optim.SGD):\n    def __init__(self, params, lr, use_triton):\n        "
    for module, end, why in (
        ("prints_and_ends", "print('triton is not installed')\n        exit()", "triton is not installed"),
        ("ends_with_a_text", "exit('no triton')", "no triton"),
        ("only_ends", "exit(1)", "it ends the program without a reason"),
    ):
        (tmp_path / f"{module}.py").write_text(start + end + "\n")
        assert trial.try_arguments(names.OptimizerSpec(module, "Lion"), {"use_triton": True}) == why
    (tmp_path / "ends_on_import.py").write_text("print('no GPU here')\nraise SystemExit\n")
    assert trial.package("ends_on_import") == "no GPU here"


# ---- what is not


@pytest.mark.parametrize("family", ["sdxl", "flux"])
def test_a_preset_takes_what_is_nearest_and_says_so(family, tmp_path, monkeypatch):
    preset, config = eight_bit(tmp_path, family), config_class(f"{family}_train_network")
    told = []
    assert presets.apply(preset, config, {}, told).optim.optimizer_type == "AdamW8bit" and told == []
    hide(monkeypatch, "bitsandbytes")
    applied = presets.apply(preset, config, {}, told)
    assert applied.optim.optimizer_type == "AdamW" and len(told) == 1
    assert str(told[0]).startswith("optimizer_type is AdamW here, as AdamW8bit needs a package that is not installed: ")
    assert packages.install_command("bitsandbytes") in str(told[0])
    assert list(optim.find_optimizer_problems(applied)) == []


@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError('CUDA Setup failed')",
        "OSError('libcudart.so.13: not found')",
        "ImportError('DLL load failed')",
        "AttributeError('no such thing')",
    ],
)
def test_a_package_that_does_not_load_counts_as_none(error, home, tmp_path, monkeypatch):
    spoil(monkeypatch, home, "bitsandbytes", error)
    (said,) = optim.find_optimizer_problems(lora(optimizer_type="AdamW8bit"))
    words = error.partition("(")[2].strip("')")
    assert str(said).startswith(
        "optimizer_type AdamW8bit needs bitsandbytes, which does not load here ("
    ) and words in str(said)
    assert packages.install_command("bitsandbytes", again=True) in str(said)
    assert working_fix(said, lora(optimizer_type="AdamW8bit")) == {"optimizer_type": "AdamW"}
    told = []
    applied = presets.apply(eight_bit(tmp_path), LORA, {}, told)
    assert applied.optim.optimizer_type == "AdamW" and "does not load here" in str(told[0]) and words in str(told[0])


def test_the_page_finds_out_by_itself_what_does_not_load(home, monkeypatch):
    """Without loading it in its own process, and once: the next preset does not wait."""
    spoil(monkeypatch, home, "bitsandbytes", "OSError('libcudart.so.13: not found')")
    assert "libcudart" in str(names.package_problem("AdamW8bit")) and "bitsandbytes" not in sys.modules
    monkeypatch.setattr(packages, "examine_packages", lambda _: pytest.fail("tried again"))
    assert "libcudart" in str(names.package_problem("AdamW8bit"))
    assert names.working_optimizer("AdamW8bit") == "AdamW" and names.working_optimizer("Lion8bit") == "Lion"


def test_one_that_loads_and_cannot_step_is_found_too(monkeypatch):
    import bitsandbytes

    def broken(*_, **__):
        raise RuntimeError("Configured CUDA binary not found at libbitsandbytes_cuda130.so")

    monkeypatch.setattr(bitsandbytes.optim.AdamW8bit, "step", broken)
    (said,) = optim.find_optimizer_problems(lora(optimizer_type="AdamW8bit"))
    assert "does not load here (RuntimeError: Configured CUDA binary not found" in str(said)
    assert names.package_problem("AdamW8bit")  # and that is remembered for the presets


def test_files_that_were_changed_are_tried_before_they_are_trusted(home, monkeypatch):
    monkeypatch.setattr(packages, "examine_packages", lambda modules: dict.fromkeys(modules, "it was tried"))
    assert packages.loading_failure("schedulefree") == ""
    monkeypatch.setattr(packages, "locked", lambda: {"schedulefree": "0.1"})  # another version than the tested one
    assert packages.loading_failure("schedulefree") == "it was tried"


def test_a_user_s_own_config_is_refused_and_not_changed(demo, squares, home, monkeypatch):
    """In a process of its own, as a user runs it."""
    spoil(monkeypatch, home, "bitsandbytes", "OSError('no library')")
    own = home / "own.toml"
    own.write_text(
        'optimizer_type = "AdamW8bit"\n'
        + demo.configs["sdxl_train_network"].read_text(encoding="utf-8").replace("optimizer_type", "# optimizer_type"),
        encoding="utf-8",
    )
    paths = os.pathsep.join([str(home / "spoilt"), str(source.ROOT)])
    done = script(
        "sdxl_train_network",
        "--config_file",
        own,
        "--train_data_dir",
        squares,
        "--output_dir",
        home / "out",
        "--no-compile",
        env={**os.environ, "PYTHONPATH": paths},
    )
    said = [line for line in done.stderr.splitlines() if "optimizer_type" in line]
    assert done.returncode and len(said) == 1 and "Traceback" not in done.stderr, done.stderr
    assert "which does not load here (OSError: no library)" in said[0] and "set optimizer_type = AdamW" in said[0]


# Options besides optimizer_type that need a package: the package, values that use it, and what is proposed instead.
NEEDED = {
    "network_module": ("lycoris", {"network_module": "lycoris.kohya", "network_args": ["algo=lokr"]}, {}),
    "base_bits": ("bitsandbytes", {"base_bits": 4, "mixed_precision": "bf16"}, {"base_bits": None, "int8_base": True}),
}


@pytest.mark.parametrize("broken", [False, True], ids=["missing", "broken"])
@pytest.mark.parametrize("option", NEEDED)
def test_each_option_that_needs_a_package_names_the_command_before_the_training(option, broken, tmp_path, monkeypatch):
    from library import methods

    package, values, fix = NEEDED[option]
    config = lora(**values)
    if broken:
        spoil(monkeypatch, tmp_path, package, "OSError('no library')")
    else:
        hide(monkeypatch, package)
    (said,) = methods.find_method_problems(config)
    reason = "which does not load here (OSError: no library)" if broken else "needs a package that is not installed"
    assert said.option == option and reason in str(said) and said.fix == fix
    assert packages.install_command(package, again=broken) in str(said)
    if fix:
        assert not list(methods.find_method_problems(lora(**values | fix)))


# ---- who says so


def test_the_doctor_lists_what_is_missing_with_the_command(monkeypatch, capsys):
    hide(monkeypatch, "bitsandbytes", "prodigyopt")
    finding = optional.optimizers()
    assert finding.verdict == "hint" and packages.install_command("bitsandbytes", "prodigyopt") in str(finding.text)
    assert "use AdamW instead of AdamW8bit" in str(finding.text)
    assert {"AdamW8bit", "Lion8bit", "Prodigy"} <= set(finding.data["without"])
    monkeypatch.setattr(report, "examine_machine", lambda quick: iter([finding]))
    assert report.main(["--quick"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("This machine can train, but without AdamW8bit, ")


def test_the_doctor_tries_what_is_there(monkeypatch):
    assert optional.optimizers().verdict == "ok"
    monkeypatch.setattr(trial, "package", lambda module: "OSError: no library" if module == "lycoris" else "")
    finding = optional.optimizers()
    assert finding.verdict == "hint" and finding.data["without"] == ["LyCORIS"]
    assert "lycoris-lora does not load (OSError: no library)" in str(finding.text)
    assert packages.install_command("lycoris", again=True) in str(finding.text)


def test_setting_up_says_what_came_of_it(monkeypatch):
    fine = dict.fromkeys(packages.PACKAGE_NAMES, "")
    assert list(packages.package_lines(fine)) == []
    said = list(packages.package_lines({**fine, "bitsandbytes": "OSError: no library"}))
    assert "does not load here (OSError: no library)" in said[0] and "AdamW instead of AdamW8bit" in said[1]
    hide(monkeypatch, "prodigyopt")
    assert list(packages.package_lines(fine)) == [
        f"prodigyopt is not installed. To install it: {packages.install_command('prodigyopt')}"
    ]
    assert "library.packages" in (source.ROOT / "library/setup/installer.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("language", ["zh", "ja"])
def test_the_sentences_are_in_every_table(language, tmp_path, monkeypatch):
    hide(monkeypatch, "bitsandbytes", "prodigyopt", "prodigyplus", "dadaptation")
    said = [
        *optim.find_optimizer_problems(lora(optimizer_type="AdamW8bit")),
        *optim.find_optimizer_problems(lora(optimizer_type="Prodigy")),
    ]
    presets.apply(eight_bit(tmp_path), LORA, {}, said)
    said += [packages.package_error("bitsandbytes", "OSError: x")]
    assert len(said) == 4
    for text in said:  # and so are those that are put into them; the command and the error stay as they are
        parts = [text, *(part for part in text.arguments.values() if isinstance(part, Message))]
        assert all(part.template in texts.load_catalogue(language) for part in parts), text
