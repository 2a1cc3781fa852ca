"""What was in the replay comes back from disk, whatever was overwritten in between; and nothing damaged does."""

import copy
import json

import numpy as np
import pytest
import torch

import dae.run.chunks
from conftest import collected
from dae.errors import FileError
from dae.replay import Replay
from dae.run.chunks import Chunk, ReplayStore


def empty_like(replay, envs):
    return Replay(
        envs.spec, replay.num_envs, replay.slots * replay.num_envs, replay.core_in.shape[-1], replay.frame_stack
    )  # fmt: skip


def same(one, other):
    assert (one.count == other.count).all()
    for name, ring in one.rings().items():
        assert torch.equal(ring, other.rings()[name]), name


def loaded(store, made):
    """Through JSON, as a checkpoint keeps it."""
    chunks = [Chunk.from_json(json.loads(json.dumps(c.to_json())), "here") for c in store.chunks]
    replay = empty_like(made.replay, made.envs)
    ReplayStore(store.folder, chunks).load(replay)
    return replay


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
@pytest.mark.parametrize("every", [1, 7, 40, 200])
def test_saved_now_and_then_it_comes_back_whole(mode, every, tmp_path, monkeypatch):
    """Catches: slots that are lost between two saves, environments with heads of their own mixed up, a ring that wrapped more than
    once since the last save, and chunks that are kept for ever."""
    monkeypatch.setattr(dae.run.chunks, "CHUNK_BYTES", 4000)
    made, store = collected(mode, 1, slots=30), ReplayStore(tmp_path / "replay")
    for step in range(1, 201):
        made.collector.step(0.5)
        if step % every == 0:
            store.save(made.replay)
            store.delete_all_but(store.chunks)
    assert made.replay.count.min() > 3 * made.replay.slots
    store.save(made.replay)
    store.delete_all_but(store.chunks)
    same(made.replay, loaded(store, made))
    kept = {path.name for path in store.folder.iterdir()}
    assert kept == {chunk.name for chunk in store.chunks}
    stored = sum(last - first for c in store.chunks for first, last in zip(c.first, c.last, strict=True))
    assert stored < 3 * 30 + 3 * 30 + 3 * every, "the rings, and no more than one chunk's worth of what was overwritten"


def test_a_save_writes_only_what_is_new(tmp_path):
    made, store = collected("next_step", 20, slots=100), ReplayStore(tmp_path)
    first = store.save(made.replay)
    for _ in range(5):
        made.collector.step(0.5)
    second = store.save(made.replay)
    assert second[: len(first)] == first
    (new,) = second[len(first) :]
    assert sum(new.last) - sum(new.first) == 15
    assert store.save(made.replay) == second, "nothing new, nothing written"


def test_older_checkpoints_stay_whole(tmp_path):
    """Catches: a chunk that an older checkpoint still needs and that is deleted or written over."""
    made, store = collected("next_step", 20, slots=30), ReplayStore(tmp_path)
    before, chunks = copy.deepcopy(made.replay), store.save(made.replay)
    for _ in range(40):
        made.collector.step(0.5)
    now = store.save(made.replay)
    store.delete_all_but([*chunks, *now])
    old = empty_like(made.replay, made.envs)
    ReplayStore(tmp_path, chunks).load(old)
    same(before, old)
    same(made.replay, loaded(store, made))


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "swap"])
def test_damage_is_refused_by_name(damage, tmp_path):
    made, store = collected("next_step", 20, slots=30), ReplayStore(tmp_path)
    store.save(made.replay)
    for _ in range(5):
        made.collector.step(0.5)
    store.save(made.replay)
    one, two = (tmp_path / chunk.name for chunk in store.chunks)
    data = bytearray(one.read_bytes())
    if damage == "flip":
        data[-3] ^= 1
    one.write_bytes({"flip": data, "cut": data[:-8], "gone": b"", "swap": two.read_bytes()}[damage])
    if damage == "gone":
        one.unlink()
    with pytest.raises(FileError, match=f"{one.name}.*missing or damaged"):
        loaded(store, made)


@pytest.mark.parametrize(
    "data",
    [
        {"name": "../x", "sha256": "", "first": [0], "last": [1]},
        {"name": "x"},
        5,
        {"name": "x", "sha256": "", "first": [0], "last": []},
    ],
)
def test_a_list_of_chunks_that_is_none(data):
    with pytest.raises(FileError):
        Chunk.from_json(data, "checkpoint.json")


def test_of_another_replay(tmp_path):
    made, store = collected("next_step", 20, slots=30), ReplayStore(tmp_path)
    store.save(made.replay)
    other = Replay(made.envs.spec, 3, 90, 5, 1)
    with pytest.raises(FileError, match="core_in is of another shape"):
        ReplayStore(tmp_path, store.chunks).load(other)
    with pytest.raises(FileError, match="of 3 environments, not of 2"):
        ReplayStore(tmp_path, store.chunks).load(Replay(made.envs.spec, 2, 60, 5, 1))
    assert np.all(other.count == 0)
