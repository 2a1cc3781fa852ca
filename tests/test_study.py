"""Studies: the file is checked in full, finished runs are not run again, and the table's numbers are those of the CSVs."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dae.errors import ConfigError, FileError
from dae.study import run as study_run
from dae.study import table
from dae.study.cell import CHOICES, EVAL, write_csv
from dae.study.outsider import OUTSIDERS, Settings
from dae.study.results import is_finished, merge
from dae.study.spec import read_study

TINY = """
[study]
name = "tiny"
seeds = [0, 1]
evaluations = 2
preset = ["laptop"]
options = { device = "cpu", num_envs = 4, embedding_dim = 8, core_dim = 8, prior_hidden = 8, value_hidden = 8, \
prediction_hidden = 8, batch_size = 2, burn_in_steps = 2, backup_steps = 4, min_replay_agent_steps = 100, eval_episodes = 3 }

[[environment]]
id = "dae/Jackpot-v0"
total_agent_steps = 200
options = { epsilon = "0.3" }
agent_options.one-step = { train_steps = 2 }

[[environment]]
id = "dae/TMaze-v0"
env_kwargs = { length = 3 }
total_agent_steps = 400
seeds = [7]
evaluations = 1

[[agent]]
name = "full"
title = "full agent"

[[agent]]
name = "one-step"
preset = ["one-step"]

