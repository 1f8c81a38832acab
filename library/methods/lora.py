"""LoRA (`networks.lora`, `networks.lora_flux` and so on), in the names and shapes of sd-scripts' files."""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from library.adapter_files.names import lora_names_of
from library.adapter_files.storage import exact
from library.config.problems import ConfigError, Message, Problem
from library.config.sections import AdapterRun
from library.families import network_args
from library.families.base import Family, ModelComponents
from library.families.shared.network_args import NetworkLayer
from library.families.stored_weights import restore_layer
from library.methods import ggpo, targets
from library.methods.adapters import Adapter, AdapterSpec, adapter_class, factors_fit, saved_alpha
from library.methods.base import TrainingMethod, trained_dtype
from library.methods.factor_cache import FactorCache
from library.methods.lora_files import Unmatched, by_name, plain_file, report_unmatched
from library.methods.targets import AdapterPlan

log = logging.getLogger(__name__)

NOTHING_TRAINED = (
    "nothing is trained: every learning rate is 0, or network_args chose no layer; "
    "set learning_rate, or leave out what limits the layers in network_args"
)


@dataclass(frozen=True)
class AdapterLocation:
    """The location of an adapter. It holds no reference to the layer, which would keep replaced weights alive."""

    part: str
    path: str

    @property
    def alias(self) -> str:
        """The name by diffusers' module tree: files with such names (lora_unet_down_blocks_...) are read as well."""
        return f"lora_unet_{self.path.replace('.', '_')}" if self.part == "denoiser" else ""


