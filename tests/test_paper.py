"""PAPER.md: everything that it names exists, its numbers are in force, and the margin tags of the code are in the paper's order."""

import ast
import importlib
import inspect
import json
import re
from pathlib import Path

import pytest

from dae.config import OPTIONS, Config, Schedule
from dae.describe import ATARI_SPEC, component_sizes
from dae.presets import PRESETS

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "dae"
PAPER = (ROOT / "PAPER.md").read_text()
FIRST, LAST = 14, 33
"""Lines of Algorithm 1 that are an update."""
IN_THE_LOOP = {14, 15}
"""They are in train.py: an update is given its window and where the schedules are."""
CONTROL_FLOW = {23, 25}
"""`else` and `end if`."""


def tables(text):
    """Every Markdown table, as a list of {column: cell}."""
    found, block = [], []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            block.append([cell.strip() for cell in line.strip().strip("|").split("|")])
        elif block:
            head, _, *rows = block
            assert all(len(row) == len(head) for row in rows), (
                f"a row of the table {head} has too few or too many cells: a | in it?"
            )
            found.append([dict(zip(head, row, strict=True)) for row in rows])
            block = []
    return found


def code(text):
    """What stands in backticks."""
    return re.findall(r"`([^`]+)`", text)


def deviations():
    """{number: {"title": ..., "Paper": ..., "Here": ..., ...}}"""
    found = {}
    for section in re.split(r"^### (?=D\d)", PAPER, flags=re.MULTILINE)[1:]:
        title, _, body = section.partition("\n")
        parts = dict(re.findall(r"^- (\w+): (.*?)(?=^- \w+: |\Z)", body, flags=re.MULTILINE | re.DOTALL))
        number, _, words = title.partition(" ")
        found[int(number[1:])] = {"title": words, **parts}
    return found


TARGETS = sorted(set(re.findall(r"`((?:\w+/)*\w+\.py):([A-Za-z_][\w.]*)`", PAPER)))
TESTS = sorted(set(re.findall(r"`(tests/\w+\.py)::(\w+)`", PAPER)))
OPTION_ROWS = [row for table in tables(PAPER) for row in table if row.get("Option")]


# ------------------------------------------------------------------------------------------------------------------- targets


def attributes(kind):
    """Of a class and its bases: what it has, declares, and sets on itself anywhere."""
    found = set(dir(kind))
    for base in kind.__mro__[:-1]:
        found |= set(vars(base).get("__annotations__", {}))
        if base.__module__.startswith("dae."):
            found |= set(re.findall(r"\bself\.(\w+)(?:, self\.\w+)*\s*(?:=|:|,)", inspect.getsource(base)))
    return found


@pytest.mark.parametrize(("path", "name"), TARGETS, ids=lambda x: x)
def test_the_code_that_the_page_names_exists(path, name):
    found = importlib.import_module("dae." + path.removesuffix(".py").replace("/", "."))
    *owners, last = name.split(".")
    for owner in owners:
        found = getattr(found, owner)
    assert last in attributes(found) if owners else hasattr(found, last)


