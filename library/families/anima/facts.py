"""The static facts of Anima."""

import re

from library.families.facts import (
    AdapterModule,
    BlockGroup,
    FamilyFacts,
    HubModel,
    ImportedModel,
    Shapes,
    has_tensor,
    hub_files,
)

ANIMA_TRANSFORMER = "an Anima transformer"
BARE = "a Cosmos-Predict2 transformer"  # or Anima's, with the adapter in a separate file
ANIMA_ADAPTER = "a text adapter of Anima"
ADAPTER_MARK = "blocks.0.cross_attn.o_proj.weight"  # a tensor of the adapter, with or without a prefix
SURROUNDING_PREFIXES = ("x_embedder.", "t_embedder.", "final_layer.")  # prefixes of the transformer's other tensors


def recognise_anima(shapes: Shapes) -> str:
    """Describe an Anima checkpoint: Cosmos-Predict2's transformer with an adapter."""
    adapter = any(name.endswith(ADAPTER_MARK) for name in shapes)
    in_folder = {"patch_embed.proj.weight", "transformer_blocks.0.norm1.linear_1.weight"} <= shapes.keys()
    if in_folder or any(re.match(r"blocks\.\d+\.adaln_modulation_self_attn\.", name) for name in shapes):
        return ANIMA_TRANSFORMER if adapter else BARE
    if adapter:
        return ANIMA_TRANSFORMER if any(name.startswith(SURROUNDING_PREFIXES) for name in shapes) else ANIMA_ADAPTER
    return ""


def anima_hub_model(title: str, name: str) -> HubModel:
    """Return a transformer of the publisher's repository, with the parts that all of them need."""
    files = hub_files(
        "circlestone-labs/Anima",
        pretrained_model_name_or_path=(f"split_files/diffusion_models/{name}", 4_182_000_000),
        qwen3=("split_files/text_encoders/qwen_3_06b_base", 1_192_000_000),
        vae=("split_files/vae/qwen_image_vae", 253_806_246),
    )
    return HubModel(title, files)


FACTS = FamilyFacts(
    name="anima",
    title="Anima",
    base_model=ANIMA_TRANSFORMER,
    scripts={
        "anima_train_network": "library.families.anima.options:AnimaLora",
        "anima_train": "library.families.anima.options:AnimaTrain",
    },
    family="library.families.anima.family:AnimaFamily",
    pipelines=("AnimaModularPipeline", "AnimaAutoBlocks"),
    recognise=recognise_anima,
    base_models=(ANIMA_TRANSFORMER,),
    base_model_version="anima",
    architecture="anima-preview",
    implementation="https://huggingface.co/circlestone-labs/Anima",
    adapter_modules={"networks.lora_anima": AdapterModule("library.families.anima.options:AnimaArgs")},
    blocks=(BlockGroup("Blocks", 28, r"_unet_blocks_(\d+)_"),),
    trained_in_compute_dtype=False,
    most_blocks_swapped=26,
    imported=ImportedModel(28, 26, ("qwen3", "vae"), "flux_shift"),
    text_tokens=0,
    graphs={"LLMAdapterTransformerBlock": 1, "Block": 1},
    compile_seconds=15,
    decoder_memory=3.4,
    hub_models=(anima_hub_model("Anima", "anima-base-v1.0"), anima_hub_model("Anima preview", "anima-preview")),
    part_options={
        "qwen3": has_tensor("model.embed_tokens.weight", 151936, 1024),
        "vae": lambda shapes: any(
            len(shapes.get(name, ())) == 5 for name in ("decoder.conv_in.weight", "decoder.conv1.weight")
        ),
        "llm_adapter_path": lambda shapes: recognise_anima(shapes) == ANIMA_ADAPTER,
    },
)