class LoraAdapters(TrainingMethod):
    """Adapters inside a frozen model."""

    def __init__(self, adapters: dict[str, Adapter], places: dict[str, AdapterLocation], config: AdapterRun) -> None:
        """`adapters` and their locations have the same keys: the names in the file."""
        self.adapters, self.places = adapters, places
        names = lora_names_of(config.family)
        self.file_names = {name: names.file_name(place.part, place.path, name) for name, place in places.items()}
        self.factor_caches = []
        self._noisy = [adapter for adapter in adapters.values() if adapter.spec.noise]
        self.args = network_args.read_network_args(config)
        self._groups = [g for g in _parameter_groups(self, config) if g["lr"] and g["params"]]
        learning = {id(p) for p in self.parameters()}
        if not learning:
            raise ConfigError(NOTHING_TRAINED)
        self._has_file = bool(config.network.network_weights)
        self.adapted_parts = {place.part for place in places.values()} if self._has_file else ()
        self.trained_parts: dict[str, bool] = {}
        for name, place in places.items():
            for parameter in own_parameters(adapters[name]):
                # Parameters without a learning rate need no gradient.
                parameter.requires_grad_(id(parameter) in learning)
                self.trained_parts[place.part] = self.trained_parts.get(place.part, False) or parameter.requires_grad

    def state_dict(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Return the file's tensors, on the CPU; cast to `dtype` if given, but alpha to float32 if `dtype` would
        change it.
        """
        tensors = {}
        for name, adapter in self.adapters.items():
            for key, tensor in adapter.tensors().items():
                kind = dtype or tensor.dtype
                stored = exact(tensor, kind) if key == "alpha" else tensor.detach().to("cpu", kind).contiguous()
                tensors[f"{self.file_names[name]}.{key}"] = stored
        return tensors

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> Unmatched:
        """Load adapters from a file. Return those that only the file or the network has, which are no error.

        Raises ConfigError if an adapter of the same name has another rank or form.
        """
        names, errors, misfits = {place.alias: name for name, place in self.places.items()}, [], []
        adapters = {names.get(name, name): values for name, values in by_name(tensors).items()}
        for name in self.adapters.keys() & adapters.keys():
            try:
                if "lora_up.weight" in adapters[name] and not factors_fit(self.adapters[name].weight, adapters[name]):
                    misfits.append(name)
                    continue
                self.adapters[name].load(adapters[name])
            except KeyError as e:
                errors.append(Message("{name} has no {key} in the file, so it is not a LoRA", name=name, key=e.args[0]))
            except (ValueError, RuntimeError) as e:
                errors.append(Message("{name} {why}", name=name, why=e))
        if errors:
            more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
            template = (
                ": the LoRA file does not fit this network: {module}{more}; "
                "set network_dim to the file's rank, or use dim_from_weights"
            )
            raise ConfigError(Problem("network_weights", template, module=min(errors, key=str), more=more))
        only_here = [name for name in self.adapters if name not in adapters]
        return Unmatched(only_here, [name for name in adapters if name not in self.adapters], sorted(misfits))

    def train(self, mode: bool = True) -> "LoraAdapters":
        """Switch dropout on or off."""
        for adapter in self.adapters.values():
            adapter.train(mode)
        return self

    def set_multiplier(self, multiplier: float) -> None:
        """Set the multiplier of all adapters; 0 gives the base model. Compiled graphs stay valid."""
        for adapters in (*self.adapters.values(), *self.factor_caches):
            adapters.set_multiplier(multiplier)

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        """Within the context, predict as the base model. Gradients stay enabled: without them a compiled block would
        need another graph.
        """
        self.set_multiplier(0.0)
        try:
            yield
        finally:
            self.set_multiplier(1.0)

    def alphas(self) -> dict[str, float]:
        return {name: float(adapter.alpha) for name, adapter in self.adapters.items()} if self._has_file else {}

    def take_alphas(self, alphas: Mapping[str, float]) -> None:
        """Set the alphas of a saved state, and keep them in states of this training, too."""
        self._has_file = self._has_file or bool(alphas)
        for name in self.adapters.keys() & alphas.keys():
            self.adapters[name].take_alpha(alphas[name])

    def note_gradients(self) -> None:
        for adapter in self._noisy:
            adapter.note_gradients()

    def mean_gradient(self) -> Tensor | None:
        return ggpo.mean_gradient(self.adapters.values()) if self.args.ggpo else None

    @torch.no_grad()
    def limit_norms(self, maximum: float) -> dict[str, Tensor]:
        """Apply `scale_weight_norms`: shrink each adapter whose product is larger than `maximum`, both factors alike.

        Returns keys_scaled, and the average and maximum norm, as 0-dim tensors on the device, which need no sync.
        """
        norms, ratios = [], []
        for adapter in self.adapters.values():
            norm = adapter.product_norm()
            # At least half the maximum, as in sd-scripts; it also keeps a norm of 0 from dividing by zero.
            bounded = norm.clamp(min=maximum / 2)
            ratio = bounded.clamp(max=maximum) / bounded
            for parameter in own_parameters(adapter):
                parameter.mul_(ratio.sqrt())  # the product of both factors shrinks by `ratio`
            norms.append(norm * ratio)
            ratios.append(ratio)
        after = torch.stack(norms)
        scaled = (torch.stack(ratios) != 1).sum()
        return {"keys_scaled": scaled, "average": after.mean(), "maximum": after.max()}

    def named(self) -> dict[str, Tensor]:
        """Return trained parameters, and GGPO's buffers."""
        prefixes = ("lora_down.", "lora_up.")
        parameters = ((f"{n}.{key}", p) for n, a in self.adapters.items() for key, p in a.named_parameters())
        buffers = {f"{n}.ggpo_rows": a.ggpo_rows for n, a in self.adapters.items() if "ggpo_rows" in a._buffers}
        return {name: p for name, p in parameters if name.partition(".")[2].startswith(prefixes)} | buffers


def attach_lora(components: ModelComponents, family: Family, config: AdapterRun) -> LoraAdapters:
    """Put the config's adapters into the denoiser and the text encoders. The model must be frozen already."""
    plan, network = targets.plan(config, family.adapter_targets), config.network
    file = network.network_weights
    weights = plain_file("network_weights", file, config.family) if file else None
    sizes = by_name(weights) if weights is not None and network.dim_from_weights else None
    adapters, places = {}, {}
    for root, layer, spec, kind in _targets(components, family, plan, sizes):
        adapters[layer.name] = kind.around(layer.layer, spec, trained_dtype(config))
        parent, _, child = layer.path.rpartition(".")
        setattr(root.get_submodule(parent), child, adapters[layer.name])
        places[layer.name] = AdapterLocation(layer.part, layer.path)
    method = LoraAdapters(adapters, places, config)
    method.factor_caches = [*_factor_caches(method, components, config)]
    _log_adapters(method)
    if weights is not None:
        report_unmatched(
            "network_weights", network.network_weights, method.load_state_dict(weights), len(by_name(weights))
        )
    return method


@torch.no_grad()
def change_layers(
    roots: Mapping[str, nn.Module],
    family: Family,
    tensors: Mapping[str, Tensor],
    change: Callable[[nn.Linear | nn.Conv2d, Mapping[str, Tensor]], None],
) -> Unmatched:
    """Call `change` with each layer of these networks that a LoRA file is for, and with the tensors for it."""
    adapters, used, misfits = by_name(tensors), set(), []
    for part, root in roots.items():
        for layer in targets.find_target_layers(root, part, family.adapter_name, ()):
            name = layer.name if layer.name in adapters else AdapterLocation(part, layer.path).alias
            if "lora_down.weight" in adapters.get(name, {}):
                used.add(name)
                if factors_fit(layer.layer.weight, adapters[name]):
                    change(layer.layer, adapters[name])
                else:
                    misfits.append(name)
    return Unmatched(unexpected=[n for n in adapters if n not in used], misfits=misfits)


def networks(components: ModelComponents) -> dict[str, nn.Module]:
    return {**{n: e for n, e in components.encoders.items() if e is not None}, "denoiser": components.denoiser}


def learned(adapter: Adapter) -> list[nn.Parameter]:
    return [*adapter.lora_up.parameters()] if adapter.spec.frozen_down else own_parameters(adapter)


def own_parameters(adapter: Adapter) -> list[nn.Parameter]:
    return [*adapter.lora_down.parameters(), *adapter.lora_up.parameters()]


# ---- attaching


def _factor_caches(method: LoraAdapters, components: ModelComponents, config: AdapterRun) -> Iterator[FactorCache]:
    """Yield the cache of cast and scaled factors for each network with adapters."""
    for part, network in networks(components).items():
        adapters = [adapter for name, adapter in method.adapters.items() if method.places[name].part == part]
        # If the whole denoiser is one graph, the preparation would be traced into it, once for each layer.
        whole = part == "denoiser" and config.compile.compile and config.compile.compile_scope == "model"
        if adapters and not whole:
            yield FactorCache(network, adapters)


def _targets(
    components: ModelComponents, family: Family, plan: AdapterPlan, sizes: dict[str, dict[str, Tensor]] | None
) -> list[tuple[nn.Module, NetworkLayer, AdapterSpec, type[Adapter]]]:
    chosen = []
    for part, root in networks(components).items():
        if not plan.wants(part):
            continue
        blocks = plan.blocks if part == "denoiser" else family.text_adapter_targets
        for target_layer in targets.find_target_layers(root, part, family.adapter_name, blocks):
            spec = plan.spec(target_layer) if sizes is None else _spec_from_file(target_layer, plan, sizes)
            if spec and (kind := adapter_class(target_layer.layer, spec)):
                chosen.append((root, target_layer, spec, kind))
    return chosen


# Why: docs/decisions/2026-11-22-foreign-lora-files-are-renamed.md
def _spec_from_file(layer: NetworkLayer, plan: AdapterPlan, sizes: dict[str, dict[str, Tensor]]) -> AdapterSpec | None:
    """Return the rank and alpha that an adapter has in the file (`dim_from_weights`); None if the file lacks it."""
    tensors = sizes.get(layer.name) or sizes.get(AdapterLocation(layer.part, layer.path).alias)
    if not tensors or "lora_down.weight" not in tensors:
        return None
    # In the file, the parts of a split adapter are stacked: both rank and alpha are multiplied by their number.
    rows = tensors["lora_down.weight"].shape[0]
    spec = plan.spec_of_rank(layer, rows, saved_alpha(tensors, rows))
    parts = len(spec.split) or 1
    return dataclasses.replace(spec, rank=rows // parts, alpha=spec.alpha / parts)


def merge_product(layer: nn.Linear | nn.Conv2d, tensors: Mapping[str, Tensor], multiplier: float) -> None:
    """Add multiplier * alpha / rank * (up @ down) to the weight, in float32; rounded once to its dtype."""
    restore_layer(layer, torch.bfloat16)
    device_and_dtype = {"device": layer.weight.device, "dtype": torch.float32}
    down, up = tensors["lora_down.weight"].to(**device_and_dtype), tensors["lora_up.weight"].to(**device_and_dtype)
    rank = down.shape[0]
    delta = (up.flatten(1) @ down.flatten(1)).reshape(layer.weight.shape)
    delta *= multiplier * saved_alpha(tensors, rank) / rank
    layer.weight.copy_((layer.weight.float() + delta).to(layer.weight.dtype))


def _log_adapters(method: LoraAdapters) -> None:
    for part, learns in method.trained_parts.items():
        count = sum(place.part == part for place in method.places.values())
        log.info("LoRA on %s: %d layers%s", part, count, "" if learns else ", not trained (learning rate 0)")
    for name, adapter in method.adapters.items() if method.args.logs_adapters else ():
        log.info("  %s: rank %d, alpha %s", name, adapter.spec.rank, adapter.alpha)


# ---- learning rates


def _parameter_groups(method: LoraAdapters, config: AdapterRun) -> Iterator[dict[str, Any]]:
    """Yield parameter groups, text encoders first: by part, by block if weighted, by pattern and for LoRA+."""
    optim, args = config.optim, method.args
    ratio = args.loraplus_text_encoder_lr_ratio or args.loraplus_lr_ratio
    for names, rate, label in _encoder_rates(method, config):
        yield from _rate_groups(method, names, rate, label, ratio)
    unet = [n for n, place in method.places.items() if place.part == "denoiser"]
    rate = optim.learning_rate if optim.unet_lr is None else optim.unet_lr
    ratio = args.loraplus_unet_lr_ratio or args.loraplus_lr_ratio
    if not (weights := args.block_weights):
        yield from _rate_groups(method, unet, rate, "unet", ratio)
        return
    blocks: dict[int, list[str]] = {}
    for name in unet:
        blocks.setdefault(method.args.block_of(name), []).append(name)
    for block, names in blocks.items():
        yield from _rate_groups(method, names, rate * weights[block], f"unet_block{block}", ratio)


def _encoder_rates(method: LoraAdapters, config: AdapterRun) -> Iterable[tuple[list[str], float, str]]:
    """Yield adapter names, learning rate and label of text encoders from `text_encoder_lr`. SDXL has one rate for both
    encoders, the first value; FLUX has one for CLIP-L, and one for T5.
    """
    chosen = tuple(config.optim.text_encoder_lr)
    # A missing value repeats the last one; without any, learning_rate applies.
    rates = (*chosen, *chosen[-1:], config.optim.learning_rate, config.optim.learning_rate)
    encoders = {n: place.part for n, place in method.places.items() if place.part != "denoiser"}
    if not (separate_rates := method.args.encoder_rates):
        yield list(encoders), rates[0], "textencoder"
        return
    yield [n for n, part in encoders.items() if part not in separate_rates], rates[0], "textencoder 1"
    for i, name in enumerate(separate_rates, 1):
        yield [n for n, part in encoders.items() if part == name], rates[i], f"textencoder {i + 1}"


def _rate_groups(
    method: LoraAdapters, names: list[str], rate: float, label: str, ratio: float | None
) -> Iterator[dict[str, Any]]:
    """Yield one group, or one for each matching pattern of `network_reg_lrs`; LoRA+ gives lora_up another rate."""
    patterns = method.args.rate_patterns
    members: dict[tuple[str, float], list[Adapter]] = {}
    for name in names:
        path = method.places[name].path
        matching_rates = (
            (f"{label} reg_lr_{i}", lr)
            for i, (pattern, lr) in enumerate(patterns)
            if method.args.fits(pattern, name, path)
        )
        members.setdefault(next(matching_rates, (label, rate)), []).append(method.adapters[name])
    for (title, lr), adapters in members.items():
        if ratio:
            downs = [p for a in adapters if not a.spec.frozen_down for p in a.lora_down.parameters()]
            yield {"params": downs, "lr": lr, "name": title}
            ups = [p for a in adapters for p in a.lora_up.parameters()]
            yield {"params": ups, "lr": lr * ratio, "name": f"{title} plus"}
        else:
            yield {"params": [p for a in adapters for p in learned(a)], "lr": lr, "name": title}
