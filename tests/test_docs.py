"""The documents: their Python runs, their commands parse, their links lead somewhere, and what they say of defaults is so."""

import importlib.util
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from dae import presets
from dae.api import DAE
from dae.cli import VERBS, _parse
from dae.errors import ConfigError

ROOT = Path(__file__).parents[1]
PAGES = sorted(p.relative_to(ROOT).as_posix() for p in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")))
READ = ("README.md", "docs/guide.md")
"""Whose code is tried out."""
NOT_RUN = "<!-- not run: "
"""On the line before a block, with the reason."""
GENERATED = ("docs/img/laptop_curves.png", "docs/img/jackpot.png")
"""Made by `make table`, once there are results."""

TINY = {
    "num_envs": 4, "embedding_dim": 8, "core_dim": 8, "core_blocks": 2, "value_hidden": 8, "prediction_hidden": 8, "prior_hidden": 8,
    "burn_in_steps": 2, "backup_steps": 4, "batch_size": 2, "min_replay_agent_steps": 100, "agent_steps_per_update": 50,
    "eval_episodes": 2, "eval_every_agent_steps": 200, "log_every_agent_steps": 100, "max_episode_agent_steps": 30,
}  # fmt: skip
MOST_AGENT_STEPS = 300


def blocks(page, language):
    """(line number, text, run?) of each fenced block of that language; None: of no language."""
    found, lines, i = [], (ROOT / page).read_text().splitlines(), 0
    while i < len(lines):
        if lines[i].startswith("```"):
            end = next(j for j in range(i + 1, len(lines)) if lines[j].startswith("```"))
            if lines[i][3:].strip() == (language or ""):
                before = next((line for line in reversed(lines[:i]) if line.strip()), "")
                found.append((i + 2, "\n".join(lines[i + 1 : end]), not before.startswith(NOT_RUN)))
            i = end
        i += 1
    return found


def commands(page):
    """(line number, words) of each command line in the blocks without a language, and in backticks."""
    found = []
    for number, text, _ in blocks(page, None):
        for i, line in enumerate(text.splitlines()):
            if line.split()[:1] in (["dae"], ["make"], ["pip"], ["python"]):
                found.append((number + i, shlex.split(line, comments=True)))
    for number, line in enumerate((ROOT / page).read_text().splitlines(), 1):
        found += [(number, shlex.split(words)) for words in re.findall(r"`((?:dae|make|python -m) [^`]+)`", line)]
    return found


COMMANDS = {f"{page}:{number}: {' '.join(words)}": words for page in PAGES for number, words in commands(page)}


# ------------------------------------------------------------------------------------------------------------------- Python


@pytest.mark.slow
@pytest.mark.parametrize("page", READ)
def test_the_python_of_a_page_runs(page, tmp_path, monkeypatch, unchecked):
    """From top to bottom, in one namespace, in an empty folder, with networks and budgets cut down."""
    monkeypatch.chdir(tmp_path)
    words, options = presets.PRESETS["laptop"]
    monkeypatch.setitem(presets.PRESETS, "laptop", (words, options | TINY))
    plain = DAE.reports
    monkeypatch.setattr(DAE, "reports", lambda self, steps=None: plain(self, min(steps or MOST_AGENT_STEPS, MOST_AGENT_STEPS)))
    names, ran = {"__name__": "page"}, 0
    for number, text, run in blocks(page, "python"):
        if run:
            exec(compile("\n" * (number - 1) + text, page, "exec"), names)  # noqa: S102  our own documents
            ran += 1
    assert ran


def test_a_page_s_own_environment_is_sound(tmp_path, monkeypatch, capsys):
    """The guide's corridor, by the guide's own command."""
    from dae.cli import run

    (text,) = [text for _, text, _ in blocks("docs/guide.md", "python") if "class Corridor" in text]
    (tmp_path / "corridor.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert run(["check", "--env", "corridor:Corridor", "--env-kwargs", "length=3"]) == 0
    assert "bad" not in capsys.readouterr().out


# ----------------------------------------------------------------------------------------------------------------- commands


@pytest.mark.parametrize("words", [w for w in COMMANDS.values() if w[0] == "dae"], ids=lambda w: " ".join(w))
def test_dae_commands_parse(words):
    """Catches: an option that was renamed. Words in capitals, such as RUN, stand for something; so do dots."""
    if "|" in words or words == ["dae", "VERB", "--help"]:
        verbs = [word for word in words[1:] if word not in ("|", "VERB", "--help")]
        assert all(verb in VERBS for verb in verbs)
        return
    verb, *rest = words[1:]
    rest = [word for word in rest if word != "..."]
    assert verb in VERBS
    if rest and rest[-1] in ("--from", "--env"):  # "such as `dae train --env ...`"
        rest.append("X")
    if not rest:
        return
    try:
        _parse(VERBS[verb], verb, rest)
    except ConfigError as error:
        pytest.fail(str(error))


@pytest.mark.parametrize("words", [w for w in COMMANDS.values() if w[0] == "make"], ids=lambda w: " ".join(w))
def test_make_targets_exist(words):
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE)


@pytest.mark.parametrize("words", [w for w in COMMANDS.values() if w[0] == "python"], ids=lambda w: " ".join(w))
def test_python_commands_exist(words):
    """Modules and scripts, and the files that they are given."""
    if words[1] == "-m":
        assert importlib.util.find_spec(words[2]) is not None
        rest = words[3:]
    else:
        rest = words[1:]
    for word in rest:
        if word.startswith(("experiments/", "docs/", "tests/")):
            assert (ROOT / word).exists()


def test_extras_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {
        name
        for page in PAGES
        for group in re.findall(r"(?:dae-rl|\.)\[([\w,]+)\]", (ROOT / page).read_text())
        for name in group.split(",")
    }
    assert named <= set(extras)
    install = re.search(r"^Extras: (.*?)\n\n", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)[1]
    assert set(re.findall(r"`(\w+)`", install)) == set(extras)


# -------------------------------------------------------------------------------------------------------------------- links


def anchors(path):
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        path = (ROOT / page).parent / file if file else ROOT / page
        name = path.resolve().relative_to(ROOT).as_posix()
        if name in GENERATED and not (ROOT / "results" / "laptop" / "manifest.json").is_file():
            continue
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), target


