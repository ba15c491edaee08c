"""Hugging Face's format both ways, for each family, on tiny random models made here; and what is refused.

Runs under transformers 4 and 5 alike; they differ in what config.json says of v1.1 (data of both kinds are made here).
"""
import fnmatch
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_model import ids, tiny_t5

import train
from data import Tokenizer
from model import T5, T5Config, config_to_hf, hf_name, pretrained_folder, read_weights

transformers = pytest.importorskip("transformers")
ROOT = Path(__file__).resolve().parent.parent
SIZES = dict(vocab_size=160, d_model=32, d_kv=16, d_ff=48, num_heads=3, num_layers=2, num_decoder_layers=2,
             decoder_start_token_id=0, pad_token_id=0, dropout_rate=0.1)
GATED, RELU = "gated-gelu", "relu"
# What Google's own config.json says (google/t5-v1_1-*, flan-t5-*, mt5-*, umt5-*, byt5-*; t5-* says nothing of tying)
FAMILIES = {
    "v1.0": ("t5", dict(feed_forward_proj=RELU), {}),
    "v1.1, Flan, LM-adapted": ("t5", dict(feed_forward_proj=GATED, tie_word_embeddings=False), {}),
    "mT5": ("mt5", dict(feed_forward_proj=GATED, tie_word_embeddings=False), {}),
    "umT5": ("umt5", dict(feed_forward_proj=GATED, tie_word_embeddings=False), {}),
    "ByT5": ("t5", dict(feed_forward_proj=GATED, tie_word_embeddings=False), dict(vocab_size=384, num_layers=3,
                                                                                 num_decoder_layers=1)),
    "deeper decoder": ("t5", dict(feed_forward_proj=GATED, tie_word_embeddings=False), dict(num_decoder_layers=4)),
    "v1.0, gated": ("t5", dict(feed_forward_proj=GATED, tie_word_embeddings=True), {}),
    "mT5 without a word on tying": ("mt5", dict(feed_forward_proj=GATED), {}),
    "other buckets": ("t5", dict(feed_forward_proj=GATED, tie_word_embeddings=False), dict(
        relative_attention_num_buckets=16, relative_attention_max_distance=30, dropout_rate=0.3)),
}
CLASSES = {"t5": ("T5Config", "T5ForConditionalGeneration"), "mt5": ("MT5Config", "MT5ForConditionalGeneration"),
           "umt5": ("UMT5Config", "UMT5ForConditionalGeneration")}


def their_model(family, seed=0):
    """A random model of transformers, its norms and head unlike the initial ones."""
    kind, settings, sizes = FAMILIES[family]
    config, model = (getattr(transformers, name) for name in CLASSES[kind])
    torch.manual_seed(seed)
    theirs = model(config(**{**SIZES, **sizes}, **settings, attn_implementation="eager")).eval()
    if not settings.get("tie_word_embeddings", kind != "mt5"):      # transformers 5 ties a fresh one nevertheless
        theirs.lm_head.weight = torch.nn.Parameter(theirs.lm_head.weight.detach().clone())
    with torch.no_grad():
        for p in theirs.parameters():
            p.mul_(1 + 0.2 * torch.randn_like(p))
        if theirs.lm_head.weight is not theirs.shared.weight:
            theirs.lm_head.weight.mul_(0.2)                 # logits near 1, not 30
    return theirs


def their_load(folder):
    """transformers' model of a folder; nothing may be missing, unexpected or of another shape."""
    theirs, told = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, output_loading_info=True,
                                                                      attn_implementation="eager")
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), told
    return theirs.eval()


def largest_difference(ours, theirs):
    """Of the logits, on rows of 37, 20 and 5 ids in one batch; and that the loss agrees."""
    source, target = ids(3, 37), ids(3, 11, seed=2)
    mask = torch.arange(37) < torch.tensor([[37], [20], [5]])
    source = source.masked_fill(~mask, 0)
    with torch.no_grad():
        answer = theirs(input_ids=source, attention_mask=mask.long(), labels=target)
        assert abs(answer.loss - ours(source, target, mask)) < 1e-5
        logits = ours.logits(source, target, mask)
    assert logits.std() > 0.1
    return float((logits - answer.logits).abs().max())


