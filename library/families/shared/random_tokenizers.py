"""Train tokenizers on a few sentences, and store them as the hub stores the real ones; for demos and tests."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from library.files import write_atomic

NUM_MERGES = 120  # enough for tokens of several letters
SENTENCES = (
    "a photo of a red circle on a white background",
    "a drawing of a blue square, simple, flat colors",
    "a painting of a green triangle, soft light, high quality",
    "sks style, a yellow star over the sea at night",
    "two small cats sit on a wooden table, best quality, masterpiece",
    "portrait of a woman with long hair, looking at the viewer, outdoors",
    "1girl, solo, smile, city street, rain, umbrella, 4k",
    "blurry, bad anatomy, low quality, worst quality, text, watermark",
)


def byte_letters() -> list[str]:
    plain = len(_plain_bytes())
    return [chr(b) for b in _plain_bytes()] + [chr(256 + i) for i in range(256 - plain)]


def _plain_bytes() -> list[int]:
    return [*range(33, 127), *range(161, 173), *range(174, 256)]


def _byte_order() -> list[int]:
    plain = _plain_bytes()
    return [*plain, *(b for b in range(256) if b not in plain)]


def clip_tokenizer(
    folder: Path,
    merges: int | None = NUM_MERGES,
    pad: str = "<|endoftext|>",
    sentences: Iterable[str] = SENTENCES,
) -> int:
    """Train a CLIP tokenizer, write vocab.json, merges.txt and its configuration; return the size of its vocabulary.

    As in the real ones, the last two tokens are BOS and EOS. `pad` is "!" for CLIP-G. If `merges` is None, every word
    of the sentences becomes one token.
    """
    written = [_in_byte_letters(word) for word in _words_of_sentences(sentences)]
    words = Counter(tuple([*word[:-1], f"{word[-1]}</w>"]) for word in written)
    pairs = []
    while any(len(word) > 1 for word in words) if merges is None else len(pairs) < merges:
        pairs.append(_merge_best(words))
    letters = byte_letters()
    vocabulary = [*letters, *(f"{c}</w>" for c in letters), *(a + b for a, b in pairs)]
    vocabulary = list(dict.fromkeys([*vocabulary, "<|startoftext|>", "<|endoftext|>"]))
    _write_json(folder / "vocab.json", {word: i for i, word in enumerate(vocabulary)})
    lines = ["#version: 0.2", *(f"{a} {b}" for a, b in pairs)]
    write_atomic(folder / "merges.txt", "\n".join(lines) + "\n")
    special = {"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}
    special["pad_token"] = pad
    settings = {"tokenizer_class": "CLIPTokenizer", "model_max_length": 77, **special}
    _write_json(folder / "tokenizer_config.json", settings)
    _write_json(folder / "special_tokens_map.json", special)
    return len(vocabulary)


def qwen_tokenizer(folder: Path, seeing: bool = False) -> int:
    """Train a byte-level tokenizer with the special tokens of chats, and of images if it is `seeing`; return the size
    of its vocabulary.
    """
    words = Counter(tuple(f"\u0120{word}") for word in _words_of_sentences(SENTENCES))  # a blank, as bytes are written
    pairs = [_merge_best(words) for _ in range(NUM_MERGES)]
    plain = list(dict.fromkeys([*byte_letters(), *(a + b for a, b in pairs)]))
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    special += ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>"] if seeing else []
    _write_json(folder / "vocab.json", {word: i for i, word in enumerate(plain)})
    write_atomic(folder / "merges.txt", "\n".join(["#version: 0.2", *(f"{a} {b}" for a, b in pairs)]) + "\n")
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    added = {str(len(plain) + i): {"content": token, **flags} for i, token in enumerate(special)}
    settings = {"tokenizer_class": "Qwen2Tokenizer", "model_max_length": 131072, "added_tokens_decoder": added}
    settings |= {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "additional_special_tokens": special[1:]}
    _write_json(folder / "tokenizer_config.json", settings)
    return len(plain) + len(special)


def mistral_tokenizer(folder: Path) -> int:
    """Train a byte-level tokenizer whose special tokens come first, write tokenizer.json and its configuration; return
    the size of its vocabulary.
    """
    words = Counter(tuple(f"\u0120{word}") for word in _words_of_sentences(SENTENCES))  # a blank, as bytes are written
    pairs = [_merge_best(words) for _ in range(NUM_MERGES)]
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[IMG]", "<pad>", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"]
    plain = list(dict.fromkeys([*special, *byte_letters(), *(a + b for a, b in pairs)]))
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    stored = {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": token, **flags} for i, token in enumerate(special)],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": {word: i for i, word in enumerate(plain)}, "merges": pairs},
    }
    _write_json(folder / "tokenizer.json", stored)
    settings = {"tokenizer_class": "LlamaTokenizerFast", "model_max_length": 131072, "padding_side": "left"}
    settings |= {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    _write_json(folder / "tokenizer_config.json", settings)
    return len(plain)


def t5_tokenizer(folder: Path, sentences: Iterable[str] = SENTENCES) -> int:
    """Build a T5 unigram tokenizer from word frequencies, write tokenizer.json; return the size of its vocabulary."""
    from transformers.models.t5 import T5Tokenizer

    counts = Counter(f"\u2581{word}" for word in _words_of_sentences(sentences))
    total = sum(counts.values())
    pieces = [(word, math.log(count / total)) for word, count in sorted(counts.items(), key=lambda p: (-p[1], p[0]))]
    letters = [chr(b) for b in range(33, 127)]
    words = {word for word, _ in pieces}
    pieces += [(letter, -12.0) for letter in ["\u2581", *letters] if letter not in words]
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *pieces]
    tokenizer = T5Tokenizer(vocab=vocabulary, extra_ids=0, model_max_length=512)
    tokenizer.save_pretrained(str(folder))
    return len(tokenizer)


def _words_of_sentences(sentences: Iterable[str]) -> Iterator[str]:
    for sentence in sentences:
        yield from sentence.replace(",", " ,").split()


def _in_byte_letters(word: str) -> str:
    letters = {byte: letter for byte, letter in zip(_byte_order(), byte_letters(), strict=True)}
    return "".join(letters[byte] for byte in word.encode())


def _merge_best(words: Counter) -> tuple[str, str]:
    """Join the most frequent pair everywhere (byte pair encoding); ties go to the pair that sorts first."""
    pairs: Counter = Counter()
    for word, count in words.items():
        for pair in zip(word, word[1:], strict=False):
            pairs[pair] += count
    best = min(pairs, key=lambda pair: (-pairs[pair], pair))
    for word, count in list(words.items()):
        joined, i = [], 0
        while i < len(word):
            step = 2 if word[i : i + 2] == best else 1
            joined.append("".join(word[i : i + step]))
            i += step
        if len(joined) != len(word):
            del words[word]
            words[tuple(joined)] += count
    return best


def _write_json(path: Path, value: dict) -> None:
    write_atomic(path, json.dumps(value, ensure_ascii=False, indent=1) + "\n")
