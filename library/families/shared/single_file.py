"""A single file with all networks of a Stable Diffusion: the names of each part in it, and in diffusers."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from library.families.shared import autoencoder
from library.families.shared.tensor_names import inverse, replace_prefix, shared_prefix
from library.families.shared.unet_names import Layout, unet_table

DROPPED = ("model_ema.",)  # a second copy of the weights, in files saved for research
Rename = Callable[[Mapping[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class SingleFile:
    """The layout of a family's single files. Parts are "denoiser" (a U-Net), "vae" and text encoders."""

    prefixes: Mapping[str, str]  # part -> the beginning of its names
    # Text encoders whose names differ from diffusers': part -> conversions from and to a single file.
    encoders: Mapping[str, tuple[Rename, Rename]] = field(default_factory=dict)
    kept_aside: tuple[str, ...] = ()  # names with a part's prefix that are none of its tensors

    def split_parts(self, names: Iterable[str]) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
        """Return the names of a single file by part, {part: {plain name: name}}, and {plain name: name} of the rest.
        Other programs add a common prefix.
        """
        # The rest (`logit_scale`, `position_ids`, marks such as `v_pred`) is kept, so that a saved file has everything
        # that the loaded one had.
        names = list(names)
        wrapped = not any(name.startswith((*self.prefixes.values(),)) for name in names)
        wrapper = shared_prefix(names) if wrapped else ""
        parts: dict[str, dict[str, str]] = {part: {} for part in self.prefixes}
        unassigned = {}
        for name in names:
            plain = name.removeprefix(wrapper)
            part = next((part for part, prefix in self.prefixes.items() if plain.startswith(prefix)), None)
            if part is not None and plain not in self.kept_aside and not plain.endswith(".position_ids"):
                parts[part][plain.removeprefix(self.prefixes[part])] = name
            elif not plain.startswith(DROPPED):
                unassigned[plain] = name
        return parts, unassigned

    def to_diffusers(self, part: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Convert plain single-file names of one part to diffusers names; U-Net values may be anything."""
        if part == "denoiser":
            table = inverse(unet_table(Layout.of(tensors)))
            return {replace_prefix(name, table): tensor for name, tensor in tensors.items()}
        if part == "vae":
            return autoencoder.vae_to_diffusers(tensors)
        return self.encoders[part][0](tensors) if part in self.encoders else dict(tensors)

    def to_single(self, part: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Convert diffusers names of one part to single-file names, prefix included."""
        if part == "denoiser":
            table = unet_table(Layout.of(tensors))
            named = {replace_prefix(name, table): tensor for name, tensor in tensors.items()}
        elif part == "vae":
            named = autoencoder.vae_to_single(tensors)
        else:
            named = self.encoders[part][1](tensors) if part in self.encoders else dict(tensors)
        return {self.prefixes[part] + name: tensor for name, tensor in named.items()}
