"""Text to articles to token windows.

Articles are split whole between calibration, train, validation and test, so that no article is in two of them. The
order is a hash of the article's own text: it depends on neither the seed nor the file's order.
"""

import bz2
import contextlib
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
from torch import Tensor

from tasks import progress
from tasks.errors import UserError, first_line

SPLITS = {"test": 0.1, "validation": 0.1, "calibration": 0.2, "train": 0.6}
"""Share of the characters; calibration and train follow test and validation, which must exist in any case."""

_BACK_MATTER = re.compile(r"^=+ *(see also|references|notes|footnotes|sources|bibliography|citations|further reading|"
                          r"external links|works cited|gallery)[^=]*=+ *$", re.IGNORECASE | re.MULTILINE)  # fmt: skip


def strip_wikitext(source: str) -> str:
    """Prose of a MediaWiki page: no templates, tables, references, files, categories, nor the sections after the text."""
    import mwparserfromhell

    back = _BACK_MATTER.search(source)
    source = source[: back.start()] if back else source
    # Before parsing: unbalanced quotes of bold and italics make the parser take a reference for text.
    source = re.sub(r"<ref[^>]*/>|<ref.*?</ref>", "", source, flags=re.DOTALL)
    code = mwparserfromhell.parse(source)
    for tag in code.filter_tags(matches=lambda n: str(n.tag).lower() in {"table", "gallery", "math", "timeline"}):
        _remove(code, tag)
    for link in code.filter_wikilinks(matches=lambda n: re.match(r" *:?\w[\w -]*:\S", str(n.title)) is not None):
        _remove(code, link)  # File:, Image:, Category:, interwiki
    text = code.strip_code(normalize=True, collapse=True)
    text = re.sub(r"[ \t\xa0]+", " ", text)
    # A removed pronunciation template leaves "(; born 1905)" or "(, )".
    text = re.sub(r"(?<=\()[ ;,:]+|[ ;,]+(?=\))", "", text).replace("()", "")
    text = re.sub(r" +([,.;:)])", r"\1", text)
    return re.sub(r"\s*\n\s*", "\n", text).strip()


def _remove(code: Any, node: Any) -> None:
    with contextlib.suppress(ValueError):  # already gone with an outer node
        code.remove(node)


