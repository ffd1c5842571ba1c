from __future__ import annotations

import socket
from contextlib import closing
from pathlib import Path

import pytest

from lora_serve.config import CatalogConfig, ServerConfig
from lora_serve.errors import ConfigError
from lora_serve.server.adapter_names.opening import member_of
from lora_serve.server.http.listener import (
    check_chat_template,
    open_listeners,
    read_template,
    shown_address,
)


def test_who_connects_before_the_server_listens_is_refused() -> None:
    listeners = open_listeners(ServerConfig(host="127.0.0.1", port=0))
    with closing(listeners), pytest.raises(ConnectionRefusedError):
        socket.create_connection(listeners.api.getsockname())


def test_two_servers_that_ask_for_any_port_have_ids_of_their_own(tmp_path: Path) -> None:
    """Else one would take the place of the other in their catalog."""
    config, catalog = ServerConfig(host="127.0.0.1", port=0), CatalogConfig(lora_catalog="/c")
    with closing(open_listeners(config)) as one, closing(open_listeners(config)) as two:
        ids = [member_of(each.with_port(config), catalog).replica_id for each in (one, two)]
        assert ids == [f"{socket.gethostname()}:{each.api.getsockname()[1]}" for each in (one, two)]
    path = ServerConfig(uds=str(tmp_path / "s"))
    with closing(open_listeners(path)) as listeners:
        assert listeners.with_port(path) == path


def test_an_address_that_is_taken_is_a_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on --host 127.0.0.1 --port {port}"):
            open_listeners(ServerConfig(host="127.0.0.1", port=port))


def test_a_unix_socket_is_replaced_if_its_server_is_dead_and_removed_at_the_end(
    tmp_path: Path,
) -> None:
    path = tmp_path / "s"
    config = ServerConfig(uds=str(path))
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    with closing(open_listeners(config)) as listeners:
        listeners.listen()
        assert shown_address(listeners.api) == f"unix:{path}"
        with pytest.raises(ConfigError, match=f"cannot listen on --uds {path}"):
            open_listeners(config)
    assert not path.exists()


def test_a_file_is_never_taken_for_a_socket(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("mine")
    with pytest.raises(ConfigError, match="cannot listen on --uds"):
        open_listeners(ServerConfig(uds=str(tmp_path / "s")))
    assert (tmp_path / "s").read_text() == "mine"


def test_an_unknown_host_is_a_clear_error() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on --host 300\.0\.0\.1"):
        open_listeners(ServerConfig(host="300.0.0.1", port=0))


def test_a_template_that_is_not_there_is_a_clear_error() -> None:
    with pytest.raises(ConfigError, match="--chat-template /nowhere cannot be read"):
        check_chat_template(ServerConfig(chat_template="/nowhere"))


def test_a_template_that_is_none_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "bad").write_text("fine\n{% for message in %}")
    config = ServerConfig(chat_template=str(tmp_path / "bad"))
    with pytest.raises(ConfigError, match="--chat-template: line 2 is no Jinja"):
        check_chat_template(config)


def test_a_template_may_be_given_itself(tmp_path: Path) -> None:
    written = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    assert read_template(written) == written
    (tmp_path / "{a}").write_text("of a file")
    assert read_template(str(tmp_path / "{a}")) == "of a file"
    with pytest.raises(ConfigError, match="--chat-template: line 1 is no Jinja"):
        check_chat_template(ServerConfig(chat_template="{% for %}"))


def test_a_template_may_use_what_transformers_adds_to_jinja(tmp_path: Path) -> None:
    (tmp_path / "good").write_text("{% generation %}x{% endgeneration %}")
    check_chat_template(ServerConfig(chat_template=str(tmp_path / "good")))
