"""Descriptions of files of no single family: unsupported models, and parts that several families share."""

UNKNOWN = "a checkpoint of an unknown kind"
# Unsupported models, by a tensor that each one has, and by its width where several share the name.
UNTRAINED = (
    (r"\.qweight$|svdq", None, "a Nunchaku file of 4 bits"),
    (r"bitsandbytes__nf4$", None, "an nf4 file of 4 bits"),
    (
        r"(^|\.)(input_hint_block|controlnet_cond_embedding|controlnet_blocks|controlnet_x_embedder)\.",
        None,
        "a ControlNet",
    ),
    (r"^cap_embedder\.1\.weight$", 2304, "a Lumina 2 transformer"),
)

# Messages for other files than .safetensors, by their first bytes; the first match applies.
BEGINNINGS = {
    b"GGUF": "{path} is a GGUF file, which is made for generating images and not for training: give the model's "
    ".safetensors file",
    b"PK": "{path} is a file of PyTorch under another name, which may hold code and is not opened: convert it to "
    ".safetensors",
    b"version ": "{path} is only a pointer of Git LFS to the file: download the file itself",
    b"<": "{path} is a web page that was saved in place of the file: download it again",
    b"": "{path} is not a safetensors file: give a .safetensors checkpoint",
}

# Parts that several families share, and others.
SHARED = (
    (r"^(emb_params|clip_[lg])$", None, "a textual inversion"),
    (r"embed_tokens\.weight$", 131072, "a Mistral text encoder"),
    (r"(^|\.)visual\.deepstack_merger_list\.", None, "a Qwen3-VL text encoder"),
    (r"layers\.0\.self_attn\.q_norm\.weight$", None, "a Qwen3 text encoder"),
    (r"encoder\.block\.0\.layer\.0\.SelfAttention\.q\.weight", None, "a T5 text encoder"),
    (r"(text_model\.|^)encoder\.layers\.0\.", None, "a CLIP text encoder"),  # transformers 5 omits the prefix
    (r"decoder\.(mid\.block_1|mid_block\.resnets\.0)\.conv1\.weight", None, "a VAE"),
)


def no_tensors(start: bytes) -> str:
    """Return the message for a file that is not .safetensors, from its first bytes."""
    if not start:
        return "{path} is empty: download it again"
    return next(words for first, words in BEGINNINGS.items() if start.startswith(first))
