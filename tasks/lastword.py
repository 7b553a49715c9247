"""A last-word task out of held-out articles, in the manner of LAMBADA (Paperno et al. 2016), for machines without a hub.

A passage of whole sentences ends in a word that occurred before in it; the model must give that word. Passages and
their order depend on the text alone.
"""

import hashlib
import re
from typing import Any

MIN_WORDS = 60
_SENTENCE = re.compile(r"(?<=[.!?]) +(?=[A-Z\"'])")
_LAST = re.compile(r"^(?P<context>.*\S) (?P<word>[A-Za-z]{4,})[.!?]$", re.DOTALL)


def passages(articles: list[str]) -> list[dict[str, str]]:
    """Rows {context, word}: the passage up to its last word, and that word."""
    found = [row for text in articles for paragraph in text.splitlines() for row in _of_paragraph(paragraph)]
    return sorted(found, key=lambda row: hashlib.sha256(row["context"].encode()).digest())


def _of_paragraph(paragraph: str) -> list[dict[str, str]]:
    rows, sentences = [], []
    for sentence in _SENTENCE.split(paragraph):
        sentences.append(sentence)
        text = " ".join(sentences)
        if len(text.split()) < MIN_WORDS:
            continue
        match = _LAST.match(text)
        if match and match["word"] in re.findall(r"[A-Za-z]+", match["context"]):
            rows.append(match.groupdict())
            sentences = []
    return rows


def task(file: str) -> dict[str, Any]:
    """The lm-eval task definition over a jsonl file of `passages`."""
    return {
        "task": "last_word",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": file}},
        "test_split": "test",
        "output_type": "loglikelihood",
        "doc_to_text": "{{context}}",
        # The blank belongs to the target: for this output type lm-eval puts none between context and target.
        "doc_to_target": "{{' ' + word}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1},
    }
