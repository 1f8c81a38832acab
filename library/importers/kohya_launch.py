"""The fields of kohya_ss's page for `accelerate launch`: which GPUs train, and in how many processes."""

from typing import Any

from library.config.command import Launch, launch_problems
from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import ConfigError, Message
from library.config.values import join_words, split_words
from library.importers.builder import ImportBuilder, is_empty, is_on, to_number

THREADS = 2  # per process: kohya_ss's default, which counts as not set
WHOLE_NUMBER_KEYS = ("num_processes", "num_machines", "main_process_port", "num_cpu_threads_per_process")
KEYS = (*WHOLE_NUMBER_KEYS, "gpu_ids", "extra_accelerate_launch_args")
PLACE = "on the page it is under Several GPUs, and in a shell it goes to `kohya train`"


def read_launch_settings(settings: JsonMapping) -> JsonObject:
    """Return the launcher's settings in a file of kohya_ss, as values of `Launch`; unreadable ones count as not set."""
    defaults, values = Launch(), {key: _launch_value(key, settings[key]) for key in KEYS if key in settings}
    return {
        key: getattr(defaults, key) if value is None or launch_problems({key: value}) else value
        for key, value in values.items()
    }


def record_launch_keys(builder: ImportBuilder, tab: str) -> None:
    """Record for each key with a value that it is a setting of the launcher."""
    for key in KEYS:
        if key not in builder.source:
            continue
        value = _launch_value(key, builder.source[key])
        if value is None or value == getattr(Launch(), key):
            builder.empty(key)
        elif problems := launch_problems({key: value}):
            builder.ignore(key, problems[0])
        else:
            builder.change(key, Message("{value}: {place}", value=_join_tuple(value), place=PLACE))
    if is_on(builder.get("multi_gpu")):
        builder.change("multi_gpu", "num_processes says how many GPUs train together")
    builder.empty("multi_gpu")


def launch_fields(chosen: JsonMapping, base: JsonMapping) -> JsonObject:
    """Convert values of `Launch` to their fields, as far as they differ from those of `base`."""
    defaults, before = Launch(), read_launch_settings(base)
    fields: JsonObject = {}
    for key in KEYS:
        value = _launch_value(key, chosen.get(key))
        value = getattr(defaults, key) if value is None else value
        if value == before.get(key, getattr(defaults, key)):
            continue
        if value is None:
            fields[key] = _unset_field(key)
        else:
            fields[key] = _join_tuple(value) if isinstance(value, tuple) else value
    if "num_processes" in fields:
        fields["multi_gpu"] = fields["num_processes"] > 1
    return fields


def _unset_field(key: str) -> int | str:
    """Return what a field of kohya_ss holds while its key is not set."""
    if key == "num_cpu_threads_per_process":
        return THREADS
    return 0 if key in WHOLE_NUMBER_KEYS else ""


def _launch_value(key: str, value: Any) -> Any:
    """Convert the value of a key to that of `Launch`; None if it is not set or invalid."""
    if is_empty(value):
        return None
    if key in WHOLE_NUMBER_KEYS:
        number = to_number(value)
        unset = number is None or number <= 0 or (key == "num_cpu_threads_per_process" and number == THREADS)
        return None if number is None or unset else int(number)
    if key == "gpu_ids":
        return ",".join(part.strip() for part in str(value).split(",") if part.strip()) or None
    try:
        return tuple(value) if isinstance(value, list | tuple) else tuple(split_words(str(value))) or None
    except ConfigError:
        return None


def _join_tuple(value: Any) -> str:
    return join_words(value) if isinstance(value, tuple) else str(value)
