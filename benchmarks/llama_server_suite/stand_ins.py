"""Small models in place of those that the tests of llama.cpp's server download.

- `write_generator`, for TinyLlama 260K: random weights, and a SentencePiece vocabulary of 512
  pieces with tokens to fill in text. Its context is long enough for all tests.
- `write_embedder`, for bge-small: all-MiniLM-L6-v2 (the extra ``minilm``) with the context of 512
  tokens that its weights have.
- `write_reranker`, for the Jina reranker: the same encoder with a random head.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file, save_file

from graphllm.checkpoints.minilm import minilm_path

DIM, LAYERS, HEADS, HIDDEN, CONTEXT, VOCAB = 64, 2, 4, 128, 16384, 512
_CONTROL = ["<s>", "</s>", "<PRE>", "<SUF>", "<MID>"]
_PIECES = """
▁t he in ▁a er on re ▁s ▁w at ▁H el lo nd ou ▁b ed ▁m en or ▁f ▁p ▁c is it ▁d ▁o ing an es ▁h ▁l
as ar ▁th le ll ve ro ▁y om al ▁be ▁n ic ▁the ▁to ▁and ▁of ▁he ▁it ▁she ▁was ▁you ▁in ▁is ▁his
▁her ▁I ▁so ▁but ow id ut ch st ly ay ig ur im ot ght ir ke un et am oo ce qu ad ra ri ti ul se us
lu um ia ent ation ▁re ▁on ▁we ▁an ▁they ▁big ▁day ▁one ▁very ▁said ▁had ▁with ▁little ▁girl ▁boy
▁bed ▁going ▁went ▁play ▁mom ▁dad ▁friend ▁happy ▁saw ▁wanted ▁park ▁tree ▁dog ▁cat ▁book ▁Book
▁The ▁What ▁best ▁Once ▁upon ▁time ,▁ .▁
"""


def vocabulary() -> tuple[list[str], list[int]]:
    """Return the pieces of the generator's vocabulary and their types."""
    numbered = [f"<0x{i:02X}>" for i in range(256)]
    known = dict.fromkeys([*_PIECES.split(), "▁", *map(chr, range(33, 127))])
    words = [*known, *(f"▁w{i}" for i in range(VOCAB))]
    pieces = ["<unk>", *_CONTROL, *numbered]
    types = [2] + [3] * len(_CONTROL) + [6] * 256
    words = words[: VOCAB - len(pieces)]
    return [*pieces, *words], [*types, *[1] * len(words)]


def weights() -> dict[str, np.ndarray]:
    """Return the generator's weights by their names in GGUF files.

    Dimension 0 of the hidden states keeps the constant of the embeddings, by which the head gives
    control tokens and bytes low logits: answers are text, and end where they are told to.
    """
    rng = np.random.default_rng(42)

    def random(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (scale * rng.standard_normal(shape)).astype(np.float32)

    embeddings, head = random(VOCAB, DIM), random(VOCAB, DIM, scale=1.5 / DIM**0.5)
    embeddings[:, 0], head[:, 0] = 4, 0
    head[np.array(vocabulary()[1]) != 1] = [-8] + [0] * (DIM - 1)
    found = {"token_embd": embeddings, "output": head}
    found["output_norm"] = np.ones(DIM, np.float32)
    for layer in range(LAYERS):
        own = {name: random(DIM, DIM, scale=DIM**-0.5)
               for name in ("attn_q", "attn_k", "attn_v", "attn_output")}  # fmt: skip
        own |= {name: random(HIDDEN, DIM, scale=DIM**-0.5) for name in ("ffn_gate", "ffn_up")}
        own["ffn_down"] = random(DIM, HIDDEN, scale=2 * HIDDEN**-0.5)
        own["attn_output"][0] = own["ffn_down"][0] = 0
        own |= dict.fromkeys(("attn_norm", "ffn_norm"), np.ones(DIM, np.float32))
        found |= {f"blk.{layer}.{name}": value for name, value in own.items()}
    return found


def write_generator(path: Path) -> Path:
    """Write a GGUF file of the architecture ``llama``."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(DIM)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(DIM // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    pieces, types = vocabulary()
    writer.add_tokenizer_model("llama")
    writer.add_token_list(pieces)
    writer.add_token_scores([-float(i) for i in range(VOCAB)])
    writer.add_token_types(types)
    writer.add_bos_token_id(pieces.index("<s>"))
    writer.add_eos_token_id(pieces.index("</s>"))
    for name, value in weights().items():
        writer.add_tensor(f"{name}.weight", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_embedder(folder: Path) -> Path:
    """Write a directory of sentence-transformers."""
    shutil.copytree(minilm_path(), folder)
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 512}')
    return folder


def write_reranker(folder: Path) -> Path:
    """Write a directory of transformers."""
    source, rng = minilm_path(), np.random.default_rng(42)
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(source / name, folder / name)
    config = json.loads((source / "config.json").read_text())
    config |= {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "score"}}
    (folder / "config.json").write_text(json.dumps(config))
    known = load_file(source / "model.safetensors")
    named = {f"bert.{name}": value for name, value in known.items()}
    head = rng.standard_normal((1, config["hidden_size"])).astype(np.float32)
    named |= {"classifier.weight": head, "classifier.bias": np.zeros(1, np.float32)}
    save_file(named, folder / "model.safetensors", {"format": "pt"})
    return folder
