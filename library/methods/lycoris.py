"""The bridge to network modules of other packages: `lycoris.kohya` of lycoris-lora, or any module that has
`create_network` as sd-scripts calls it.

Such a network patches the layers' forward. Its adapters are renamed to sd-scripts' names and registered inside the
layers they belong to, so that they move, are found and are synchronised together with them.
"""

import contextlib
import importlib
import io
import logging
import math
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional

from library import packages
from library.adapter_files.names import lora_names_of
from library.adapter_files.storage import exact, is_finite, keeps_numbers
from library.compiler.subclass import with_gradient
from library.config import code_names
from library.config.json_types import JsonMapping, JsonObject
from library.config.outside_files import parse_json
from library.config.problems import ConfigError, Problem, raise_if_any
from library.config.schema import section_options
from library.config.sections import AdapterRun
from library.config.values import did_you_mean
from library.families import network_args
from library.families.base import Family, ModelComponents
from library.methods import lora
from library.methods.base import TrainingMethod, trained_dtype
from library.methods.lora import AdapterLocation
from library.methods.lora_files import Unmatched, file_of, report_unmatched
from library.methods.lycoris_denoiser import FilteredDenoiser, left_out
from library.methods.lycoris_files import (
    adapter_alpha,
    block_sizes,
    cast_output_to_layer_dtype,
    draw_rank_dropout_on_device,
    follow_alpha,
    match_scale_of_file,
    put_blocks,
    takes_the_weight,
    use_full_rank_outside_steps,
)
from library.methods.lycoris_presets import known_presets
from library.methods.small_files import unused_alphas


