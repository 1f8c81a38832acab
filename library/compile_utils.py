"""Block compilation under its published names; implemented in `library.compiler`."""

from library.compiler.blocks import (
    add_compile_arguments,
    compile_model,
    disable_linear_from_compile,
    maybe_uncompile_state_dict,
    torch_compile_options,
    uncompile_model,
)

__all__ = [
    "add_compile_arguments",
    "compile_model",
    "disable_linear_from_compile",
    "maybe_uncompile_state_dict",
    "torch_compile_options",
    "uncompile_model",
]
