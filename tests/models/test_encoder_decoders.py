"""Encoder-decoders against transformers: logits, greedy decoding and beam search; requests."""

from __future__ import annotations

import json
from copy import deepcopy

import hf_models
import numpy as np
import pytest
from cuda_cases import DEVICES, need_device
from safetensors.numpy import load_file, save_file
from translation_tokenizers import from_transformers

import graphllm
from graphllm.errors import ConfigError, ModelFileError, NumericError, RequestError
from graphllm.model.batch import source_length, source_tokens

pytestmark = pytest.mark.parity
RNG = np.random.default_rng(5)
SPECS = {name: s for name, s in hf_models.SPECS.items() if s.is_encoder_decoder}
VARIANTS = [(name, i) for name, spec in SPECS.items() for i in range(len(spec.tiny))]
EOS = {"t5": 1, "pegasus": 1, "marian": 0}  # 2: of the others
LENGTHS = [1, 2, 62, 40, *RNG.integers(1, 40, 16)]  # of sources without their EOS token
NEW = 10  # tokens of an answer, forced ones included


def write(folder, name, variant=0, vocab_size=131, config=None, **settings):
    """A directory of a small random model; returns transformers' model.

    ``config``: keys of its config.json; ``settings``: of its generation_config.json.
    """
    import torch
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    config = hf_models.config_of(SPECS[name], variant) | {
        "vocab_size": vocab_size,
        **(config or {}),
    }
    if name == "marian":
        config["decoder_vocab_size"] = vocab_size
    made = AutoConfig.for_model(name, **deepcopy(config))
    model = AutoModelForSeq2SeqLM.from_config(made, dtype=torch.float32).eval()
    hf_models.randomise(model)
    with torch.no_grad():
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias += torch.linspace(-1, 1, config["vocab_size"])
            model.final_logits_bias[0, EOS.get(name, 2)] += 2 + 3 * (name == "marian")
        eos = model.get_input_embeddings().weight[EOS.get(name, 2)]
        eos *= 8 if name == "t5" else 3  # so that some answers end
    for key, value in settings.items():
        setattr(model.generation_config, key, value)
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder).eval()  # Marian does not save its positions


def sources(name, lengths=LENGTHS):
    """Token ids without 3, which pads in a variant of M2M100: transformers gives it no position."""
    ids = np.random.default_rng(8)
    return [[*ids.integers(4, 130, n).tolist(), EOS.get(name, 2)] for n in lengths]


def load(folder, device="cpu", **options):
    given = {"context": 256, "max_sequences": 20, "kv_type": "f32", **options}
    return graphllm.load(folder, device=device, **given)


def answers(model, given, name, forced=0, **options):
    """Answers of transformers, without forced first tokens and the EOS token."""
    import torch

    torch.set_num_threads(1)
    width, pad = max(map(len, given)), model.config.pad_token_id
    ids = torch.tensor([each + [pad] * (width - len(each)) for each in given])
    mask = torch.tensor([[1] * len(each) + [0] * (width - len(each)) for each in given])
    found = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, **options)
    eos = EOS.get(name, 2)
    rows = [row[1 + forced :] for row in found.tolist()]
    return [row[: row.index(eos)] if eos in row else row for row in rows]


@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize("name, variant", VARIANTS)
def test_logits(name, variant, device, tmp_path):
    """Teacher-forced logits of ragged sources and targets; of one variant on the reference, too."""
    import torch

    need_device(device)
    model = write(tmp_path, name, variant)
    for each in ("cpu", "reference") if (device, variant) == ("cpu", 0) else (device,):
        with load(tmp_path, each) as llm:
            for source, count in zip(sources(name)[:4], (9, 1, 30, 2)):
                target = RNG.integers(4, 130, count).tolist()  # without padding
                with torch.no_grad():
                    given = {"input_ids": torch.tensor([source])}
                    want = model(**given, decoder_input_ids=torch.tensor([target])).logits[0]
                have = llm.logits(source, target=target)
                assert hf_models.distance(have, want.numpy()) <= 1e-4
                if each == "cpu":
                    assert np.array_equal(llm.logits(source, True, target), have[-1])
            assert not llm.misses()


