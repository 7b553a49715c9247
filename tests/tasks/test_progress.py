import logging

from tasks import progress


def test_lines_carry_a_bar_and_the_time_left(monkeypatch, caplog):
    now = iter([0.0, 10.0, 20.0, 30.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: False, raising=False)
    caplog.set_level(logging.INFO, "windquant")
    report = progress.bar("blocks")
    for done in (1, 2, 3):
        report(done, 4)
    assert caplog.messages[1] == "blocks [##########..........] 2/4, 0:20 left"


def test_resumed_work_counts_as_no_time(monkeypatch, caplog):
    """28 of 30 lie in the resume state: one new piece took 10 s, so one more takes 10 s."""
    now = iter([0.0, 10.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    caplog.set_level(logging.INFO, "windquant")
    progress.bar("blocks")(29, 30)
    assert caplog.messages[0].endswith("29/30, 0:10 left")


def test_clock():
    assert [progress.clock(s) for s in (5, 65, 3700)] == ["0:05", "1:05", "1:01:40"]
