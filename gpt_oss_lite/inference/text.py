"""Text in and out: prompts as the shards hold documents, samples as they come, and a read-sample-print loop."""

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, TextIO

from gpt_oss_lite.inference.generate import Sample, Sampler, Speed, generate
from gpt_oss_lite.model.transformer import GPTOSS
from gpt_oss_lite.training.weights import load_model
from shared_data.console import count_of, say
from shared_data.errors import UserError
from shared_data.tokenizer import Tokenizer, load_tokenizer

REPLACEMENT = "\ufffd"
MAX_UTF8_BYTES = 4

HELP = """\
A line is a text to continue, with \\n for a line break. Settings, each with a value or `none`:
  :temperature :top_k :top_p :min_p :repetition_penalty :max_new_tokens :seed     : alone shows them; Ctrl-D leaves"""


@dataclasses.dataclass(frozen=True)
class Settings:
    """How texts are continued; see `generate`."""

    max_new_tokens: int = 64
    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int | None = None

    def changed(self, name: str, text: str) -> "Settings":
        """With one setting read from text.

        Raises:
            UserError: no such setting, not a value of its type, or out of range.
        """
        fields = {field.name: field for field in dataclasses.fields(self)}
        if name not in fields:
            raise UserError(f"there is no setting {name!r}; there are: {', '.join(fields)}")
        optional = fields[name].default is None
        kind: type[int] | type[float] = int if name in ("max_new_tokens", "top_k", "seed") else float
        try:
            value = None if optional and text == "none" else kind(text)
        except ValueError:
            allowed = f"{'an integer' if kind is int else 'a number'}{' or none' if optional else ''}"
            raise UserError(f"{name} is {text!r}: it must be {allowed}") from None
        changes: dict[str, Any] = {name: value}
        settings = dataclasses.replace(self, **changes)
        sampling = {field.name: getattr(settings, field.name) for field in dataclasses.fields(Sampler)}
        Sampler(**sampling)  # which refuses what it cannot draw with
        return settings


class TextStream:
    """Prints tokens as they come; the bytes of a character that several tokens share wait for the last of them."""

    def __init__(self, tokenizer: Tokenizer, write: Callable[[str], Any]) -> None:
        self._tokenizer, self._write = tokenizer, write
        self._waiting: list[int] = []

    def __call__(self, row: int, token: int) -> None:
        """As `generate` calls on_token; for one prompt."""
        self._waiting.append(token)
        text = self._tokenizer.decode(self._waiting)
        if not text.endswith(REPLACEMENT) or len(self._waiting) >= MAX_UTF8_BYTES:
            self.flush()

    def flush(self) -> None:
        """Print what waits, whole or not."""
        self._write(self._tokenizer.decode(self._waiting))
        self._waiting.clear()


def load_with_tokenizer(
    checkpoint: Path, step: int | None, device: Literal["cuda", "cpu"] = "cpu"
) -> tuple[GPTOSS, Tokenizer]:
    """A model and the tokenizer that its corpus was made with.

    Args:
        checkpoint: run folder, or its checkpoints/.
        step: None: the newest complete one.

    Raises:
        UserError: no such checkpoint, or the model has another vocabulary.
    """
    model, _ = load_model(checkpoint, step, device)
    tokenizer = load_tokenizer()
    rows = model.config.embedding_rows
    if model.config.vocab_size != tokenizer.vocab_size or tokenizer.eos_token_id >= rows:
        raise UserError(
            f"{checkpoint}: the model has vocab_size {model.config.vocab_size} and {rows} rows, but the tokenizer "
            f"{tokenizer.name} has vocab_size {tokenizer.vocab_size} and EOS {tokenizer.eos_token_id}"
        )
    return model, tokenizer


def prompt_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Ids of a prompt: as in the shards, a document follows the end-of-document id."""
    return [tokenizer.eos_token_id, *tokenizer.encode(prompt)]


def complete(
    model: GPTOSS,
    tokenizer: Tokenizer,
    prompt: str,
    settings: Settings,
    *,
    n_samples: int = 1,
    on_token: Callable[[int, int], None] | None = None,
) -> tuple[list[Sample], Speed]:
    """Continue a text n_samples times; what was drawn, and how fast."""
    speed = Speed()
    samples = generate(
        model,
        [prompt_ids(tokenizer, prompt)] * n_samples,
        stop_ids=[tokenizer.eos_token_id],
        on_token=on_token,
        speed=speed,
        **dataclasses.asdict(settings),
    )
    return samples, speed


def stream_text(model: GPTOSS, tokenizer: Tokenizer, prompt: str, settings: Settings, out: TextIO) -> Speed:
    """Print a text and its continuation, each token as soon as it is drawn."""

    def write(text: str) -> None:
        out.write(text)
        out.flush()

    write(prompt)
    stream = TextStream(tokenizer, write)
    _, speed = complete(model, tokenizer, prompt, settings, on_token=stream)
    stream.flush()
    write("\n")
    return speed


def repl(model: GPTOSS, tokenizer: Tokenizer, settings: Settings, lines: Iterable[str], out: TextIO) -> None:
    """Continue each line until there are no more; a wrong setting or too long a prompt is one line, and goes on."""
    say(HELP)
    for line in lines:
        line = line.rstrip("\r\n")
        try:
            if line.startswith(":"):
                settings = _set(settings, line)
            elif line:
                say_speed(stream_text(model, tokenizer, line.replace("\\n", "\n"), settings, out))
        except UserError as error:
            say(f"error: {error}")


def _set(settings: Settings, line: str) -> Settings:
    name, _, value = line[1:].partition(" ")
    if name:
        settings = settings.changed(name, value.strip())
    say(", ".join(f"{key}={value}" for key, value in dataclasses.asdict(settings).items()))
    return settings


def say_speed(speed: Speed) -> None:
    """Print how fast a prompt was read and tokens were drawn."""
    parts = []
    if speed.prefill_s > 0:
        parts.append(f"prompt {count_of(speed.prefill_tokens, 'token')} in {speed.prefill_s:.2f} s")
    if speed.decode_tokens_per_s is not None:
        rate = f"{speed.decode_tokens_per_s:.1f} tokens/s"
        parts.append(f"{speed.decode_tokens:,} more tokens in {speed.decode_s:.2f} s ({rate})")
    if parts:
        say(f"[generate] {'; '.join(parts)}")
