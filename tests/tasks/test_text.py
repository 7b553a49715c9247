import bz2

import pytest

from tasks.errors import UserError
from tasks.text import SPLITS, local_articles, split_articles, strip_wikitext, token_windows, wiki_articles
from tests.conftest import article, tiny_tokenizer

PAGE = """{{Infobox|x=1}}'''Ada''' (; [[IPA]]: {{IPA|x}}) was a [[mathematician|great mathematician]].<ref name="a">''Broken</ref>
{| class="wikitable"
| cell
|}
[[File:Ada.jpg|thumb|A portrait]]
== Life ==
She wrote ''notes''.<ref name="b" />
== References ==
Not this.
"""


def test_wikitext_becomes_prose():
    assert strip_wikitext(PAGE) == "Ada (IPA:) was a great mathematician.\nLife\nShe wrote notes."


def dump(tmp_path, suffix):
    pages = "".join(
        f"<page><title>{t}</title><ns>{ns}</ns><revision><text>{text}</text></revision></page>"
        for t, ns, text in [("A", 0, "Some ''text''."), ("B", 0, "#REDIRECT [[A]]"), ("Talk:A", 1, "Chat.")]
    )
    data = f'<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/">{pages}</mediawiki>'.encode()
    file = tmp_path / f"dump{suffix}"
    file.write_bytes(bz2.compress(data) if suffix.endswith("bz2") else data)
    return file


@pytest.mark.parametrize("suffix", [".xml", ".xml.bz2", ".xml-p1p2-shortened.bz2"])
def test_a_dump_gives_its_articles_and_no_redirects_or_talk(tmp_path, suffix):
    assert list(wiki_articles(dump(tmp_path, suffix))) == [{"title": "A", "text": "Some text."}]
    assert local_articles(dump(tmp_path, suffix)) == [{"title": "A", "text": "Some text."}]


def test_local_files_of_every_kind(tmp_path):
    (tmp_path / "a.txt").write_text("plain")
    (tmp_path / "b.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    (tmp_path / "c.csv").write_text("instruction,output\nask,answer\n")
    assert sorted(a["text"] for a in local_articles(tmp_path)) == ["ask\nanswer", "one", "plain", "two"]


def test_a_folder_without_text_is_refused(tmp_path):
    (tmp_path / "x.bin").write_text("")
    with pytest.raises(UserError, match=r"holds no text: put \.txt"):
        local_articles(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", "caf\xe9".encode("latin-1")),
        ("a.jsonl", b'{"text": '),
        ("a.parquet", b"junk"),
        ("a.xml.bz2", b"junk"),
        ("a.xml", b"<mediawiki><page>"),
    ],
)
def test_a_broken_file_is_named(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"{name} cannot be read as .* text .*mend the file or take it away"):
        local_articles(tmp_path)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_empty_files_hold_no_text(tmp_path, name):
    (tmp_path / name).write_text("")
    with pytest.raises(UserError, match="holds no text"):
        local_articles(tmp_path)


def articles(n=60):
    return [{"title": str(i), "text": article(i)} for i in range(n)]


def test_splits_share_no_article_and_have_their_shares():
    found = split_articles(articles())
    texts = [a["text"] for split in found.values() for a in split]
    assert sorted(texts) == sorted(a["text"] for a in articles())
    total = sum(map(len, texts))
    for name, share in SPLITS.items():
        assert sum(len(a["text"]) for a in found[name]) / total == pytest.approx(share, abs=0.04)


def test_the_split_does_not_depend_on_the_order_of_files():
    forward, backward = split_articles(articles()), split_articles(articles()[::-1])
    assert forward == backward


def test_a_single_text_is_cut_into_pieces():
    text = " ".join(article(i, 3) for i in range(100))  # all on one line
    found = split_articles([{"title": "x", "text": text}])
    assert all(found.values())


def test_windows_hold_the_joined_text():
    tokenizer = tiny_tokenizer()
    rows = token_windows(articles(3), tokenizer, 16, 16, "test")
    stream = [t for a in articles(3) for t in [*tokenizer(a["text"]).input_ids, tokenizer.eos_token_id]]
    assert rows.flatten().tolist() == stream[: rows.numel()] and len(stream) - rows.numel() < 16


def test_overlapping_windows_move_by_the_stride():
    rows = token_windows(articles(3), tiny_tokenizer(), 16, 4, "test")
    assert rows[0, 4:].tolist() == rows[1, :-4].tolist()


def test_a_tokenizer_with_bos_begins_every_window_with_it(monkeypatch):
    monkeypatch.setattr("tasks.text.begins_with_bos", lambda tokenizer: True)
    rows = token_windows(articles(3), tiny_tokenizer(), 16, 16, "test")
    assert rows.shape[1] == 16 and set(rows[:, 0].tolist()) == {0}


def test_a_text_too_short_for_a_window_is_refused():
    with pytest.raises(UserError, match=r"the test text has \d+ tokens, a window takes 512; bring more text or set"):
        token_windows([{"title": "a", "text": "short"}], tiny_tokenizer(), 512, 512, "test")
