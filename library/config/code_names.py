"""Options that name code, and what can be checked without running any of it.

Importing a module runs it, so a name is looked up in its package's files: nothing of an unlisted package is imported
before a training starts, and from the page only after a confirmation on this computer.
"""

import ast
import sys
from collections.abc import Mapping

from library.config import code_bases
from library.config.problems import Message
from library.config.run_config import RunConfig
from library.config.schema import option_values, options_of
from library.config.values import did_you_mean

# Modules whose classes are offered, including submodules of packages.
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
BACKEND = "compile_backend"  # installed packages may add backends
CREATE = "create_network"  # function of a network module
BASES = {"optimizer_type": "Optimizer", "lr_scheduler_type": "LRScheduler"}  # required base class by option


def code_options(config: type[RunConfig]) -> tuple[str, ...]:
    return tuple(name for name, option in options_of(config).items() if option.kind == "code")


def is_listed(module: str) -> bool:
    return any(module == offered or module.startswith(f"{offered}.") for offered in OFFERED_MODULES)


def may_look(module: str) -> bool:
    return is_listed(module) or module in sys.modules


def is_absent(name: str) -> bool:
    return code_bases.find_module(name.partition(".")[0]) is None


def unlisted(config: RunConfig) -> Mapping[str, str]:
    """Return names of unlisted code by the option that names it."""
    values, options = option_values(config), options_of(type(config))
    names_by_option: dict[str, str] = {}
    for option in code_options(type(config)):
        names = sorted(config.compile.backends) if option == BACKEND else [str(values[option] or "")]
        for name in names:
            # A class counts by its module; one without a module is PyTorch's.
            module = name if option in (*MODULES, BACKEND) else name.rpartition(".")[0]
            if module and name not in options[option].choices and not is_listed(module):
                names_by_option[option] = name
    return names_by_option


def why_not_class(module: str, name: str, option: str) -> Message | str:
    """Return why a name cannot be a class that the option accepts, "" if it can.

    Looks it up in source files and runs nothing.
    """
    if why := why_not_module(module):
        return why
    defined = _names_in_module(module)
    if defined and name in defined.functions:
        return Message("{module}.{name} is a function, not a class", module=module, name=name)
    candidates = defined.classes | defined.others if defined else ()
    actual_name = next((candidate for candidate in candidates if candidate.lower() == name.lower()), name)
    if code_bases.derives(module, actual_name, BASES[option]) is False:
        return Message(
            "{module}.{name} is not a subclass of {base}", module=module, name=actual_name, base=BASES[option]
        )
    if defined is None or defined.is_open or actual_name in defined.classes | defined.others:
        return ""
    return Message("{module} has no {name}{hint}", module=module, name=name, hint=did_you_mean(name, defined.classes))


def why_not_network(module: str) -> Message | str:
    """Return why a module cannot create a network, "" if it can, from its file alone."""
    if why := why_not_module(module):
        return why
    names = _names_in_module(module)
    if names is None or CREATE in names.functions | names.others or names.is_open:
        return ""
    return Message("{module} has no create_network", module=module)


def why_not_module(module: str) -> Message | str:
    """Return why a module cannot contain an option's code: it belongs to Python itself, or does not exist."""
    root = module.partition(".")[0]
    if root in sys.stdlib_module_names or root in sys.builtin_module_names:
        return Message("{module} is part of Python itself and has nothing to train with", module=module)
    if not all(part.isidentifier() for part in module.split(".")) or module.endswith("__main__"):
        return Message("{module} is not the name of a module", module=module)
    return Message("there is no module {module}", module=module) if code_bases.find_module(module) is None else ""


class _Names:
    """The names that a module defines, from its source."""

    def __init__(self, body: list[ast.stmt]) -> None:
        self.classes = {statement.name for statement in body if isinstance(statement, ast.ClassDef)}
        self.functions = {statement.name for statement in body if isinstance(statement, ast.FunctionDef)}
        imports = [statement for statement in body if isinstance(statement, ast.Import | ast.ImportFrom)]
        imported = [alias for statement in imports for alias in statement.names]
        self.others = {(alias.asname or alias.name).partition(".")[0] for alias in imported}
        targets = [target for statement in body if isinstance(statement, ast.Assign) for target in statement.targets]
        self.others |= {target.id for target in targets if isinstance(target, ast.Name)}
        # Other statements may define names, too, which cannot be known without running them.
        plain = ast.ClassDef | ast.FunctionDef | ast.Import | ast.ImportFrom | ast.Expr | ast.Assign | ast.AnnAssign
        has_other_statements = any(not isinstance(statement, plain) for statement in body)
        self.is_open = has_other_statements or "__getattr__" in self.functions
        self.is_open = self.is_open or any(alias.name == "*" for alias in imported)


def _names_in_module(module: str) -> _Names | None:
    tree = code_bases.module_source(module)
    return _Names(tree.body) if tree else None
