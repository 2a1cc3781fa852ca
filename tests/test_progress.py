"""The display: what is said on the way."""

from dae.config import ObjectiveConfig
from dae.run.progress import Progress
from dae.train import Report
from test_diagnostics import WELL


def test_no_end_is_foretold_while_the_replay_fills(capsys):
    """Catches: hours or seconds left, told from steps without a single update."""
    progress = Progress("a run", 10_000, ObjectiveConfig())
    progress.show(Report("train", 500, 0, [], {"rollout/epsilon": 1.0}))
    said = capsys.readouterr().err
    assert "filling the replay" in said
    assert "left" not in said
    progress.show(Report("train", 1_000, 20, [], WELL))
    assert " left  score -  skill 1 " in capsys.readouterr().err


def test_a_terminal_that_is_gone_ends_no_run(monkeypatch):
    def closed(*_, **__):
        raise OSError(5, "Input/output error")

    progress = Progress("a run", 10_000, ObjectiveConfig())
    monkeypatch.setattr("builtins.print", closed)
    assert progress.show(Report("train", 500, 0, [], {}))["time/seconds"] >= 0
