"""The classes that load tokenizers. Imports transformers, so it is imported only where a tokenizer is loaded."""

# Imported from the models' own modules: with `from transformers import ...` type checkers would read all models.
from transformers.models.clip import CLIPTokenizer
from transformers.models.qwen2 import Qwen2Tokenizer
from transformers.models.t5 import T5Tokenizer
from transformers.tokenization_utils_tokenizers import TokenizersBackend

# Mistral's needs no class of its own: all of it is in tokenizer.json.
BY_KIND = {
    "Unigram": T5Tokenizer,
    "chat BPE": Qwen2Tokenizer,
    "instruct BPE": TokenizersBackend,
    "BPE": CLIPTokenizer,
}