def wiki_articles(path: Path) -> Iterator[dict[str, str]]:
    """Articles (namespace 0, no redirects) of a MediaWiki XML dump, plain or .bz2."""
    report, size = progress.bar(f"articles of {path.name}"), path.stat().st_size
    with path.open("rb") as file, bz2.open(file) if path.suffix == ".bz2" else file as stream:
        for _, page in ElementTree.iterparse(stream):
            tag = page.tag.rsplit("}", 1)[-1]
            if tag != "page":
                continue
            found = {e.tag.rsplit("}", 1)[-1]: e.text or "" for e in page.iter()}
            page.clear()
            report(100 * file.tell() // size, 100)  # percent of the file's bytes
            if (
                found.get("ns") == "0"
                and "redirect" not in found
                and not found["text"].lstrip().lower().startswith("#redirect")
            ):
                text = strip_wikitext(found["text"])
                if text:
                    yield {"title": found["title"], "text": text}


def _frame(rows: Any) -> list[dict[str, str]]:
    """Dataset rows to articles. The text is the column `text` or `content`, else all string columns joined by lines."""
    articles = []
    names = rows.column_names
    column = next((c for c in ("text", "content") if c in names), None)
    for i, row in enumerate(rows):
        text = row[column] if column else "\n".join(v for v in row.values() if isinstance(v, str) and v)
        if isinstance(text, str) and text.strip():
            articles.append({"title": str(row.get("title", i)), "text": text})
    return articles


def local_articles(path: Path) -> list[dict[str, str]]:
    """Articles of a file or of all files of a folder: .txt (one article), .jsonl, .json, .csv, .parquet (one a row),
    MediaWiki XML dumps."""
    import datasets

    loaders = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
    articles: list[dict[str, str]] = []
    files = sorted(f for f in path.rglob("*") if f.is_file()) if path.is_dir() else [path]
    for file in files:
        kind = file.suffix.lower()
        try:
            if kind in (".bz2", ".xml") or ".xml" in file.name:
                articles += wiki_articles(file)
            elif kind in loaders and file.stat().st_size:
                articles += _frame(datasets.load_dataset(loaders[kind], data_files=str(file), split="train"))
            elif kind == ".txt":
                articles.append({"title": file.stem, "text": file.read_text(encoding="utf-8")})
        except Exception as e:  # every format has errors of its own
            cause = first_line(e.__cause__ or e)
            raise UserError(f"{file} cannot be read as {kind} text (UTF-8): {cause}; mend the file or take it away") from e
    articles = [a for a in articles if a["text"].strip()]
    if not articles:
        raise UserError(f"{path} holds no text: put .txt, .jsonl, .json, .csv, .parquet or MediaWiki .xml files there")
    return articles


def hub_articles(rest: str) -> dict[str, list[dict[str, str]]]:
    """Articles by split of a hub dataset `<repo id>[:<config>][@<revision>]`."""
    import datasets

    name, _, revision = rest.partition("@")
    repo, _, subset = name.partition(":")
    try:
        found = datasets.load_dataset(repo, subset or None, revision=revision or None)
    except Exception as e:  # the hub's errors share no base class with the network's
        raise UserError(f"the text hf:{rest} could not be fetched: {first_line(e)}; is the hub reachable and the "
                        f"name right (hf:<repo id>:<config>)?") from e  # fmt: skip
    return {str(split): _frame(rows) for split, rows in found.items()}


def split_articles(articles: list[dict[str, str]]) -> dict[str, list[dict[str, str]]]:
    """Whole articles to SPLITS by their shares of the characters.

    A text of few articles is cut into pieces first, so that it too can be split.
    """
    if len(articles) < 2 * len(SPLITS):
        articles = [piece for a in articles for piece in _pieces(a)]
    ordered = sorted(articles, key=lambda a: hashlib.sha256(a["text"].encode()).digest())
    total = sum(len(a["text"]) for a in ordered)
    out: dict[str, list[dict[str, str]]] = {name: [] for name in SPLITS}
    bounds, edge = [], 0.0
    for name, share in SPLITS.items():
        edge += share
        bounds.append((name, edge * total))
    seen = 0
    for article in ordered:
        name = next((n for n, bound in bounds if seen < bound), bounds[-1][0])
        out[name].append(article)
        seen += len(article["text"])
    return out


def _pieces(article: dict[str, str], count: int = 20) -> list[dict[str, str]]:
    words = re.findall(r"\S+\s*", article["text"])
    size = max(1, -(-len(words) // count))
    return [
        {"title": f"{article['title']} ({i // size + 1})", "text": "".join(words[i : i + size])}
        for i in range(0, len(words), size)
    ]


def token_windows(articles: list[dict[str, str]], tokenizer: Any, length: int, stride: int, split: str) -> Tensor:
    """Token windows (n, length), int32, cut `stride` apart out of the split's articles joined by end-of-text tokens.

    A tokenizer that begins every text with a BOS token begins every window with one. Raises UserError when the text is
    too short for one window.
    """
    texts = [a["text"] for a in articles]
    encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
    separator = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    stream = [t for ids in encoded for t in ids + separator]
    bos = begins_with_bos(tokenizer)
    body, step = length - bos, stride if stride < length else length - bos
    if len(stream) < body:
        raise UserError(
            f"the {split} text has {len(stream)} tokens, a window takes {length}; bring more text or set "
            f"prepare.window and prepare.eval_window to at most {len(stream)}"
        )
    windows = torch.tensor(stream, dtype=torch.int32).unfold(0, body, step)
    if bos:
        windows = torch.nn.functional.pad(windows, (1, 0), value=tokenizer.bos_token_id)
    return windows.contiguous()


def begins_with_bos(tokenizer: Any) -> bool:
    ids = tokenizer("a").input_ids
    return tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id]
