"""Trials of one host wait until their predicted memory fits on a device beside the others."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from perfguard.device_room import DeviceRoom
from tests.warm import processes


def room_in(folder: Path, **options: float) -> DeviceRoom:
    return DeviceRoom(name="Toy 0", capacity_bytes=100, folder=folder, poll_s=0.01, **options)


def test_what_fits_does_not_wait(tmp_path: Path) -> None:
    room = room_in(tmp_path)
    lines: list[str] = []
    both = [room.reserve(40, on_wait=lines.append), room.reserve(60, on_wait=lines.append)]
    assert room.num_reserved() == 2
    assert not lines
    for one in both:
        one.release()
    assert room.num_reserved() == 0


def test_in_an_empty_room_everything_fits(tmp_path: Path) -> None:
    room_in(tmp_path).reserve(1000).release()


def test_what_does_not_fit_waits_for_a_release_and_says_so(tmp_path: Path) -> None:
    room = room_in(tmp_path)
    first = room.reserve(60)
    is_waiting = threading.Event()
    lines: list[str] = []

    def note(line: str) -> None:
        lines.append(line)
        is_waiting.set()

    second = threading.Thread(target=lambda: room.reserve(50, on_wait=note).release())
    second.start()
    assert is_waiting.wait(30)
    assert room.num_reserved() == 1
    first.release()
    second.join(30)
    assert not second.is_alive()
    assert len(lines) == 1
    assert "1 running trials have reserved" in lines[0]


def test_a_wait_has_a_limit(tmp_path: Path) -> None:
    room = room_in(tmp_path, most_wait_s=0.02)
    lines: list[str] = []
    held = room.reserve(60)
    room.reserve(50, on_wait=lines.append).release()
    held.release()
    assert "starts all the same" in lines[-1]


def _hold(folder: Path, started: threading.Event) -> None:
    reservation = room_in(folder).reserve(60)
    started.set()
    threading.Event().wait(60)
    reservation.release()


def test_what_a_killed_process_has_reserved_is_free(tmp_path: Path) -> None:
    started = processes().Event()
    child = processes().Process(target=_hold, args=(tmp_path, started))
    child.start()
    assert started.wait(60)
    room = room_in(tmp_path)
    assert room.num_reserved() == 1
    child.kill()
    child.join()
    assert room.num_reserved() == 0


def test_a_trial_knows_that_it_has_had_neighbours(tmp_path: Path) -> None:
    room = room_in(tmp_path)
    first = room.reserve(10)
    assert not first.look_for_neighbours()
    second = room.reserve(10)
    assert first.look_for_neighbours()
    second.release()
    assert first.look_for_neighbours(), "it was slowed for a part of its time"
    first.release()
    first.release()


def test_a_folder_that_is_a_link_is_not_trusted(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "rooms").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="not a folder of this user"):
        room_in(tmp_path / "rooms").reserve(1)