def as_google_publishes(theirs, family, folder):
    """config.json with Google's keys, pytorch_model.bin with every alias."""
    kind, settings, sizes = FAMILIES[family]
    config = {"architectures": [CLASSES[kind][1]], "model_type": kind, "layer_norm_epsilon": 1e-06, "eos_token_id": 1,
              "relative_attention_num_buckets": 32, "is_encoder_decoder": True, **SIZES, **sizes, **settings}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    state = dict(theirs.state_dict())
    state |= {f"{part}.embed_tokens.weight": state["shared.weight"] for part in ("encoder", "decoder")}
    if family == "v1.0":
        state["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = torch.randn(32, 3)
    torch.save(state, folder / "pytorch_model.bin")


# --- both ways -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("family", FAMILIES)
def test_we_read_what_transformers_writes(family, tmp_path):
    theirs = their_model(family)
    theirs.save_pretrained(tmp_path)
    ours = T5.from_pretrained(tmp_path)
    assert not ours.training and ours.config.tied == family.startswith("v1.0")
    assert largest_difference(ours, theirs) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_we_read_what_google_publishes(family, tmp_path):
    theirs = their_model(family)
    as_google_publishes(theirs, family, tmp_path / "a")
    assert largest_difference(T5.from_pretrained(tmp_path / "a"), theirs) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_what_we_write(family, tmp_path):
    as_google_publishes(their_model(family), family, tmp_path / "a")
    ours = T5.from_pretrained(tmp_path / "a")
    ours.save_pretrained(tmp_path / "b")
    assert largest_difference(ours, their_load(tmp_path / "b")) < 1e-5
    again = T5.from_pretrained(tmp_path / "b")
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    assert (again.lm_head.weight is again.shared.weight) == ours.config.tied and again.config == ours.config


def test_a_fresh_v11_that_transformers_has_tied_is_read_as_such(tmp_path):
    """transformers 5 writes one table for embedding and head, and scale_decoder_outputs false."""
    theirs = transformers.T5ForConditionalGeneration(transformers.T5Config(
        **SIZES, feed_forward_proj=GATED, tie_word_embeddings=False, attn_implementation="eager")).eval()
    theirs.save_pretrained(tmp_path)
    ours = T5.from_pretrained(tmp_path)
    assert not ours.config.tied and ours.lm_head.weight.data_ptr() != ours.shared.weight.data_ptr()
    assert largest_difference(ours, theirs) < 1e-4          # a head at 1: logits near 30


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_shards_and_half_precision_are_read_exactly(dtype, kind, tmp_path):
    theirs = their_model("mT5").to(dtype)
    if kind == "safetensors":
        theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    else:
        theirs.config.save_pretrained(tmp_path)
        state, where = theirs.state_dict(), {}
        for n, names in enumerate([list(state)[::2], list(state)[1::2]]):
            torch.save({name: state[name] for name in names}, tmp_path / f"pytorch_model-{n}.bin")
            where |= dict.fromkeys(names, f"pytorch_model-{n}.bin")
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    assert len(list(tmp_path.glob(f"*.{kind}"))) > 1
    ours = T5.from_pretrained(tmp_path)
    assert largest_difference(ours, theirs.float()) < 1e-5
    assert all(p.dtype == torch.float32 for p in ours.parameters())


def test_wrapped_models_save_and_load(tmp_path):
    """torch.compile's and DistributedDataParallel's prefixes."""
    ours = tiny_t5()
    torch.compile(ours).save_pretrained(tmp_path / "a")
    assert largest_difference(T5.from_pretrained(tmp_path / "a"), their_load(tmp_path / "a")) < 1e-5
    for prefix in ("_orig_mod.", "module.", "module._orig_mod."):
        folder = tmp_path / prefix.strip(".")
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config_to_hf(ours.config)))
        torch.save({prefix + hf_name(k): v for k, v in ours.state_dict().items()}, folder / "pytorch_model.bin")
        again = T5.from_pretrained(folder)
        assert all(torch.equal(v, again.state_dict()[k]) for k, v in ours.state_dict().items())


