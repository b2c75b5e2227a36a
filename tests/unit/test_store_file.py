"""`store/file.py`, and what `ExemplarStore` does with it: exact round trips, atomic saving, forgetting in files."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import stat
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_core.embeddings import Embeddings

from langchain_dpicl import ExemplarStore, StoreFileError
from langchain_dpicl.store import file as store_file

TEMPORARY = ".*.tmp"


def leftovers(folder: Path) -> list[Path]:
    return list(folder.glob(TEMPORARY))


def same(one: ExemplarStore, other: ExemplarStore) -> bool:
    rows = np.arange(len(one), dtype=np.int64)
    return (
        len(one) == len(other)
        and one.read(rows) == other.read(rows)
        and list(one.owners) == list(other.owners)
        and one._held.ids.tolist() == other._held.ids.tolist()
        and one._held.owner_of.tolist() == other._held.owner_of.tolist()
        and (one.input_key, one.output_key, one.dimension, one._held.next_id)
        == (other.input_key, other.output_key, other.dimension, other._held.next_id)
        and (not len(one) or (one._held.vectors == other._held.vectors).all())
    )


# -- round trips -------------------------------------------------------------------------------------------------------


def test_a_store_comes_back_exactly(records: Any, store_of: Any, tmp_path: Path) -> None:
    store = store_of(records(5, 3), ids=range(10, 25))
    store.forget("owner-2")
    store.save(tmp_path / "store.npz")
    loaded = ExemplarStore.load(tmp_path / "store.npz", store.embeddings)
    assert same(store, loaded)
    more = [{"input": "more", "output": "x", "owner": "owner-4"}]
    assert loaded.add(more, owner_key="owner") == store.add(more, owner_key="owner") == [25]
    assert same(store, loaded)


def test_every_character_comes_back(embeddings: Embeddings, tmp_path: Path) -> None:
    texts = ["ü☃漢\U0001f600", "lone \ud83d surrogate", "nul \x00", "\u2028\u2029\ufeff", "a" * 100_000]
    store = ExemplarStore.from_texts(
        texts, embeddings, owners=[f"{text[:9]}!" for text in texts], vectors=np.eye(5, dtype=np.float32)
    )
    store.save(tmp_path / "store.npz")
    assert same(store, ExemplarStore.load(tmp_path / "store.npz", embeddings))


@pytest.mark.parametrize("name", ["store", "store.npz", "ström ☃.bin", ".hidden", "with space"])
def test_the_file_has_the_name_that_was_asked_for(name: str, records: Any, store_of: Any, tmp_path: Path) -> None:
    store = store_of(records(2))
    store.save(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert same(store, ExemplarStore.load(str(tmp_path / name), store.embeddings))


def test_the_file_holds_no_pickle_and_is_for_its_owner_alone(records: Any, store_of: Any, tmp_path: Path) -> None:
    path = tmp_path / "store.npz"
    old_mask = os.umask(0)
    try:
        store_of(records(3)).save(path)
    finally:
        os.umask(old_mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with np.load(path, allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    assert set(arrays) >= {"header", "vectors", "ids", "owner_of", "texts"}
    assert not [name for name, array in arrays.items() if array.dtype.hasobject]


def test_saving_twice_replaces_and_remembers_one_path(
    records: Any, store_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = store_of(records(3))
    store.save("store.npz")
    store.save(tmp_path / "store.npz")
    assert len(store._files) == 1
    assert len(list(tmp_path.iterdir())) == 1


# -- files that cannot be read -----------------------------------------------------------------------------------------


@pytest.fixture
def saved(records: Any, store_of: Any, canary: str, tmp_path: Path) -> tuple[ExemplarStore, Path]:
    store = store_of(records(3, secret=canary))
    store.save(tmp_path / "saved.npz")
    return store, tmp_path / "saved.npz"


def refused(path: Path, embeddings: Any, check: Callable[..., None], match: str = "cannot be read") -> None:
    with pytest.raises(StoreFileError, match=match) as caught:
        ExemplarStore.load(path, embeddings)
    check(caught.value)


def test_a_missing_file_is_said_to_be_missing(
    embeddings: Embeddings, tmp_path: Path, canary_free: Callable[..., None]
) -> None:
    refused(tmp_path / "nothing.npz", embeddings, canary_free, "no such file")


def test_a_folder_is_no_store(embeddings: Embeddings, tmp_path: Path, canary_free: Callable[..., None]) -> None:
    refused(tmp_path, embeddings, canary_free)


@pytest.mark.parametrize(
    "kind", ["empty", "text", "pickle", "npy", "another npz", "object array", "zip", "sqlite", "zeros"]
)
def test_foreign_files_are_refused(
    kind: str, canary: str, embeddings: Embeddings, tmp_path: Path, canary_free: Callable[..., None]
) -> None:
    path = tmp_path / "foreign"
    buffer = io.BytesIO()
    match kind:
        case "empty":
            pass
        case "text":
            buffer.write(f"{canary}\n".encode() * 50)
        case "pickle":
            import pickle

            pickle.dump({"secret": canary}, buffer)
        case "npy":
            np.save(buffer, np.arange(5))
        case "another npz":
            np.savez(buffer, header=np.arange(3), secret=np.array([canary]))
        case "object array":
            np.savez(buffer, header=np.array([{"secret": canary}], dtype=object))
        case "zip":
            with zipfile.ZipFile(buffer, "w") as archive:
                archive.writestr("header.npy", canary)
        case "sqlite":
            buffer.write(b"SQLite format 3\x00" + canary.encode())
        case "zeros":
            buffer.write(bytes(5000))
    path.write_bytes(buffer.getvalue())
    refused(path, embeddings, canary_free)


def test_a_file_cut_anywhere_is_refused(saved: Any, tmp_path: Path, canary_free: Callable[..., None]) -> None:
    store, path = saved
    whole = path.read_bytes()
    cut = tmp_path / "cut.npz"
    for size in [*range(0, len(whole), 97), len(whole) - 1, len(whole) - 22]:
        cut.write_bytes(whole[:size])
        refused(cut, store.embeddings, canary_free)


@pytest.mark.slow
def test_a_flipped_bit_anywhere_is_refused_or_harmless(saved: Any, canary_free: Callable[..., None]) -> None:
    """Every second byte of the file, one bit each, and every bit of the places where zip keeps its flags: a typed
    error, or exactly the same store (bits that zip ignores)."""
    store, path = saved
    whole = path.read_bytes()
    flags = [at + 8 for at in range(len(whole) - 4) if whole[at : at + 4] == b"PK\x01\x02"]
    flips = [(place, place * 7 % 8) for place in range(0, len(whole), 2)]
    flips += [(place, bit) for at in flags for place in range(at, at + 4) for bit in range(8)]  # flags and method
    raw: dict[str, int] = {}
    for place, bit in flips:
        broken = bytearray(whole)
        broken[place] ^= 1 << bit
        path.write_bytes(broken)
        try:
            loaded = ExemplarStore.load(path, store.embeddings)
        except StoreFileError as error:
            canary_free(error)
        except Exception as error:
            raw[f"{type(error).__module__}.{type(error).__name__}"] = place
        else:
            assert same(store, loaded), f"byte {place} changed the store unnoticed"
    assert raw == {}, "these errors came out as they were"


def rewrite(path: Path, **changes: Any) -> None:
    """The same file with another header (None removes a key), its zip checksums right."""
    with np.load(path, allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    header = json.loads(arrays["header"].tobytes())
    header = {key: value for key, value in (header | changes).items() if key not in changes or value is not None}
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    with path.open("wb") as file:
        np.savez(file, **arrays)


def test_rewriting_alone_changes_nothing(saved: Any) -> None:
    store, path = saved
    rewrite(path)
    assert same(store, ExemplarStore.load(path, store.embeddings))


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 4},
        {"version": 2},
        {"version": 0},
        {"version": None},
        {"format": "something else"},
        {"sha256": "0" * 64},
        {"sha256": None},
        {"dimension": 7},
        {"dimension": 16},
        {"dimension": "8"},
        {"dimension": None},
        {"next_id": 0},
        {"next_id": -5},
        {"next_id": "many"},
        {"lineage": None},
        {"lineage": "0" * 32},
        {"generation": 7},
        {"edition": "0" * 32},
        {"records": "0" * 64},
        {"budgets": [{"ledger": "l", "url": "u", "name": "n"}]},
        {"releases": ["a head"]},
        {"input_key": 5},
        {"input_key": "renamed"},
        {"output_key": ["a"]},
    ],
    ids=str,
)
def test_another_header_is_refused(changes: dict[str, Any], saved: Any, canary_free: Callable[..., None]) -> None:
    store, path = saved
    rewrite(path, **changes)
    refused(path, store.embeddings, canary_free)


@pytest.mark.parametrize("header", [b"[]", b"null", b"17", b"{", b"\xff\xfe", b"", b'"text"'])
def test_a_header_that_is_no_header_is_refused(header: bytes, saved: Any, canary_free: Callable[..., None]) -> None:
    store, path = saved
    with np.load(path, allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    arrays["header"] = np.frombuffer(header, np.uint8)
    with path.open("wb") as file:
        np.savez(file, **arrays)
    refused(path, store.embeddings, canary_free)


def test_a_missing_array_is_refused(saved: Any, canary_free: Callable[..., None]) -> None:
    store, path = saved
    with np.load(path, allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    for missing in arrays:
        with path.open("wb") as file:
            np.savez(file, **{name: array for name, array in arrays.items() if name != missing})
        refused(path, store.embeddings, canary_free)


# -- saving is atomic --------------------------------------------------------------------------------------------------


def failing_at(number: int, real: Callable[..., Any], error: BaseException) -> Callable[..., Any]:
    """`real`, but its call with this number (from 1) raises."""
    calls = 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            raise error
        return real(*args, **kwargs)

    return wrapped


def half_written(file: Any, **arrays: Any) -> None:
    file.write(b"half of it")
    raise OSError(28, "No space left on device")


def break_step(step: str, patch: pytest.MonkeyPatch, error: BaseException) -> None:
    if step == "open":
        real_open = os.open

        def refuse(path: Any, flags: int, *mode: int, **more: Any) -> int:
            if flags & os.O_CREAT:
                raise error
            return real_open(path, flags, *mode, **more)

        patch.setattr(os, "open", refuse)
    elif step == "write":
        patch.setattr(np, "savez", failing_at(1, np.savez, error))
    elif step == "half a write":
        patch.setattr(np, "savez", half_written)
    elif step == "sync":
        patch.setattr(os, "fsync", failing_at(1, os.fsync, error))
    elif step == "rename":
        patch.setattr(os, "replace", failing_at(1, os.replace, error))


STEPS = ["open", "write", "half a write", "sync", "rename"]


@pytest.mark.parametrize("step", STEPS)
def test_a_fault_while_saving_leaves_the_old_file_and_nothing_else(
    step: str, saved: Any, records: Any, monkeypatch: pytest.MonkeyPatch, canary_free: Callable[..., None]
) -> None:
    store, path = saved
    old = path.read_bytes()
    store.add(records(2), owner_key="owner")
    with monkeypatch.context() as patch:
        break_step(step, patch, OSError(28, "No space left on device"))
        with pytest.raises(StoreFileError, match="No space left") as caught:
            store.save(path)
    canary_free(caught.value, frames=True)
    assert path.read_bytes() == old
    assert leftovers(path.parent) == []
    store.save(path)
    assert same(store, ExemplarStore.load(path, store.embeddings))


@pytest.mark.parametrize("step", ["write", "sync", "rename"])
def test_an_interrupt_while_saving_leaves_the_old_file_and_nothing_else(
    step: str, saved: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A temporary file left behind would keep texts that a later `forget` does not reach."""
    store, path = saved
    old = path.read_bytes()
    with monkeypatch.context() as patch:
        break_step(step, patch, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            store.save(path)
    assert path.read_bytes() == old
    assert leftovers(path.parent) == []


def test_a_fault_after_the_rename_is_not_called_harmless(saved: Any, records: Any, monkeypatch: Any) -> None:
    """When the folder cannot be synced the new file is in place already: the message must not say otherwise."""
    store, path = saved
    store.add(records(2), owner_key="owner")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing_at(2, os.fsync, OSError(5, "Input/output error")))
        with pytest.raises(StoreFileError) as caught:
            store.save(path)
    assert same(store, ExemplarStore.load(path, store.embeddings)), "the file is whole: the new one"
    assert "as it was" not in str(caught.value)


