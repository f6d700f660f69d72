"""What scripts/learning.py asks of a trained model, in one process: the model is loaded once.

    python scripts/learning_questions.py --checkpoint RUN --questions FILE --out FILE

Each question is also a command: `gpt-oss-lite eval`, `eval --positions`, `passkey`, `generate`, `export`, `report`.
"""

import datetime
import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import needs_packages  # noqa: F401
import numpy as np
import torch
import typer

from gpt_oss_lite.inference.passkey import open_corpus_filler, passkey
from gpt_oss_lite.inference.perplexity import by_position, evaluate
from gpt_oss_lite.inference.text import Settings, complete
from gpt_oss_lite.report.run_log import SAMPLES_NAME
from gpt_oss_lite.training.dataset import PretrainDataset
from gpt_oss_lite.training.evaluation import evaluating
from gpt_oss_lite.training.knobs import autocast, set_knobs
from gpt_oss_lite.training.loss import head_token_losses
from gpt_oss_lite.training.weights import load_model
from shared_data.console import run_app, say
from shared_data.errors import UserError
from shared_data.files import write_atomic
from shared_data.tokenizer import Tokenizer, load_tokenizer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

PROMPTS = (
    "def read_lines(path):\n    \"\"\"",
    "The function returns",
    "impl<T> Iterator for",
    "To install a package on Debian, you",
    "#include <linux/",
    "In this chapter we",
)  # fmt: skip
TEMPERATURES = (0.0, 0.7)
NEW_TOKENS = 96
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
MAX_POSITION_TOKENS = 2_000_000


