"""Import OneTrainer's embeddings: textual inversions, of the families that have them here."""

from library.importers.builder import ImportBuilder, describe
from library.importers.onetrainer_learning import LEARNING_IMPORTS, import_rates
from library.importers.onetrainer_model import (
    MODEL_IMPORTS,
    image_part,
    import_adapters,
    import_dtypes,
    import_other_dtypes,
)
from library.importers.shared import precision

EMBEDDING = "EMBEDDING"  # training_method
EMBEDDING_SCRIPTS = {"sd15": "train_textual_inversion", "sdxl": "sdxl_train_textual_inversion"}
WORD_STARTS = {"placeholder": "<embedding>", "token_count": 1, "initial_embedding_text": "*"}  # OneTrainer's own
OF_ADAPTERS = ("peft_", "lora_", "lokr_", "oft_", "layer_filter")


def import_word(builder: ImportBuilder) -> None:
    """Import the word, the one that it begins from, and its learning rate; all networks stay as they are."""
    for key, value in WORD_STARTS.items():
        builder.assume(f"embedding.{key}", value)
    builder.rename("embedding.placeholder", "token_string")
    builder.rename("embedding.token_count", "num_vectors_per_token", int(builder.number("embedding.token_count") or 1))
    if builder.get("embedding.initial_embedding_text"):
        builder.rename("embedding.initial_embedding_text", "init_word")
    if builder.get("embedding.model_name"):
        builder.rename("embedding.model_name", "weights")
    key = "learning_rate" if builder.number("embedding_learning_rate") is None else "embedding_learning_rate"
    rate = builder.number(key) or 0.0
    builder.change(key, describe({"learning_rate": f"{rate:g}"}), {"learning_rate": rate})
    mixed = precision(builder.get("train_dtype"))
    builder.convert("train_dtype", {"mixed_precision": mixed})
    import_other_dtypes(builder)
    starts = (f"{image_part(builder)}.", "text_encoder", "embedding.", "embedding_", *OF_ADAPTERS)
    for key in builder.left():
        is_read = key.endswith((".gradient_checkpointing", "dropout_probability"))
        if key == "learning_rate" or key.startswith(starts) and not is_read:
            builder.ignore(key, "only the new word learns")


EMBEDDING_IMPORTS = (
    import_word,
    *(part for part in MODEL_IMPORTS if part not in (import_dtypes, import_adapters)),
    *(part for part in LEARNING_IMPORTS if part is not import_rates),
)