@pytest.mark.parametrize("where", ["no/such/folder/store.npz", "file/store.npz"])
def test_a_path_that_cannot_be_written_is_a_typed_error(
    where: str, saved: Any, tmp_path: Path, canary_free: Callable[..., None]
) -> None:
    store, _ = saved
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StoreFileError) as caught:
        store.save(tmp_path / where)
    canary_free(caught.value, frames=True)
    assert len(store._files) == 1, "a path that was never written is not remembered"


def test_a_full_disk_is_a_typed_error(saved: Any, canary_free: Callable[..., None]) -> None:
    store, _ = saved
    with pytest.raises(StoreFileError) as caught:
        store.save("/proc/store.npz")  # a folder in which nobody can create a file
    canary_free(caught.value, frames=True)


SAVER = """
import sys
import numpy as np
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_dpicl import ExemplarStore

path = sys.argv[1]
rows = 40_000
store = ExemplarStore.load(path, DeterministicFakeEmbedding(size=8))
store.add(
    [{"input": f"secret text {i} " + "x" * 1400, "output": "x", "owner": "many"} for i in range(rows)],
    vectors=np.ones((rows, 8), np.float32))
print("ready", flush=True)
for _ in range(1000):
    store.save(path)
"""


@pytest.mark.parametrize("moments", [(0, 2), pytest.param((0, 1, 3), marks=pytest.mark.slow)])
def test_a_process_killed_while_saving_leaves_a_whole_file(
    moments: tuple[int, ...], saved: Any, tmp_path: Path, embeddings: Embeddings
) -> None:
    """SIGKILL at different moments of saving 60 MB: the file is the old or the new one, never half of one."""
    store, path = saved
    old = path.read_bytes()
    seen_temporary = 0
    for moment in moments:
        path.write_bytes(old)
        process = subprocess.Popen([sys.executable, "-c", SAVER, str(path)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        deadline = time.monotonic() + 20
        while not leftovers(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.0005)
        time.sleep(0.02 * moment)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        loaded = ExemplarStore.load(path, embeddings)
        assert len(loaded) == len(store) + 40_000 or same(store, loaded)
        for rest in leftovers(tmp_path):
            seen_temporary += 1
            assert stat.S_IMODE(rest.stat().st_mode) == 0o600
            rest.unlink()
    assert seen_temporary, "at least one kill must have hit the middle of a save, or this proves nothing"


# -- forgetting in files -----------------------------------------------------------------------------------------------


@pytest.fixture
def with_secret(records: Any, store_of: Any, canary: str) -> ExemplarStore:
    store: ExemplarStore = store_of(records(4, 2))
    store.add([{"input": f"{canary} {i}", "output": canary, "owner": canary} for i in range(3)], owner_key="owner")
    return store


def test_forgetting_rewrites_every_file_and_overwrites_the_old_content(
    with_secret: ExemplarStore, canary: str, tmp_path: Path
) -> None:
    paths = [tmp_path / "one.npz", tmp_path / "two.npz"]
    vector = with_secret._held.vectors[-1].tobytes()
    for i, path in enumerate(paths):
        with_secret.save(path)
        assert canary.encode() in path.read_bytes()
        assert vector in path.read_bytes()
        os.link(path, tmp_path / f"old-{i}")  # the old file under another name: its very bytes must be gone
    with_secret.forget(canary)
    for i, path in enumerate(paths):
        assert canary.encode() not in path.read_bytes()
        assert vector not in path.read_bytes()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert same(with_secret, ExemplarStore.load(path, with_secret.embeddings))
        old = (tmp_path / f"old-{i}").read_bytes()
        assert old == bytes(len(old))
    assert leftovers(tmp_path) == []


def test_a_loaded_store_forgets_in_its_file_too(with_secret: ExemplarStore, canary: str, tmp_path: Path) -> None:
    path = tmp_path / "store.npz"
    with_secret.save(path)
    loaded = ExemplarStore.load(path, with_secret.embeddings)
    loaded.save(tmp_path / "copy.npz")
    assert loaded.forget(canary) == 3
    for name in ("store.npz", "copy.npz"):
        assert canary.encode() not in (tmp_path / name).read_bytes()
    assert canary not in ExemplarStore.load(path, with_secret.embeddings).owners


def test_forgetting_passes_over_a_file_that_is_gone(with_secret: ExemplarStore, canary: str, tmp_path: Path) -> None:
    with_secret.save(tmp_path / "store.npz")
    (tmp_path / "store.npz").unlink()
    assert with_secret.forget(canary) == 3
    assert list(tmp_path.iterdir()) == []


def test_forgetting_reaches_the_file_behind_a_link(with_secret: ExemplarStore, canary: str, tmp_path: Path) -> None:
    """current.npz -> v1.npz: saving through the link and forgetting must leave nothing in v1.npz."""
    real, link = tmp_path / "v1.npz", tmp_path / "current.npz"
    with_secret.save(real)
    link.symlink_to(real)
    loaded = ExemplarStore.load(link, with_secret.embeddings)
    loaded.save(link)
    loaded.forget(canary)
    assert canary.encode() not in link.read_bytes()
    assert canary.encode() not in real.read_bytes()


@pytest.mark.parametrize("step", STEPS)
def test_forgetting_that_could_not_reach_a_file_says_so_and_can_be_repeated(
    step: str, with_secret: ExemplarStore, canary: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store.npz"
    with_secret.save(path)
    with monkeypatch.context() as patch:
        break_step(step, patch, OSError(28, "No space left on device"))
        with pytest.raises(StoreFileError):
            with_secret.forget(canary)
    ExemplarStore.load(path, with_secret.embeddings)  # whole, whichever it is
    assert leftovers(tmp_path) == []
    os.link(path, tmp_path / "old")
    with_secret.forget(canary)  # the caller's obvious next step
    assert canary.encode() not in path.read_bytes()
    assert canary.encode() not in (tmp_path / "old").read_bytes()
    assert canary not in with_secret.owners


def test_faults_leave_no_open_file(with_secret: ExemplarStore, canary: str, tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "store.npz"
    with_secret.save(path)
    before = set(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        break_step("write", patch, OSError(28, "No space left on device"))
        with pytest.raises(StoreFileError):
            with_secret.forget(canary)
    opened = []
    for number in set(os.listdir("/proc/self/fd")) - before:
        with contextlib.suppress(OSError):
            opened.append(os.readlink(f"/proc/self/fd/{number}"))
    assert [name for name in opened if "store.npz" in name] == []


def test_what_a_killed_save_left_behind_is_cleared_by_forgetting(
    with_secret: ExemplarStore, canary: str, tmp_path: Path
) -> None:
    """A process killed while it saved leaves a temporary file beside the target, full of texts."""
    path = tmp_path / "store.npz"
    with_secret.save(path)
    stray = path.with_name(f".{path.name}.{'0' * 16}.tmp")
    stray.write_bytes(path.read_bytes())
    with_secret.forget(canary)
    assert not [p.name for p in tmp_path.iterdir() if canary.encode() in p.read_bytes()]


def test_the_writer_itself_has_no_way_to_pickle() -> None:
    source = Path(store_file.__file__).read_text()
    assert "allow_pickle=False" in source
    assert "allow_pickle=True" not in source
