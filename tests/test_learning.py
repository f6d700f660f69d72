"""The experiments of docs/learning.md in miniature."""

import json
import re
import shutil
from pathlib import Path

import learning
import learning_corpus
import pytest
import yaml
from learning_plan import ABLATIONS, Plan, choose
from tiny_run import events, make_corpus, rows, write_recipe

from gpt_oss_lite.config import load_recipe
from gpt_oss_lite.model.transformer import GPTOSS
from gpt_oss_lite.training.memory import meta_model
from gpt_oss_lite.training.pretrain import PretrainOptions, pretrain
from shared_data.console import run_app
from shared_data.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[1]
GPT_OSS = {"n_experts": 5, "experts_per_token": 3, "n_shared_experts": 0, "expert_activation": "clamped_swiglu"}
BLANK = "Not measured yet"


def test_transformers_gpt_oss_learns_step_by_step_as_our_loop_does(tmp_path):
    from learning_peer import train_peer

    corpus = make_corpus(tmp_path / "corpus")
    recipe = write_recipe(
        tmp_path / "recipe.yaml", corpus, model=GPT_OSS, total_steps=12, eval_interval=12, save_interval=100
    )
    run = tmp_path / "run"
    assert pretrain(PretrainOptions(config=recipe, out=run, seed=3)) == 0
    peer = train_peer(load_recipe(recipe), seed=3)
    ours = rows(run)
    assert ours[-1]["ce"] < ours[0]["ce"] - 0.3
    for key in ("ce", "aux", "grad_norm", "lr"):
        assert [row[key] for row in peer["rows"]] == pytest.approx([row[key] for row in ours], rel=2e-4), key
    assert peer["final"]["loss"] == pytest.approx(events(run, "eval")[-1]["loss"], rel=2e-4)


@pytest.mark.parametrize("size", ["full", "mini"])
def test_every_experiment_is_a_recipe_that_loads(size):
    plan = Plan(data=ROOT, size=size, **({} if size == "full" else {"long_window": 512, "passkey_length": 1024}))
    experiments = plan.experiments()
    assert len({one.name for one in experiments}) == len(experiments) == 1 + 2 + 8 + 2 * len(ABLATIONS) + 3
    for one in experiments:
        words = [word for word in one.words() if word != "--set"]
        recipe = load_recipe(one.recipe, words)
        lengths = one.questions.get("passkey_lengths", [1])
        assert max(lengths) <= recipe.model.eval_context, one.name
        assert one.questions.get("positions", 1) <= recipe.model.eval_context, one.name
    named = {
        one.name: load_recipe(one.recipe, [word for word in one.words() if word != "--set"]) for one in experiments
    }
    assert named["muon-1"].training.optimizer == "muon"
    assert named["all-full-attention-0"].model.window_size is None
    assert named["long-extended"].model.rope_scale == named["long-scale-32"].model.rope_scale == 32
    assert named["gpt-oss-0"].model == named["transformers-0"].model
    winners, beside = named["real-muon-wsd"].training, named["winners-recipe"].training
    assert (winners.optimizer, winners.schedule, winners.decay_steps) == ("muon", "wsd", 88)
    assert winners == beside.replace(optimizer="muon", schedule="wsd", decay_steps=88)  # and nothing else
    if size == "full":
        assert (beside.total_steps, beside.warmup_steps, beside.eval_interval) == (440, 44, 73)
        assert beside.lr == load_recipe(experiments[0].recipe).training.lr
    assert [one.init_from for one in experiments if one.group == "long"] == ["real", "real", None]
    assert named["gpt-oss-fp32-1"].model.residual_dtype == "fp32"
    assert [one.name for one in choose(experiments, ["parity", "dense-1"])] == [
        "transformers-0", "gpt-oss-0", "recipe-0", "gpt-oss-fp32-0",
        "transformers-1", "gpt-oss-1", "recipe-1", "gpt-oss-fp32-1", "dense-1",
    ]  # fmt: skip


@pytest.mark.parametrize("base", ["winners-recipe", "real-muon-wsd"])
def test_the_long_part_starts_from_the_run_that_is_named(base):
    named = {one.name: one for one in Plan(data=ROOT, long_from=base).experiments()}
    assert named["long-before"].init_from == named["long-extended"].init_from == base
    from_start = {**named[base].sets, "model.rope_scale": 32}
    assert named["long-scale-32"].sets == from_start