def test_a_loaded_model_trains(tmp_path):
    tiny_t5(tied=True).save_pretrained(tmp_path)
    ours = T5.from_pretrained(tmp_path).train()
    before = ours.shared.weight.detach().clone()
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    ours(ids(2, 9), ids(2, 5)).backward()
    optimizer.step()
    assert not torch.equal(ours.shared.weight, before) and ours.lm_head.weight is ours.shared.weight


def test_a_written_folder_holds_all_that_transformers_opens(corpus, tmp_path):
    """Weights, settings of generation, tokenizer: greedy and beam-4 ids as ours, from the folder alone."""
    tokenizer = Tokenizer(corpus / "spiece.model")
    ours = tiny_t5(vocab_size=256, n_decoder_layer=2).eval()
    ours.save_pretrained(tmp_path / "a", tokenizer)
    names = {"config.json", "generation_config.json", "model.safetensors", "spiece.model", "tokenizer_config.json"}
    assert {path.name for path in (tmp_path / "a").iterdir()} == names
    assert len({path.stat().st_mode for path in (tmp_path / "a").iterdir()}) == 1
    assert json.loads((tmp_path / "a" / "config.json").read_text())["tie_word_embeddings"] is False
    theirs, theirs_tokenizer = their_load(tmp_path / "a"), transformers.AutoTokenizer.from_pretrained(tmp_path / "a")
    texts = ["The list of the array", "The value", "A number of new lines of the class"]
    batch = theirs_tokenizer(texts, return_tensors="pt", padding=True)
    source, mask = (torch.from_numpy(a) for a in tokenizer.batch(texts))
    assert torch.equal(batch.input_ids, source) and torch.equal(batch.attention_mask, mask.long())
    for n in (1, 4):
        told = theirs.generate(**batch, num_beams=n, max_new_tokens=20, do_sample=False)[:, 1:]
        assert ours.generate(source, mask, max_new_tokens=20, num_beams=n).tolist() == told.tolist()
    T5.from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "b")              # the tokenizer goes along
    assert {path.name for path in (tmp_path / "b").iterdir()} == names
    assert (tmp_path / "b" / "spiece.model").read_bytes() == (corpus / "spiece.model").read_bytes()


def test_the_best_model_of_a_run_is_such_a_folder(corpus, tmp_path):
    train.main([str(ROOT / "config" / "debug.py"), f"--data_dir={corpus}", f"--out_dir={tmp_path}", "--max_steps=2",
                "--eval_batches=1", "--input_length=32"])
    best = torch.load(tmp_path / "best.pt", weights_only=True)["model"]
    ours = T5.from_pretrained(tmp_path)                             # the run's folder itself
    assert all(torch.equal(v, ours.state_dict()[k]) for k, v in best.items())
    assert pretrained_folder(tmp_path) == tmp_path / "hf" and Tokenizer.from_pretrained(tmp_path).n_id == 250
    assert largest_difference(ours, their_load(tmp_path / "hf")) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tensors_are_read_in_blocks_of_rows(dtype, tmp_path):
    from safetensors.torch import save_file
    tensors = {"a": torch.randn(37, 7), "b": torch.randn(5), "c": torch.randn(3, 400), "d": torch.randn(()),
               "e": torch.randn(0, 4)}
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "a.safetensors")
    for block in (1, 30, 100, 10 ** 6):
        got = dict(read_weights(tmp_path / "a.safetensors", block))
        assert got.keys() == tensors.keys() and all(torch.equal(got[name], tensors[name].float()) for name in got)