@pytest.mark.parametrize(("path", "name"), TESTS, ids=lambda x: x)
def test_the_tests_that_the_page_names_exist(path, name):
    tree = ast.parse((ROOT / path).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_the_page_names_no_code_in_another_way():
    """Catches: a path with a typo in it, which the two tests above would not see."""
    known = {f"{path}:{name}" for path, name in TARGETS} | {f"{path}::{name}" for path, name in TESTS}
    files = {"objective.py:dae_residual", "agent.py:Agent.update", "src/dae/objective.py", "src/dae/agent.py"}
    stray = [word for word in code(PAPER) if ".py" in word and word not in known | files]
    assert all((ROOT / word).is_file() for word in stray), stray


# --------------------------------------------------------------------------------------- equations, Algorithm 1, margin tags


def test_every_equation_and_every_line_has_a_row():
    """Eq. 1 to 8, and lines 1 to 35 of Algorithm 1, each once and in order."""
    equations = [int(row["Eq."]) for table in tables(PAPER) for row in table if "Eq." in row]
    lines = [int(row["Line"]) for table in tables(PAPER) for row in table if "Line" in row]
    assert equations == list(range(1, 9))
    assert lines == list(range(1, 36))


def test_every_line_that_computes_has_code():
    rows = {int(row["Line"]): row for table in tables(PAPER) for row in table if "Line" in row}
    assert {line for line, row in rows.items() if not code(row["Code"])} == {25, 34, 35}
    for line in IN_THE_LOOP:
        assert all(target.startswith(("train.py", "replay.py")) for target in code(rows[line]["Code"]))


def tags(source):
    """(number of the source line, lines of Algorithm 1) for each margin tag."""
    found = []
    for number, line in enumerate(source.splitlines(), 1):
        tag = re.search(r"# l\.(\d+(?:[-, ]+\d+)*)", line)
        if tag:
            found.append((number, [int(n) for n in re.findall(r"\d+", tag[1])]))
    return found


def update_part():
    """`Agent.losses` and `Agent.update`, as text."""
    from dae.agent import Agent

    return [inspect.getsource(method) for method in (Agent.losses, Agent.update)]


def test_margin_tags_rise():
    """Catches: code that leaves the paper's order, and tags that were not moved along."""
    order = [lines[-1] for _, lines in tags("\n".join(update_part()))]
    assert order == sorted(set(order))
    assert min(order) >= FIRST and max(order) == LAST


def test_every_line_of_an_update_is_tagged():
    tagged = {line for _, lines in tags("\n".join(update_part())) for line in lines}
    assert tagged - IN_THE_LOOP == set(range(FIRST, LAST + 1)) - IN_THE_LOOP - CONTROL_FLOW


def test_tags_elsewhere_are_lines_of_algorithm_1():
    """And name the same functions as the page does."""
    from dae import objective

    rows = {int(row["Line"]): row["Code"] for table in tables(PAPER) for row in table if "Line" in row}
    for name, function in inspect.getmembers(objective, inspect.isfunction):
        words = re.search(r"Alg\. 1 l\.(\d+(?:, \d+)*)|^\s*.*App\. B\.1; Alg\. 1 l\.(\d+)", function.__doc__ or "")
        for line in re.findall(r"\d+", (words[1] or words[2]) if words else ""):
            assert f"`objective.py:{name}`" in rows[int(line)], f"l.{line} and {name}"


def test_the_whole_algorithm_reads_in_400_lines():
    """objective.py and the update, comments and all."""
    length = len((SRC / "objective.py").read_text().splitlines()) + sum(len(part.splitlines()) for part in update_part())
    assert length < 400


# -------------------------------------------------------------------------------------------------------------------- tables


def in_force(option):
    return next(getattr(section, option) for section in vars(Config()).values() if hasattr(section, option))


@pytest.mark.parametrize("row", OPTION_ROWS, ids=lambda row: row["Parameter"])
def test_the_defaults_of_the_page_are_the_defaults(row):
    options, defaults = code(row["Option"]), code(row["Default"])
    if row["Option"].startswith("none"):
        return
    assert len(options) == len(defaults) == 1
    value = in_force(options[0])
    assert value == (Schedule.parse(defaults[0]) if isinstance(value, Schedule) else json.loads(defaults[0]))


def test_every_default_row_is_checked():
    """Catches: a table whose column has another name, so that nothing above looks at it."""
    assert len(OPTION_ROWS) >= 27


def test_the_parameters_of_the_page_are_counted():
    rows = [row for table in tables(PAPER) for row in table if "Parameters" in row]
    for row in rows:
        sizes = component_sizes(Config().override(width=float(row["m"])), ATARI_SPEC, 18, (-1.0, 0.0, 1.0))
        count = int(row["Parameters"].replace(",", ""))
        assert sizes[row["Component"]] == count
        assert round(count / 1e6) == int(row["Paper"])
    assert {row["Component"] for row in rows} == {"encoder", "core", "transition model", "value heads"}


# ---------------------------------------------------------------------------------------------------------------- deviations


def test_deviations_are_numbered_through_and_complete():
    found = deviations()
    assert list(found) == list(range(1, len(found) + 1))
    for number, parts in found.items():
        assert list(parts) == ["title", "Paper", "Here", "Reason", "Switch", "Code", "Test"], f"D{number}"
        assert code(parts["Code"]), f"D{number}"
        assert code(parts["Test"]) or parts["Test"].strip() == "none yet", f"D{number}"


def test_every_deviation_that_is_mentioned_exists():
    known = deviations()
    for path in (*SRC.rglob("*.py"), *ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("tests/*.py")):
        text = path.read_text()
        listed = re.findall(r"PAPER\.md[`)\]\w/.(]* (D\d+(?:(?:,| and) D\d+)*)", text)
        for number in re.findall(r"D(\d+)", " ".join(listed)):
            assert int(number) in known, f"{path.relative_to(ROOT)}: D{number}"
    for number in re.findall(r"\bD(\d+)\b", PAPER):
        assert int(number) in known, f"PAPER.md: D{number}"


@pytest.mark.parametrize("number", deviations())
def test_switches_are_options_or_presets(number):
    words = [word.split("=")[0] for word in code(deviations()[number]["Switch"])]
    assert [word for word in words if word not in OPTIONS and word not in PRESETS] == []


def test_every_option_of_the_algorithm_is_on_the_page():
    """Catches: a new option that nobody has held against the paper. (Where the run is written, and how, is no matter of it.)"""
    named = {word.split("=")[0] for word in code(PAPER)}
    cfg = Config()
    options = {name for part in (cfg.environment, cfg.network, cfg.objective, cfg.learning, cfg.acting) for name in vars(part)}
    assert sorted(options - named) == []


def test_every_preset_of_an_experiment_is_on_the_page():
    named = set(code(PAPER))
    assert {name for name in PRESETS if name not in named} <= {"paper", "laptop", "quickstart"}
