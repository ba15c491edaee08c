"""The tokenizer of prompts and answers: against transformers' T5 tokenizer, by round trips, on ids without text."""
import json
from pathlib import Path

import numpy as np
import pytest
from test_prepare import vocabulary_with_sentinels

import data
from data import EOS, PAD, Tokenizer

ASSET = Path(__file__).resolve().parents[2] / "shared" / "assets" / "t5_tokenizer"

# Texts, and their ids in T5's vocabulary, from transformers 4.57.6 (AutoTokenizer on a folder of save_pretrained)
T5_IDS = {
    "<extra_id_0>. Hello": [32099, 5, 8774],
    "<extra_id_0> Hello": [32099, 8774],
    "Hello <extra_id_0> world": [8774, 32099, 296],
    "Hello<extra_id_0>world": [8774, 32099, 7276],
    "Hello <extra_id_0>world": [8774, 32099, 7276],
    "Hello<extra_id_0> world": [8774, 32099, 296],
    "<extra_id_0><extra_id_1>": [32099, 32098],
    "<extra_id_0> <extra_id_1>": [32099, 32098],
    " <extra_id_0>": [32099],
    "<extra_id_0> ": [32099],
    "": [],
    " ": [],
    "a  b\n\tc": [3, 9, 3, 115, 3, 75],
    "{ } < \\ ^ ~": [3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2],
    "\u200b": [],
    "\ufb01ne \u00bd \u2460": [1399, 209, 2, 357, 209],
    "<extra_id_99>": [32000],
    "<extra_id_100>": [3, 2, 25666, 834, 23, 26, 834, 2915, 3155],
    "<extra_id_00>": [3, 2, 25666, 834, 23, 26, 834, 1206, 3155],
    "<extra_id_-1>": [3, 2, 25666, 834, 23, 26, 834, 2292, 3155],
    "<extra_id_5": [3, 2, 25666, 834, 23, 26, 834, 755],
    "extra_id_5>": [996, 834, 23, 26, 834, 755, 3155],
    "The <extra_id_0>, of <extra_id_1>; end<extra_id_2>!": [37, 32099, 6, 13, 32098, 117, 414, 32097, 55],
    "<extra_id_0>\nnew line": [32099, 126, 689],
    "<extra_id_0>\u00a0nbsp": [32099, 3, 29, 115, 7, 102],
    "x<extra_id_3>\u200by": [3, 226, 32096, 3, 63],
    "日本語 <extra_id_7>。русский 😀": [3, 2, 32092, 2, 23912, 5345, 30610, 2, 3, 2],
    "Don't <extra_id_0>'t": [1008, 31, 17, 32099, 31, 17],
    "<extra_id_0>s <extra_id_1>ing": [32099, 7, 32098, 53],
    "\u2581 <extra_id_0>\u2581x": [32099, 3, 226],
}

TEXTS = list(T5_IDS)


@pytest.mark.skipif(not ASSET.is_dir(), reason="T5's own vocabulary is not part of this project")
def test_ids_are_those_of_transformers_4_in_t5s_vocabulary():
    tokenizer = Tokenizer(ASSET / "spiece.model")
    for text, wanted in T5_IDS.items():
        assert tokenizer.encode(text) == wanted, text
    for case in json.loads((ASSET / "golden.json").read_text(encoding="utf-8"))["cases"]:
        assert tokenizer.encode(case["text"]) == case["ids"] and tokenizer.decode(case["ids"]) == case["decoded"]


