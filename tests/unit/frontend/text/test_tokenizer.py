"""The tokenizers of GGUF files against transformers' conversion, and of folders against tokenizer.json."""

import hashlib
import json
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizers

from octavo.base.errors import BadCheckpoint, RequestError, Unsupported
from octavo.frontend.text.gguf_vocab import derive_merges, tokenizer_from_metadata
from octavo.frontend.text.loader import load_tokenizer
from octavo.frontend.text.tokenizer import SpecialTokens, Tokenizer
from tests.fakes import ByteTokenizer
from tests.real_tokenizers import NASTY, real_tokenizer

GEMMA3_DIGESTS = Path(__file__).with_name("gemma3_digests.txt")


def transformers_tokenizer(path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.fixture(scope="module")
def smollm2(smollm2_path):
    return real_tokenizer(smollm2_path)


@pytest.fixture(scope="module")
def gemma3(gemma3_path):
    return real_tokenizer(gemma3_path)


@pytest.fixture(scope="module")
def smollm2_oracle(smollm2_path):
    """Transformers' conversion ignores that tokenizer.ggml.pre says "smollm": digits are single words."""
    oracle = transformers_tokenizer(smollm2_path)
    pre = tokenizers.pre_tokenizers
    oracle.backend_tokenizer.pre_tokenizer = pre.Sequence(
        [pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)]
    )
    return oracle


def test_smollm2_equals_transformers(smollm2, smollm2_oracle):
    assert_equal_tokenizers(smollm2, smollm2_oracle)
    assert smollm2.encode("Hi") == smollm2.encode("Hi", add_special_tokens=False)
    assert (smollm2.bos_token, smollm2.eos_token, smollm2.eos_token_id) == ("<|im_start|>", "<|im_end|>", 2)


@pytest.mark.opt_in("OCTAVO_WHOLE_TOKENIZERS")  # its conversion takes a minute
def test_gemma3_equals_transformers(gemma3, gemma3_path):
    oracle = transformers_tokenizer(gemma3_path)
    assert_equal_tokenizers(gemma3, oracle)
    known = "".join(f"{digest}\n" for digest in digests(oracle))
    assert GEMMA3_DIGESTS.read_text(encoding="utf-8") == known, GEMMA3_DIGESTS.write_text(known)


def test_gemma3_gives_the_ids_that_transformers_gave(gemma3):
    """OCTAVO_WHOLE_TOKENIZERS=1 asks transformers again."""
    assert digests(gemma3) == GEMMA3_DIGESTS.read_text(encoding="utf-8").split()


def digests(tokenizer):
    """One of the vocabulary, and one per text: of its ids and of what they are decoded to."""
    seen = [sorted(tokenizer.get_vocab().items())]
    for text in texts():
        ids = tokenizer.encode(text, add_special_tokens=False)
        seen.append((list(ids), [tokenizer.decode(ids, skip_special_tokens=skip) for skip in (True, False)]))
    return [hashlib.sha256(json.dumps(each).encode()).hexdigest()[:16] for each in seen]


def texts():
    rng = random.Random(0)
    soup = ["".join(rng.choices("".join(NASTY), k=60)) for _ in range(100)]
    return [*NASTY, *soup, "\n".join(NASTY)]


def assert_equal_tokenizers(ours, oracle):
    assert len(ours) == len(oracle)
    for text in texts():
        ids = oracle.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False) == ids, repr(text)
        for skip in (True, False):
            expected = oracle.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip_special_tokens=skip) == expected, repr(text)
    assert ours.get_vocab() == oracle.get_vocab()


def test_random_ids_decode_like_transformers(smollm2, smollm2_oracle):
    """Any ids at all, so also bytes that are no UTF-8."""
    rng = random.Random(1)
    for _ in range(300):
        ids = rng.choices(range(smollm2.vocab_size), k=rng.randrange(1, 30))
        expected = smollm2_oracle.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert smollm2.decode(ids, skip_special_tokens=False) == expected


def test_gemma3_begins_with_bos(gemma3):
    assert gemma3.encode("Hi")[0] == gemma3.bos_token_id == 2
    assert gemma3.encode("Hi", add_special_tokens=False)[0] != 2
    assert gemma3.encode("") == [2]


def test_gemma3_spells_every_byte(gemma3):
    """Characters without a token become byte tokens, and come back."""
    text = "\U0001fbff\U000e0101\x01"
    ids = gemma3.encode(text, add_special_tokens=False)
    assert gemma3.decode(ids) == text
    assert gemma3.token_bytes(gemma3.get_vocab()["<0xF0>"]) == b"\xf0"
    assert gemma3.decode([gemma3.get_vocab()["<0xF0>"]]) == "\ufffd"


