import datetime

import pytest

from tasks.errors import UserError
from tasks.settings import load, parse


def test_the_effort_dial_fills_what_is_left_out():
    assert parse({}).prepare.calibration_windows == 32
    assert parse({"common": {"effort": "full"}}).prepare.calibration_windows == 128
    assert parse({"common": {"effort": "full"}, "prepare": {"calibration_windows": 5}}).prepare.calibration_windows == 5


def test_whole_numbers_are_numbers_of_bits_and_lists_are_tasks():
    params = parse({"allocate": {"target_bits": 3}, "benchmark": {"tasks": ["piqa", "boolq"]}})
    assert params.allocate.target_bits == 3.0 and params.benchmark.tasks == ("piqa", "boolq")


def test_yaml_1_2_reads_exponents_as_numbers(tmp_path):
    file = tmp_path / "params.yaml"
    file.write_text("allocate:\n  target_bits: 25e-1\n")
    assert load(file).allocate.target_bits == 2.5


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"allocat": {}}, "there is no section 'allocat'; the sections are common, prepare"),
        (
            {"allocate": {"target": 2}},
            r"allocate\.target is not a parameter; allocate has .*target_bits, target_size, embedding_bits, allocator",
        ),
        ({"allocate": {"target_bits": "two"}}, r"allocate\.target_bits is 'two': input should be a valid number"),
        ({"allocate": {"target_bits": True}}, r"allocate\.target_bits is True: input should be a valid number"),
        ({"prepare": {"window": 51.5}}, r"prepare\.window is 51\.5: input should be a valid integer"),
        ({"prepare": {"window": 1}}, "prepare: window 1 is too short"),
        ({"prepare": {"eval_stride": 2048}}, "prepare: eval_stride 2048 skips tokens: at most eval_window, 1024"),
        ({"allocate": {"target_bits": 0}}, "allocate: target_bits 0 is not a number of bits"),
        ({"allocate": {"target_size": "80"}}, "allocate: target_size '80' is not a size"),
        ({"allocate": {"allocator": "best"}}, "allocate: allocator 'best' is unknown; choose one of uniform"),
        ({"common": {"effort": "max"}}, r"common\.effort is 'max': input should be 'demo' or 'full'"),
        ({"common": {"seed": -1}}, "common: seed -1 is not a whole number from 0"),
        ({"common": {"seed": 2**70}}, r"common\.seed is|common: seed"),
        ({"common": {"seed": datetime.date(2020, 1, 1)}}, r"common\.seed is '2020-01-01': input should be a valid integer"),
        ({"common": {"threads": 100000}}, "common: threads 100000 is not between 0 and 1024"),
        ({"benchmark": {"tasks": []}}, "benchmark: tasks is an empty list"),
        ({"benchmark": {"tasks": ["piqa", 3]}}, r"benchmark\.tasks\.1 is 3: input should be a valid string"),
        ({"common": [1]}, "common is"),
    ],
)
def test_bad_params_end_in_a_sentence_with_the_path(data, sentence):
    with pytest.raises(UserError, match=sentence):
        parse(data)


def test_a_missing_file_says_where_it_looked(tmp_path):
    with pytest.raises(UserError, match="params.yaml is missing; run from the project's root"):
        load(tmp_path / "params.yaml")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: [", "is not YAML"),
        ("- 1", "must be a mapping of sections, not list"),
        ("common: {}\ncommon: {}", r"line \d is not YAML: found duplicate key"),
    ],
)
def test_a_file_that_is_no_mapping_is_refused(tmp_path, text, sentence):
    file = tmp_path / "params.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=sentence):
        load(file)
