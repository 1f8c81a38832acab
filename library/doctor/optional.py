"""Which optimizer packages work on this machine, for the doctor."""

from typing import get_args

from library import packages
from library.config.problems import Message, join_messages
from library.config.sections.learning import OptimizerName
from library.doctor.finding import MachineFinding, hint, ok
from library.optim import trial
from library.optim.names import SPECS, working_optimizer


def optimizers() -> MachineFinding:
    """Report optimizer packages and LyCORIS: load each, and step a small weight on the training's device."""
    absent = [module for module in packages.PACKAGE_NAMES if not packages.is_installed(module)]
    broken = {
        module: error for module in packages.PACKAGE_NAMES if module not in absent and (error := trial.package(module))
    }
    names = [name for name in get_args(OptimizerName) if SPECS[name.lower()].package in (*absent, *broken)]
    without = names + ["LyCORIS"] * ("lycoris" in (*absent, *broken))
    sentences = []
    if absent:
        titles = ", ".join(map(packages.package_name, absent))
        sentences.append(
            Message("not installed: {names}: {command}", names=titles, command=packages.install_command(*absent))
        )
    for module, error in broken.items():
        command = packages.install_command(module, again=True)
        template = "{name} does not load ({error}): {command}"
        sentences.append(Message(template, name=packages.package_name(module), error=error, command=command))
    data = {"absent": absent, "broken": broken, "without": without}
    if not without:
        return ok("optimizers", Message("{names} work", names=", ".join(packages.PACKAGE_NAMES.values())), **data)
    if "AdamW8bit" in without:
        template = "use {other} instead of AdamW8bit, it needs more memory"
        sentences.append(Message(template, other=working_optimizer("AdamW8bit")))
    return hint("optimizers", join_messages(sentences, "; "), **data)
