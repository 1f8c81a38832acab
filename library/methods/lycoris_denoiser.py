"""What of a denoiser the package of LyCORIS gets to see: the modules that it may put adapters into."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from torch import nn

from library import families
from library.config.sections import AdapterRun
from library.families import network_args
from library.families.base import Family
from library.families.facts import BlockGroup, block_of
from library.methods.lycoris_presets import OF_ATTENTION

# What the package would find in our denoiser by name or class, but not in sd-scripts' U-Net, where these have other
# names; so its users' files do not contain them.
OUTSIDE = ("conv_in", "conv_out", "time_embedding", "add_embedding")
EVERY_BLOCK = "all"  # of train_block_indices


class FilteredDenoiser:
    """The denoiser as the package may see it: without what is in OUTSIDE, and without blocks that shall not learn. It
    asks for nothing but `named_modules`."""

    def __init__(self, root: nn.Module, left_out: Collection[str] = ()) -> None:
        """`root` is the denoiser; `left_out` are paths of what shall not learn."""
        self._root, self._left_out = root, left_out

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Paths and modules, as nn.Module gives them."""
        seen = ((path, m) for path, m in self._root.named_modules() if path.split(".")[0] not in OUTSIDE)
        return ((path, module) for path, module in seen if path not in self._left_out)


def left_out(denoiser: nn.Module, family: Family, config: AdapterRun) -> set[str]:
    """Paths of modules that get no adapters, by what network_args chooses for LyCORIS."""
    args, groups = network_args.read(config), families.facts(config.family).blocks
    if not isinstance(args, network_args.LycorisArgs):
        return set()
    found: set[str] = set()
    if args.preset == OF_ATTENTION or args.train_block_indices != EVERY_BLOCK:
        blocks = _blocks_of_layers(denoiser, family, groups)
        if args.preset == OF_ATTENTION:
            found |= _attention_before_blocks(denoiser, blocks)
        if args.train_block_indices != EVERY_BLOCK:
            counts = [0] * len(groups)
            for group, number in blocks.values():
                counts[group] = max(counts[group], number + 1)
            found |= _outside_of_chosen(blocks, args.chosen_blocks(counts))
    return found


def _blocks_of_layers(denoiser: nn.Module, family: Family, groups: Iterable[BlockGroup]) -> dict[str, tuple[int, int]]:
    """The paths of all layers in blocks -> the group of the block, and its number in it."""
    layers = (path for path, module in denoiser.named_modules() if not [*module.children()])
    found = ((path, block_of(family.adapter_name("denoiser", path), groups)) for path in layers)
    return {path: block for path, block in found if block}


def _attention_before_blocks(denoiser: nn.Module, blocks: Mapping[str, tuple[int, int]]) -> set[str]:
    """Attention of refiners or of a text adapter, which the package's preset finds by its class as well."""
    attention = {path for path, module in denoiser.named_modules() if type(module).__name__.endswith("Attention")}
    return {path for path in attention if not any(layer.startswith(f"{path}.") for layer in blocks)}


def _outside_of_chosen(blocks: Mapping[str, tuple[int, int]], chosen: Sequence[Sequence[float]]) -> set[str]:
    """Modules all of whose layers are in blocks that are not chosen: the layers, and what they lie in."""
    trained: set[str] = set()
    others: set[str] = set()
    for path, (group, number) in blocks.items():
        words = path.split(".")
        around = {".".join(words[:end]) for end in range(1, len(words) + 1)}
        (trained if chosen[group][number] else others).update(around)
    return others - trained
