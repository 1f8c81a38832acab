"""What files are that no family states: models that are not trained here, and parts that several families share."""

UNKNOWN = "a checkpoint of an unknown kind"
# Models that are not trained here, by a tensor that each one has; its width tells those apart that share their names.
UNTRAINED = (
    (r"\.qweight$|svdq", None, "a Nunchaku file of 4 bits"),
    (r"bitsandbytes__nf4$", None, "an nf4 file of 4 bits"),
    (r"^cap_embedder\.1\.weight$", 2304, "a Lumina 2 transformer"),
    (r"^(txtfusion|text_fusion)\.projector\.", None, "a Krea 2 transformer"),
    (r"embed_tokens\.weight$", 131072, "a Mistral text encoder"),
)

# Parts that several families share, and what is left.
SHARED = (
    (r"layers\.0\.self_attn\.q_norm\.weight$", None, "a Qwen3 text encoder"),
    (r"encoder\.block\.0\.layer\.0\.SelfAttention\.q\.weight", None, "a T5 text encoder"),
    (r"text_model\.encoder\.layers\.0\.", None, "a CLIP text encoder"),
    (r"decoder\.(mid\.block_1|mid_block\.resnets\.0)\.conv1\.weight", None, "a VAE"),
)
