"""`kohya cache latents` and `kohya cache text`: make a training's caches beforehand, on any GPUs.

The equivalent scripts are sd-scripts/tools/cache_latents.py and cache_text_encoder_outputs.py.
"""

from pathlib import Path

from library import families
from library.cli import train_script
from library.cli.launch import script_of_toml, split_file, split_launch
from library.cli.main import EXIT_DONE, EXIT_MISUSED, complain
from library.config import environment
from library.config.building import Reading
from library.config.problems import ConfigError, Message, either
from library.config.run_config import RunConfig
from library.jobs.work import ahead_of, join_work
from library.runs import foreground, gpu_slots, keys
from library.runs.gpu_wait import reserve_devices
from library.runs.launcher import launch_command

SCRIPTS = {"latents": "tools/cache_latents", "text": "tools/cache_text_encoder_outputs"}
WHAT = {"latents": "images through the VAE", "text": "captions through the text encoders"}
FORCED = {
    "latents": [
        "--cache_latents_to_disk",
        "--no-cache_text_encoder_outputs",
        "--no-cache_text_encoder_outputs_to_disk",
    ],
    "text": ["--cache_text_encoder_outputs_to_disk", "--no-cache_latents", "--no-cache_latents_to_disk"],
}
IGNORED = ("--skip_existing",)  # of sd-scripts; valid caches are always kept here
USAGE = """kohya cache {kind} RUN.toml [options]
kohya cache {kind} --{family} --train_data_dir FOLDER --pretrained_model_name_or_path MODEL [options]

Encodes all {what} and keeps the results beside the images, where a training with
{option} finds them. If you stop it, the next start continues there. Waits while a training uses the GPUs.
Options are those of the training script and of the launcher: --num_processes 2 --gpu_ids 0,1 uses two GPUs,
each for its share. Without a TOML, one of these names the family:
{families}."""


def start_caching(kind: str, argv: list[str]) -> int:
    """Check the options here, then cache in separate processes, on GPUs that no training uses; return the launcher's
    exit code.
    """
    if argv and argv[0].lower().endswith(".toml"):
        argv = ["--config_file", *argv]
    launch_options, flags, launch_problems = split_launch(argv)
    if _wants_help(argv):
        print(cache_usage(kind))
        return EXIT_DONE if argv else EXIT_MISUSED
    read_options(kind, flags)  # reports mistakes before a launcher has loaded torch
    if problems := [*launch_problems, *gpu_slots.find_launch_problems(launch_options)]:
        return complain("\n".join(map(str, problems)), EXIT_MISUSED)
    path, flags = split_file(flags)
    work = ahead_of("cache")
    with work, reserve_devices(launch_options, work.wait) as devices:
        arguments, variables = launch_command(
            path or "", SCRIPTS[kind], **gpu_slots.options_for_devices(launch_options, devices)
        )
        variables |= keys.key_environment() | gpu_slots.device_environment(devices)
        work.hand_on()
        return foreground.run_in_foreground([*(arguments if path else arguments[:-2]), *flags], variables)


def main(kind: str, argv: list[str]) -> int:
    """Cache in this process, or its share of several, and return the exit code."""
    if _wants_help(argv):
        print(cache_usage(kind))
        return EXIT_DONE if argv else EXIT_MISUSED
    try:
        reading = read_options(kind, argv)
        from library.train.caching import make_caches  # loads torch

        with join_work("cache") as work:
            last_line = ""

            def report(phase: Message, done: int, total: int) -> None:
                nonlocal last_line
                work.phase(phase, done, total)
                line = f"{phase} {done} / {total}" if total else phase
                if line != last_line and (done == total or done % max(1, total // 20) == 0):
                    print(line, flush=True)
                last_line = line

            images = make_caches(reading.config, report)
            if environment.first_process():
                what = "captions" if kind == "text" else kind
                print(f"{what} of {images} image{'s' * (images != 1)} are cached", flush=True)
    except ConfigError as error:
        train_script.fail(error, code=1)
    except KeyboardInterrupt:
        if environment.first_process():
            print("Stopped: what was written stays, and the next run continues from there.", flush=True)
        return train_script.INTERRUPTED
    return EXIT_DONE


def read_options(kind: str, argv: list[str]) -> Reading[RunConfig]:
    """Return the config of a training that only caches this. Exits with all mistakes in the options."""
    named_families = [family for family in families.FAMILIES if f"--{family}" in argv]
    flags = [flag for flag in argv if flag not in IGNORED and flag.removeprefix("--") not in named_families]
    path, _ = split_file(flags)
    if len(named_families) > 1:
        raise ConfigError("{flags}: choose one family", flags=", ".join(f"--{family}" for family in named_families))
    if path and not named_families:
        script = script_of_toml(train_script.config_path(path) or Path(path))
    elif named_families:
        script = families.lora_script(named_families[0])
    else:
        all_flags = either([f"--{family}" for family in families.FAMILIES])
        raise ConfigError("write for which family: {every}, or name a TOML with --config_file", every=all_flags)
    reading = train_script.read_command_line(families.config_class(script), [*flags, *FORCED[kind]])
    if reading.problems:
        train_script.fail(ConfigError(*reading.problems))
    return reading


def cache_usage(kind: str) -> str:
    """Return the help of one kind."""
    flags = ", ".join(f"--{family}" for family in families.FAMILIES)
    first = families.FAMILIES[0]
    return USAGE.format(kind=kind, what=WHAT[kind], option=FORCED[kind][0][2:], families=flags, family=first)


def _wants_help(argv: list[str]) -> bool:
    return not argv or argv[0] in ("-h", "--help")