def test_a_folder_can_be_written_again(corpus, tmp_path):
    """Into the folder that it came from, or over another model with other files."""
    tiny_t5(seed=1, vocab_size=256).save_pretrained(tmp_path, Tokenizer(corpus / "spiece.model"))
    (tmp_path / "tokenizer.json").write_text("of another vocabulary")
    ours = T5.from_pretrained(tmp_path)
    with torch.no_grad():
        ours.shared.weight[5] = 7.0
    ours.save_pretrained(tmp_path)
    assert (T5.from_pretrained(tmp_path).shared.weight[5] == 7).all() and (tmp_path / "spiece.model").stat().st_size
    tiny_t5(tied=True, vocab_size=256).save_pretrained(tmp_path, Tokenizer(corpus / "spiece.model"))
    assert T5.from_pretrained(tmp_path).config.tied and not (tmp_path / "tokenizer.json").exists()
    assert not list(tmp_path.glob("*.tmp"))
    tiny_t5().bfloat16().save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert T5.from_pretrained(tmp_path).shared.weight.dtype == torch.float32


def test_saving_needs_neither_the_folder_it_came_from_nor_harms_a_run(corpus, tmp_path, monkeypatch):
    tokenizer = Tokenizer(corpus / "spiece.model")
    tiny_t5(vocab_size=256).save_pretrained(tmp_path / "a", tokenizer)
    monkeypatch.chdir(tmp_path)
    ours, theirs = T5.from_pretrained("a"), Tokenizer.from_pretrained("a")
    monkeypatch.chdir("/")
    ours.save_pretrained(tmp_path / "b")
    shutil.rmtree(tmp_path / "a")
    theirs.save_pretrained(tmp_path / "c")
    assert (tmp_path / "b" / "spiece.model").read_bytes() == (tmp_path / "c" / "spiece.model").read_bytes()
    (tmp_path / "b" / "tokenizer.json").write_text("of another vocabulary")
    T5.from_pretrained(tmp_path / "b").save_pretrained(tmp_path / "b")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "tokenizer.json").write_text("of another vocabulary")
    (tmp_path / "b" / "tokenizer.json").unlink()
    T5.from_pretrained(tmp_path / "b").save_pretrained(tmp_path / "d")
    assert not (tmp_path / "d" / "tokenizer.json").exists() and (tmp_path / "d" / "spiece.model").exists()
    with pytest.raises(ValueError, match="rows for ids"):
        tiny_t5().save_pretrained(tmp_path / "e", tokenizer)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "ckpt.pt").write_bytes(b"")
    with pytest.raises(ValueError, match="is the folder of a run"):
        ours.save_pretrained(tmp_path / "run")


# --- memory ----------------------------------------------------------------------------------------------------------

