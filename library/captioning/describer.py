"""Vision language models and captioners of Hugging Face in a local folder: Qwen2.5-VL, LLaVA, BLIP, GIT and others."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from library.config.json_types import JsonObject
from library.config.outside_files import load_json
from library.config.problems import ConfigError, first_line, option_name

# Prompts for chat models, by title; the first is the default.
PROMPTS = {
    "One sentence": "Describe this image in one sentence.",
    "Detailed": "Describe this image in detail: the subject, its pose and clothing, the background, the light, the "
    "colors and the style. Begin with the subject.",
    "Tags": "Describe this image as a list of short tags separated by commas, the most important first. Write nothing "
    "else.",
    "For a style": "Describe what is shown in this image in one or two sentences. Do not mention the art style, the "
    "medium or the quality.",
    "For a subject": "Describe the pose, the clothing, the background and the light in this image in one or two "
    "sentences. Do not describe the face or the body of the main subject.",
}


@dataclass(frozen=True)
class Generation:
    """Parameters of text generation."""

    max_tokens: int = 75
    min_tokens: int = 0
    beams: int = 1
    top_p: float = 0  # nucleus sampling; 0: greedy decoding
    seed: int = 42

    def __post_init__(self) -> None:
        for name in ("max_tokens", "beams"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    "{name} is {value}: it must be at least 1", name=option_name(name), value=getattr(self, name)
                )
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ConfigError(
                "min_tokens is {value}: use 0 to max_tokens, which is {most}",
                value=self.min_tokens,
                most=self.max_tokens,
            )
        if not 0 <= self.top_p <= 1:
            raise ConfigError("top_p is {value}: it is a sum of probabilities, from 0 to 1", value=f"{self.top_p:g}")

    @property
    def arguments(self) -> JsonObject:
        """The arguments for `generate` of transformers."""
        # top_k defaults to 50 in transformers, which would cut nucleus sampling; 0 switches it off.
        sampling = {"do_sample": True, "top_p": self.top_p, "top_k": 0} if self.top_p else {"do_sample": False}
        minimum = {"min_new_tokens": self.min_tokens} if self.min_tokens else {}
        return {"max_new_tokens": self.max_tokens, "num_beams": self.beams, **minimum, **sampling}


class Describer:
    """A loaded captioner. Calling it returns a caption for each image."""

    makes_tags = False

    def __init__(
        self,
        folder: Path,
        prompt: str = "",
        generation: Generation = Generation(),
        batch_size: int = 1,
        device: str = "auto",
    ) -> None:
        """Weights must be .safetensors. `prompt` is an instruction, the title of one in `PROMPTS`, or for models
        without chat the beginning of the caption (`PROMPTS` are ignored then). Raises ConfigError when the folder is
        not a model, or needs code of its own."""
        self.name, self.batch_size, self.prompt = folder.name, max(1, batch_size), PROMPTS.get(prompt, prompt)
        check_folder(folder)
        os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported
        import torch

        self.device = chosen_device(device)
        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        self.model, self.processor, self.tokenizer = _load_describer(folder, dtype)
        self.model.to(self.device).eval()
        self.dtype, self.generation_arguments = dtype, generation.arguments
        torch.manual_seed(generation.seed)

    def __call__(self, pictures: list[Image.Image]) -> list[str]:
        """Caption RGB images."""
        import torch

        inputs = self._inputs(pictures).to(self.device)
        # Pixels take the model's dtype; token ids and masks stay integers.
        inputs = {key: v.to(self.dtype) if v.is_floating_point() else v for key, v in inputs.items()}
        with torch.inference_mode():
            generated = self.model.generate(**inputs, **self.generation_arguments)
        prompt_tokens = inputs.get("input_ids")
        # Decoder-only models return the prompt in front of their answer. BLIP's prompt is the beginning of its caption.
        if (
            prompt_tokens is not None
            and self.model.config.model_type != "blip"
            and generated.shape[1] >= prompt_tokens.shape[1]
        ):
            repeats_prompt = bool((generated[:, : prompt_tokens.shape[1]] == prompt_tokens).all())
            generated = generated[:, prompt_tokens.shape[1] :] if repeats_prompt else generated
        words = self.tokenizer.batch_decode(generated, skip_special_tokens=True)
        return [" ".join(sentence.split()) for sentence in words]

    def _inputs(self, pictures: list[Image.Image]) -> Any:
        if getattr(self.processor, "chat_template", None):
            question = {"type": "text", "text": self.prompt or next(iter(PROMPTS.values()))}
            conversations = [
                [{"role": "user", "content": [{"type": "image", "image": picture}, question]}] for picture in pictures
            ]
            return self.processor.apply_chat_template(
                conversations,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                return_tensors="pt",
                padding=True,
            )
        # Models without chat continue the prompt. An instruction from PROMPTS would become part of the caption.
        if (
            self.prompt
            and self.prompt not in PROMPTS.values()
            and self.processor is not self.tokenizer
            and hasattr(self.processor, "tokenizer")
        ):
            return self.processor(
                images=pictures, text=[self.prompt] * len(pictures), return_tensors="pt", padding=True
            )
        return self.processor(images=pictures, return_tensors="pt")


def check_folder(folder: Path) -> str:
    """Return the type of the model in a folder. Raises ConfigError unless it is a model with .safetensors weights."""
    try:
        config = load_json(folder / "config.json")
    except ConfigError:
        raise ConfigError(
            "{folder} has no readable config.json: choose the folder of a Hugging Face model", folder=folder
        ) from None
    if not isinstance(config, dict) or not config.get("model_type"):
        raise ConfigError("{path} does not say what model it is (model_type)", path=folder / "config.json")
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(
            "{folder} has no .safetensors weights; other files may hold code and are not opened", folder=folder
        )
    return str(config["model_type"])


def chosen_device(device: str) -> str:
    """Return the device, cuda or cpu. Raises ConfigError when a GPU is requested and there is none."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("{name} is cuda, but there is no usable NVIDIA GPU here: use cpu", name=option_name("device"))
    return "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"


def _load_describer(folder: Path, dtype: Any) -> tuple[Any, Any, Any]:
    """Load the model, its processor and its tokenizer."""
    from transformers.models.auto import AutoImageProcessor, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

    local_options: JsonObject = {"local_files_only": True, "trust_remote_code": False}
    path = str(folder)
    try:
        model = AutoModelForImageTextToText.from_pretrained(path, use_safetensors=True, dtype=dtype, **local_options)
        try:
            processor = AutoProcessor.from_pretrained(path, **local_options)
        except (OSError, ValueError, KeyError):
            processor = AutoImageProcessor.from_pretrained(path, **local_options)
        if not hasattr(processor, "image_processor"):  # a processor for images or for text only
            processor = AutoImageProcessor.from_pretrained(path, **local_options)
        tokenizer: Any = getattr(processor, "tokenizer", None) or AutoTokenizer.from_pretrained(path, **local_options)
    except Exception as error:  # any error of an unknown model's folder
        template = "{folder} cannot be used as a captioner: {why}"
        raise ConfigError(template, folder=folder, why=first_line(error)) from error
    if getattr(tokenizer, "pad_token", None) is None:  # batches need padding; the attention mask hides it
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"  # so that generated tokens of a batch begin at the same position
    return model, processor, tokenizer