def test_ctranslate2_gives_the_same_answers(tmp_path):
    """A conversion of T5, which knows tokens by their texts, greedy and with beams.

    With a length penalty of 1, CTranslate2 ends some searches before transformers does.
    """
    ctranslate2 = pytest.importorskip("ctranslate2")
    import transformers

    from_transformers(tmp_path, "T5Tokenizer")
    texts = transformers.AutoTokenizer.from_pretrained(tmp_path)
    write(tmp_path, "t5", vocab_size=len(texts))
    converted = str(tmp_path / "ctranslate2")
    ctranslate2.converters.TransformersConverter(str(tmp_path)).convert(converted)
    translator = ctranslate2.Translator(converted, device="cpu", intra_threads=1)
    given = sources("t5")
    with load(tmp_path) as llm:
        for own, other in (
            ({"temperature": 0}, {"beam_size": 1}),
            ({"beams": 4, "length_penalty": 0.3}, {"beam_size": 4, "length_penalty": 0.3}),
            ({"beams": 5, "length_penalty": 0.3}, {"beam_size": 5, "length_penalty": 0.3}),
        ):
            found = translator.translate_batch(
                [texts.convert_ids_to_tokens(ids) for ids in given],
                max_decoding_length=NEW,
                **other,
            )
            want = [texts.convert_tokens_to_ids(done.hypotheses[0]) for done in found]
            have = [done.ids for done in llm.generate(given, max_tokens=NEW, **own)]
            assert have == want, own
            assert len({tuple(ids) for ids in have}) > 5  # they differ by source


@pytest.mark.cuda
@pytest.mark.parametrize("kv_type", ["f32", "f16"])
def test_greedy_decoding_and_beam_search_on_cuda(kv_type, tmp_path):
    """T5 has position biases and skips the prefix; heads of 64 are those of tensor cores."""
    need_device("cuda")
    config = {"d_kv": 64, "num_heads": 2}
    model, given = write(tmp_path, "t5", config=config), sources("t5")
    with load(tmp_path, "cuda", kv_type=kv_type) as llm:
        assert not llm.misses()
        for options in ({}, {"num_beams": 4}):
            want = answers(model, given, "t5", **options)
            own = {"max_tokens": NEW, **(options or {"temperature": 0})}
            found = [done.ids for done in llm.generate(given, **own)]
            same = sum(a == b for a, b in zip(found, want))
            assert same >= (20 if kv_type == "f32" else 17), (same, options)


@pytest.mark.parametrize(
    "name, settings",
    [
        ("t5", {}),
        ("bart", {"forced_bos_token_id": 0}),
        ("marian", {"bad_words_ids": [[130]]}),
        ("m2m_100", {"forced_bos_token_id": 7}),
    ],
)
def test_greedy_decoding_and_beam_search(name, settings, tmp_path):
    """Batched and alone, whatever the company; forced first and last tokens count as generated."""
    model, given = write(tmp_path, name, **settings), sources(name)
    forced = int("forced_bos_token_id" in settings)
    with load(tmp_path) as llm:
        for options in (
            {},
            {"num_beams": 4},
            {"num_beams": 5, "length_penalty": 0.3},
            {"num_beams": 4, "length_penalty": 2.0, "early_stopping": True},
        ):
            want = answers(model, given, name, forced, **options)
            own = {"max_tokens": NEW - forced, **(options or {"temperature": 0})}
            assert [done.ids for done in llm.generate(given, **own)] == want
            some = slice(None) if not options else slice(0, 20, 6)
            assert [llm.generate(ids, **own).ids for ids in given[some]] == want[some]
        assert len(set(map(len, want))) > 1  # some answers ended


@pytest.mark.long
@pytest.mark.parametrize("name, variant", VARIANTS)
def test_every_family_searches_as_transformers(name, variant, tmp_path):
    """All sources batched and alone, with 1, 4 and 5 beams."""
    model, given = write(tmp_path, name, variant), sources(name)
    with load(tmp_path) as llm:
        for beams, penalty in ((1, 1.0), (4, 1.0), (5, 0.3), (5, 2.0)):
            shared = {"length_penalty": penalty} if beams > 1 else {}
            want = answers(model, given, name, num_beams=beams, **shared)
            own = {"beams": beams, "temperature": 0, "max_tokens": NEW, **shared}
            assert [done.ids for done in llm.generate(given, **own)] == want, own
            assert [llm.generate(ids, **own).ids for ids in given] == want, own


