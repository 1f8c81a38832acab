"""What the toy states about itself."""

from library.families.facts import AdapterModule, FamilyFacts, Shapes


def recognise_toy(shapes: Shapes) -> str:
    return "a toy checkpoint" if "toy.patches.weight" in shapes else ""


FACTS = FamilyFacts(
    name="toy",
    title="Toy",
    base_model="a toy checkpoint",
    scripts={
        "toy_train_network": "library.families.toy.options:ToyLora",
        "toy_train": "library.families.toy.options:ToyTrain",
    },
    family="library.families.toy.family:Toy",
    pipelines=(),
    recognise=recognise_toy,
    base_models=("a toy checkpoint",),
    base_model_version="toy1",
    architecture="toy",
    implementation="https://example.org/toy",
    has_prediction_type=False,
    adapter_modules={"networks.lora": AdapterModule("library.families.shared.network_args:NetworkArgs")},
    trained_in_compute_dtype=False,
    saves_all_parts=True,
    most_blocks_swapped=2,
    text_tokens=77,
    graphs={"ToyBlock": 1},
    compile_seconds=5,
)
