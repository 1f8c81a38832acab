"""The options that families share, by theme. A family's own options are in families/<name>/options.py."""

from library.config.sections.adapters import (
    AdapterData,
    AdapterOptim,
    AdapterPrecision,
    AdapterSteps,
    FrozenPrecision,
    Network,
)
from library.config.sections.caching import Cache, TextBatchCache
from library.config.sections.captions import Captions
from library.config.sections.compiling import Compile
from library.config.sections.embedding import Embedding
from library.config.sections.flow import FLOW_INEFFECTIVE, Flow, FlowLoss, SafetensorsSave, flow_rules
from library.config.sections.inputs import Data, Model
from library.config.sections.learning import FullOptim, Optim
from library.config.sections.length import Steps, Validation
from library.config.sections.machine import Distributed, Memory, Precision
from library.config.sections.noise import Loss, Noise
from library.config.sections.outputs import AdapterSave, EmbeddingSave, FullSave, Hub, Log, Metadata, Save
from library.config.sections.runs import AdapterRun, ControlRun, EmbeddingRun, FullRun
from library.config.sections.sampling import NO_GUIDANCE, Sampling
from library.config.sections.transformers import (
    NO_ENCODER,
    ModulatedMemory,
    ReferenceAdapterData,
    ReferenceData,
    TransformerFlow,
    TransformerLora,
    TransformerNetwork,
    TransformerTrain,
    blocks_to_swap,
    flow_shift,
    network_module,
    reference_folder,
    text_encoder_file,
)
from library.config.sections.unets import (
    UnetAdapterCache,
    UnetCompile,
    UnetEmbeddingCache,
    UnetFullCache,
    UnetFullSteps,
    UnetNetwork,
)