def test_answers_do_not_depend_on_the_batch(tmp_path):
    """Samples and their log-probabilities, in batches of 1, 2 and 17, and with preemptions."""
    write(tmp_path, "bart")
    given = sources("bart")[:17]
    settings = {"seed": 1, "max_tokens": 20, "logprobs": 2, "n": 2, "repeat_penalty": 1.3}

    def results(found):
        return [[(each.ids, each.logprobs) for each in done.choices] for done in found]

    with load(tmp_path) as llm:
        alone = results([llm.generate(ids, **settings) for ids in given])
        for count in (2, 17):
            assert results(llm.generate(given[:count], **settings)) == alone[:count]
        handle = llm.submit(given[0], **settings)
        assert results([handle.result()]) == alone[:1]
    block = 2 * 3 * 60 * 4 * 64  # bytes of a block: keys and values of three layers
    with load(tmp_path, kv_memory=5 * block, context=128) as llm:
        assert results(llm.generate(given, **settings)) == alone
        beams = [llm.generate(ids, beams=4, max_tokens=20).ids for ids in given]
        assert [done.ids for done in llm.generate(given, beams=4, max_tokens=20)] == beams
        assert llm.engine.scheduler.preempted


def test_a_step_that_has_room_for_a_source_only(tmp_path):
    """A step of 512 tokens takes 256 + 1 and 62 + 1 of two requests, and 192 + 0 of the third."""
    write(tmp_path, "t5")
    given = sources("t5", [255, 61, 191])
    with load(tmp_path, context=512) as llm:
        alone = [llm.generate(ids, max_tokens=4, temperature=0).ids for ids in given]
        llm.engine.clear_cache()
        before = llm.engine.batcher.steps
        assert [done.ids for done in llm.generate(given, max_tokens=4, temperature=0)] == alone
        assert llm.engine.batcher.steps == before + 5  # the last target is a step late


def test_a_source_is_computed_once(tmp_path):
    write(tmp_path, "t5")
    (source,) = sources("t5", [100])
    with load(tmp_path) as llm:
        first = llm.generate(source, max_tokens=3, temperature=0)
        again = llm.generate(source, max_tokens=5, temperature=0)
        assert first.cached_tokens == 0 and again.cached_tokens == len(source)
        assert again.prompt_ids == [*source, 0] and again.ids[:3] == first.ids
        (other,) = sources("t5", [99])
        assert llm.generate(other, max_tokens=3, temperature=0).cached_tokens == 0


def test_samples_share_a_source(tmp_path):
    """Three samples of two sources, not full blocks long: each source is encoded once."""
    write(tmp_path, "bart")
    given, encoded = sources("bart", [50, 7]), []
    settings = {"seed": 3, "max_tokens": 12, "logprobs": 1, "n": 3}
    with load(tmp_path) as llm:
        runner = llm.engine.batcher.runner
        encode = runner.encode

        def counted(spans, recorder=None):
            encoded.extend(len(span.tokens) for span in spans)
            encode(spans, recorder)

        runner.encode = counted
        done = llm.generate(given, **settings)
        assert encoded == [51, 8]
        assert [[c.cached_tokens for c in each.choices] for each in done] == [
            [0, 51, 51],
            [0, 8, 8],
        ]
        again = [llm.generate(ids, **settings) for ids in given]  # with the sources in the cache
        assert encoded == [51, 8]
        for one, two in zip(done, again, strict=True):
            assert [c.ids for c in one.choices] == [c.ids for c in two.choices]
            assert [c.logprobs for c in one.choices] == [c.logprobs for c in two.choices]
    with load(tmp_path, max_sequences=2) as llm:  # samples that wait for a place
        alone = llm.generate(given, **settings)
        assert [[c.ids for c in each.choices] for each in alone] == [
            [c.ids for c in each.choices] for each in done
        ]


def test_ops_that_miss_the_first_backend_are_reported(tmp_path):
    write(tmp_path, "t5")
    off = ("cpu:packed_attention", "cpu:attention")
    with load(tmp_path, no_kernels=off) as llm:
        found = " ".join(llm.misses())
        assert "packed_attention ran on reference (2 steps per source)" in found
        assert "attention ran on reference (4 steps per token)" in found
        assert llm.generate([5, 1], max_tokens=2, temperature=0).ids
    with load(tmp_path) as llm:
        assert not llm.misses()


def test_marked_sources():
    assert source_tokens(source_tokens([0, 7])) == [0, 7]
    assert source_length([*source_tokens([0, 7]), 0, 3]) == 2 and source_length([0]) == 0


