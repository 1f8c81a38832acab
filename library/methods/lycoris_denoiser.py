"""A view of the denoiser for the package of LyCORIS, with only the modules into which it may put adapters."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from torch import nn

from library import families
from library.config.sections import AdapterRun
from library.families import network_args
from library.families.base import Family
from library.families.facts import BlockGroup, block_of_adapter
from library.methods.lycoris_presets import OF_ATTENTION

# Modules that the package would find in our denoiser by name or class, but not in sd-scripts' U-Net, where they have
# other names; so its users' files do not contain them.
OUTSIDE = ("conv_in", "conv_out", "time_embedding", "add_embedding")
EVERY_BLOCK = "all"  # of train_block_indices


class FilteredDenoiser:
    """The denoiser without the modules in OUTSIDE, and without blocks that are not trained. The package calls only
    `named_modules`.
    """

    def __init__(self, root: nn.Module, left_out: Collection[str] = ()) -> None:
        self._root, self._left_out = root, left_out

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        modules = ((path, m) for path, m in self._root.named_modules() if path.split(".")[0] not in OUTSIDE)
        return ((path, module) for path, module in modules if path not in self._left_out)


def left_out(denoiser: nn.Module, family: Family, config: AdapterRun) -> set[str]:
    """Return the paths of modules that get no adapters with the network_args of LyCORIS."""
    args, groups = network_args.read_network_args(config), families.facts_of(config.family).blocks
    if not isinstance(args, network_args.LycorisArgs):
        return set()
    excluded: set[str] = set()
    if args.preset == OF_ATTENTION or args.train_block_indices != EVERY_BLOCK:
        blocks = _blocks_of_layers(denoiser, family, groups)
        if args.preset == OF_ATTENTION:
            excluded |= _attention_before_blocks(denoiser, blocks)
        if args.train_block_indices != EVERY_BLOCK:
            counts = [0] * len(groups)  # blocks per group
            for group, number in blocks.values():
                counts[group] = max(counts[group], number + 1)
            excluded |= _outside_of_chosen(blocks, args.chosen_blocks(counts))
    return excluded


def _blocks_of_layers(denoiser: nn.Module, family: Family, groups: Iterable[BlockGroup]) -> dict[str, tuple[int, int]]:
    """Return, by path of each layer in a block, the index of the block's group and its number in that."""
    layers = (path for path, module in denoiser.named_modules() if not [*module.children()])
    blocks_by_path = ((path, block_of_adapter(family.adapter_name("denoiser", path), groups)) for path in layers)
    return {path: block for path, block in blocks_by_path if block}


def _attention_before_blocks(denoiser: nn.Module, blocks: Mapping[str, tuple[int, int]]) -> set[str]:
    attention = {path for path, module in denoiser.named_modules() if type(module).__name__.endswith("Attention")}
    return {path for path in attention if not any(layer.startswith(f"{path}.") for layer in blocks)}


def _outside_of_chosen(blocks: Mapping[str, tuple[int, int]], chosen: Sequence[Sequence[float]]) -> set[str]:
    """Return layers in blocks that are not chosen, and the modules around them that contain no chosen block."""
    trained: set[str] = set()
    frozen: set[str] = set()
    for path, (group, number) in blocks.items():
        words = path.split(".")
        path_and_parents = {".".join(words[:end]) for end in range(1, len(words) + 1)}
        (trained if chosen[group][number] else frozen).update(path_and_parents)
    return frozen - trained
