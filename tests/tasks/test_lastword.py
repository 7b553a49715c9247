from tasks.lastword import MIN_WORDS, passages
from tests.conftest import article

FILLER = " ".join(["Many plain words make one long sentence that says nothing of note."] * 4)


def test_a_passage_ends_in_a_word_it_used_before():
    text = f"The harbour lay in mist. {FILLER} Then the ships came back to the harbour. A new start follows here."
    (row,) = passages([text])
    assert row["word"] == "harbour" and row["context"].endswith("back to the") and "harbour" in row["context"]


def test_a_new_word_at_the_end_makes_no_passage():
    assert passages([f"The harbour lay in mist. {FILLER} Then the ships came back to the island."]) == []


def test_passages_are_long_enough_and_ordered_by_their_text_alone():
    texts = [article(i) for i in range(6)]
    rows = passages(texts)
    assert rows and rows == passages(texts[::-1])
    assert all(len(r["context"].split()) >= MIN_WORDS - 1 for r in rows)