class LycorisAdapters(TrainingMethod):
    """Adapters of another package as a TrainingMethod."""

    def __init__(self, network: Any, places: dict[str, AdapterLocation], config: AdapterRun) -> None:
        """`places` are the locations of adapters by their names."""
        self.network, self._config = network, config
        names = lora_names_of(config.family)
        self.file_names = {name: names.file_name(place.part, place.path, name) for name, place in places.items()}
        self._groups = self._make_groups()
        learning = {id(p) for g in self._groups for p in g["params"]}
        if not learning:
            raise ConfigError(lora.NOTHING_TRAINED)
        self._has_file = bool(config.network.network_weights)
        self.adapted_parts = {place.part for place in places.values()} if self._has_file else ()
        self.trained_parts: dict[str, bool] = {}
        for adapter in network.loras:
            for parameter in adapter.parameters():
                parameter.requires_grad_(id(parameter) in learning)
            part = places[adapter.lora_name].part
            learns = any(p.requires_grad for p in adapter.parameters())
            self.trained_parts[part] = self.trained_parts.get(part, False) or learns

    def state_dict(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Return the file's tensors, on the CPU; cast to `dtype` if given."""
        tensors, blocks = {}, block_sizes(self.network)
        for full_key, tensor in self.network.state_dict().items():
            name, _, key = full_key.partition(".")
            if key == "alpha":
                tensor = tensor * blocks.get(name, 1)
                kind = dtype or tensor.dtype
                stored = (
                    exact(tensor, kind) if keeps_numbers(kind, tensor) and is_finite(tensor) else tensor.to("cpu", kind)
                )
            else:
                stored = tensor.detach().to("cpu", dtype or tensor.dtype)
            tensors[f"{self.file_names[name]}.{key}"] = stored.contiguous()
        return tensors

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> Unmatched:
        """Load a file of the same kind of network, with its alpha; return the names that do not match."""
        alphas_before = [adapter_alpha(adapter) for adapter in self.network.loras]
        unused = unused_alphas(tensors)
        loaded = {name: tensor for name, tensor in tensors.items() if name not in unused}
        for name, size in block_sizes(self.network).items():
            if (key := f"{name}.alpha") in loaded:
                loaded[key] = loaded[key] / size
        for name, tensor in loaded.items():
            if name.endswith(".alpha") and not math.isfinite(float(tensor)):
                template = "{name} of the file is infinite or NaN; take a file that was saved in float or bf16"
                raise ConfigError(template, name=name)
        try:
            missing, unexpected = self.network.load_state_dict(loaded, strict=False)
            block_names = [name for adapter in self.network.loras for name in put_blocks(adapter, tensors)]
        except RuntimeError as e:
            raise ConfigError("the file does not fit this network: {why}", why=str(e).splitlines()[-1].strip()) from e
        for adapter, before in zip(self.network.loras, alphas_before, strict=True):
            follow_alpha(adapter, before)
        missing = [name for name in missing if name not in unused]
        blocks = (".up_list.", ".down_list.")
        missing = [name for name in missing if not (block_names and any(block in name for block in blocks))]
        return Unmatched(missing, [name for name in unexpected if name not in block_names])

    def train(self, mode: bool = True) -> "LycorisAdapters":
        """Switch dropout on or off."""
        for parameter in self.parameters():  # the package views some as matrices, which channels-last ones cannot be
            if not parameter.is_contiguous():
                parameter.data = parameter.data.contiguous()
        self.network.train(mode)
        return self

    def set_multiplier(self, multiplier: float) -> None:
        """Set the strength of all adapters. The package keeps it as a Python number, so compiled graphs recompile."""
        for adapter in self.network.loras:
            adapter.multiplier = multiplier

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        """Within the context, predict as the base model, without gradients and compiled or recorded graphs: they have
        the strength as a constant.
        """
        self.set_multiplier(0.0)
        try:
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                yield
        finally:
            self.set_multiplier(1.0)

    def limit_norms(self, maximum: float) -> dict[str, Tensor]:
        """Apply `scale_weight_norms` as the package does."""
        device = self.parameters()[0].device
        scaled, average, largest = self.network.apply_max_norm_regularization(maximum, device)
        values = {"keys_scaled": scaled, "average": average, "maximum": largest}
        return {name: torch.as_tensor(value) for name, value in values.items()}

    def alphas(self) -> dict[str, float]:
        return {a.lora_name: adapter_alpha(a) for a in self.network.loras} if self._has_file else {}

    def take_alphas(self, alphas: Mapping[str, float]) -> None:
        """Set the alphas of a saved state, and keep them in states of this training, too."""
        self._has_file = self._has_file or bool(alphas)
        for adapter in self.network.loras:
            if adapter.lora_name in alphas and isinstance(alpha := getattr(adapter, "alpha", None), Tensor):
                before = adapter_alpha(adapter)
                alpha.fill_(alphas[adapter.lora_name])
                follow_alpha(adapter, before)

    def named(self) -> dict[str, nn.Parameter]:
        return {f"{a.lora_name}.{key}": p for a in self.network.loras for key, p in a.named_parameters()}

    def _make_groups(self) -> list[dict[str, Any]]:
        optim = self._config.optim
        encoder_lr = optim.text_encoder_lr[0] if optim.text_encoder_lr else None
        optimizer_params = self.network.prepare_optimizer_params(encoder_lr, optim.unet_lr, optim.learning_rate)
        has_names = isinstance(optimizer_params, tuple)
        groups, names = optimizer_params if has_names else (optimizer_params, ["" for _ in optimizer_params])
        return [
            {"params": list(g["params"]), "lr": g.get("lr", optim.learning_rate), "name": name or f"group{i}"}
            for i, (g, name) in enumerate(zip(groups, names, strict=True))
        ]


def find_lycoris_problems(config: AdapterRun) -> Iterator[Problem]:
    """Yield a problem if the package of the network module is missing or cannot be used."""
    module = config.network.module
    if module.startswith("networks."):
        return
    # The package first: in one that does not load no module is found.
    if obstacle := packages.obstacle(module.split(".")[0]):
        modules = section_options(type(config.network))["network_module"].choices
        hint = did_you_mean(module, modules)
        if hint and module not in modules:
            yield Problem("network_module", "{name} is not known{hint}", name=module, hint=hint)
        else:
            yield Problem("network_module", "{module} {absent}", module=module, absent=obstacle)
    elif why := code_names.why_not_network(module):
        template = "{module}: {why}; write lycoris.kohya, or leave it empty"
        yield Problem("network_module", template, module=module, why=why)


def load_module(name: str) -> Any:
    """Import a network module. Raises ConfigError if it cannot be loaded here or has no create_network."""
    try:
        module = importlib.import_module(name)
    except Exception as error:  # a package built for another machine may raise anything
        raise ConfigError(
            Problem(
                "network_module",
                "{name} cannot be loaded: {kind}: {why}",
                name=name,
                kind=type(error).__name__,
                why=error,
            )
        ) from error
    if not callable(getattr(module, "create_network", None)):
        raise ConfigError(
            Problem("network_module", "{name} has no create_network: write lycoris.kohya, or leave it empty", name=name)
        )
    return module


def attach_lycoris(components: ModelComponents, family: Family, config: AdapterRun) -> LycorisAdapters:
    """Let the package put its adapters into the model. Raises ConfigError if it is missing or does not fit."""
    raise_if_any([*find_lycoris_problems(config), *network_args.find_network_args_problems(config)])
    dim, alpha, settings = _wanted_network(config)
    encoders = _trained_encoders(components, config, settings)
    network = _create_network(components, encoders, family, config, (dim, alpha, settings))
    places = _name_adapters(network, {**encoders, "denoiser": components.denoiser}, family)
    device = next(components.denoiser.parameters()).device
    learns_denoiser = not config.network.network_train_text_encoder_only
    network.apply_to(list(encoders.values()), components.denoiser, bool(encoders), learns_denoiser)
    for adapter in network.loras:
        _put_into_its_layer(adapter, device, trained_dtype(config))
    method = LycorisAdapters(network, places, config)
    if weights := config.network.network_weights:
        _load_weights(method, weights, config.family)
    return method


def _wanted_network(config: AdapterRun) -> tuple[int, float, JsonObject]:
    """Return rank, alpha and the package's other arguments: of the config, or of a file, over which the config's
    arguments take precedence.
    """
    network = config.network
    is_lycoris = network.module == network_args.LYCORIS
    settings: JsonObject = {
        **(network_args.lycoris_settings(config) if is_lycoris else network_args.network_args_as_text(config))
    }
    dim, alpha = network.network_dim or 4, network.network_alpha
    if network.dim_from_weights:
        dim, alpha, stored = _network_of_file(network.network_weights)
        settings = {**stored, **settings}
    settings.setdefault("dropout", network.network_dropout or 0.0)
    return dim, alpha, settings


def _create_network(
    components: ModelComponents,
    encoders: Mapping[str, nn.Module],
    family: Family,
    config: AdapterRun,
    requested: tuple[int, float, JsonObject],
) -> Any:
    """Return the package's network. It has chosen its layers among the modules shown to it, but patched none yet."""
    name, (dim, alpha, settings) = config.network.module, requested
    create = load_module(name).create_network
    visible_denoiser = FilteredDenoiser(components.denoiser, left_out(components.denoiser, family, config))
    with contextlib.ExitStack() as stack:
        if name == network_args.LYCORIS:
            stack.enter_context(known_presets(str(settings.get("preset", "full")), components.denoiser))
        stack.enter_context(_without_messages(name))
        network = create(1.0, dim, alpha, components.vae, list(encoders.values()) or None, visible_denoiser, **settings)
    if not isinstance(network, nn.Module):
        raise ConfigError(Problem("network_module", "{name} makes no network: write lycoris.kohya", name=name))
    return network


def _load_weights(method: LycorisAdapters, path: str, family: str) -> None:
    tensors = file_of(path, family)
    try:
        unmatched = method.load_state_dict(tensors)
    except ConfigError as e:
        raise ConfigError(*(Problem("network_weights", ": {why}", why=why) for why in e.problems)) from e
    # Each kind of adapter has an alpha, so that alone does not make it the same kind.
    report_unmatched("network_weights", path, unmatched, sum(not name.endswith(".alpha") for name in tensors))


def _put_into_its_layer(adapter: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Register an adapter inside its layer, with which it moves from now on, and replace the methods of the package
    that fail here.
    """
    layer = adapter.org_module[0]
    match_scale_of_file(adapter)
    use_full_rank_outside_steps(adapter)
    cast_output_to_layer_dtype(adapter)
    layer.add_module("adapter", _moved(adapter, device, dtype))
    if getattr(adapter.org_forward, "__func__", None) is type(layer).forward:
        adapter.org_forward = types.MethodType(_call_current_forward, layer)
    if vars(layer).get("forward") == adapter.forward and not takes_the_weight(adapter):
        layer.forward = types.MethodType(_adapted_or_not, adapter)
    if getattr(adapter, "op", None) is functional.group_norm:
        adapter.op = _group_norm
    if type(adapter).__name__ == "LokrModule" and adapter.rank_dropout:
        draw_rank_dropout_on_device(adapter)


def _call_current_forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the forward method of the layer's current class: the package keeps the one from before the weights were
    quantized to 8 bits, which changes the class.
    """
    return type(layer).forward(layer, *args, **kwargs)


def _adapted_or_not(adapter: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the layer with its adapter, or without it at a multiplier of 0: the package's DoRA would then add the
    difference of the weights all the same.
    """
    return adapter.forward(*args, **kwargs) if adapter.multiplier else adapter.org_forward(*args, **kwargs)


def _moved(adapter: Any, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Move an adapter to the device and dtype of training. Its alpha keeps its dtype if that is too small for it, and
    its device if it would lose its value on the device "meta".
    """
    alpha = getattr(adapter, "alpha", None)
    adapter.to(device, dtype)
    if isinstance(alpha, Tensor) and adapter.alpha.is_meta:
        adapter.alpha = alpha
    elif isinstance(alpha, Tensor) and not math.isfinite(float(adapter.alpha)):
        adapter.alpha = alpha.to(device)
    return adapter


def _group_norm(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return functional.group_norm(with_gradient(input), *args, **kwargs)


def _network_of_file(path: Any) -> tuple[int, float, dict[str, str]]:
    """Return rank, alpha and arguments of the network that wrote a file, from its metadata. Raises ConfigError if they
    are missing.
    """
    metadata: Mapping[str, str] = {}
    if str(path).endswith(".safetensors"):
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
    try:
        arguments = parse_json(metadata.get("ss_network_args", "{}"), path)
        settings = {name: str(value) for name, value in arguments.items() if name != "dropout"}
        if settings.get("preset") not in network_args.LAYER_PRESETS:  # a preset file on the author's machine
            settings.pop("preset", None)
        return int(metadata["ss_network_dim"]), float(metadata["ss_network_alpha"]), settings
    except (KeyError, ValueError, AttributeError) as e:
        raise ConfigError(
            Problem(
                "dim_from_weights",
                ": {path} does not say which network it was made by (ss_network_dim); set "
                "network_dim, network_alpha and network_args to what they were, and leave "
                "dim_from_weights out",
                path=path,
            )
        ) from e


def _trained_encoders(components: ModelComponents, config: AdapterRun, settings: JsonMapping) -> dict[str, nn.Module]:
    if not config.network.encoders_learn:
        return {}
    t5 = str(settings.get("train_t5xxl", "")).lower() in ("true", "1")
    return {n: e for n, e in components.encoders.items() if e is not None and (n != "t5xxl" or t5)}


def _name_adapters(network: Any, roots: Mapping[str, nn.Module], family: Family) -> dict[str, AdapterLocation]:
    """Give each adapter its name in sd-scripts' files. Return their locations by name."""
    locations = {id(module): (part, path) for part, root in roots.items() for path, module in root.named_modules()}
    places = {}
    for adapter in network.loras:
        part, path = locations[id(adapter.org_module[0])]
        adapter.lora_name = family.adapter_name(part, path)
        places[adapter.lora_name] = AdapterLocation(part, path)
    return places


@contextlib.contextmanager
def _without_messages(name: str) -> Iterator[None]:
    """Suppress the package's warnings and prints, and turn its errors into ConfigError: it warns about every kind of
    model that it knows and did not find here, and prints a line for each layer without dropout.
    """
    logger = logging.getLogger("LyCORIS")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    except (AssertionError, KeyError, ValueError, TypeError) as e:
        raise ConfigError(
            Problem(
                "network_module", "{name} refuses its network_args: {why}", name=name, why=str(e) or type(e).__name__
            )
        ) from e
    finally:
        logger.setLevel(level)
