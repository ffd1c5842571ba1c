from __future__ import annotations

import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

from benchmarks.soak.cold_answers import ColdAnswers
from benchmarks.soak.health import HealthProbe, Probe, note_refusals, permille_999
from benchmarks.soak.journal import UNEXPECTED, Journal
from benchmarks.soak.tenants import Span
from lora_serve.bench.http_stream import Origin


class AlwaysIll(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(503)
        self.send_header("Content-Length", "3")
        self.end_headers()
        self.wfile.write(b"ill")

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def test_what_a_server_says_of_its_health_is_timed_in_another_process(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), AlwaysIll) as server:
        Thread(target=server.serve_forever).start()
        begin = time.monotonic()
        origin = Origin.parse(f"http://127.0.0.1:{server.server_port}")
        with HealthProbe(origin, tmp_path / "probes") as probe:
            while len(probe.probes()) < 3:
                time.sleep(0.1)
        server.shutdown()
    probes = probe.probes()
    assert {(each.status, each.text) for each in probes} == {(503, "ill")}
    assert all(begin < each.begin < each.end < time.monotonic() for each in probes)


def test_only_an_engine_that_is_down_excuses_a_refusal() -> None:
    journal = Journal(ColdAnswers(), began_at=100.0, outages=[Span("down", 110.0, 120.0)])
    refusals = [Probe(begin, begin + 1, 503, "ill") for begin in (105.0, 115.0)]
    note_refusals([Probe(101.0, 102.0, 200, ""), *refusals], journal)
    assert journal.counts == {UNEXPECTED: 1}
    assert "/health at 5.0 s: 503 ill" in journal.incidents[0]


def test_the_999th_permille_leaves_out_one_probe_of_a_thousand() -> None:
    assert permille_999([]) == 0.0
    assert permille_999([3.0]) == 3.0
    assert permille_999([*[1.0] * 1998, 2.0, 9.0]) == 2.0
