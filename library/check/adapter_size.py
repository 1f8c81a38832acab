"""The size of the adapters of network settings: layers, parameters and bytes of the file, counted without weights.

The page shows it while the user types, so this runs as a process that answers each line of stdin with a line: `python
-m library.check.adapter_size`. It ends after some idle minutes, and with the page.
"""

import contextlib
import copy
import functools
import json
import logging
import os
import sys
import threading
import warnings
from dataclasses import replace
from typing import Any

import torch

from library import families, methods
from library.check import estimate, meta_model
from library.config.building import draft
from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import ConfigError
from library.config.schema import options_of
from library.config.sections import AdapterRun
from library.families import network_args
from library.families.base import Family, ModelComponents
from library.families.facts import block_of_adapter
from library.families.network_args import LycorisArgs
from library.methods.lora import LoraAdapters

IDLE = 300.0  # the process ends after this many seconds without a request
# Options with which all layers are trained from new weights.
ALL = {
    "learning_rate": 1e-4,
    "unet_lr": None,
    "text_encoder_lr": None,
    "network_weights": None,
    "dim_from_weights": False,
    "base_weights": None,
    "assistant_lora": None,
}
HEADER = 120  # bytes of a file's header per tensor


def adapter_size(config: AdapterRun) -> JsonObject:
    """Return trained layers, parameters, bytes of the file, layers of each block, and blocks of the model by group.

    Raises ConfigError for invalid adapters, RuntimeError if only a training can count them.
    """
    if network_args.args_class(config) is None:  # never import a package whose name is still being typed
        raise RuntimeError(config.network.module)
    args, groups = network_args.read_network_args(config), families.facts_of(config.family).blocks
    # Attaching adapters changes the networks, so attach them to a copy of the cached ones; without data it is quick.
    family, pristine = _load_components(type(config), _model_key(config), methods.reads_encoders(config))
    components = ModelComponents(copy.deepcopy(pristine.denoiser), None, copy.deepcopy(pristine.encoders), {})
    counts = [0] * len(groups)  # blocks of the model
    for path, _ in components.denoiser.named_parameters():
        if block := block_of_adapter(family.adapter_name("denoiser", path.rpartition(".")[0]), groups):
            counts[block[0]] = max(counts[block[0]], block[1] + 1)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that tensors on the meta device hold no data
        method: Any = methods.attach_method(components, family, _without_weights(config, args))
    if isinstance(method, LoraAdapters):
        names = list(method.adapters)
        stored = [tensor for adapter in method.adapters.values() for tensor in adapter.tensors().values()]
    else:
        names = [adapter.lora_name for adapter in method.network.loras]
        stored = list(method.network.state_dict().values())
    blocks = [[0] * count for count in counts]  # adapted layers of each
    for name in names:
        if block := block_of_adapter(name, groups):
            blocks[block[0]][block[1]] += 1
    parameter_count = sum(tensor.numel() for tensor in method.parameters())
    stored_count = sum(tensor.numel() for tensor in stored)
    if isinstance(args, LycorisArgs):
        layers = [adapter.org_module[0] for adapter in method.network.loras]
        if args.algo == "full":
            own_parameters = (parameter for layer in layers for parameter in layer.parameters(recurse=False))
            parameter_count = stored_count = sum(parameter.numel() for parameter in own_parameters)
        elif args.dora_wd:  # the adapters were built without: add the magnitudes
            side = 0 if args.wd_on_output else 1
            magnitudes = sum(layer.weight.shape[side] for layer in layers if layer.weight.dim() > 1)
            parameter_count, stored_count = parameter_count + magnitudes, stored_count + magnitudes
    return {
        "layers": len(names),
        "parameters": parameter_count,
        "blocks": blocks,
        "counts": counts,
        "bytes": stored_count * estimate.saved_bytes(config) + HEADER * len(stored),
    }


def _without_weights(config: AdapterRun, args: Any) -> AdapterRun:
    """Return a config with adapters on the same layers that can be built without weights."""
    # DoRA and whole weights need the weights.
    if not isinstance(args, LycorisArgs) or not (args.dora_wd or args.algo == "full"):
        return config
    pairs = [p for p in config.network.network_args if p.partition("=")[0].strip() not in ("algo", "dora_wd")]
    algo = "locon" if args.algo == "full" else args.algo
    return replace(config, network=replace(config.network, network_args=(f"algo={algo}", *pairs)))


def _model_key(config: AdapterRun) -> str:
    values = {name: getattr(config.model, name) for name in options_of(type(config)) if hasattr(config.model, name)}
    return json.dumps(values, default=str, sort_keys=True)


@functools.lru_cache(maxsize=2)
def _load_components(cls: type[AdapterRun], key: str, encoders: bool) -> tuple[Family, ModelComponents]:
    """Return networks without memory: the config's own model, or the published one if its files are not here."""
    options = options_of(cls)
    config = draft(cls, {name: options[name].read(value) for name, value in json.loads(key).items()})
    with contextlib.suppress(Exception):  # the check reports missing or invalid files
        if config.model.pretrained_model_name_or_path and meta_model.has_model_files(config):
            return meta_model.empty_components(config, encoders)
    family = families.family_for(config)
    module = families.random_module(family.name)
    networks = module.make_networks(module.FULL)
    denoiser = networks.denoiser()
    families.adopt_denoiser(family, denoiser)
    made_encoders = {name: make() for name, make in networks.encoders.items()} if encoders else {}
    return family, ModelComponents(denoiser, None, made_encoders, {})


def answer(request: JsonMapping) -> JsonObject:
    """Return the size, or only `why`: what is wrong with the adapter, "" if LyCORIS needs weights, which are missing
    here.
    """
    cls: Any = families.config_class(request["script"])
    options = options_of(cls)
    try:
        return adapter_size(
            draft(cls, {name: options[name].read(value) for name, value in {**request["values"], **ALL}.items()})
        )
    except ConfigError as error:
        return {"why": error.problems[0].as_json()}
    except (RuntimeError, NotImplementedError):
        return {"why": ""}


def main() -> None:
    """Answer each line of standard input with a line."""
    logging.disable(logging.ERROR)
    answers, sys.stdout = sys.stdout, sys.stderr  # packages print to stdout
    idle = threading.Timer(IDLE, os._exit, (0,))
    for line in sys.stdin:
        idle.cancel()
        print(json.dumps(answer(json.loads(line)), default=str), file=answers, flush=True)
        idle = threading.Timer(IDLE, os._exit, (0,))
        idle.daemon = True
        idle.start()


if __name__ == "__main__":
    main()