def test_derived_merges_are_all_splits():
    rng = random.Random(2)
    words = sorted({"".join(rng.choices("abcß▁", k=rng.randrange(1, 7))) for _ in range(800)}, key=hash)
    known = set(words)
    expected = [
        (word[:cut], word[cut:])
        for word in words
        for cut in range(len(word) - 1, 0, -1)
        if word[:cut] in known and word[cut:] in known
    ]
    assert len(expected) > 500
    assert derive_merges(words) == expected


def sentencepiece_metadata(**extra):
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "h", "i", "▁h", "▁hi", "hi"]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(pieces) - 259)],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(pieces) - 259),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **{f"tokenizer.ggml.{name}": value for name, value in extra.items()},
    }


def test_sentencepiece_with_space_prefix():
    """Llama's manner: a space before the text that decoding takes away, BOS unless the file says no."""
    tokenizer = tokenizer_from_metadata(sentencepiece_metadata())
    vocab = tokenizer.get_vocab()
    assert tokenizer.encode("hi hi") == [1, vocab["▁hi"], vocab["▁hi"]]
    assert tokenizer.decode(tokenizer.encode("hi hi")) == "hi hi"
    assert tokenizer.decode(tokenizer.encode("hi hi"), skip_special_tokens=False) == "<s> hi hi"
    assert tokenizer.token_text(vocab["▁hi"]) == " hi"
    assert tokenizer.token_bytes(vocab["▁hi"], first=True) == b"hi"
    plain = tokenizer_from_metadata(
        sentencepiece_metadata(add_bos_token=False, add_eos_token=True, add_space_prefix=False)
    )
    assert plain.encode("hi") == [vocab["hi"], 2]


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "ab 123's  x", ["ab", " 123", "'s", " ", " x"]),
        ("smollm", "ab 123's  x", ["ab", " ", "1", "2", "3", "'s", " ", " x"]),
        ("llama-bpe", "ab 1234'S\n\n x", ["ab", " ", "123", "4", "'S", "\n\n", " x"]),
        ("qwen2", "ab 12(x\n", ["ab", " ", "1", "2", "(x", "\n"]),
        ("gpt-4o", "HelloWorld's 1234/a", ["Hello", "World's", " ", "123", "4", "/a"]),
        ("tekken", "HelloWorld 12", ["Hello", "World", " ", "1", "2"]),
    ],
)
def test_words_of_pre_tokenizers(pre, text, words):
    """A vocabulary that has every expected word whole shows where the text was cut."""
    from octavo.frontend.text.tokenizer import byte_alphabet

    char_of = {byte: char for char, byte in byte_alphabet().items()}
    spelled = ["".join(char_of[b] for b in word.encode()) for word in words]
    tokens, merges = list(byte_alphabet()), []
    for word in sorted(set(spelled), key=len):
        for n in range(2, len(word) + 1):
            if word[:n] not in tokens:
                tokens.append(word[:n])
                merges.append(f"{word[: n - 1]} {word[n - 1]}")
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre}
    metadata |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": merges}
    tokenizer = tokenizer_from_metadata(metadata)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode(text)) == spelled


def test_special_tokens_outside_the_byte_alphabet_stay_whole():
    tokens = [*ByteTokenizer().get_vocab(), "<\uff5cUser\uff5c>", "  "]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 2) + [3, 4],
    }
    tokenizer = tokenizer_from_metadata(metadata)
    ids = tokenizer.encode("<\uff5cUser\uff5c>  a")
    assert ids[:2] == [len(tokens) - 2, len(tokens) - 1]
    assert tokenizer.decode(ids) == "  a"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<\uff5cUser\uff5c>  a"
    assert tokenizer.vocab_size == len(tokens)


def test_end_of_turn_ends_a_text():
    tokenizer = tokenizer_from_metadata(sentencepiece_metadata(eot_token_id=5))
    assert tokenizer.end_ids == {2, 5}


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"model": "t5"}, Unsupported),
        ({"tokens": None}, BadCheckpoint),
        ({"token_type": [1]}, BadCheckpoint),
        ({"scores": [0.0]}, BadCheckpoint),
        ({"bos_token_id": 10**6}, BadCheckpoint),
        ({"merges": ["x y"]}, BadCheckpoint),
    ],
)
def test_bad_metadata_is_refused(change, error):
    with pytest.raises(error):
        tokenizer_from_metadata(sentencepiece_metadata(**change))


def test_unknown_pre_tokenizer_is_refused():
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.pre": "moon"}
    with pytest.raises(Unsupported, match="moon"):
        tokenizer_from_metadata(metadata)