LOAD = r"""
import re, sys, torch, safetensors.torch, model
torch.set_num_threads(1); torch.empty(1 << 20).fill_(1)
peak = lambda: int(re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1]) * 1024
model.T5.from_pretrained(sys.argv[2])           # what is imported on the way
before = peak()
t5 = model.T5.from_pretrained(sys.argv[1])
print((peak() - before) / sum(p.numel() * 4 for p in t5.parameters()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read as Linux gives it")
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_loading_needs_at_most_1_2_times_the_weights(kind, tmp_path):
    """The rise of the process's peak memory over 180 MB of weights, of which the embedding is a third."""
    model = T5(T5Config(vocab_size=32_128, n_layer=4, d_model=448))
    tiny_t5().save_pretrained(tmp_path / "tiny")
    model.save_pretrained(tmp_path)
    if kind == "bin":
        (tmp_path / "model.safetensors").unlink()
        torch.save({hf_name(k): v for k, v in model.state_dict().items()}, tmp_path / "pytorch_model.bin")
    done = subprocess.run([sys.executable, "-c", LOAD, tmp_path, tmp_path / "tiny"], cwd=ROOT, text=True, check=True,
                          capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert 0.9 < float(done.stdout) <= 1.2


# --- refused ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("change, part", [
    (dict(model_type="longt5"), "model_type 'longt5' is not a T5 of this kind"),
    (dict(model_type="switch_transformers"), "model_type 'switch_transformers' is not"),
    (dict(model_type=None), "model_type None is not"),
    (dict(feed_forward_proj="gated-silu"), "feed_forward_proj 'gated-silu' is not known"),
    (dict(layer_norm_epsilon=1e-5), "layer_norm_epsilon 1e-05 is not known here, only 1e-06"),
    (dict(decoder_start_token_id=2), "decoder_start_token_id 2"),
    (dict(pad_token_id=5), "pad_token_id 5"), (dict(eos_token_id=2), "eos_token_id 2"),
    (dict(d_model="wide"), "d_model is 'wide', not a whole number"), (dict(d_ff=48.0), "d_ff is 48.0, not a whole"),
    (dict(d_kv=None), "d_kv is None, not a whole number"), (dict(num_heads=0), "n_head=0"),
    (dict(dropout_rate="much"), r"config\.json: "),
    (dict(d_ff=64), r"wi_0\.weight has the shape \(48, 32\), config.json asks for \(64, 32\)"),
    (dict(vocab_size=200), r"weight has the shape \(160, 32\), config.json asks for \(200, 32\)"),
    (dict(num_layers=3), r"9 missing \(encoder\.block\.2\."), (dict(num_layers=1), r"9 unknown \(encoder\.block\.1\."),
    (dict(tie_word_embeddings=True), "shared.weight differs from lm_head.weight, though config.json says"),
    (dict(feed_forward_proj="relu"), r"missing .*DenseReluDense\.wi\.weight.*unknown .*wi_0"),
])
def test_configs_that_do_not_fit_are_named(change, part, tmp_path):
    tiny_t5(n_decoder_layer=2).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ValueError, match=part) as error:
        T5.from_pretrained(tmp_path)
    assert "\n" not in str(error.value)


def test_broken_folders_are_named(tmp_path):
    def refused(kind, part):
        with pytest.raises(kind, match=part) as error:
            T5.from_pretrained(tmp_path)
        assert "\n" not in str(error.value)

    refused(FileNotFoundError, "holds no model in Hugging Face's format: there is none of model.safetensors,")
    tiny_t5().save_pretrained(tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:len(whole) // 2])
    refused(ValueError, r"model\.safetensors cannot be read as weights")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    refused(ValueError, r"pytorch_model\.bin cannot be read as weights")
    (tmp_path / "pytorch_model.bin").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"shared.weight": "gone.bin"}}))
    refused(FileNotFoundError, r"gone\.bin is missing")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    refused(ValueError, "is not an index of weight files")
    (tmp_path / "config.json").write_text("{")
    refused(ValueError, r"config\.json is not Hugging Face's config\.json")
    (tmp_path / "config.json").unlink()
    refused(FileNotFoundError, r"config\.json is missing")


def test_code_hidden_in_a_bin_file_does_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    tiny_t5().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"shared.weight": Evil()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="cannot be read as weights"):
        T5.from_pretrained(tmp_path)
    assert not (tmp_path / "ran").exists()


# --- the Hub, by a cache without a network ---------------------------------------------------------------------------

def into_cache(cache, name, folder):
    """Lay a folder into a Hub cache as huggingface_hub does."""
    repo = cache / f"models--{name.replace('/', '--')}"
    snapshot = repo / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(snapshot.name)
    snapshot.parent.mkdir()
    folder.rename(snapshot)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    import huggingface_hub.constants
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


