"""The pipeline of datatrove 0.10.1 that bench_pipeline.py compares with; runs in an environment that has datatrove.

    python scripts/bench_datatrove.py INPUT.jsonl OUTPUT_FOLDER TOKENIZER.json [spacy | white_space]

Repetition, Gopher's quality rules, C4 (lines without a terminal mark stay, as in FineWeb) and FineWeb's rules, then
tokenizing, in one process. `spacy` is how it ships; `white_space` cuts words where white space is, as we do.
"""

import json
import re
import sys
import time
from importlib.util import find_spec
from pathlib import Path

SENTENCE = re.compile(r"\S.*?(?:[.!?](?=\s)|$)", re.DOTALL)


def peak_mb() -> float:
    """Largest resident size of this program; the system's account of a process begins with that of its parent."""
    status = Path("/proc/self/status").read_text()
    (kilobytes,) = re.findall(r"VmHWM:\s+(\d+) kB", status)
    return int(kilobytes) / 1024


def main(source: str, output: str, tokenizer: str, words: str = "spacy") -> None:
    from datatrove.executor.local import LocalPipelineExecutor
    from datatrove.pipeline.filters import (
        C4QualityFilter,
        FineWebQualityFilter,
        GopherQualityFilter,
        GopherRepetitionFilter,
    )
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer
    from datatrove.utils.word_tokenizers import WordTokenizer

    class WhiteSpace(WordTokenizer):
        def word_tokenize(self, text: str) -> list[str]:
            return text.split()

        def sent_tokenize(self, text: str) -> list[str]:
            return [text[begin:end] for begin, end in self.span_tokenize(text)]

        def span_tokenize(self, text: str) -> list[tuple[int, int]]:
            return [match.span() for match in SENTENCE.finditer(text)]

    language = WhiteSpace() if words == "white_space" else "eng"
    path = Path(source)
    started, cpu = time.perf_counter(), time.process_time()
    executor = LocalPipelineExecutor(
        pipeline=[
            JsonlReader(str(path.parent), glob_pattern=path.name, text_key="text", id_key="id"),
            GopherRepetitionFilter(language=language),
            GopherQualityFilter(language=language),
            C4QualityFilter(filter_no_terminal_punct=False, language=language),
            FineWebQualityFilter(language=language),
            DocumentTokenizer(f"{output}/tokens", tokenizer, eos_token="<|eot_id|>", shuffle_documents=False),
        ],
        logging_dir=f"{output}/logs",
    )
    executor.run()
    stats = json.loads((Path(output) / "logs" / "stats.json").read_text())
    kept = next(step["stats"] for step in stats if "Writer" in step["name"] or "token" in step["name"].lower())
    print(
        json.dumps(
            {
                "seconds": time.perf_counter() - started,
                "cpu_seconds": time.process_time() - cpu,
                "rss_mb": peak_mb(),
                "documents_kept": kept.get("total_documents", kept.get("total", {})),
                "steps": {step["name"]: step["stats"] for step in stats},
            },
            default=str,
        )
    )


def wrong_words(words: list[str]) -> str | None:
    """What is wrong with the command line; None: nothing."""
    if not 3 <= len(words) <= 4:
        return "it takes INPUT.jsonl OUTPUT_FOLDER TOKENIZER.json [spacy | white_space]"
    if words[3:] and words[3] not in ("spacy", "white_space"):
        return f"{words[3]}: it must be spacy or white_space"
    missing = [path for path in (words[0], words[2]) if not Path(path).is_file()]
    if missing:
        return f"{missing[0]}: there is no such file"
    if find_spec("datatrove") is None:
        return "datatrove is not installed here: see scripts/bench_pipeline.py for an environment that has it"
    return None


if __name__ == "__main__":
    if wrong := wrong_words(sys.argv[1:]):
        print(f"error: {wrong}", file=sys.stderr)
        sys.exit(2)
    main(*sys.argv[1:])