def test_files_that_are_named_exist():
    """Catches: `docs/....md` in code or text that was never written."""
    for path in (*(ROOT / "src").rglob("*.py"), *(ROOT / page for page in PAGES)):
        for name in re.findall(r"\b((?:docs|tests|experiments)/[\w./]+\.(?:md|py|toml|png))\b", path.read_text()):
            assert (ROOT / name).exists() or name in (*GENERATED, "tests/mutations.md"), f"{path.name}: {name}"


# --------------------------------------------------------------------------------------------------------- what they say is so


def test_the_table_has_its_place():
    readme = (ROOT / "README.md").read_text()
    assert readme.count("<!-- table:laptop -->\n") == readme.count("<!-- /table:laptop -->\n") == 1


def test_the_demo_is_what_the_readme_says():
    options = presets.PRESETS["quickstart"][1]
    demo = (ROOT / "README.md").read_text().split("## Install")[0]
    assert f"{options['stop_at_score']} or more" in " ".join(demo.split())
    assert f"{options['total_agent_steps']:,} agent steps" in " ".join(demo.split())
    assert f"runs/{options['name']}/{options['env'].replace('/', '-')}/seed0" in demo


def test_every_preset_is_in_the_guide():
    guide = (ROOT / "docs" / "guide.md").read_text()
    assert [name for name in presets.PRESETS if f"`{name}`" not in guide] == []


def test_every_exit_code_is_in_the_guide():
    from dae import errors

    table = (ROOT / "docs" / "guide.md").read_text().split("## Exit codes")[1].split("##")[0]
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)}
    kinds = {kind.exit_code for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.DaeError)}
    assert listed == kinds | {0} | {128 + number for number in (1, 2, 15)}, "and the signals': SIGHUP, SIGINT, SIGTERM"


def test_every_metric_is_on_its_page():
    """And none that is not logged."""
    source = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    logged = set(re.findall(r"\"((?:train|dae|rollout|eval|time)/[a-z_]+)\"", source))
    logged |= {f"train/loss_{name}" for name in ("dae", "prior", "rec", "temperature")}
    listed = set(re.findall(r"^\| `([a-z]+/[a-z_]+)` \|", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE))
    assert listed == logged


def test_changes_say_of_which_kind_they_are():
    text = (ROOT / "CHANGELOG.md").read_text()
    entries = re.findall(r"^- (.*)$", text, re.MULTILINE)
    assert entries
    assert [e for e in entries if not e.startswith(("**[results]** ", "**[no-results-change]** "))] == []
