"""The box for additional parameters of kohya_ss's page: flags that take precedence over its fields."""

from library.config.problems import Message
from library.config.values import split_words
from library.importers.builder import ImportBuilder


def read_typed_flags(builder: ImportBuilder) -> None:
    """Read the flags in the box, which take precedence over all fields."""
    text = builder.get("additional_parameters")
    if not isinstance(text, str):
        builder.empty("additional_parameters")
        return
    typed = flags(text)
    stray_words = typed.pop("", [])
    if "torch_compile" in typed:
        typed.pop("torch_compile")
        backend = builder.get("dynamo_backend")
        typed["compile"] = []
        if backend and str(backend).casefold() != "no":
            typed.setdefault("compile_backend", [str(backend)])
    values = {name: (items if len(items) > 1 else items[0]) if items else True for name, items in typed.items()}
    if not values:
        builder.ignore("additional_parameters", "there is no --flag in it")
        return
    if stray_words:
        name = f"additional_parameters {' '.join(stray_words)}"
        builder.source = {**builder.source, name: stray_words}
        builder.ignore(name, "there is no --flag in it")
    explanation = Message("its flags stand by themselves: {flags}", flags=", ".join(values))
    builder.change("additional_parameters", explanation)
    for name, value in values.items():
        # Each flag has an outcome of its own, so that unknown ones are reported by name.
        builder.source = {**builder.source, f"additional_parameters --{name}": value}
        builder.rename(f"additional_parameters --{name}", name, value)


def flags(text: str) -> dict[str, list[str]]:
    """Split `--seed 5 --network_args a=1 b=2` into flags with their values; under "" what precedes the first flag."""
    values_by_flag: dict[str, list[str]] = {}
    for token in split_words(text):
        if token.startswith("--"):
            name, equals, value = token[2:].partition("=")
            values_by_flag[name] = [value] if equals else []
        else:
            values_by_flag.setdefault(next(reversed(values_by_flag), ""), []).append(token)
    return values_by_flag
