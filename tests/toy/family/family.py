"""The toy as a family."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from library.families.toy.model import ToyDenoiser
from torch import Tensor, nn

from library.config.problems import ConfigError
from library.families import recognition
from library.families.base import BlockCost, BlockInputs, DeferredNetwork, LatentCache, ModelComponents, TextCache
from library.families.shared import autoencoder, clip, hub, random_networks, tokenizers, weights
from library.objectives.base import NoisedBatch
from library.objectives.diffusion import Diffusion

if TYPE_CHECKING:
    from library.families.shared.sampler import Sampler

PREFIXES = {"denoiser": "toy.", "vae": "vae.", "clip_l": "clip_l."}
OPTION = "pretrained_model_name_or_path"
SCALE = 0.5


class Toy:
    """The toy's side of the Family protocol, for one run's config."""

    name = "toy"
    grid = 16
    block_classes = ("ToyBlock",)
    adapter_targets = ("ToyBlock",)
    text_adapter_targets = clip.CLIP_LAYER_CLASSES
    architecture = "toy"
    base_model_version = "toy1"
    block_inputs = {"ToyBlock": BlockInputs(streams=(0,), dynamic=((0, 1),))}
    block_costs = {"ToyBlock": BlockCost("blocks")}
    utilization = {False: 0.2, True: 0.3}
    patch_size = 2
    sample_defaults = {"negative_prompt": "", "width": 64, "height": 64, "sample_steps": 4, "scale": 1.0}
    sample_multiple = 16
    latent_cache = LatentCache(suffix="_toy.npz", keyed_by_size=True)
    text_cache = TextCache(suffix="_toy_te.npz", keys=("words",))
    validation_timesteps = (200, 400, 600, 800)

    def __init__(self, config: Any):
        self.config = config
        self.objective = Diffusion(config.noise, config.loss, config.model.v_parameterization, SCALE)

    def problems(self) -> Iterator[Any]:
        """Whether the file is a toy, and its tokenizer is there."""
        name = self.config.model.pretrained_model_name_or_path
        if problem := hub.missing_model(f"--{OPTION}", name, "a toy checkpoint"):
            yield problem
            return
        facts, words = recognition.family_and_description(weights.header(name))
        if not facts or facts.name != self.name:
            yield f"--{OPTION}: {name} is {words}, not a toy checkpoint: choose one"

    def notes(self) -> Iterator[str]:
        return iter(())

    def stored_shapes(self) -> Mapping[str, Mapping[str, tuple[int, ...]]]:
        """From the header of its file."""
        path = Path(self.config.model.pretrained_model_name_or_path or "")
        return {part: dict(shapes) for part, shapes in split(weights.header(path)).items()} if path.is_file() else {}

    def load(self, dtype: torch.dtype, frozen: torch.dtype | None = None, deferring: bool = False) -> ModelComponents:
        """Everything on the CPU."""
        path = self.config.model.pretrained_model_name_or_path
        file = weights.open_weights(path, not self.config.model.disable_mmap_load_safetensors)
        kinds = {"denoiser": dtype, "vae": frozen or dtype, "clip_l": frozen or dtype}
        tensors = {
            part: {short: weights.cast_floating(file[name], kinds[part]) for short, name in names.items()}
            for part, names in split({name: name for name in file}).items()
        }
        if not tensors["denoiser"]:
            raise ConfigError(f"{OPTION}: {path} is no toy checkpoint: choose one")
        place = tokenizers.find_tokenizer(tokenizers.CLIP_L, path)
        waiting = {
            "vae": DeferredNetwork(
                lambda: autoencoder.build_autoencoder(tensors["vae"], SCALE), (Path(path),), "toy vae"
            ),
            "clip_l": DeferredNetwork(lambda: clip.build_encoder(tensors["clip_l"]), (Path(path),), "toy clip_l"),
        }
        words = tokenizers.Tokenizers({"clip_l": (place, tokenizers.CLIP_L)})
        components = ModelComponents(build(tensors["denoiser"]), None, {}, words, {}, waiting)
        if not deferring:
            components.read_vae()
            components.read_encoders()
        return components

    def latents(self, components: ModelComponents, pixels: Tensor, generator: Any = None) -> Tensor:
        """Raw samples, float32 [B, 4, h / 8, w / 8]."""
        with torch.no_grad(), torch.autocast(pixels.device.type, enabled=False):
            return autoencoder.encode(components.vae, pixels).sample(generator).float()

    @property
    def text_lengths(self) -> Mapping[str, int]:
        return {"words": 77}

    def train_text_length(self, components: ModelComponents, captions: Collection[str]) -> int | None:
        return None  # a step reads all tokens

    def text(
        self, components: ModelComponents, captions: Sequence[str], encoders: tuple[str, ...] | None = None
    ) -> dict[str, Tensor]:
        """Captions -> words [B, 77, width]."""
        model = components.encoders["clip_l"]
        ids = clip.clip_tokens(components.tokenizers["clip_l"], captions)[:, 0].to(next(model.parameters()).device)
        return {"words": model(input_ids=ids).last_hidden_state}

    def noised(self, latents: Tensor, generator: torch.Generator, timesteps: Tensor | None = None) -> NoisedBatch:
        return self.objective.noised(latents, generator, timesteps)

    def predict(
        self,
        denoiser: nn.Module,
        noised: NoisedBatch,
        text: dict[str, Tensor],
        sizes: Tensor,
        controls: Sequence[Tensor] = (),
    ) -> Tensor:
        return denoiser(noised.latents, noised.timesteps, text["words"]).float()

    def export(self, components: ModelComponents) -> dict[str, Tensor]:
        """All three networks."""
        components.read_vae()
        components.read_encoders()
        state_dicts = {
            "denoiser": components.denoiser.state_dict(),
            "vae": components.vae.state_dict() if components.vae is not None else {},
            "clip_l": clip.clip_tensors(components.encoders["clip_l"]),
        }
        return {
            PREFIXES[part] + name.replace("_orig_mod.", ""): tensor
            for part, tensors in state_dicts.items()
            for name, tensor in tensors.items()
        }

    def resolution_level(self, path: str) -> int:
        return 0  # all blocks see the same tokens

    def execution_key(self, path: str) -> tuple[int, ...]:
        return ()  # everything runs in the order of the tree

    def swap_plan(self, number: int) -> dict[str, int]:
        return {"ToyBlock": number}

    def sampler(self, components: ModelComponents) -> "Sampler":
        """The sampler that generates images with these networks."""
        from library.families.toy.sampler import ToySampler

        return ToySampler(self, components)

    def adapter_name(self, part: str, path: str) -> str:
        """("denoiser", "blocks.0.qkv") -> "lora_unet_blocks_0_qkv"."""
        prefix, path = ("lora_unet", path) if part == "denoiser" else ("lora_te1", clip.canonical_clip_path(path))
        return f"{prefix}_{path.replace('.', '_')}"


def split(named: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """By part, without its prefix."""
    return {
        part: {name.removeprefix(prefix): value for name, value in named.items() if name.startswith(prefix)}
        for part, prefix in PREFIXES.items()
    }


def build(tensors: Mapping[str, Tensor]) -> nn.Module:
    """A denoiser of the sizes of its tensors."""
    width, inputs = tensors["patches.weight"].shape
    blocks = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("blocks."))
    text = tensors["words.weight"].shape[1]
    return weights.assign(random_networks.build_on_meta(lambda: ToyDenoiser(width, blocks, inputs // 4, text)), tensors)
