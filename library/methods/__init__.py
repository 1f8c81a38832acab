"""Training methods: full fine-tuning, adapters, textual inversion, and ControlNet-LLLite."""

from collections.abc import Iterator
from pathlib import Path

from library import families, packages
from library.config.hub_names import FILE, about_absent, is_file_id
from library.config.problems import Problem
from library.config.run_config import RunConfig
from library.config.sections import AdapterRun, ControlRun, EmbeddingRun
from library.config.strengths import strength_problems
from library.config.values import split_strength
from library.families import network_args
from library.families.base import Family, ModelComponents
from library.methods import base_weights, embedding, full, lllite, lora, lycoris
from library.methods.assistant import attach_assistant
from library.methods.base import TrainingMethod
from library.methods.full import FullFinetune


def attach_method(components: ModelComponents, family: Family, config: RunConfig) -> TrainingMethod:
    """Freeze the model, create the trained parameters, and return the method. Call it once, before dtypes, devices and
    compiling are set.
    """
    for network in (components.denoiser, components.vae, *components.encoders.values()):
        if network is not None:
            network.requires_grad_(False)
    if isinstance(config, EmbeddingRun):
        return embedding.attach_words(components, family, config)
    if isinstance(config, ControlRun):
        return lllite.attach_lllite(components, family, config)
    if not isinstance(config, AdapterRun):
        return full.unfreeze_model(components, family, config)
    base_weights.merge_into_model(components, family, config)
    is_ours = config.network.module.startswith("networks.")
    attach = lora.attach_lora if is_ours else lycoris.attach_lycoris
    method = attach(components, family, config)
    for path, strength in assistant_lora(config).items():
        method.assistant = attach_assistant(components, family, path, strength)
    return method


def reads_encoders(config: RunConfig) -> bool:
    """Return whether `attach_method` needs the text encoders: they or their words are trained, adapter files may change
    them, or a foreign network module receives them.
    """
    if isinstance(config, EmbeddingRun):
        return True
    if not isinstance(config, AdapterRun):
        return config.trains_whole_encoders
    network = config.network
    files = network.base_weights or network.network_weights or network.dim_from_weights
    return bool(files) or not network.network_train_unet_only or not network.module.startswith("networks.")


def assistant_lora(config: RunConfig) -> dict[Path, float]:
    path, strength = split_strength((isinstance(config, AdapterRun) and config.network.assistant_lora) or "")
    return {Path(path): strength} if path else {}


def find_method_problems(config: RunConfig) -> Iterator[Problem]:
    """Return problems of the training method that depend on files and installed packages."""
    beginnings = {"weights": config.embedding.weights} if isinstance(config, EmbeddingRun) else {}
    beginnings |= {"network_weights": config.control.network_weights} if isinstance(config, ControlRun) else {}
    for option, path in beginnings.items():
        if path and not Path(path).is_file():
            yield about_absent(option, path)
    if not isinstance(config, AdapterRun):
        return
    if config.precision.nf4_denoiser and (obstacle := packages.obstacle("bitsandbytes")):
        template = "{why}; or set int8_base in its place, which takes twice the memory"
        yield Problem("base_bits", template, why=obstacle, fix={"base_bits": None, "int8_base": True})
    yield from network_args.find_network_args_problems(config)
    yield from lycoris.find_lycoris_problems(config)
    files = [("network_weights", config.network.network_weights)]
    files += [("base_weights", path) for path in config.network.base_weights or ()]
    if not any(strength_problems("assistant_lora", config.network.assistant_lora)):  # else its rule names it
        files.append(("assistant_lora", split_strength(config.network.assistant_lora or "")[0]))
    for option, path in files:
        # The other files may be downloaded from the hub later, network_weights not.
        if path and not Path(path).is_file() and not (option != "network_weights" and is_file_id(path)):
            if Path(path).is_dir():
                yield Problem(option, ": {path} is a folder: name a file in it", path=path)
            else:
                yield about_absent(option, path, "" if option == "network_weights" else FILE)


def method_notes(config: RunConfig) -> Iterator[Problem]:
    """Yield what is unusual in network_args, and assistant LoRAs in the wrong option."""
    if isinstance(config, AdapterRun):
        yield from network_args.network_args_notes(config)
        yield from _merged_assistants(config)


def _merged_assistants(config: AdapterRun) -> Iterator[Problem]:
    """Yield a published assistant LoRA that is merged, and so shows in samples."""
    files, strengths = config.network.base_weights, config.network.base_weights_multiplier
    for assistant in families.facts_of(config.family).assistant_loras:
        if len(files) == 1 and assistant.is_named(files[0]) and not config.network.assistant_lora:
            yield Problem(
                "base_weights",
                ": {file} is merged into the model and shows in samples; as assistant_lora it is off in them",
                file=files[0],
                also="assistant_lora",
                fix={
                    "base_weights": (),
                    "base_weights_multiplier": (),
                    "assistant_lora": ":".join([files[0], *(f"{strength:g}" for strength in strengths)]),
                },
            )
