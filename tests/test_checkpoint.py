"""Files: whole or refused, and never code."""

import ast
import errno
import json
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

import dae
from conftest import VECTOR, tiny_agent, tiny_config
from dae.errors import ConfigError, Diverged, FileError, ResourceError
from dae.run.checkpoint import Blueprint, export, latest_checkpoint, load_acting, load_checkpoint, save_checkpoint


def blueprint(**changes):
    return Blueprint(tiny_config(seed=3), VECTOR, 3, (-1.0, 0.0, 1.0), **({"env_id": "X-v0", "env_kwargs": {"a": 1}} | changes))


@pytest.fixture
def saved(tmp_path):
    return save_checkpoint(
        tmp_path / "checkpoints" / "12", tiny_agent().state_dict(), blueprint(agent_steps=12, updates=2), {"more": 1}
    )


def test_what_is_saved_is_loaded(saved):
    tensors, loaded, data = load_checkpoint(saved)
    expected = tiny_agent().state_dict()
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[k], v) for k, v in expected.items())
    assert loaded == blueprint(agent_steps=12, updates=2)
    assert data["more"] == 1


@pytest.mark.parametrize("name", ["agent.safetensors", "checkpoint.json", "manifest.json"])
@pytest.mark.parametrize("harm", ["flip", "truncate", "remove"])
def test_damage_is_noticed_and_named(saved, name, harm):
    """Catches: a flipped bit that safetensors itself would accept, and a traceback."""
    path = saved / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    if harm == "remove":
        path.unlink()
    else:
        path.write_bytes(bytes(content) if harm == "flip" else bytes(content[: len(content) // 2]))
    with pytest.raises(FileError) as caught:
        load_checkpoint(saved)
    assert str(saved) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_newest_checkpoint_is_found(saved):
    """Catches: an order by letters (9 after 12), and a half-written folder that is taken for one."""
    run = saved.parent.parent
    save_checkpoint(saved.parent / "9", {}, blueprint(), {})
    (saved.parent / ".13.partial").mkdir()
    (saved.parent / "14").mkdir()
    assert latest_checkpoint(run) == latest_checkpoint(saved) == saved


def test_saving_again_replaces(saved):
    save_checkpoint(saved, {"x": torch.ones(2)}, blueprint(), {})
    assert load_checkpoint(saved)[0].keys() == {"x"}


def test_what_is_no_checkpoint_is_not_replaced(saved, tmp_path, monkeypatch):
    """Catches: somebody's folder deleted by `agent.save(PATH)`, and a traceback."""
    notes, empty, link = tmp_path / "notes", tmp_path / "empty", tmp_path / "link"
    notes.mkdir(), empty.mkdir()
    (notes / "thesis.tex").write_text("years of work")
    link.symlink_to(saved)
    monkeypatch.chdir(notes)
    for folder in (notes, notes / "thesis.tex", link, saved.parent, Path(), Path(".."), Path("/"), saved / ".."):
        with pytest.raises(ConfigError) as caught:
            save_checkpoint(folder, {"x": torch.ones(2)}, blueprint(), {})
        assert "\n" not in str(caught.value)
    assert (notes / "thesis.tex").read_text() == "years of work"
    (saved / "notes.txt").write_text("which run this was")
    with pytest.raises(ConfigError, match="no checkpoint: it is not replaced"):
        save_checkpoint(saved, {"x": torch.ones(2)}, blueprint(), {})
    for folder in (notes / "thesis.tex" / "agent", Path("/proc/nowhere/agent")):
        with pytest.raises(FileError, match="can't be written: "):
            save_checkpoint(folder, {"x": torch.ones(2)}, blueprint(), {})
    assert save_checkpoint(empty, {"x": torch.ones(2)}, blueprint(), {}) == empty
    assert load_checkpoint(empty)[0].keys() == {"x"}


@pytest.mark.parametrize(
    "error", [SafetensorError("I/O error: No space left on device"), OSError(errno.ENOSPC, "No space left on device")]
)
def test_a_save_that_fails_leaves_what_was_there(saved, error, monkeypatch):
    """Catches: a torn folder that stays, the old checkpoint deleted first, two kinds of traceback for a full disk."""

    def save(tensors, path):
        path.write_bytes(b"half")
        raise error

    monkeypatch.setattr("dae.run.checkpoint.save_file", save)
    for folder in (saved, saved.parent / "13"):
        with pytest.raises(ResourceError, match=rf"{folder}: can't be written: .*No space left on device$"):
            save_checkpoint(folder, {"x": torch.ones(2)}, blueprint(), {})
    assert list(saved.parent.iterdir()) == [saved]
    assert load_checkpoint(saved)[1] == blueprint(agent_steps=12, updates=2)


def test_numbers_that_are_not_finite_are_not_kept(saved):
    for value in (float("nan"), float("inf")):
        with pytest.raises(Diverged, match="'x' is not finite"):
            save_checkpoint(saved, {"x": torch.tensor([1.0, value])}, blueprint(), {})
    assert load_checkpoint(saved)


def test_what_is_missing_is_named(saved):
    """Catches: "not a run folder" of a run folder whose only checkpoint is torn."""
    run = saved.parent.parent
    with pytest.raises(FileError, match=f"give the run folder that it is in, {run}, or"):
        latest_checkpoint(saved.parent)
    (saved / "manifest.json").unlink()
    with pytest.raises(FileError, match=rf"^{saved}/manifest\.json: is missing"):
        latest_checkpoint(run)
    with pytest.raises(FileError, match=rf"^{saved}/manifest\.json: No such file"):
        load_checkpoint(latest_checkpoint(saved))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": 99}, "format 99"),
        ({"config": {"no_such_option": 1}}, "no_such_option"),
        ({"config": {"core": "gru"}}, "core=gru"),
        ({"env_id": "os:system"}, "no plain Gymnasium id"),
        ({"observation": {"obs": {"shape": [3], "dtype": "object", "scale": 1}}}, "not a description"),
        ({"num_actions": None}, "not a description"),
    ],
)
def test_a_description_that_makes_no_sense_is_refused(change, words):
    from dae.errors import DaeError

    with pytest.raises(DaeError, match=words):
        Blueprint.from_json(blueprint().to_json() | change, "here")


def test_an_export_holds_only_what_acting_needs(tmp_path):
    agent = tiny_agent()
    path = export(tmp_path / "a.safetensors", agent.state_dict(), blueprint())
    weights, loaded = load_acting(path)
    assert loaded == blueprint()
    assert {name.split(".")[0] for name in weights} == {"encoder", "prev_action", "prev_reward", "core", "adv"}
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, agent.net.state_dict()[name], atol=1e-3, rtol=1e-3)
        assert tensor.dtype == torch.float32


