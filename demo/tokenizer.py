"""A byte-level BPE of 3072 ids, trained on the corpus, in the file layout of the release.

Source: the pre-tokenizer expression, the single digits and the added tokens are those of the Qwen3.5 family
(transformers 5.24, models/qwen3_5/tokenization_qwen3_5.py). Its NFC normalizer is left out, so that decoding
gives back exactly the text that went in.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 3072
END_OF_TEXT, TURN_START, TURN_END = 0, 1, 2

# Position is id. Control tokens are skipped in text; the others are text that happens to have an id of its own.
_CONTROL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
_MARKUP = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Learn the merges on texts. Returns a tokenizer whose ids are 0 to vocab_size - 1, added tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(t, normalized=False) for t in (*_CONTROL, *_MARKUP)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the corpus gave {tokenizer.get_vocab_size()} ids; {vocab_size} were asked for")
    return _with_markup_as_text(tokenizer)


def _with_markup_as_text(tokenizer: Tokenizer) -> Tokenizer:
    # the trainer marks every token it is given as special
    state = json.loads(tokenizer.to_str())
    for token in state["added_tokens"]:
        token["special"] = token["content"] in _CONTROL
    return Tokenizer.from_str(json.dumps(state))


def save_tokenizer(tokenizer: Tokenizer, directory: Path, max_tokens: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja; max_tokens is the model's context."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    template = (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8")
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    text = json.dumps(_tokenizer_config(max_tokens), indent=2)
    (directory / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def _tokenizer_config(max_tokens: int) -> dict[str, Any]:
    added = {
        str(i): {"content": token, "special": token in _CONTROL, "normalized": False}
        | {"lstrip": False, "rstrip": False, "single_word": False}
        for i, token in enumerate((*_CONTROL, *_MARKUP))
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": added,
        "bos_token": None,
        "eos_token": _CONTROL[TURN_END],
        "pad_token": _CONTROL[END_OF_TEXT],
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_tokens,
    }