def test_the_longest_source_and_target(tmp_path):
    write(tmp_path, "bart")
    (longest,) = sources("bart", [63])  # 64 positions
    with load(tmp_path) as llm:
        done = llm.generate(longest, max_tokens=500, temperature=0, ignore_eos=True)
        assert len(done.ids) == 63 and done.finish_reason == "length"  # and the forced EOS token
        with pytest.raises(RequestError, match="the source has 65 tokens, but at most 64 fit"):
            llm.generate([5, *longest])
    with load(tmp_path, context=32) as llm:
        with pytest.raises(RequestError, match="the source has 64 tokens, but at most 16 fit"):
            llm.generate(longest)
        done = llm.generate(longest[:16], max_tokens=500, temperature=0, ignore_eos=True)
        assert len(done.ids) == 32 + 1 - 17 and "context of 32 tokens is full" in done.notes[0]


def test_wrong_requests(tmp_path):
    write(tmp_path, "t5")
    with load(tmp_path) as llm:
        for wrong, text in (
            (lambda: llm.submit([]), "the prompt is empty"),
            (lambda: llm.generate([131]), "token id 131 is not in"),
            (lambda: llm.generate([5, 1], source_lang="en"), "source_lang needs a text"),
            (lambda: llm.generate([5, 1], prompt_logprobs=0), "no log-probabilities"),
            (lambda: llm.perplexity([5] * 64, context=32), "not supported for encoder-decoders"),
            (lambda: llm.logits([5], target=[131]), "token id 131"),
            (lambda: llm.logits([5], target=[]), "the target is empty"),
            (lambda: llm.generate([5], forced_eos_id=131), "token id 131"),
            (lambda: llm.embed("a"), "needs an encoder"),
        ):
            with pytest.raises(RequestError, match=text):
                wrong()
        assert llm.generate([5, 1], max_tokens=2).text == ""  # there is no tokenizer


# Keys of published configurations that transformers' classes do not write.
PUBLISHED = {
    "bart": {"add_bias_logits": False, "add_final_layer_norm": False, "classif_dropout": 0.0,
             "extra_pos_embeddings": 2, "normalize_before": False, "normalize_embedding": True,
             "num_hidden_layers": 2, "prefix": " ", "static_position_embeddings": False,
             "force_bos_token_to_be_generated": True, "no_repeat_ngram_size": 3},
    "marian": {"add_bias_logits": False, "add_final_layer_norm": False, "num_beams": 6,
               "extra_pos_embeddings": 131, "normalize_before": False, "max_length": 512,
               "normalize_embedding": False, "static_position_embeddings": True},
    "pegasus": {"normalize_before": True, "normalize_embedding": False, "length_penalty": 0.8,
                "add_final_layer_norm": True, "static_position_embeddings": True},
    "m2m_100": {"max_length": 200, "num_beams": 5},
    "t5": {"n_positions": 512, "output_past": True, "task_specific_params": {"a": {"b": 1}}},
}  # fmt: skip


