"""Which packages of optimizers work on this machine, for the doctor."""

from typing import get_args

from library import packages
from library.config.sections.learning import OptimizerName
from library.doctor.finding import MachineFinding, hint, ok
from library.optim import trial
from library.optim.names import SPECS, nearest


def optimizers() -> MachineFinding:
    """The packages of optimizers, and LyCORIS: each is loaded, and steps a small weight where a training would."""
    absent = [module for module in packages.PACKAGES if not packages.installed(module)]
    wrong = {module: error for module in packages.PACKAGES if module not in absent and (error := trial.package(module))}
    names = [name for name in get_args(OptimizerName) if SPECS[name.lower()].package in (*absent, *wrong)]
    without = names + ["LyCORIS"] * ("lycoris" in (*absent, *wrong))
    text = f"not installed: {', '.join(map(packages.title, absent))}: {packages.command(*absent)}" if absent else ""
    for module, error in wrong.items():
        text += "; " * bool(text) + f"{packages.title(module)} does not load ({error}): "
        text += packages.command(module, again=True)
    data = {"absent": absent, "broken": wrong, "without": without}
    if not without:
        return ok("optimizers", f"{', '.join(packages.PACKAGES.values())} work", **data)
    if "AdamW8bit" in without:
        text += f"; use {nearest('AdamW8bit')} instead of AdamW8bit, it needs more memory"
    return hint("optimizers", text, **data)
