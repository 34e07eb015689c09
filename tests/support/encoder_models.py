"""Directories of small random encoders, with transformers as the oracle."""

from __future__ import annotations

from copy import deepcopy

import hf_models

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(chr, range(97, 123)), "the", "##s"]


def write_tokenizer(folder):
    """A WordPiece tokenizer of single letters and two words."""
    from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
    from tokenizers.models import WordPiece

    words = [*WORDS, *(f"##{chr(i)}" for i in range(97, 123) if chr(i) != "s")]
    made = Tokenizer(WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    made.add_special_tokens(WORDS[:5])
    made.save(str(folder / "tokenizer.json"))


def write_encoder(folder, spec, variant, task="", **changes):
    """A directory of a small random model; returns transformers' model.

    ``task``: end of the name of the class, such as "MaskedLM"; ``changes``: keys of the
    configuration.
    """
    import torch
    import transformers

    config = {**hf_models.config_of(spec, variant), **changes}
    kind = config.pop("model_type", spec.name)
    made = transformers.AutoConfig.for_model(kind, **deepcopy(config))
    auto = getattr(transformers, f"AutoModelFor{task}" if task else "AutoModel")
    model = auto.from_config(made, dtype=torch.float32, attn_implementation="eager").eval()
    hf_models.randomise(model)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model