UNUSED_TENSORS = {
    "t5": ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
    "m2m_100": ("model.decoder.embed_positions.weights",),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_keys_of_published_configurations(name, tmp_path):
    write(tmp_path, name)
    path, file = tmp_path / "config.json", tmp_path / "model.safetensors"
    path.write_text(json.dumps({**json.loads(path.read_text()), **PUBLISHED[name]}))
    tensors = load_file(file)
    tensors |= {each: np.zeros((3, 2), np.float32) for each in UNUSED_TENSORS.get(name, ())}
    prefix = "" if name == "t5" else "model."
    for copy in ("lm_head", f"{prefix}encoder.embed_tokens", f"{prefix}decoder.embed_tokens"):
        tensors[f"{copy}.weight"] = tensors[f"{prefix}shared.weight"]
    save_file(tensors, file)
    with load(tmp_path) as llm:
        assert llm.generate([5, 1], max_tokens=2, temperature=0).prompt_ids[:2] == [5, 1]


@pytest.mark.parametrize("name", ["bart", "mbart", "marian", "m2m_100", "pegasus"])
def test_embeddings_of_each_side(name, tmp_path):
    """Without tie_word_embeddings, encoder, decoder and head have tables of their own."""
    model = write(tmp_path, name, config={"tie_word_embeddings": False})
    tables = load_file(tmp_path / "model.safetensors")
    sides = [tables[f"model.{side}.embed_tokens.weight"] for side in ("encoder", "decoder")]
    assert np.abs(sides[0] - sides[1]).max() > 0.1 and "lm_head.weight" in tables
    check_logits(tmp_path, model, name)


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_copies_of_the_embedding(name, tmp_path):
    """A tied table may have any of its names; tables of the same name that differ are an error."""
    model, file = write(tmp_path, name), tmp_path / "model.safetensors"
    prefix, tensors = "" if name == "t5" else "model.", load_file(file)
    table = tensors.pop(f"{prefix}shared.weight")
    tensors[f"{prefix}decoder.embed_tokens.weight"] = table
    save_file(tensors, file, {"format": "pt"})
    check_logits(tmp_path, type(model).from_pretrained(tmp_path).eval(), name)
    check_logits(tmp_path, model, name)
    save_file({**tensors, f"{prefix}shared.weight": table + 1}, file)
    with pytest.raises(ModelFileError, match=r"decoder.embed_tokens.weight' differs from .*shared"):
        load(tmp_path, "reference")


@pytest.mark.parametrize("gated", [True, False])
def test_activation_of_t5(gated, tmp_path):
    """dense_act_fn and is_gated_act take precedence over feed_forward_proj."""
    stated = {"feed_forward_proj": "gated-gelu", "dense_act_fn": "relu", "is_gated_act": gated}
    model = write(tmp_path, "t5", config=stated)
    assert json.loads((tmp_path / "config.json").read_text())["dense_act_fn"] == "relu"
    check_logits(tmp_path, model, "t5")


def check_logits(folder, model, name):
    """Compare the logits of one source and target with those of transformers' model."""
    import torch

    (source,), target = sources(name, [9]), [7, 50, 4, 99]
    with load(folder, "reference") as llm, torch.no_grad():
        given = {"input_ids": torch.tensor([source])}
        want = model(**given, decoder_input_ids=torch.tensor([target])).logits[0]
        assert hf_models.distance(llm.logits(source, target=target), want.numpy()) <= 1e-4


@pytest.mark.parametrize("separate", [True, False])
def test_settings_of_config_json(separate, tmp_path):
    """They count only without a generation_config.json, but for the first token."""
    write(tmp_path, "bart")
    path, own = tmp_path / "config.json", tmp_path / "generation_config.json"
    legacy = {"forced_bos_token_id": 7, "forced_eos_token_id": 9, "bad_words_ids": [[130]]}
    path.write_text(json.dumps({**json.loads(path.read_text()), **legacy}))
    own.write_text('{"decoder_start_token_id": null, "bad_words_ids": [[5]]}')
    if not separate:
        own.unlink()
    with load(tmp_path, "reference") as llm:
        found = llm.seq2seq.start, llm.seq2seq.forced_eos_id, llm.seq2seq.banned
    assert found == (([2], None, (5,)) if separate else ([2, 7], 9, (130,)))


def test_logits_that_are_not_finite(tmp_path):
    import torch

    model = write(tmp_path, "t5")
    with torch.no_grad():
        model.decoder.block[1].layer[2].DenseReluDense.wo.weight[3, 4] = float("nan")
    model.save_pretrained(tmp_path)
    with load(tmp_path) as llm, pytest.raises(NumericError, match=r"position 4 .*decoder.block.1"):
        llm.generate([9, 8, 7, 1], max_tokens=3, temperature=0)


@pytest.mark.parametrize(
    "name, file, change, error",
    [
        ("t5", "config.json", {"decoder_start_token_id": None}, "missing key 'decoder_start"),
        ("t5", "config.json", {"decoder_start_token_id": 131}, "is not a token id below 131"),
        ("t5", "config.json", {"feed_forward_proj": "gated-mish"}, "'gated-mish' is not supp"),
        ("t5", "config.json", {"num_decoder_layers": 10**9}, "missing tensor"),
        ("t5", "config.json", {"relative_attention_max_distance": 2**31 - 1}, "is not in 17.."),
        ("t5", "config.json", {"relative_attention_num_buckets": 2}, "= 2 is not in 4.."),
        ("t5", "config.json", {"relative_attention_num_buckets": 64}, "is not 64 buckets"),
        ("marian", "config.json", {"max_position_embeddings": 2**31 - 1}, "is too large"),
        ("bart", "config.json", {"decoder_layers": 10**9}, "missing tensor"),
        ("bart", "config.json", {"normalize_before": True}, "normalize_before = True is not"),
        ("marian", "config.json", {"decoder_vocab_size": 99}, "decoder_vocab_size = 99 is not"),
        ("marian", "generation_config.json", {"bad_words_ids": [[1, 2]]}, "one token id"),
    ],
)
def test_wrong_files(name, file, change, error, tmp_path):
    write(tmp_path, name)
    content = json.loads((tmp_path / file).read_text())
    if file == "config.json":
        (tmp_path / "generation_config.json").unlink()
    (tmp_path / file).write_text(json.dumps({**content, **change}))
    with pytest.raises((ConfigError, ModelFileError), match=error):
        load(tmp_path)
