"""Passkey retrieval: texts are what they say, found means what greedy decoding writes, and the map shows the cells."""

import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
import torch
from command_line import MODEL_SETTINGS, write_text_corpus

from gpt_oss_lite.config import ModelConfig
from gpt_oss_lite.inference import passkey as passkey_module
from gpt_oss_lite.inference.generate import generate
from gpt_oss_lite.inference.passkey import (
    Cell,
    answer_states,
    corpus_filler,
    default_lengths,
    heat_map,
    open_corpus_filler,
    passkey,
    passkey_text,
    score_answers,
    sentence_filler,
)
from gpt_oss_lite.model.transformer import GPTOSS
from shared_data.errors import UserError
from shared_data.passkeys import KEYS, draw_evaluation_key, evaluation_keys, is_evaluation_key, training_keys
from shared_data.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer()
CONFIG = ModelConfig(
    **{**MODEL_SETTINGS, "max_seq_len": 64, "yarn_original_max_seq_len": 64, "yarn_target_seq_len": 256,
       "eval_max_seq_len": 256, "init_std": 0.3}
)  # fmt: skip


@pytest.fixture(scope="module")
def model() -> GPTOSS:
    torch.manual_seed(0)
    return GPTOSS(CONFIG).eval()


def test_keys_of_evaluation_and_training_are_disjoint_and_share_their_tokens():
    assert sorted([*evaluation_keys(), *training_keys()]) == list(KEYS)
    assert len(evaluation_keys()) == 9_000
    for part in (slice(0, 3), slice(3, 5)):  # the tokenizer takes digits by three
        tokens = [{str(key)[part] for key in keys_of_side} for keys_of_side in (evaluation_keys(), training_keys())]
        assert tokens[0] == tokens[1]
    rng = np.random.default_rng(0)
    assert all(is_evaluation_key(draw_evaluation_key(rng)) for _ in range(300))


@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("length", [60, 61, 250])
def test_a_text_has_its_length_and_its_key_at_its_depth(length, depth):
    text, answer = passkey_text(TOKENIZER, length, depth, 71432, sentence_filler(TOKENIZER), np.random.default_rng(0))
    assert len(text) + len(answer) == length
    assert text[0] == TOKENIZER.eos_token_id
    decoded = TOKENIZER.decode(text[1:])
    assert TOKENIZER.decode(answer) == "71432"
    assert decoded.endswith("What is the pass key? The pass key is ")
    before, _, after = decoded.partition("\nThe pass key is 71432. Remember it. 71432 is the pass key.\n")
    after = after.removesuffix("\nWhat is the pass key? The pass key is ")
    n_before, n_after = len(TOKENIZER.encode(before)), len(TOKENIZER.encode(after))
    assert abs(n_before - depth * (n_before + n_after)) <= 2  # pieces that meet may be encoded as one
    assert "71432" not in before + after


def test_a_text_too_short_for_its_sentences_is_refused():
    with pytest.raises(UserError, match="a passkey text of 34 tokens is too short: it takes at least 35"):
        passkey_text(TOKENIZER, 34, 0.5, 71432, sentence_filler(TOKENIZER), np.random.default_rng(0))


