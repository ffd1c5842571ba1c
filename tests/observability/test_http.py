from __future__ import annotations

from lora_serve.observability.http import HTTPMetrics


def test_requests_are_counted_by_route_method_and_status() -> None:
    metrics = HTTPMetrics()
    metrics.observe("/v1/completions", "POST", 200, 0.5)
    metrics.observe("/v1/completions", "POST", 200, 0.5)
    metrics.observe("/v1/completions", "POST", 400, 0.001)
    text = metrics.render().decode()
    count = 'http_requests_total{handler="/v1/completions",method="POST",status="%d"} %s'
    assert count % (200, 2.0) in text
    assert count % (400, 1.0) in text
    assert (
        'http_request_duration_seconds_sum{handler="/v1/completions",method="POST"} 1.001' in text
    )


def test_what_a_client_invents_makes_no_series() -> None:
    metrics = HTTPMetrics()
    for number in range(50):
        metrics.observe(None, f"METHOD{number}", 404, 0.001)
    lines = metrics.render().decode().splitlines()
    counts = [line for line in lines if line.startswith("http_requests_total")]
    assert counts == ['http_requests_total{handler="none",method="other",status="404"} 50.0']