class Questions:
    """The answers about one checkpoint; each method is one question of a plan, called with its argument."""

    def __init__(self, run: Path, questions: dict[str, Any]) -> None:
        self.run, self.questions = run, questions
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        set_knobs(deterministic=False)
        self.model, self.meta = load_model(run, None, self.device)
        self.data = Path(questions["data"])

    def answer(self) -> dict[str, Any]:
        """Everything that is asked; a question that fails leaves its error, and the others are answered."""
        asked: dict[str, Any] = {"held_out": self.held_out}
        for key, method in (("positions", self.positions), ("passkey_lengths", self.passkeys),
                            ("samples", self.samples), ("export", self.export), ("report", self.report)):  # fmt: skip
            if self.questions.get(key):
                asked[key] = method
        answers: dict[str, Any] = {"step": self.meta["step"]}
        for name, method in asked.items():
            started = time.perf_counter()
            try:
                answers[name] = method()
            except (OSError, ValueError, RuntimeError) as error:  # bad input, a full disk, a card that is too small
                say(f"{self.run.name}: {name} failed: {error}")
                answers[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
            answers[f"{name}_seconds"] = time.perf_counter() - started
            say(f"{self.run.name}: {name} in {answers[f'{name}_seconds']:.1f} s")
        return answers

    def held_out(self) -> dict[str, object]:
        """Loss and bits per byte of every validation token, by source."""
        dataset = PretrainDataset(self.data, self.model.config.max_seq_len, self.model.config.embedding_rows)
        return evaluate(self.model, dataset, micro_batch_size=_windows(self.model.config.max_seq_len)).as_dict()

    def positions(self) -> list[dict[str, Any]]:
        """Loss by position in windows of this many tokens."""
        width = int(self.questions["positions"])
        dataset = PretrainDataset(self.data, width, self.model.config.embedding_rows)
        spans = by_position(self.model, dataset, rope_scale=self.questions.get("rope_scale"),
                            max_windows=max(MAX_POSITION_TOKENS // width, 1),
                            micro_batch_size=_windows(width))  # fmt: skip
        return [vars(span) for span in spans]

    def passkeys(self) -> list[dict[str, Any]]:
        """Cells of the heat map, in text of the corpus; a length that the card cannot do ends it."""
        tokenizer = load_tokenizer()
        filler = open_corpus_filler(self.data, self.model.config, tokenizer)
        cells: list[dict[str, Any]] = []
        for length in self.questions["passkey_lengths"]:
            try:
                found = passkey(self.model, tokenizer, [length], DEPTHS, trials=self.questions["trials"],
                                filler=filler, rope_scale=self.questions.get("rope_scale"))  # fmt: skip
            except RuntimeError as error:  # out of memory, or a kernel that refuses the length
                if not cells:
                    raise
                say(f"passkeys of {length:,} tokens: {error}")
                break
            cells += [{**vars(cell), "accuracy": cell.accuracy} for cell in found]
        return cells

    def samples(self) -> list[dict[str, Any]]:
        """Continuations; they also go where the report page looks for them."""
        tokenizer = load_tokenizer()
        prompts = PROMPTS[: 3 * int(self.questions["samples"])]
        drawn = [(prompt, temperature, self._continue(tokenizer, prompt, temperature))
                 for prompt in prompts for temperature in TEMPERATURES]  # fmt: skip
        with open(self.run / SAMPLES_NAME, "a") as file:
            for prompt, _, text in drawn:
                row = {"step": self.meta["step"], "prompt": prompt, "text": text, "time": time.time()}
                file.write(json.dumps(row) + "\n")
        return [{"prompt": prompt, "temperature": temperature, "text": text} for prompt, temperature, text in drawn]

    def _continue(self, tokenizer: Tokenizer, prompt: str, temperature: float) -> str:
        room = self.model.config.eval_context - 64
        settings = Settings(min(NEW_TOKENS, room), temperature, None, None, None, 1.0, 0)
        (sample,), _ = complete(self.model, tokenizer, prompt, settings)
        return tokenizer.decode(sample.ids)

    def export(self) -> dict[str, Any]:
        """The exported folder, loaded by transformers: its loss on validation windows beside ours."""
        from transformers import AutoModelForCausalLM

        from gpt_oss_lite.export.hf import export_checkpoint

        folder = self.run / "export"
        done = export_checkpoint(self.run, folder, step=None)
        theirs: Any = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        theirs = theirs.to(self.device).eval()
        config = self.model.config
        dataset = PretrainDataset(self.data, min(config.max_seq_len, 1024), config.embedding_rows)
        losses = np.array([self._both_losses(theirs, *dataset[index]) for index in range(min(8, len(dataset)))])
        return {"layout": done.layout, "files": done.files, "bytes": done.n_bytes, "ours": float(losses[:, 0].mean()),
                "transformers": float(losses[:, 1].mean()), "same_choice": float(losses[:, 2].mean())}  # fmt: skip

    @torch.no_grad()
    def _both_losses(self, theirs: Any, ids_T: torch.Tensor, targets_T: torch.Tensor) -> tuple[float, float, float]:
        """Our loss, transformers' loss, and the share of positions where both would write the same token."""
        ids_BT, targets_BT = ids_T[None].to(self.device), targets_T[None].to(self.device)
        with evaluating(self.model), autocast(torch.device(self.device), self.model.config.dtype):
            h_BTD, _ = self.model.hidden_states(ids_BT)
            ours = head_token_losses(h_BTD, self.model.head.weight, targets_BT, chunk_size=1024).mean()
            choice = self.model.head(h_BTD).argmax(dim=-1)
        logits = theirs(input_ids=ids_BT).logits
        loss = torch.nn.functional.cross_entropy(logits[0].float(), targets_BT[0])
        return float(ours), float(loss), float((logits.argmax(dim=-1) == choice).float().mean())

    def report(self) -> str:
        """The run's page."""
        from gpt_oss_lite.report.page import render
        from gpt_oss_lite.report.run_log import read_run

        page = render([read_run(self.run)], datetime.datetime.now(datetime.UTC))
        write_atomic(self.run / "report.html", page.encode(errors="replace"))
        return str(self.run / "report.html")


def _windows(width: int) -> int:
    """Windows of a forward pass, some 32,768 tokens."""
    return max(32_768 // width, 1)


@app.command()
def ask(
    checkpoint: Annotated[Path, typer.Option(metavar="RUN", help="Run folder.", show_default=False)],
    questions: Annotated[Path, typer.Option(metavar="FILE", help="JSON: see Questions.", show_default=False)],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the answers go.", show_default=False)],
) -> None:
    """Ask a trained model everything."""
    try:
        asked = json.loads(questions.read_bytes())
    except ValueError as error:
        raise UserError(f"--questions {questions} is not JSON ({error})") from None
    if not isinstance(asked, dict) or not isinstance(asked.get("data"), str):
        raise UserError(f"--questions {questions}: it must be a mapping with data, the corpus")
    write_atomic(out, json.dumps(Questions(checkpoint, asked).answer()))


if __name__ == "__main__":
    sys.exit(run_app(app, prog_name="learning_questions.py"))