@pytest.fixture
def folder(tmp_path):
    """A Hugging Face folder with a word-level vocabulary."""
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"hello": 0, "world": 1, "?": 2}, unk_token="?")
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.enable_truncation(1)
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": True}
    config["chat_template"] = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "tools"},
    ]
    config["added_tokens_decoder"] = {"5": {"content": "<extra>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def test_folder(folder):
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("hello world<extra>") == [3, 0, 1, 5]
    assert tokenizer.encode("hello world moon", add_special_tokens=False) == [0, 1, 2]
    assert tokenizer.decode([3, 0, 1]) == "hello world"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.vocab_size) == (3, 4, 6)
    assert tokenizer.chat_template == "plain"
    assert tokenizer.apply_chat_template([], tools=[{"name": "f"}], tokenize=False) == "tools"
    (folder / "chat_template.jinja").write_text("file")
    assert load_tokenizer(folder).chat_template == "file"


def test_damaged_folders_are_refused(folder, tmp_path_factory):
    (folder / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(BadCheckpoint, match=r"tokenizer\.json"):
        load_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(BadCheckpoint, match=r"tokenizer_config\.json"):
        load_tokenizer(folder)
    with pytest.raises(BadCheckpoint):
        load_tokenizer(tmp_path_factory.mktemp("empty"))
    with pytest.raises(BadCheckpoint):
        load_tokenizer(folder / "nowhere")


def test_word_pieces_decode_like_the_library():
    """A decoder that puts spaces between words, as BERT's does."""
    vocab = {"un": 0, "##known": 1, "word": 2, "[SEP]": 3}
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab))
    backend.decoder = tokenizers.decoders.WordPiece(cleanup=False)
    ids = [0, 1, 2, 3, 2]
    assert Tokenizer(backend).decode(ids, skip_special_tokens=False) == backend.decode(ids)


def test_metaspace_decodes_like_the_library():
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({"▁a": 0, "b": 1, "▁": 2}, []))
    backend.decoder = tokenizers.decoders.Metaspace()
    for ids in ([0, 1, 0, 2, 1], [2, 0], [1, 2, 2]):
        assert Tokenizer(backend).decode(ids) == backend.decode(ids)


def test_lookups_and_calls():
    tokenizer = ByteTokenizer()
    one = tokenizer("hé")
    assert one == {"input_ids": [104, 195, 169], "attention_mask": [1, 1, 1]}
    assert one.input_ids == [104, 195, 169]
    assert tokenizer(["a", "bc"]).input_ids == [[97], [98, 99]]
    assert tokenizer.convert_tokens_to_ids("a") == 97
    assert tokenizer.convert_tokens_to_ids(["a", "nope"]) == [97, None]
    assert tokenizer.convert_ids_to_tokens([97, 256, 10**6]) == ["a", "<s>", ""]
    assert tokenizer.batch_decode([[97], [98, 257]]) == ["a", "b"]
    assert tokenizer.decode(97) == "a"
    assert tokenizer.decode([97, -1, 2**40, 10**6]) == "a"
    assert tokenizer.all_special_ids == [256, 257]
    assert tokenizer.all_special_tokens == tokenizer.convert_ids_to_tokens([256, 257])
    assert tokenizer.tokenize("ab") == ["a", "b"]
    assert tokenizer.max_token_chars == 4
    with pytest.raises(RequestError, match="lone surrogate"):
        tokenizer.encode("a\ud800")


def test_calls_cut_and_fill_as_transformers_do(smollm2):
    from transformers import PreTrainedTokenizerFast

    backend = tokenizers.Tokenizer.from_str(smollm2._backend.to_str())
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=smollm2.pad_token)
    texts = ["Hello", "a longer text than that", "你好 🙂"]
    for options in (
        {},
        {"padding": True},
        {"truncation": True, "max_length": 3},
        {"padding": "max_length", "truncation": True, "max_length": 4},
        {"padding": "max_length", "max_length": 9},
    ):
        for text in (texts, texts[1]):
            ours, expected = smollm2(text, **options), theirs(text, return_token_type_ids=False, **options)
            assert ours == dict(expected), options
    assert smollm2.tokenize(texts[2]) == theirs.tokenize(texts[2])


def test_missing_chat_template_says_what_to_do():
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, []))
    with pytest.raises(RequestError, match="pass chat_template"):
        Tokenizer(backend, SpecialTokens()).apply_chat_template([{"role": "user", "content": "a"}])


def test_threads_share_a_tokenizer(smollm2):
    expected = [smollm2.encode(text) for text in NASTY]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(4):
            assert list(pool.map(smollm2.encode, NASTY)) == expected


def test_smollm2_chat(smollm2):
    text = smollm2.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    ids = smollm2.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert ids == smollm2.encode(text, add_special_tokens=False)


def test_the_tokenizer_needs_no_heavy_import():
    import subprocess

    program = "import sys, octavo.frontend.text.loader; print({'torch', 'transformers'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
