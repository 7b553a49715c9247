import json

import pytest
import torch

from tasks import harness
from tasks.errors import UserError
from tests.conftest import article, tiny_tokenizer

ARC = {
    "question": "Which one?",
    "choices": {"text": ["rows", "weights", "bits", "text"], "label": ["A", "B", "C", "D"]},
    "answerKey": "B",
}


def write(folder, name, rows):
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


def evaluate(tiny, names, folder, limit=3):
    return harness.evaluate(
        tiny, tiny_tokenizer(), names, data_dir=folder, articles=[article(i) for i in range(5)], bos=False,
        limit=limit, batch_size=2, few_shot=0, max_length=128,
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # lm-eval's own
def test_local_rows_run_the_stock_task_beside_ours(tiny, tmp_path):
    write(tmp_path, "arc_easy", [ARC] * 4)
    found = evaluate(tiny, ["last_word", "arc_easy"], tmp_path)
    assert {"acc/last_word", "acc/arc_easy", "acc_norm/arc_easy"} <= found.keys()
    assert all(0 <= found[k] <= 1 for k in found if k.startswith("acc"))


@pytest.mark.filterwarnings("ignore")
def test_accuracy_is_the_share_of_examples_whose_right_answer_is_likeliest(tiny, tmp_path):
    """The right answer of each row is what the model itself prefers: accuracy 1; any other: 0."""
    tokenizer = tiny_tokenizer()
    prompt = tokenizer(f"Question: {ARC['question']}\nAnswer:").input_ids
    scores = []
    for text in ARC["choices"]["text"]:
        answer = tokenizer(f" {text}").input_ids
        logp = tiny(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
        scores.append(sum(logp[len(prompt) - 1 + i, t].item() for i, t in enumerate(answer)))
    best = ARC["choices"]["label"][scores.index(max(scores))]
    worst = ARC["choices"]["label"][scores.index(min(scores))]
    for key, expected in ((best, 1.0), (worst, 0.0)):
        write(tmp_path, "arc_easy", [ARC | {"answerKey": key}] * 3)
        assert evaluate(tiny, ["arc_easy"], tmp_path)["acc/arc_easy"] == expected


@pytest.mark.filterwarnings("ignore")
def test_last_word_counts_what_the_model_would_say_next(tiny, tmp_path, monkeypatch):
    """Contexts whose greedy next token is a word with a blank before it: accuracy 1 for that word, 0 for another."""
    tokenizer, rows = tiny_tokenizer(), []
    for i in range(400):
        context = article(i, 1)[: 20 + i % 30].rsplit(" ", 1)[0]
        token = tiny(torch.tensor([tokenizer(context).input_ids])).logits[0, -1].argmax()
        word = tokenizer.decode(token)
        if tokenizer(context + word).input_ids == [*tokenizer(context).input_ids, int(token)] and word[:1] == " " != word:
            rows.append({"context": context, "word": word[1:]})
    assert rows
    for change, expected in ((lambda w: w, 1.0), (lambda w: w + "zz", 0.0)):
        changed = [r | {"word": change(r["word"])} for r in rows]
        monkeypatch.setattr(harness.lastword, "passages", lambda articles, rows=changed: rows)
        assert evaluate(tiny, ["last_word"], tmp_path, limit=0)["acc/last_word"] == expected


def test_a_missing_field_is_refused_and_not_scored_as_nothing(tmp_path):
    write(tmp_path, "piqa", [{"query": "x", "choices": ["a", "b"], "gold": 0}])
    with pytest.raises(UserError, match=r"piqa\.jsonl lacks the field goal: a row of piqa holds goal, sol1, sol2, label"):
        harness.write_definitions(tmp_path, ["piqa"], tmp_path, [], 0)


def test_a_file_that_is_no_jsonl_is_refused(tmp_path):
    (tmp_path / "piqa.jsonl").write_text("not json\n")
    with pytest.raises(UserError, match="is not jsonl"):
        harness.write_definitions(tmp_path, ["piqa"], tmp_path, [], 0)


def test_text_without_passages_is_refused(tmp_path):
    with pytest.raises(UserError, match="no passage that ends in a word it used before"):
        harness.write_definitions(tmp_path, ["last_word"], tmp_path, ["Too short."], 0)


@pytest.mark.parametrize("name", ["arc_easy", "arc_challenge", "hellaswag", "piqa", "winogrande", "boolq", "lambada_openai"])
def test_the_stock_definition_is_found(name):
    assert harness._stock(name).exists()


def test_an_unknown_task_on_local_data_is_refused():
    with pytest.raises(UserError, match="lm-eval has no task 'no_such_task'"):
        harness._stock("no_such_task")
