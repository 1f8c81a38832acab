"""A package that the program does not list, as a config may name it: it leaves a mark where any of it runs."""

from pathlib import Path

MARK = "from pathlib import Path\nPath({mark!r}).write_text('it ran')\n"
CLASSES = """
from torch.optim import SGD
from torch.optim.lr_scheduler import ConstantLR

class Own(SGD):
    pass

class Schedule(ConstantLR):
    pass

class Other:
    def __init__(self, *args, **kwargs):
        raise SystemExit("it was called")

Made = type("Made", (Other,), dict())  # of which no source says what it derives from

def function(*args, **kwargs):
    raise SystemExit("it was called")
"""
NETWORK = "def create_network(*args): pass\n"


def write_package(site: Path, name: str, mark: Path) -> None:
    """Write the package `name` into the folder `site`: an optimizer, a schedule, a network and others that are none."""
    folder, runs = site / name, MARK.format(mark=str(mark))
    folder.mkdir(parents=True)
    for module, source in (("__init__", ""), ("classes", CLASSES), ("network", NETWORK)):
        (folder / f"{module}.py").write_text(runs + source, encoding="utf-8")