def test_ids_are_those_of_transformers_5_with_the_rules_of_legacy_false(corpus, tmp_path):
    """transformers 5 ignores legacy=False; its own backend is given the rules that transformers 4 has for it."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Regex, normalizers, pre_tokenizers
    tokenizer = Tokenizer(corpus / "spiece.model")
    tokenizer.save_pretrained(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert len(theirs) == tokenizer.n_id == 250 and theirs.convert_tokens_to_ids("<extra_id_0>") == 249
    assert theirs("The list").input_ids == [*tokenizer.encode("The list"), EOS]
    backend = theirs.backend_tokenizer
    backend.normalizer = normalizers.Sequence([backend.normalizer, normalizers.Strip(left=False, right=True),
                                               normalizers.Replace(Regex(" {2,}"), "\u2581")])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    for text in TEXTS:
        assert tokenizer.encode(text) == theirs(text, add_special_tokens=False).input_ids, text


@pytest.mark.parametrize("text", [
    "The <extra_id_0> of a list is its <extra_id_1>.", "<extra_id_0>s and <extra_id_1>ing", "a<extra_id_2> b",
    "<extra_id_0><extra_id_1> <extra_id_2>", "The list", "<extra_id_99> the"])
def test_decoding_with_sentinels_gives_the_ids_again(corpus, text):
    tokenizer = Tokenizer(corpus / "spiece.model")
    ids = tokenizer.encode(text)
    assert tokenizer.encode(tokenizer.decode(ids, sentinels=True)) == ids
    assert tokenizer.decode([*ids, EOS, PAD, PAD]) == tokenizer.decode(ids)
    assert "extra_id" not in tokenizer.decode(ids)


def test_ids_without_text_give_none(corpus):
    tokenizer = Tokenizer(corpus / "spiece.model")
    ids = tokenizer.encode("The list of the array")
    odd = np.insert(np.array(ids), [0, 1, 2, 3, len(ids)], [-100, PAD, 10 ** 9, 250, EOS])
    assert tokenizer.decode(odd) == "The list of the array"
    assert tokenizer.decode([]) == tokenizer.decode([PAD, EOS, -1]) == ""
    assert tokenizer.decode([2]) == " \u2047 "                                  # unknown: sentencepiece's mark


def test_batches_are_padded_behind_their_eos(corpus):
    tokenizer = Tokenizer(corpus / "spiece.model")
    ids, mask = tokenizer.batch(["The list of the array", "list", ""])
    assert ids.dtype == np.int64 and mask.dtype == bool and ids.shape == mask.shape
    for row, real, text in zip(ids, mask, ["The list of the array", "list", ""], strict=True):
        assert row[real].tolist() == [*tokenizer.encode(text), EOS] and not row[~real].any()
        assert real.tolist() == sorted(real.tolist(), reverse=True)


def test_blanks_are_filled_in_place(corpus):
    tokenizer = Tokenizer(corpus / "spiece.model")
    source = tokenizer.encode("The <extra_id_0> of a list<extra_id_1>s its <extra_id_2>.")

    def fill(text):
        return tokenizer.fill([*source, EOS], None if text is None else [PAD, *tokenizer.encode(text), EOS])

    assert fill(None) == "The ____ of a list ____s its ____."
    assert fill("<extra_id_0> name<extra_id_1> i<extra_id_2> end") == "The [name] of a list [i]s its [end]."
    assert fill("<extra_id_2> end<extra_id_0> name<extra_id_2> again") == "The [name] of a list ____s its [end]."
    assert fill("stray text <extra_id_0><extra_id_1> i <extra_id_7> x") == "The [] of a list [i]s its ____."
    assert fill("") == fill(None)
    blank = tokenizer.vocabulary.piece_to_id("\u2581")
    assert tokenizer.fill(source, [*tokenizer.encode("<extra_id_2> end"), blank, EOS, PAD]).endswith("its [end].")
    assert data.split_spans([tokenizer.first_sentinel, 9, EOS, PAD, PAD], tokenizer.first_sentinel) == {0: [9]}


def test_what_a_model_must_not_write(corpus):
    tokenizer = Tokenizer(corpus / "spiece.model")
    assert tokenizer.suppress(256) == [0, *range(250, 256)]
    assert tokenizer.suppress(256, sentinels=True) == [0, *range(150, 256)]


def test_a_vocabulary_of_other_size_than_the_model_is_refused_with_both_numbers(corpus):
    tokenizer = Tokenizer(corpus / "spiece.model")
    tokenizer.check_fits(256)
    for vocab_size in (249, 32_128):
        with pytest.raises(ValueError, match=rf"{vocab_size:,} rows for ids.*has 250 ids"):
            tokenizer.check_fits(vocab_size)


def test_a_vocabulary_with_its_own_sentinels(tmp_path):
    """mT5 has them as pieces; here pieces stand above them too."""
    vocabulary = vocabulary_with_sentinels([f"<extra_id_{k}>" for k in reversed(range(100))])
    (tmp_path / "spiece.model").write_bytes(vocabulary.serialized_model_proto())
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    assert (tokenizer.first_sentinel, tokenizer.n_id, tokenizer.n_sentinel) == (102, 180, 100)
    ids = tokenizer.encode("The <extra_id_0> of <extra_id_1>")
    assert [i for i in ids if i <= 102] == [102, 101] and max(ids) > 102
    assert tokenizer.fill(ids, [102, *tokenizer.encode("list"), 101, EOS]) == "The [list] of []"
    assert tokenizer.decode(ids) == "The of" and tokenizer.encode("<extra_id_100>") != [2]
    tokenizer.save_pretrained(tmp_path / "again")
    again = Tokenizer.from_pretrained(tmp_path / "again")
    assert (again.first_sentinel, again.n_id, again.n_sentinel) == (102, 180, 100)


def test_pieces_above_a_vocabularys_own_sentinels_are_text():
    ids = np.array([2, 3, 102, 103, 179])
    assert data.is_sentinel(ids, 102).tolist() == [False, True, True, False, False]
    assert data.split_spans([102, 150, 3, 101, 1], 102) == {0: [150], 99: [], 1: []}


# --- bytes -----------------------------------------------------------------------------------------------------------

def test_bytes_are_byt5s(tmp_path):
    """id = byte + 3; sentinels from 258 down, as the ByT5 paper trained them (section 3.1)."""
    transformers = pytest.importorskip("transformers")
    tokenizer = Tokenizer()
    for text in ("Life is like a box of chocolates.", "naïve 日本 😀", " two  blanks\n", ""):
        assert tokenizer.encode(text) == transformers.ByT5Tokenizer()(text, add_special_tokens=False).input_ids
        assert tokenizer.decode([*tokenizer.encode(text), EOS]) == text
    assert tokenizer.encode("a<extra_id_0>b<extra_id_10><extra_id_11>")[:4] == [100, 258, 101, 248]
    assert tokenizer.encode("<extra_id_11>") == [b + 3 for b in b"<extra_id_11>"]
    assert tokenizer.decode([100, 258, 101], sentinels=True) == "a<extra_id_0>b"
    assert tokenizer.decode([-1, 0, 1, 100, 300, 383]) == "a"
    assert tokenizer.decode("é".encode()[:1]) == ""                                 # half a letter
    assert tokenizer.fill(tokenizer.encode("a <extra_id_0> c"), [258, 101, EOS]) == "a [b] c"
    assert tokenizer.suppress(384) == [0, 2, *range(259, 384)]
    tokenizer.save_pretrained(tmp_path)
    assert Tokenizer.from_pretrained(tmp_path).vocabulary is None
    assert type(transformers.AutoTokenizer.from_pretrained(tmp_path)).__name__ == "ByT5Tokenizer"


# --- where it comes from ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("settings, n", [
    ({}, 100), ({"extra_ids": 300}, 300), ({"additional_special_tokens": [f"<extra_id_{k}>" for k in range(7)]}, 7),
    ({"added_tokens_decoder": {"5": {"content": "<extra_id_299>"}, "1": {"content": "</s>"}}}, 300)])
def test_the_number_of_sentinels_comes_from_tokenizer_config(corpus, tmp_path, settings, n):
    (tmp_path / "spiece.model").write_bytes((corpus / "spiece.model").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "T5Tokenizer", **settings}))
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    assert tokenizer.n_id == 150 + n and tokenizer.encode(f"<extra_id_{n - 1}>") == [150]
    tokenizer.save_pretrained(tmp_path / "again")
    assert Tokenizer.from_pretrained(tmp_path / "again").n_id == 150 + n


@pytest.mark.parametrize("file, content", [
    ("tokenizer_config.json", {"added_tokens_decoder": {"250": {"content": "{"}, "249": {"content": "<extra_id_0>"}}}),
    ("added_tokens.json", {"{": 250, "<extra_id_0>": 249})])
def test_tokens_added_to_the_vocabulary_are_refused_by_name(corpus, tmp_path, file, content):
    Tokenizer(corpus / "spiece.model").save_pretrained(tmp_path)
    names = {"added_tokens_decoder": {str(250 - 1 - k): {"content": f"<extra_id_{k}>"} for k in range(100)}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    assert Tokenizer.from_pretrained(tmp_path).n_id == 250
    if file == "tokenizer_config.json":
        content = {"added_tokens_decoder": names["added_tokens_decoder"] | content["added_tokens_decoder"]}
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"has 1 tokens of its own beside the vocabulary \('\{'\)"):
        Tokenizer.from_pretrained(tmp_path)


def test_what_is_no_tokenizer_is_named(tmp_path, corpus):
    with pytest.raises(FileNotFoundError, match=r"no spiece\.model in it.*takes --vocab=PATH"):
        Tokenizer.from_pretrained(tmp_path)
    for broken in ("[", "[]", '{"additional_special_tokens": 5}', '{"added_tokens_decoder": [1]}'):
        (tmp_path / "tokenizer_config.json").write_text(broken)
        with pytest.raises(ValueError, match=r"tokenizer_config\.json is not Hugging Face's"):
            Tokenizer.from_pretrained(tmp_path)
    (tmp_path / "a.model").write_bytes(b"no")
    with pytest.raises(ValueError, match="is not a SentencePiece model"):
        Tokenizer(tmp_path / "a.model")
    with pytest.raises(FileNotFoundError, match=r"none\.model is missing"):
        Tokenizer(tmp_path / "none.model")


def test_weights_and_tokenizer_are_looked_for_in_the_same_place(corpus, tmp_path):
    """First the folder itself, then its hf/."""
    Tokenizer(corpus / "spiece.model").save_pretrained(tmp_path / "hf")
    assert Tokenizer.from_pretrained(tmp_path).n_id == 250
    Tokenizer().save_pretrained(tmp_path)
    assert Tokenizer.from_pretrained(tmp_path).vocabulary is None


def test_digits_of_other_scripts_make_no_sentinel(corpus):
    assert Tokenizer(corpus / "spiece.model").encode("<extra_id_1\u0663>")[-1] < 150


def test_odd_letters_of_a_command_line_do_not_stop_it(corpus):
    tokenizer = Tokenizer(corpus / "spiece.model")
    assert tokenizer.encode("list \udcff") == tokenizer.encode("list ?")