def test_the_ablations_compare_models_of_equal_active_size():
    experiments = {one.name: one for one in Plan(data=ROOT).ablations()}

    def model(name: str) -> GPTOSS:
        one = experiments[name]
        return meta_model(load_recipe(one.recipe, [word for word in one.words() if word != "--set"]).model)

    base = model("baseline-0")
    assert base.num_parameters() == pytest.approx(133e6, rel=0.01)
    assert base.num_active_parameters() == pytest.approx(90e6, rel=0.01)
    for name in ("dense-0", "no-shared-expert-0", "muon-0"):
        assert model(name).num_active_parameters() == pytest.approx(base.num_active_parameters(), rel=1e-3), name


def fake_results() -> dict[str, object]:
    """Results of every experiment, with figures that are told apart easily."""

    def result(loss: float) -> dict[str, object]:
        row = {"ce": loss, "tokens": 4096, "epoch": 0, "tokens_per_s": 1000.0, "mfu": 0.4, "memory_gib": 1.0,
               "imbalance": 1.25}  # fmt: skip
        own = {"loss": loss, "perplexity": 2.0, "bits_per_byte": loss / 2, "tokens": 10}
        held_out = {**own, "by_source": {"prose": own}}
        cell = {"length": 4096, "depth": 0.5, "trials": 3, "found": 2, "nats_per_token": 1.0, "accuracy": 2 / 3}
        answers = {
            "held_out": held_out, "passkey_lengths": [cell],
            "positions": [{"start": 0, "stop": 64, "loss": loss, "tokens": 64}],
            "samples": [{"prompt": "It", "temperature": 0.0, "text": " rains"}],
            "export": {"layout": "gpt_oss_lite", "bytes": 9, "ours": 1.5, "transformers": 1.5, "same_choice": 1.0},
        }  # fmt: skip
        return {"rows": [{**row, "step": step} for step in range(1, 31)], "final": held_out, "answers": answers,
                "evaluations": [{"step": 30, "loss": loss}], "load": [[0.5, 0.25, 0.25], [0.4, 0.3, 0.3]], "skips": 0,
                "seconds": 1.0, "corpus": {"total_tokens": 77, "sources": {"prose": {"documents": 3, "bytes": 5_000_000,
                "tokens": 77}}}}  # fmt: skip

    results = {
        one.name: {**result(3.0 + 0.01 * int(one.name[-1] == "1")), "init_from": one.init_from}
        for one in Plan(data=ROOT).experiments()
    }
    for seed in (0, 1):
        results[f"dense-{seed}"] = result(3.5 + 0.01 * seed)
        results[f"muon-{seed}"] = result(2.5 + 0.01 * seed)
        results[f"gpt-oss-{seed}"] = result(3.002 + 0.01 * seed)
    results["real-muon-wsd"] = {**result(2.75), "init_from": None}
    return {"results": results}


def test_tables_and_pictures_hold_the_figures_of_the_results(tmp_path):
    from learning_tables import PARTS, write_page

    page = tmp_path / "learning.md"
    shutil.copy(ROOT / "docs/learning.md", page)
    written = write_page(fake_results(), page)
    text = page.read_text()
    assert BLANK not in text
    assert "lie 0.0020 apart in the mean and 0.0020 at most" in " ".join(text.split())
    assert "two seeds of transformers' model 0.0100 and 0.0100" in " ".join(text.split())
    table = [line for line in text.splitlines() if line.endswith(("better |", "worse |", "noise |"))]
    assert [line.split(" | ")[0] for line in (table[0], table[-1])] == ["| muon", "| dense"]
    assert "-0.5000" in table[0]
    assert all(line.endswith("within the noise |") for line in table[1:-1])
    assert "| ours, GPT-OSS's variant, residual stream in fp32 | 3.0000 | 3.0100 |" in text
    assert "| all | 3.0000 | 2.7500 | -0.2500 | 1.5000 | 1.3750 |" in text
    assert "| 30 | 3.0000 | 2.7500 | -0.2500 |" in text
    assert "| passkeys in 4,096 tokens; nats per token | 2 of 3; 1.00 | 2 of 3; 1.00 |" in text
    assert "Before the extension: the recipe in 30 steps (`real`). The extension: 30 steps," in text
    assert "2.00 times its share" not in text
    assert "1.50 times its share" in text
    assert {path.name for path in written} == {
        "learning.md", "parity.svg", "real.svg", "winners.svg", "passkeys-before.svg", "passkeys-extended.svg",
        "passkeys-scale-32.svg",
    }  # fmt: skip
    for path in written[1:]:
        assert f"(learning/{path.name})" in text
    partial = {"results": {"real": fake_results()["results"]["real"], "baseline-0": {"error": "exit code 1"}}}
    page.write_text(re.sub(r"(<!-- [\w-]+ -->\n).*?(<!-- end -->)", rf"\1{BLANK}\n\2", text, flags=re.DOTALL))
    write_page(partial, page)
    assert page.read_text().count(BLANK) == len(PARTS) - 5  # all of the real run's are written, and no other