[[agent]]
name = "ppo"
outsider = "RecurrentPPO"
options = { n_steps = 16, total_agent_steps = 300 }
"""


@pytest.fixture
def write(tmp_path):
    def to_file(text=TINY):
        path = tmp_path / "tiny.toml"
        path.write_text(text)
        return path

    return to_file


@pytest.fixture
def study(write):
    return read_study(write())


# ---------------------------------------------------------------------------------------------------------------- the file


def test_layers_override_one_another(study):
    cells = {(c.agent, c.env, c.seed): c for c in study.cells()}
    assert len(cells) == 3 * 2 + 3 * 1
    full, one_step = cells["full", "dae/Jackpot-v0", 1].config, cells["one-step", "dae/Jackpot-v0", 1].config
    assert full.learning.batch_size == 2 and full.acting.epsilon(0, 1) == 0.3 and full.run.seed == 1
    assert (full.objective.backup_steps, full.train_steps) == (4, 4)
    assert (one_step.objective.backup_steps, one_step.train_steps) == (1, 2)  # the environment's word on one agent comes last
    assert cells["one-step", "dae/TMaze-v0", 7].config.train_steps == 16
    assert cells["full", "dae/TMaze-v0", 7].config.environment.env_kwargs == {"length": 3}
    assert full.acting.eval_every_agent_steps == 100 and full.run.log_every_agent_steps == 5


def test_an_outsider_takes_what_is_shared_and_its_own_options(study):
    (cell,) = study.cells(["ppo"], ["dae/TMaze-v0"])
    assert cell.settings == Settings(n_steps=16)
    assert cell.total_agent_steps == 300 and cell.config.acting.eval_episodes == 3
    assert cell.config.learning.batch_size != 2  # ours, not its


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ('name = "tiny"', 'nam = "tiny"', r"no key 'nam' \(did you mean 'name'\?\)"),
        ("batch_size = 2", "batch_siz = 2", r"no option 'batch_siz' \(did you mean 'batch_size'\?\)"),
        ("backup_steps = 4", "backup_steps = 0", "backup_steps=0: must be at least 1"),
        ('preset = ["one-step"]', 'preset = ["onestep"]', r"no preset 'onestep' \(did you mean 'one-step'\?\)"),
        ("agent_options.one-step", "agent_options.one-stp", r"agent_options of 'one-stp' \(did you mean 'one-step'\?\)"),
        ("n_steps = 16", "n_step = 16", r"no outsider's setting 'n_step' \(did you mean 'n_steps'\?\)"),
        ("n_steps = 16", "n_steps = 1.5", "n_steps=1.5: must be of type int"),
        ('outsider = "RecurrentPPO"', 'outsider = "RecurrentPO"', "did you mean 'RecurrentPPO'"),
        ("seeds = [7]", "seeds = [7, 7]", "must be different whole numbers"),
        ("seeds = [7]", "seed = 7", r"no key 'seed' \(did you mean 'seeds'\?\)"),
        ('{ epsilon = "0.3" }', "{ seed = 3 }", "option seed is settled by the study"),
        ('id = "dae/TMaze-v0"', 'id = "os:system"', "only plain Gymnasium ids"),
        ('id = "dae/TMaze-v0"', 'id = "dae/Jackpot-v0"', "stands there twice"),
        ('name = "full"', 'name = "../full"', "letters, digits"),
        ("[study]", "[study", "not TOML"),
    ],
)
def test_mistakes_are_found_before_anything_starts(write, old, new, error):
    assert old in TINY
    with pytest.raises(ConfigError, match=error):
        read_study(write(TINY.replace(old, new, 1)))


def test_a_missing_file_is_said(tmp_path):
    with pytest.raises(FileError, match="No such file"):
        read_study(tmp_path / "no.toml")


def test_unknown_names_on_the_command_line(study):
    with pytest.raises(ConfigError, match=r"no agent 'ful' \(did you mean 'full'\?\)"):
        study.cells(["ful"])
    with pytest.raises(ConfigError, match="no environment 'TMaze'"):
        study.cells((), ["TMaze"])


def test_the_published_study_is_sound():
    study = read_study(Path(__file__).parents[1] / "experiments" / "laptop.toml")
    cells = study.cells()
    assert {c.agent for c in cells} == {"full", "luck-off", "one-step", "frame-stack", "recurrent-ppo"}
    assert sum(study_run.cost(c) for c in cells) < 6 * 3600
    assert max(study_run.cost(c) for c in cells) < 600


# ---------------------------------------------------------------------------------------------------------------- the runs


def pretend(work, cell, score=1.0, wrong=0):
    """The folder of a finished run; scores rise to `score`, and the episodes of an evaluation differ by 2."""
    folder = work / cell.key
    folder.mkdir(parents=True, exist_ok=True)
    where = {"experiment": "tiny", "agent": cell.agent, "env": cell.env, "seed": cell.seed}
    rows = [
        {**where, "agent_steps": steps, "frames": steps, "episode": e, "score": mean + 2 * e - 1, "length": 5}
        for steps, mean in ((100 + cell.seed, 0.0), (200, score))
        for e in (0, 1)
    ]
    write_csv(folder / "eval.csv", EVAL, rows)
    write_csv(folder / "train.csv", ("agent", "seed", "agent_steps", "seconds"), [{**where, "agent_steps": 50, "seconds": 1.5}])
    if "Jackpot" in cell.env:
        choices = [{**where, "agent_steps": 200, "after": a, "decisions": 10, "wrong": n} for a, n in (("won", wrong), ("lost", 0))]
        write_csv(folder / "choices.csv", CHOICES, choices)
    about = {
        **where, "fingerprint": cell.fingerprint, "agent_steps": 200, "hours": 0.05, "cpu_seconds": 180.0, "commit": "abc",
        "hardware": {"cpu": "a CPU", "cores": 4}, "platform": "Linux", "python": "3.12", "versions": {"torch": "2.11"},
        "started": "2026-01-02T03:04:05Z",
    }  # fmt: skip
    (folder / "cell.json").write_text(json.dumps(about))
    return folder


def test_the_plan_skips_what_is_finished_and_begins_with_the_longest(study, tmp_path):
    first = study.cells()[0]
    folder = pretend(tmp_path, first)
    queue, done = study_run.plan(study, tmp_path, (), ())
    assert done == [first] and first not in queue and len(queue) == 8
    assert [study_run.cost(c) for c in queue] == sorted((study_run.cost(c) for c in queue), reverse=True)
    about = json.loads((folder / "cell.json").read_text())
    (folder / "cell.json").write_text(json.dumps(about | {"fingerprint": "of other options"}))
    assert len(study_run.plan(study, tmp_path, (), ())[0]) == 9


def test_one_option_more_makes_another_run(write, study, tmp_path):
    cell = study.cells()[0]
    folder = pretend(tmp_path, cell)
    assert is_finished(folder, cell)
    (other,) = [c for c in read_study(write(TINY.replace("batch_size = 2", "batch_size = 3"))).cells() if c.key == cell.key]
    assert not is_finished(folder, other)


def test_merging_keeps_every_row_and_says_where_it_comes_from(study, tmp_path):
    jackpot = [c for c in study.cells() if "Jackpot" in c.env]
    for cell in jackpot:
        pretend(tmp_path / "work", cell)
    out = tmp_path / "results"
    assert merge(study, tmp_path / "work", out) == len(jackpot) == 6
    with (out / "dae-Jackpot-v0.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["experiment", "agent", "env", "seed", "agent_steps", "frames", "episode", "score", "length"]
    assert len(rows) == 6 * 4 and {(r["agent"], r["seed"]) for r in rows} == {(c.agent, str(c.seed)) for c in jackpot}
    assert not (out / "dae-TMaze-v0.csv").exists()
    manifest = json.loads((out / "manifest.json").read_text())
    assert (manifest["runs_finished"], manifest["runs_planned"], manifest["cpu_hours"]) == (6, 9, 0.3)
    assert manifest["sha256"] == study.sha256 and manifest["commits"] == ["abc"] and len(manifest["machines"]) == 1
    assert not list(out.glob(".*"))


def test_merging_one_run_again_loses_no_other(write, study, tmp_path):
    """A clone has the results but not the folders of the runs."""
    out, jackpot = tmp_path / "results", [c for c in study.cells() if "Jackpot" in c.env]
    for cell in jackpot:
        pretend(tmp_path / "work", cell, wrong=3)
    merge(study, tmp_path / "work", out)
    before = {path.name: path.read_text() for path in out.iterdir()}
    assert merge(study, tmp_path / "nothing", out) == 6
    assert {path.name: path.read_text() for path in out.iterdir()} == before
    pretend(tmp_path / "again", jackpot[0], score=5.0, wrong=9)
    assert merge(study, tmp_path / "again", out) == 6
    with (out / "dae-Jackpot-v0.csv").open() as file:
        changed = list(csv.DictReader(file))
    best = {(r["agent"], r["seed"]): float(r["score"]) for r in changed}  # of the last episode of each run
    assert len(changed) == 6 * 4 and best.pop((jackpot[0].agent, str(jackpot[0].seed))) == 6 and set(best.values()) == {2}
    assert (out / "jackpot_choices.csv").read_text().count(",9\n") == 1
    other = read_study(write(TINY.replace("batch_size = 2", "batch_size = 3")))  # other settings: those runs are not these
    assert merge(other, tmp_path / "nothing", out) == 2  # but for the outsider, who has no such option


def test_a_failed_run_stops_no_other(study, tmp_path, monkeypatch):
    """The processes here only pretend: one ends well, one with an error, one never."""
    cells = study.cells(["full"])
    assert [c.env for c in cells] == ["dae/Jackpot-v0", "dae/Jackpot-v0", "dae/TMaze-v0"]
    programs = ["print('fine')", "import sys; sys.exit('dae: it broke')", "import time; time.sleep(60)"]
    real = subprocess.Popen

    def start(command, **options):
        which = next(i for i, c in enumerate(cells) if command[5:8] == [c.agent, c.env, str(c.seed)])
        if which == 0:
            pretend(tmp_path, cells[0])
        return real([sys.executable, "-c", programs[which]], **options)

    monkeypatch.setattr(study_run.subprocess, "Popen", start)
    outcome = study_run.execute(study, cells, tmp_path, jobs=3, minutes=2 / 60)
    assert outcome.finished == [cells[0]]
    assert outcome.failed == [(cells[1], "dae: it broke")]
    assert outcome.left == [cells[2]]


def test_a_real_study_from_file_to_table(write, tmp_path, capsys):
    """Two runs in processes of their own, merged, resumed and tabulated; the diary counts each choice at an odd step."""
    work, out = tmp_path / "work", tmp_path / "results"
    arguments = [str(write()), "--jobs", "2", "--work", str(work), "--out", str(out), "--only", "full", "--env", "dae/Jackpot-v0"]
    assert study_run.run(study_run._parser().parse_args(arguments)) == 0
    with (out / "jackpot_choices.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert sum(int(r["decisions"]) for r in rows if r["seed"] == "0") == 500 * 4
    assert {r["after"] for r in rows} == {"won", "lost"} and all(int(r["wrong"]) <= int(r["decisions"]) for r in rows)
    with (out / "dae-Jackpot-v0.csv").open() as file:
        assert len({(r["seed"], r["agent_steps"]) for r in csv.DictReader(file)}) == 4  # two evaluations of each
    before = (work / "dae-Jackpot-v0/full/seed0/cell.json").stat().st_mtime_ns
    assert study_run.run(study_run._parser().parse_args(arguments)) == 0
    assert (work / "dae-Jackpot-v0/full/seed0/cell.json").stat().st_mtime_ns == before
    assert "0 runs to do, 2 finished already" in capsys.readouterr().err
    assert "full agent" in table.markdown(table.read_results(out))


def test_the_outsider_trains_and_is_evaluated_alike(study):
    pytest.importorskip("sb3_contrib")
    from dae.envs.gymnasium import env_source

    (cell,) = study.cells(["ppo"], ["dae/TMaze-v0"])
    make = env_source(cell.env, cell.config.environment.env_kwargs).make
    learner, reports = OUTSIDERS["RecurrentPPO"](cell, make), []
    learner.run(reports.append)
    (last,) = [r for r in reports if r.kind == "eval"]
    assert last.agent_steps == learner.agent_steps == 384 and len(last.episodes) == 3  # whole rollouts of 8 * 16
    assert all(-1 <= e.score <= 1 and e.length_agent_steps <= 100 for e in last.episodes)


# ---------------------------------------------------------------------------------------------------------------- the table


def test_student_s_interval():
    e = table.estimate([1.0, 2.0, 3.0])
    assert e.mean == 2 and e.half == pytest.approx(4.303 / np.sqrt(3)) and e.seeds == 3
    assert np.isnan(table.estimate([5.0]).half)
    assert table.estimate([4.0, 4.0]).half == 0
    rng = np.random.default_rng(0)
    hits = [abs((e := table.estimate(rng.normal(size=5))).mean) < e.half for _ in range(4000)]
    assert np.mean(hits) == pytest.approx(0.95, abs=0.01)


def test_numbers_of_the_table_against_a_calculation_by_hand(study, tmp_path):
    for cell in study.cells(["full", "one-step"], ["dae/Jackpot-v0"]):
        score = {("full", 0): 1.0, ("full", 1): 2.0, ("one-step", 0): -0.5, ("one-step", 1): -0.5}[cell.agent, cell.seed]
        pretend(tmp_path / "work", cell, score, wrong=5 + cell.seed if cell.agent == "full" else 0)
    merge(study, tmp_path / "work", tmp_path / "results")
    results = table.read_results(tmp_path / "results")
    curve = results.curves["dae/Jackpot-v0"]["full"]
    assert (
        curve.scores.tolist() == [[0, 1], [0, 2]]
        and curve.agent_steps.tolist() == [100.5, 200]
        and curve.minutes == pytest.approx(3)
    )
    text = table.markdown(results)
    full, one_step = (line for line in text.splitlines() if line.startswith(("| full agent", "| one-step")))
    # mean 1.5; standard deviation 0.7071; 12.706 * 0.7071 / sqrt(2) = 6.353
    assert "| 1.50 ± 6.35<br><sub>0.2k steps, 3.0 min</sub> | 55% / 0% |" in full
    assert "| -0.50 ± 0.00<br>" in one_step
    assert "4 runs (5 more are planned), 0.2 CPU-hours on a CPU, 4 cores, torch 2.11" in text
    assert "| *random policy* | -0.20 | 50% / 50% |" in text


def test_a_table_with_runs_missing_says_so(study, tmp_path):
    pretend(tmp_path / "work", study.cells(["full"])[0])
    merge(study, tmp_path / "work", tmp_path / "results")
    assert "1.00<br><sub>0.2k steps, 3.0 min, 1 of 2 seeds</sub>" in table.markdown(table.read_results(tmp_path / "results"))


def test_only_what_stands_between_the_markers_is_replaced():
    text = "a\n<!-- table:tiny -->\nold\n<!-- /table:tiny -->\nb\n"
    assert table.put_between(text, "tiny", "new\n", "x") == "a\n<!-- table:tiny -->\nnew\n<!-- /table:tiny -->\nb\n"
    with pytest.raises(ConfigError, match="needs one line"):
        table.put_between("nothing", "tiny", "new\n", "README.md")


def test_pictures_are_drawn(study, tmp_path):
    pytest.importorskip("matplotlib")
    from dae.study.figures import draw_curves, draw_jackpot

    for cell in study.cells(["full"]):
        pretend(tmp_path / "work", cell)
    merge(study, tmp_path / "work", tmp_path / "results")
    results = table.read_results(tmp_path / "results")
    for path in (draw_curves(results, tmp_path / "curves.png"), draw_jackpot(results, tmp_path / "jackpot.png")):
        assert path.stat().st_size > 5000


def test_the_table_writes_only_what_it_is_asked_to(study, tmp_path, monkeypatch, capsys):
    """Catches: tracked pictures that change because somebody looked at the table."""
    pytest.importorskip("matplotlib")
    for cell in study.cells(["full"]):
        pretend(tmp_path / "work", cell)
    merge(study, tmp_path / "work", tmp_path / "results")
    monkeypatch.chdir(tmp_path)

    def written(*options):
        before = {p for p in tmp_path.rglob("*") if p.is_file()}
        monkeypatch.setattr("sys.argv", ["table", "results", *options])
        table.main()
        assert "full agent" in capsys.readouterr().out
        return {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()} - {
            str(p.relative_to(tmp_path)) for p in before
        }

    assert written() == set()
    assert "results/table.md" in written("--pictures", "img")
    assert (tmp_path / "img" / "tiny_curves.png").exists()
