"""`kohya cache latents` and `kohya cache text`: what a training would encode first, made beforehand, on any GPUs.

The scripts of the same purpose are sd-scripts/tools/cache_latents.py and cache_text_encoder_outputs.py.
"""

from pathlib import Path

from library import families
from library.cli import train_script
from library.cli.launch import script_of, split_file, split_launch
from library.cli.main import DONE, MISUSED, complain
from library.config import environment
from library.config.building import Reading
from library.config.problems import ConfigError, Message, either
from library.config.run_config import RunConfig
from library.jobs.work import ahead_of, joined
from library.runs import foreground, gpu_slots, keys
from library.runs.gpu_wait import free_devices
from library.runs.launcher import starting

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
IGNORED = ("--skip_existing",)  # of sd-scripts: what is there and fits is always left
USAGE = """kohya cache {kind} RUN.toml [options]
kohya cache {kind} --{family} --train_data_dir FOLDER --pretrained_model_name_or_path MODEL [options]

Encodes all {what} and keeps the results beside the images, as a training with
{option} does, in which they are not made again. Stopped, it goes on where it was. Waits while a training uses the GPUs.
Options are those of the training script and of the launcher: --num_processes 2 --gpu_ids 0,1 uses two GPUs,
each for its share. {families} say for which family it is where no TOML does."""


def start(kind: str, argv: list[str]) -> int:
    """Look at the options here, then cache in processes of their own, on GPUs that no training uses; the exit code of
    the launcher."""
    if argv and argv[0].lower().endswith(".toml"):
        argv = ["--config_file", *argv]
    how, flags, wrong = split_launch(argv)
    if _wants_help(argv):
        print(usage(kind))
        return DONE if argv else MISUSED
    read_options(kind, flags)  # so that mistakes are said before a launcher has loaded torch
    if problems := [*wrong, *gpu_slots.problems(how)]:
        return complain("\n".join(map(str, problems)), MISUSED)
    path, flags = split_file(flags)
    work = ahead_of("cache")
    with work, free_devices(how, work.wait) as own:
        arguments, variables = starting(path or "", SCRIPTS[kind], **gpu_slots.launch_options(how, own))
        variables |= keys.environment() | gpu_slots.environment(own)
        work.hand_on()
        return foreground.run([*(arguments if path else arguments[:-2]), *flags], variables)


def main(kind: str, argv: list[str]) -> int:
    """The script: cache in this process, or its share where it is one of several. The exit code."""
    if _wants_help(argv):
        print(usage(kind))
        return DONE if argv else MISUSED
    try:
        reading = read_options(kind, argv)
        from library.train.caching import make_caches  # loads torch

        with joined("cache") as work:
            last = ""

            def report(phase: Message, done: int, total: int) -> None:
                nonlocal last
                work.phase(phase, done, total)
                said = f"{phase} {done} / {total}" if total else phase
                if said != last and (done == total or done % max(1, total // 20) == 0):
                    print(said, flush=True)
                last = said

            images = make_caches(reading.config, report)
            if environment.first_process():
                print(f"{kind} of {images} image{'s' * (images != 1)} are cached", flush=True)
    except ConfigError as wrong:
        train_script.fail(wrong, code=1)
    except KeyboardInterrupt:
        if environment.first_process():
            print("Stopped: what was written stays, and the next run goes on from there.", flush=True)
        return train_script.INTERRUPTED
    return DONE


def read_options(kind: str, argv: list[str]) -> Reading[RunConfig]:
    """The config of a training that caches this and nothing else. Ends the process with all mistakes in the options."""
    named = [family for family in families.FAMILIES if f"--{family}" in argv]
    flags = [flag for flag in argv if flag not in IGNORED and flag.removeprefix("--") not in named]
    path, _ = split_file(flags)
    if len(named) > 1:
        raise ConfigError("{flags}: choose one family", flags=", ".join(f"--{family}" for family in named))
    if path and not named:
        script = script_of(train_script.config_path(path) or Path(path))
    elif named:
        script = families.lora_script(named[0])
    else:
        every = either([f"--{family}" for family in families.FAMILIES])
        raise ConfigError("write for which family: {every}, or name a TOML with --config_file", every=every)
    reading = train_script.read(families.config_class(script), [*flags, *FORCED[kind]])
    if reading.problems:
        train_script.fail(ConfigError(*reading.problems))
    return reading


def usage(kind: str) -> str:
    """The help of one kind."""
    flags = ", ".join(f"--{family}" for family in families.FAMILIES)
    first = families.FAMILIES[0]
    return USAGE.format(kind=kind, what=WHAT[kind], option=FORCED[kind][0][2:], families=flags, family=first)


def _wants_help(argv: list[str]) -> bool:
    return not argv or argv[0] in ("-h", "--help")