def test_a_name_on_the_hub_is_read_from_its_cache(hub, corpus, tmp_path):
    theirs = their_model("mT5")
    theirs.save_pretrained(tmp_path / "a", max_shard_size="20KB")
    Tokenizer(corpus / "spiece.model").save_pretrained(tmp_path / "a")
    into_cache(hub, "someone/tiny", tmp_path / "a")
    ours = T5.from_pretrained("someone/tiny")
    assert largest_difference(ours, theirs) < 1e-5
    assert Tokenizer.from_pretrained("someone/tiny").encode("<extra_id_0>") == [249]
    assert sorted(path.name for path in ours.tokenizer_files) == ["spiece.model", "tokenizer_config.json"]
    Tokenizer().save_pretrained(tmp_path / "b")
    into_cache(hub, "someone/bytes", tmp_path / "b")
    assert Tokenizer.from_pretrained("someone/bytes").vocabulary is None


@pytest.mark.parametrize("files, wanted", [
    (["config.json", "model.safetensors", "pytorch_model.bin"], ["model.safetensors"]),
    (["config.json", "model-1-of-2.safetensors", "model-2-of-2.safetensors", "model.safetensors.index.json",
      "flax_model.msgpack"], ["model-1-of-2.safetensors", "model-2-of-2.safetensors", "model.safetensors.index.json"]),
    (["config.json", "pytorch_model-1-of-1.bin", "pytorch_model.bin.index.json", "spiece.model", "README.md"],
     ["pytorch_model-1-of-1.bin", "pytorch_model.bin.index.json", "spiece.model"])])
def test_one_format_of_the_weights_is_fetched(hub, files, wanted, monkeypatch, tmp_path):
    import huggingface_hub
    asked, local = [], huggingface_hub.snapshot_download

    def download(name, allow_patterns=None, **more):
        if more:
            return local(name, **more)                          # what is there already: nothing
        asked.extend(allow_patterns)
        return tmp_path

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda self, name: files)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert pretrained_folder("someone/large") == tmp_path
    assert [f for f in files if any(fnmatch.fnmatch(f, pattern) for pattern in asked)] == ["config.json", *wanted]


def test_names_that_give_no_model_get_one_line(hub, tmp_path):
    (tmp_path / "runs" / "tiny").mkdir(parents=True)
    (tmp_path / "runs" / "tiny" / "metrics.jsonl").write_text("")
    for name, part in (("runs/tinny", "runs/tinny is no folder here, and a name on the Hub reads"),
                       ("someone/none", "someone/none is no folder here, and the Hub gave none"),
                       ("no/such/folder", "no/such/folder is no folder here, and a name on the Hub reads OWNER/NAME")):
        with pytest.raises(FileNotFoundError, match=part) as error:
            T5.from_pretrained(name)
        assert "\n" not in str(error.value)
    with pytest.raises(FileNotFoundError, match=r"the Hub gave no tokenizer_config\.json"):     # no network to ask
        Tokenizer.from_pretrained("someone/none")


def test_what_lies_in_the_cache_is_enough_or_not(hub, corpus, tmp_path, monkeypatch):
    """Whole: the network is not asked. A shard missing: it is. Weights without a tokenizer and no network: they do."""
    import huggingface_hub
    asked = []

    def ask(self, name):
        asked.append(name)
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", ask)
    for name in ("whole", "part", "bare"):
        their_model("mT5").save_pretrained(tmp_path / name, max_shard_size="20KB")
        if name != "bare":
            Tokenizer(corpus / "spiece.model").save_pretrained(tmp_path / name)
        if name == "part":
            next((tmp_path / name).glob("model-00002*")).unlink()
        into_cache(hub, f"someone/{name}", tmp_path / name)
    assert T5.from_pretrained("someone/whole") and not asked
    with pytest.raises(FileNotFoundError, match="someone/part is no folder here, and the Hub gave none"):
        T5.from_pretrained("someone/part")
    assert T5.from_pretrained("someone/bare") and asked == ["someone/part", "someone/bare"]
