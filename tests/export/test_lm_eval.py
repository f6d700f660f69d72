"""lm-evaluation-harness on an exported folder, with local tasks and no network: its figures are those of our model."""

import json
import math

import pytest
import torch
import yaml
from command_line import MODEL_SETTINGS
from exported import save
from torch.nn import functional as F

from gpt_oss_lite.config import ModelConfig
from gpt_oss_lite.export.hf import export_checkpoint
from gpt_oss_lite.inference.generate import generate
from gpt_oss_lite.inference.text import prompt_ids
from gpt_oss_lite.model.transformer import GPTOSS
from shared_data.tokenizer import load_tokenizer

QUESTIONS = [
    {"question": f"Is {number} even or odd? It is", "choices": [" even", " odd"], "answer": number % 2}
    for number in range(24)
]
TEXTS = [{"text": "The river runs past the mill."}, {"text": "Ω is a letter.\n"}, {"text": "def f(x):\n    return x"}]


def nats(model: GPTOSS, context: list[int], continuation: list[int]) -> float:
    """Surprise of a continuation, from the whole sequence at once."""
    tokens = torch.tensor([context + continuation])
    with torch.no_grad():
        logits, _ = model(tokens[:, :-1])
    start = len(context) - 1
    return F.cross_entropy(logits[0, start:], tokens[0, start + 1 :], reduction="sum").item()


def write_tasks(folder) -> None:
    def write(name: str, documents: list[dict], **task) -> None:
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(document) + "\n" for document in documents))
        common = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({**common, "test_split": "test", **task}))

    write(
        "local_choice", QUESTIONS, output_type="multiple_choice", doc_to_text="{{question}}", doc_to_target="answer",
        doc_to_choice="{{choices}}", target_delimiter="", metric_list=[{"metric": "acc"}],
    )  # fmt: skip
    write(
        "local_perplexity", TEXTS, output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{text}}",
        metric_list=[{"metric": "bits_per_byte"}],
    )  # fmt: skip
    write(
        "local_generation", TEXTS, output_type="generate_until", doc_to_text="{{text}}", doc_to_target="x",
        generation_kwargs={"max_gen_toks": 5, "until": ["\n\n\n"], "do_sample": False}, metric_list=[{"metric":
        "exact_match"}],
    )  # fmt: skip


def test_the_harness_measures_what_we_measure(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    import lm_eval  # reads the environment, and takes seconds
    from lm_eval.tasks import TaskManager

    torch.manual_seed(0)
    model = GPTOSS(ModelConfig(**{**MODEL_SETTINGS, "max_seq_len": 64, "yarn_original_max_seq_len": None,
                                  "yarn_target_seq_len": None, "init_std": 0.5})).eval()  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    export_checkpoint(save(model, tmp_path / "run"), tmp_path / "hf")
    write_tasks(tmp_path)

    def evaluate(*tasks: str, **model_args: object) -> dict:
        return lm_eval.simple_evaluate(
            model="hf",
            model_args={
                "pretrained": str(tmp_path / "hf"),
                "trust_remote_code": True,
                "dtype": "float32",
                **model_args,
            },
            tasks=list(tasks),
            task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
            device="cpu",
            batch_size=4,
            bootstrap_iters=0,
        )

    done = evaluate("local_choice", "local_generation")
    # Where whole texts are scored, the harness itself puts the end-of-document id before them.
    rolling = evaluate("local_perplexity", add_bos_token=False)

    tokenizer = load_tokenizer()
    right = 0
    for document in QUESTIONS:
        context = prompt_ids(tokenizer, document["question"])
        scores = [nats(model, context, tokenizer.encode(choice)) for choice in document["choices"]]
        right += scores.index(min(scores)) == document["answer"]
    assert 0 < right < len(QUESTIONS)
    assert done["results"]["local_choice"]["acc,none"] == pytest.approx(right / len(QUESTIONS))

    total = sum(nats(model, [tokenizer.eos_token_id], tokenizer.encode(document["text"])) for document in TEXTS)
    n_bytes = sum(len(document["text"].encode()) for document in TEXTS)
    theirs = rolling["results"]["local_perplexity"]["bits_per_byte,none"]
    assert theirs == pytest.approx(total / math.log(2) / n_bytes, rel=1e-5)

    for document, sample in zip(TEXTS, done["samples"]["local_generation"], strict=True):
        prompt = prompt_ids(tokenizer, document["text"])
        (ours,) = generate(model, [prompt], 5, temperature=0, stop_ids=[tokenizer.eos_token_id])
        assert sample["resps"][0][0] == tokenizer.decode(ours.ids)
