"""Fill in what the launchers of lora-scripts, train.sh and train.ps1, choose when they run: the script and flags."""

import re
from collections.abc import Iterator, Mapping

from library.importers.shared import load_tables, other_model_error

TRAINER = "lora-scripts"
TABLES = load_tables("lora_scripts_launcher")
CHOICE = re.compile(r"^[ \t]*\$?(?:trainer_file|script_name)[ \t]*=.*$", re.M)
CHOSEN_SCRIPT = re.compile(r"\$\{?(?:trainer_file|script_name)\b\}?")
# The lists of further flags, where the command uses them and not where they are filled.
LISTS = re.compile(
    r"(?<=[ \t])[\"']?\$\{?(?P<name>ext_?args|launch_?args)(?:\[@\])?\}?[\"']?(?=[ \t]*$|[ \t]+[-$\"'.`\\])",
    re.MULTILINE | re.IGNORECASE,
)
OFF = ("", "0", "$false")


def fill_launcher(text: str, variables: Mapping[str, str]) -> str:
    """Put the script and the flags of a launcher in their places; return any other text unchanged.

    Raises ConfigError for models that are not trained here.
    """
    if not (CHOSEN_SCRIPT.search(text) and LISTS.search(text)):
        return text
    model = variables.get("model_type", "sdxl" if _is_on(variables, "sdxl") else "sd1.5")
    if model in TABLES["other_models"]:
        raise other_model_error(TRAINER, TABLES["other_models"][model])
    if not (script := TABLES["scripts"].get(model)):
        return text
    flags = " ".join(_more_flags(variables, model))
    launcher = "--multi_gpu --num_processes=2" if _is_on(variables, "multi_gpu") else ""
    with_lists = LISTS.sub(lambda place: flags if place["name"].lower().startswith("ext") else launcher, text)
    return CHOSEN_SCRIPT.sub(lambda place: script, CHOICE.sub("", with_lists))


def _more_flags(variables: Mapping[str, str], model: str) -> Iterator[str]:
    """Yield the flags that its variables add; only train.sh and train.ps1 have such variables."""
    if "model_type" not in variables:
        return
    for name, flag in TABLES["switches"].items():
        if _is_on(variables, name):
            yield f"--{flag}"
    for name in TABLES["values"]:
        if _is_on(variables, name) and (name != "clip_skip" or model == "sd1.5"):
            yield f'--{name}="{variables[name]}"'
    if variables.get("optimizer_type") == "DAdaptation":
        yield "--optimizer_args decouple=True"
    if variables.get("network_module") == "lycoris.kohya":
        arguments = [f'"{name}={variables[name]}"' for name in TABLES["lycoris"] if variables.get(name)]
        yield " ".join(["--network_args", *arguments])
    is_wandb = _is_on(variables, "use_wandb")
    yield f"--log_with={'all' if is_wandb else 'tensorboard'}"
    if is_wandb and _is_on(variables, "log_tracker_name"):
        yield f'--log_tracker_name="{variables["log_tracker_name"]}"'


def _is_on(variables: Mapping[str, str], name: str) -> bool:
    return variables.get(name, "").lower() not in OFF and '"' not in variables[name]