def test_other_files_are_no_agents(tmp_path):
    (tmp_path / "text").write_text("hello")
    save_file({"x": torch.ones(1)}, tmp_path / "plain.safetensors")
    save_file({"x": torch.ones(1)}, tmp_path / "odd.safetensors", metadata={"dae": "{"})
    for name, words in {
        "none": "no such file",
        "text": "not a safetensors",
        "plain.safetensors": "not an exported",
        "odd.safetensors": "damaged",
    }.items():
        with pytest.raises(FileError, match=words):
            load_acting(tmp_path / name)


def test_nothing_that_is_read_can_run():
    """Catches: pickle, eval and their kin anywhere in the package, and imports by name but for the two that the user asks for."""
    allowed = {
        ("envs/gymnasium.py", "import_module"),
        ("envs/minatar.py", "import_module"),
        ("__init__.py", "import_module"),
        ("study/outsider.py", "import_module"),
    }
    root = Path(dae.__file__).parent
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node, "attr", getattr(node, "id", "")) if isinstance(node, ast.Attribute | ast.Name) else ""
            if isinstance(node, ast.Import | ast.ImportFrom):
                modules = {getattr(node, "module", None) or ""} | {alias.name for alias in node.names}
                assert not modules & {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}, path
            where = str(path.relative_to(root))
            assert name not in {"eval", "exec", "__import__"}, path
            assert not (name == "load" and getattr(getattr(node, "value", None), "id", "") in {"torch", "np", "yaml"}), path
            assert name != "import_module" or (where, name) in allowed, path


def test_the_manifest_tells_sizes(saved):
    manifest = json.loads((saved / "manifest.json").read_text())
    assert {name: entry["bytes"] for name, entry in manifest.items()} == {name: (saved / name).stat().st_size for name in manifest}