def test_the_winners_picture_has_evaluations_between_logged_steps(tmp_path):
    """Every evaluation is a point, at its own tokens."""
    from learning_tables import draw_winners

    results = fake_results()["results"]
    for name in ("winners-recipe", "real-muon-wsd"):
        rows = [row for row in results[name]["rows"] if row["step"] % 10 == 0]
        rows = [{**row, "tokens": 1_000_000 * row["step"]} for row in rows]
        evaluations = [{"step": step, "loss": 3.0} for step in (0, 7, 14, 30)]
        results[name] = {**results[name], "rows": rows, "evaluations": evaluations}
    draw_winners(results, tmp_path / "winners.svg")
    marks = (tmp_path / "winners.svg").read_text().count('<use xlink:href="#m')
    for name in ("winners-recipe", "real-muon-wsd"):
        results[name]["evaluations"] = results[name]["evaluations"][:1]
    draw_winners(results, tmp_path / "winners.svg")
    assert marks - (tmp_path / "winners.svg").read_text().count('<use xlink:href="#m') >= 2 * 3


def test_the_long_tables_say_what_was_found_and_how_surprising_the_rest_was():
    from learning_long import long_passkeys

    def cells(*cells: tuple[int, float, int, float]) -> dict[str, object]:
        keys = ("length", "depth", "found", "nats_per_token")
        return {"passkey_lengths": [{**dict(zip(keys, cell, strict=True)), "trials": 3} for cell in cells]}

    results = {
        "winners-recipe": {"rows": [{"step": 1, "tokens": 8}, {"step": 1440, "tokens": 800}]},
        "long-before": {"init_from": "winners-recipe", "answers": cells((64, 0.0, 0, 9.0), (64, 1.0, 1, 8.0))},
        "long-scale-32": {"init_from": None, "answers": cells((64, 0.0, 0, 7.0), (128, 0.0, 2, 0.5))},
    }
    lines = long_passkeys(results)
    assert lines[0] == "Before the extension: the recipe in 1,440 steps (`winners-recipe`)."
    assert "| passkeys found | 64 | 128 |" in lines
    assert "| trained at 4,096, scale as needed | 1 of 6 | - |" in lines
    assert "| scale 32 from the start, 4,096 | 0 of 3 | 2 of 3 |" in lines
    assert "| trained at 4,096, scale as needed | 8.50 | - |" in lines
    assert "| scale 32 from the start, 4,096 | 7.00 | 0.50 |" in lines


