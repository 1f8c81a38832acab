"""Options that name code, and what can be said of a name without running any of it.

Importing a module runs it, so a name is looked up in the files of its package: of packages that are not listed here
nothing is imported before a training starts, and from the page only after a confirmation on this computer.
"""

import ast
import sys
from collections.abc import Mapping

from library.config import code_bases
from library.config.problems import Message
from library.config.run_config import RunConfig
from library.config.schema import option_values, options_of
from library.config.values import did_you_mean

# Modules whose classes are offered; what is in a package counts, too.
OFFERED_MODULES = (
    "torch.optim",
    "transformers.optimization",
    "diffusers.optimization",
    "bitsandbytes.optim",
    "dadaptation",
    "lion_pytorch",
    "prodigyopt",
    "prodigyplus",
    "pytorch_optimizer",
    "schedulefree",
    "lycoris.kohya",
    "networks",
    "library.optim.sorted_groups",
)
MODULES = ("network_module",)  # options that name a module and not a class
BACKEND = "compile_backend"  # which an installed package may bring
CREATE = "create_network"  # what a network module has
BASES = {"optimizer_type": "Optimizer", "lr_scheduler_type": "LRScheduler"}  # what classes of options derive from


def code_options(config: type[RunConfig]) -> tuple[str, ...]:
    """The options of a config class that name code."""
    return tuple(name for name, option in options_of(config).items() if option.kind == "code")


def is_listed(module: str) -> bool:
    """Whether a module belongs to a package that is listed."""
    return any(module == one or module.startswith(f"{one}.") for one in OFFERED_MODULES)


def may_look(module: str) -> bool:
    """Whether a check may import a module: it is listed, or runs already."""
    return is_listed(module) or module in sys.modules


def is_absent(name: str) -> bool:
    """Whether the package of a name is not there at all."""
    return code_bases.find_module(name.partition(".")[0]) is None


def unlisted(config: RunConfig) -> Mapping[str, str]:
    """The names of code that is not listed, by the option that names it."""
    given, known = option_values(config), options_of(type(config))
    found: dict[str, str] = {}
    for option in code_options(type(config)):
        names = sorted(config.compile.backends) if option == BACKEND else [str(given[option] or "")]
        for name in names:
            # Of a class its module counts; one without a module is PyTorch's.
            module = name if option in (*MODULES, BACKEND) else name.rpartition(".")[0]
            if module and name not in known[option].choices and not is_listed(module):
                found[option] = name
    return found


def why_not_class(module: str, name: str, option: str) -> Message | str:
    """Why a name cannot be a class of a module that an option takes, "" where it can be one.

    It is looked up in source files, and nothing is run.
    """
    if why := why_not_module(module):
        return why
    defined = _names_in_module(module)
    if defined and name in defined.functions:
        return Message("{module}.{name} is a function and no class", module=module, name=name)
    named = (
        next((one for one in defined.classes | defined.others if one.lower() == name.lower()), name)
        if defined
        else name
    )
    if code_bases.derives(module, named, BASES[option]) is False:
        return Message("{module}.{name} is no subclass of {base}", module=module, name=named, base=BASES[option])
    if defined is None or defined.is_open or named in defined.classes | defined.others:
        return ""
    return Message("{module} has no {name}{hint}", module=module, name=name, hint=did_you_mean(name, defined.classes))


def why_not_network(module: str) -> Message | str:
    """Why a module cannot make a network, "" where it can, from its file alone."""
    if why := why_not_module(module):
        return why
    found = _names_in_module(module)
    if found is None or CREATE in found.functions | found.others or found.is_open:
        return ""
    return Message("{module} has no create_network", module=module)


def why_not_module(module: str) -> Message | str:
    """Why no code of an option can be in a module: it belongs to Python itself, or does not exist."""
    root = module.partition(".")[0]
    if root in sys.stdlib_module_names or root in sys.builtin_module_names:
        return Message("{module} belongs to Python itself and holds nothing that trains", module=module)
    if not all(part.isidentifier() for part in module.split(".")) or module.endswith("__main__"):
        return Message("{module} is not the name of a module", module=module)
    return Message("there is no module {module}", module=module) if code_bases.find_module(module) is None else ""


class _Names:
    """What a module defines, from its source."""

    def __init__(self, body: list[ast.stmt]) -> None:
        self.classes = {one.name for one in body if isinstance(one, ast.ClassDef)}
        self.functions = {one.name for one in body if isinstance(one, ast.FunctionDef)}
        imported = [alias for one in body if isinstance(one, ast.Import | ast.ImportFrom) for alias in one.names]
        self.others = {(alias.asname or alias.name).partition(".")[0] for alias in imported}
        made = [target for one in body if isinstance(one, ast.Assign) for target in one.targets]
        self.others |= {target.id for target in made if isinstance(target, ast.Name)}
        # Names may also come of other statements, which nobody can know without running them.
        plain = ast.ClassDef | ast.FunctionDef | ast.Import | ast.ImportFrom | ast.Expr | ast.Assign | ast.AnnAssign
        self.is_open = any(not isinstance(one, plain) for one in body) or "__getattr__" in self.functions
        self.is_open = self.is_open or any(alias.name == "*" for alias in imported)


def _names_in_module(module: str) -> _Names | None:
    """None for a module that is no readable source."""
    tree = code_bases.module_source(module)
    return _Names(tree.body) if tree else None
