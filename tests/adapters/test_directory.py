from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from lora_serve.adapters.checkpoint import read_adapter
from lora_serve.adapters.directory import open_directory
from lora_serve.errors import AdapterError, AdapterFormatError
from tests.adapters.conftest import Shapes
from tests.fakes.adapter_files import lora_tensors, write_adapter

FILES = ("adapter_config.json", "adapter_model.safetensors")
SECRET = b'"the words of another"'


@pytest.fixture
def roots(tmp_path: Path) -> Path:
    return tmp_path / "roots"


@pytest.fixture
def adapter(roots: Path, lora_modules: Shapes) -> Path:
    return Path(write_adapter(roots / "a" / "adapter", lora_tensors(lora_modules)))


def read_file(directory: Path, name: str, *roots: Path) -> bytes:
    with (
        open_directory(str(directory), [str(root) for root in roots]) as opened,
        opened.open_file(name) as file,
    ):
        return file.read()


@pytest.mark.parametrize("name", FILES)
def test_a_linked_file_does_not_lead_out_of_the_roots(
    tmp_path: Path, roots: Path, adapter: Path, name: str, lora_modules: Shapes
) -> None:
    (adapter / name).rename(tmp_path / "outside")
    (adapter / name).symlink_to(tmp_path / "outside")
    with pytest.raises(AdapterError, match=r"does not lie below --lora-allowed-roots \(/.*roots\)"):
        read_adapter(
            str(adapter), lora_modules=lora_modules, max_lora_rank=8, allowed_roots=[str(roots)]
        )
    read_adapter(str(adapter), lora_modules=lora_modules, max_lora_rank=8)


@pytest.mark.parametrize("is_absolute", [True, False])
def test_a_linked_file_may_lead_elsewhere_below_the_roots(
    roots: Path, adapter: Path, is_absolute: bool
) -> None:
    (roots / "shared").mkdir()
    (roots / "shared" / "config").write_text("{}")
    (adapter / FILES[0]).unlink()
    target = roots / "shared" / "config"
    (adapter / FILES[0]).symlink_to(target if is_absolute else Path("../../shared/config"))
    assert read_file(adapter, FILES[0], roots) == b"{}"


def test_of_several_roots_each_is_good(tmp_path: Path, roots: Path, adapter: Path) -> None:
    (tmp_path / "other").mkdir()
    assert read_file(adapter, FILES[0], tmp_path / "other", roots)


def test_a_root_may_be_the_adapter_itself(adapter: Path) -> None:
    assert read_file(adapter, FILES[0], adapter)


def test_both_files_come_from_one_directory_whatever_its_name_means_meanwhile(
    tmp_path: Path, adapter: Path
) -> None:
    latest = tmp_path / "latest"
    latest.symlink_to(adapter)
    with open_directory(str(latest)) as opened:
        latest.unlink()
        latest.symlink_to(tmp_path)
        with opened.open_file(FILES[1]) as file:
            assert file.read() == (adapter / FILES[1]).read_bytes()


def make_socket(path: Path) -> None:
    short = f"/proc/self/cwd/{path.name}"  # a socket's path is bounded
    before = Path.cwd()
    os.chdir(path.parent)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(short)
    os.chdir(before)


@pytest.mark.parametrize(
    "make",
    [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/zero")],
    ids=["directory", "pipe", "device"],
)
def test_only_regular_files_are_opened(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "special")
    with pytest.raises(AdapterError, match="special is not a regular file"):
        read_file(tmp_path, "special")


def test_a_socket_is_not_opened(tmp_path: Path) -> None:
    make_socket(tmp_path / "special")
    with pytest.raises(OSError, match="No such device or address"):
        read_file(tmp_path, "special", tmp_path)


@contextmanager
def swapping(act: Callable[[], None]) -> Iterator[None]:
    """Do `act` again and again in a thread."""
    is_over = threading.Event()

    def run() -> None:
        while not is_over.is_set():
            with suppress(OSError):
                act()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@pytest.mark.parametrize("part", ["a", "a/adapter", f"a/adapter/{FILES[0]}"])
def test_what_is_swapped_for_a_link_while_it_is_opened_leads_nowhere(
    tmp_path: Path, roots: Path, adapter: Path, part: str
) -> None:
    outside = tmp_path / "outside"
    (outside / "a" / "adapter").mkdir(parents=True)
    (outside / "a" / "adapter" / FILES[0]).write_bytes(SECRET)
    place, aside = roots / part, roots / "aside"
    inside = (adapter / FILES[0]).read_bytes()

    def swap() -> None:
        place.rename(aside)
        place.symlink_to(outside / part)
        place.unlink()
        aside.rename(place)

    num_read = num_refused = 0
    with swapping(swap):
        while num_read < 200 or num_refused < 200:  # whichever of the two threads runs more
            try:
                assert read_file(adapter, FILES[0], roots) == inside
                num_read += 1
            except (OSError, AdapterError):
                num_refused += 1


# ── files that are no adapter's ─────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "content",
    [
        SECRET,
        b'{"password": ' + SECRET + b"}",
        b'{"words": 1, "words": 2}',
        b"the words of another",
        b"[" + SECRET + b"]",
        b"words\xff",
    ],
)
def test_a_file_that_is_no_adapters_is_not_quoted(
    adapter: Path, lora_modules: Shapes, content: bytes
) -> None:
    (adapter / FILES[0]).write_bytes(content)
    with pytest.raises(AdapterFormatError) as error:
        read_adapter(str(adapter), lora_modules=lora_modules, max_lora_rank=8)
    for told in ("words", "password", "0xff"):
        assert told not in str(error.value)


def test_the_first_bytes_of_what_is_no_safetensors_file_are_not_told(
    adapter: Path, lora_modules: Shapes
) -> None:
    (adapter / FILES[1]).write_bytes(b"hunter42" * 3)
    with pytest.raises(AdapterFormatError, match="truncated or none") as error:
        read_adapter(str(adapter), lora_modules=lora_modules, max_lora_rank=8)
    assert str(int.from_bytes(b"hunter42", "little")) not in str(error.value)