def test_what_results_lack_is_told_and_the_rest_is_written(tmp_path, capsys):
    from learning_tables import write_page

    page = tmp_path / "learning.md"
    blank = re.sub(
        r"(<!-- [\w-]+ -->\n).*?(<!-- end -->)", rf"\1{BLANK}\n\2", (ROOT / "docs/learning.md").read_text(),
        flags=re.DOTALL,
    )  # fmt: skip
    page.write_text(blank)
    results = fake_results()["results"]
    real = results["real"]
    real["rows"][0]["mfu"] = None
    del real["answers"]["export"]["ours"]
    real["answers"]["passkey_lengths"] = []
    real["answers"]["samples"][0]["text"] = " rains\n<!-- end -->\n```\n<!-- corpus -->\n````"
    results["transformers-1"]["rows"].pop()
    results["baseline-0"]["final"]["loss"] = 10**400  # which is no float
    write_page({"results": results}, page)
    first = page.read_text()
    write_page({"results": results}, page)
    assert page.read_text() == first  # a sample that looks like the page's marks cuts nothing
    said = capsys.readouterr().err
    assert "exported stays as it is: the results lack something (KeyError: 'ours')" in said
    assert "parity stays as it is" in said
    assert "ablations stays as it is: the results lack something (OverflowError:" in said
    assert first.count(BLANK) == 4  # and of passkeys, of which there are none
    assert "MFU 40.0%" in first
    for row in real["rows"]:
        row["mfu"] = None
    write_page({"results": results}, page)
    assert "MFU n/a" in page.read_text()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "it has no key results"),
        ('{"result": {}}', "it has no key results"),
        ('{"results": null}', "its key results has to hold an object for each experiment"),
        ('{"results": []}', "its key results has to hold an object for each experiment"),
        ('{"results": {"real": 5}}', "its key results has to hold an object for each experiment"),
        (None, "there is no results/*.json"),
        (
            json.dumps({"results": {"real": {"answers": {"samples": [{"prompt": "", "text": "", "temperature": 0}]}}}}),
            "page.md: it has 0 parts between <!-- samples --> and <!-- end -->",
        ),
    ],
)
def test_files_that_are_no_results_are_refused_in_one_line(tmp_path, capsys, content, said):
    results, page = tmp_path / "results.json", tmp_path / "page.md"
    page.write_text("A page\n")
    if content is None:
        results = tmp_path / "out"
        results.mkdir()
    else:
        results.write_text(content)
    assert run_app(learning.app, ["tables", "--results", str(results), "--page", str(page)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert said in error
    assert len(error.splitlines()) == 1
    assert page.read_text() == "A page\n"
    assert not (tmp_path / "out" / "results.json").exists()


def test_an_experiment_is_run_once_and_a_failure_is_told(tmp_path):
    corpus = make_corpus(tmp_path / "corpus")
    tiny = {"model.vocab_size": 61, "model.padded_vocab_size": 64, "model.max_seq_len": 16,
            "model.yarn_original_max_seq_len": 16, "model.yarn_target_seq_len": 512, "model.eval_max_seq_len": 512,
            "training.log_interval": 1}  # fmt: skip
    plan = Plan(data=corpus, size="mini", ablation_steps=3)
    one = plan.ablations()[0]
    run = type(one)(**{**vars(one), "sets": {**one.sets, **tiny}})
    broken = type(one)(**{**vars(one), "name": "broken", "sets": {**run.sets, "training.lr": -1}})
    needy = type(one)(**{**vars(one), "name": "needy", "init_from": "nothing"})
    late = type(one)(**{**vars(one), "name": "late", "seconds": 1e9})
    bench = learning.Bench(tmp_path / "out", deadline=10**9)
    outcomes = learning.perform_all(bench, [run, broken, needy, late])
    assert outcomes["baseline-0"] == "done"
    assert outcomes["broken"].startswith("exit code 2")
    assert "training.lr" in outcomes["broken"]
    assert outcomes["needy"] == "needs nothing"
    assert outcomes["late"] == "no time"
    result = json.loads(learning.gather(tmp_path / "out").read_bytes())["results"]["baseline-0"]
    assert [row["step"] for row in result["rows"]] == [1, 2, 3]
    assert result["final"]["bits_per_byte"] > 0
    before = bench.result_file("baseline-0").stat().st_mtime_ns
    assert bench.perform(run) == "done"
    assert bench.result_file("baseline-0").stat().st_mtime_ns == before
    assert not (bench.run_folder("baseline-0") / "checkpoints").exists()


def test_the_corpus_is_cleaned_sampled_and_read_by_the_pipeline(tmp_path, monkeypatch):
    """Two sources of the real ones' kinds; every stage is the real one."""
    sentence = "Item {} of the manual says what the program of that name does, and how it is called from a shell. "
    folder = tmp_path / "docs"
    (folder / "files" / "manual").mkdir(parents=True)
    for page in range(30):
        body = " ".join(sentence.format(page * 100 + line) for line in range(8))
        (folder / "files" / "manual" / f"{page}.html").write_text(f"<html><body><p>{body}</p></body></html>")
    (folder / "files" / "manual" / "double.html").write_text(f"<html><body><div>{body}</div></body></html>")
    code = lambda root: iter([(f"{n}.py", f"def f{n}(x):\n    return x + {n}\n" * 20) for n in range(5)])  # noqa: E731
    monkeypatch.setattr(learning_corpus, "SOURCES", {
        "manual": (learning_corpus.pages("manual"), 1, 1, None), "code": (code, 1, 1, "code"),
    })  # fmt: skip
    out = tmp_path / "out"
    monkeypatch.chdir(tmp_path)
    learning_corpus.make(folder, out, tmp_path / "work", megabytes=1.0, share=0.015)
    mixture = yaml.safe_load((out / "mixture.yaml").read_text())
    assert sum(source["weight"] for source in mixture["sources"]) == pytest.approx(1, abs=1e-5)
    from shared_data.records import PLAIN, Span, read_documents

    path = out / "manual.jsonl.xz"
    texts = [document.text for document in read_documents([Span(path, "manual", 0, 1)], PLAIN)]
    assert len(texts) == len(set(texts))
    assert 5 < len(texts) < 30  # 1.5 % of 1 MB holds some 20
    tokens = sum(len(load_tokenizer().encode(text)) + 1 for text in texts)
    share = mixture["sources"][0]["weight"]
    total = yaml.safe_load((out / "data_config.yaml").read_text())["total_tokens"]
    assert tokens == pytest.approx(share * total, abs=1)
