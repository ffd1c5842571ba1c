from __future__ import annotations

from pathlib import Path

import pytest
from starlette.datastructures import Headers

from lora_serve.config import ServerConfig
from lora_serve.errors import ConfigError, UnauthorizedError
from lora_serve.server.http.auth import Caller, KeyRing
from lora_serve.server.http.keys import ApiKeys, read_keys


def test_files_and_flags_add_up(tmp_path: Path) -> None:
    users, admins = tmp_path / "users", tmp_path / "admins"
    users.write_text("# team a\nu1\n\n  u2  \r\n")
    admins.write_text("root\n")
    config = ServerConfig(api_key=("u0",), api_key_file=str(users), admin_api_key_file=str(admins))
    assert read_keys(config) == ApiKeys(("u0", "u1", "u2"), ("root",))


@pytest.mark.parametrize("flag", ["api_key_file", "admin_api_key_file"])
@pytest.mark.parametrize("text", [None, "", "\n  \n", "# only a comment\n"])
def test_a_file_without_a_key_is_refused(tmp_path: Path, flag: str, text: str | None) -> None:
    path = tmp_path / "keys"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=flag.replace("_", "-")):
        read_keys(ServerConfig(**{flag: str(path)}))


@pytest.mark.parametrize("flag", ["api_key", "admin_api_key"])
@pytest.mark.parametrize("key", ["", " ", "\t\n"])
def test_an_empty_key_is_refused_at_start(flag: str, key: str) -> None:
    with pytest.raises(ConfigError, match="empty key"):
        ServerConfig(**{flag: ("good", key)})


def test_a_reload_takes_new_keys_and_drops_old_ones(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("old\n")
    keys = KeyRing(ServerConfig(api_key_file=str(path)))
    path.write_text("new\n")
    assert keys.identify(Headers({"Authorization": "Bearer old"})).api_key == "old"
    keys.reload()
    assert keys.identify(Headers({"Authorization": "Bearer new"})) == Caller("new", is_admin=False)
    with pytest.raises(UnauthorizedError):
        keys.identify(Headers({"Authorization": "Bearer old"}))


def test_a_reload_that_fails_leaves_the_keys_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("old\n")
    keys = KeyRing(ServerConfig(api_key_file=str(path)))
    path.write_text("")
    with pytest.raises(ConfigError, match="holds no key"):
        keys.reload()
    assert keys.identify(Headers({"Authorization": "Bearer old"})).api_key == "old"
    with pytest.raises(UnauthorizedError):
        keys.identify(Headers())


@pytest.mark.parametrize(
    ("mode", "is_open"), [(0o400, False), (0o440, False), (0o444, True), (0o620, True)]
)
def test_a_file_that_others_may_read_or_change_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, is_open: bool
) -> None:
    path = tmp_path / "keys"
    path.write_text("key\n")
    path.chmod(mode)
    KeyRing(ServerConfig(admin_api_key_file=str(path)))
    told = f"--admin-api-key-file {path}: mode {mode:04o} lets others read or change it; chmod 600"
    assert (told in caplog.text) == is_open