def test_found_is_what_greedy_decoding_writes(model):
    """The model's own continuation is found by definition; one that differs in any one token is not."""
    texts = [torch.randint(0, 128000, (50,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(3)]
    answers = [sample.ids for sample in generate(model, texts, 3, temperature=0)]
    with torch.no_grad():
        assert [found for found, _ in score_answers(model, texts, answers)] == [True] * 3
        assert [found for found, _ in score_answers(model, texts, [answer[:1] for answer in answers])] == [True] * 3
        for wrong in range(3):
            changed = [[*answer[:wrong], (answer[wrong] + 1) % 128000, *answer[wrong + 1 :]] for answer in answers]
            assert [found for found, _ in score_answers(model, texts, changed)] == [False] * 3


def test_nats_are_those_of_the_answer_after_the_text(model, monkeypatch):
    monkeypatch.setattr("gpt_oss_lite.inference.generate.PREFILL_TOKENS", 16)
    text, answer = list(range(100, 150)), [7, 8, 9]
    with torch.no_grad():
        ((_, nats),) = score_answers(model, [text], [answer])
        logits, _ = model(torch.tensor([text + answer]))
    log_probs = logits[0, len(text) - 1 : -1, :128000].log_softmax(-1)
    assert nats == pytest.approx(-sum(log_probs[i, token].item() for i, token in enumerate(answer)), rel=1e-5)


@pytest.mark.parametrize("n_answer", [1, 3])
def test_one_pass_and_parts_over_a_cache_read_the_same(model, monkeypatch, n_answer):
    monkeypatch.setattr("gpt_oss_lite.inference.generate.PREFILL_TOKENS", 16)
    texts_BT, answers_BK = torch.arange(100, 200).view(2, 50), torch.arange(7, 7 + 2 * n_answer).view(2, n_answer)
    with torch.no_grad():
        parts_BKD, whole_BKD = (answer_states(model, texts_BT, answers_BK, whole=whole) for whole in (False, True))
        logits_BTV, _ = model(torch.cat((texts_BT, answers_BK), dim=1))
        for states_BKD in (parts_BKD, whole_BKD):
            torch.testing.assert_close(model.head(states_BKD), logits_BTV[:, 49 : 49 + n_answer], rtol=1e-4, atol=1e-5)


def test_every_cell_is_measured_at_its_scale(model, monkeypatch):
    scales = []
    hook = model.blocks[0].register_forward_pre_hook(lambda *_: scales.append(model.rotary.scale))
    try:
        cells = passkey(model, TOKENIZER, [64, 256], [0.0, 0.5, 1.0], trials=2)
    finally:
        hook.remove()
    assert [(cell.length, cell.depth, cell.trials) for cell in cells] == [
        (length, depth, 2) for length in (64, 256) for depth in (0.0, 0.5, 1.0)
    ]
    assert set(scales) == {1.0, 4.0}
    assert model.rotary.scale == 1.0
    assert all(cell.found == 0 and 5 < cell.nats_per_token < 30 for cell in cells)  # untrained: ln 128000 is 11.8


def test_a_cell_depends_on_seed_length_and_depth_alone(model, monkeypatch):
    alone = passkey(model, TOKENIZER, [64], [0.5], trials=3, seed=1)
    assert alone[0] == passkey(model, TOKENIZER, [80, 64], [0.0, 0.5], trials=3, seed=1)[3]
    assert alone != passkey(model, TOKENIZER, [64], [0.5], trials=3, seed=2)
    monkeypatch.setattr(passkey_module, "BATCH_TOKENS", 1)
    (one_by_one,) = passkey(model, TOKENIZER, [64], [0.5], trials=3, seed=1)
    assert one_by_one.nats_per_token == pytest.approx(alone[0].nats_per_token, rel=1e-5)


def test_a_corpus_as_filler(tmp_path):
    tokens = np.array([1, 2, 3, 9, 4, 5, 9], dtype=np.uint32)
    fill = corpus_filler(lambda start, stop: tokens[start:stop], 7, eos_token_id=9)
    text = fill(12, np.random.default_rng(0))
    order = [1, 2, 3, 4, 5]
    start = order.index(text[0])
    assert text == [order[(start + i) % 5] for i in range(12)]  # read round, without the 9
    corpus = write_text_corpus(tmp_path / "corpus")
    part = open_corpus_filler(corpus, CONFIG, TOKENIZER)(400, np.random.default_rng(0))
    assert len(part) == 400
    assert TOKENIZER.eos_token_id not in part
    assert "A sentence about the number" in TOKENIZER.decode(part)


def test_lengths_by_default_reach_the_longest_context():
    assert default_lengths(CONFIG) == [64, 128, 256]
    assert default_lengths(ModelConfig())[-1] == 131_072
    assert default_lengths(ModelConfig())[0] == 1024
    assert default_lengths(CONFIG.replace(eval_max_seq_len=50)) == [50]


CELLS = [
    Cell(length, depth, 10, found, nats)
    for length, depth, found, nats in [(64, 0.0, 10, 0.0), (64, 1.0, 5, 1.0), (128, 0.0, 0, 8.5), (128, 1.0, 0, 12.0)]
]


def test_the_heat_map_shows_every_cell(tmp_path):
    heat_map(CELLS, tmp_path / "map.svg", "Passkeys found")
    tree = ElementTree.parse(tmp_path / "map.svg")
    shown = {element.text for element in tree.iter() if element.tag.endswith("text")}
    for text in ("10 of 10", "5 of 10", "0 of 10", "8.5", "100%", "64", "128", "context, tokens", "Passkeys found"):
        assert text in shown
    heat_map(CELLS, tmp_path / "again.svg", "Passkeys found")
    assert (tmp_path / "again.svg").read_bytes() == (tmp_path / "map.svg").read_bytes()
    assert tree.getroot().tag.endswith("svg")
    heat_map(CELLS[:1], tmp_path / "map.PNG", "one cell")
    assert (tmp_path / "map.PNG").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match=r"map\.jpg: a picture's name must end in \.png or \.svg"):
        heat_map(CELLS, tmp_path / "map.jpg", "x")


@pytest.mark.parametrize(
    ("nats", "colour"), [(0.0, (253, 231, 37)), (12.0, (68, 1, 84)), (13.0, (68, 1, 84)), (np.inf, (68, 1, 84))]
)
def test_the_heat_maps_colours_go_from_a_certain_key_to_a_guess(tmp_path, nats, colour):
    """The ends of viridis, yellow and violet, whatever is found."""
    from matplotlib.image import imread

    heat_map([Cell(64, 0.0, 10, 5, nats)], tmp_path / "map.png", "one cell")
    pixels = (imread(tmp_path / "map.png")[:, :, :3].reshape(-1, 3) * 255).round().astype(int)
    colours, counts = np.unique(pixels[(pixels < 255).any(axis=1)], axis=0, return_counts=True)
    assert colours[counts.argmax()] == pytest.approx(colour, abs=1)


@pytest.mark.parametrize(("nats", "fill"), [(0.0, "#000000"), (5.9, "#000000"), (6.1, "#ffffff"), (np.inf, "#ffffff"),
                                            (np.nan, "#000000")])  # fmt: skip
def test_a_cells_text_can_be_read_on_its_colour_and_on_none(tmp_path, nats, fill):
    """White on dark colours; black on bright ones, and on the paper where there is no number."""
    heat_map([Cell(64, 0.0, 10, 5, nats)], tmp_path / "map.svg", "one cell")
    texts = [element for element in ElementTree.parse(tmp_path / "map.svg").iter() if element.text == f"{nats:.1f}"]
    found = {style.partition("fill:")[2].strip()[:7] for text in texts for style in [text.get("style", "")]}
    assert {colour or "#000000" for colour in found} == {fill}


def test_a_heat_maps_title_is_taken_as_it_is(tmp_path):
    heat_map(CELLS[:1], tmp_path / "map.svg", "Passkeys found: run $x^ and $y_")
    texts = [element.text for element in ElementTree.parse(tmp_path / "map.svg").iter()]
    assert "Passkeys found: run $x^ and $y_" in texts


def test_labels_are_level_and_a_long_title_stays_in_the_picture(tmp_path):
    cells = [Cell(length, depth, 10, 5, 1.0) for length in (65_536, 131_072) for depth in (0.0, 1.0)]
    heat_map(cells, tmp_path / "map.svg", "Passkeys found: " + 12 * "long_name_")
    texts = [element for element in ElementTree.parse(tmp_path / "map.svg").iter() if element.tag.endswith("text")]
    turned = {e.text for e in texts if re.search(r"rotate\(-?0*[1-9]", e.get("transform", ""))}
    assert turned == {"depth of the key", "nats per token of the key"}
    assert {"65,536", "131,072", "0%", "100%"} <= {e.text for e in texts}
    title = [e.text for e in texts if "_" in e.text]
    assert "".join(title) == "Passkeys found: " + 12 * "long_name_"
    assert max(map(len, title)) <= 45  # of 12 points, on 5 inches


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lengths": [257]}, "the length 257 must lie between 1 and 256 (model.eval_max_seq_len)"),
        ({"lengths": [0]}, "the length 0 must lie between 1"),
        ({"lengths": []}, "there are no lengths"),
        ({"lengths": [30]}, "a passkey text of 30 tokens is too short"),
        ({"depths": [1.1]}, "the depth 1.1 must lie between 0 and 1"),
        ({"trials": 0}, "trials is 0"),
        ({"rope_scale": 0.5}, "the RoPE scale is 0.5"),
    ],
)
def test_what_is_refused(model, arguments, message):
    with pytest.raises(UserError) as refused:
        passkey(model, TOKENIZER, **{"lengths": [64], "depths": [0.5], "trials": 1, **arguments})
    assert message in str(refused.value)
    assert model.rotary.scale == 1.0
