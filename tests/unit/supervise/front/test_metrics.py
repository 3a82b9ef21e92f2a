"""Pages of metrics of replicas that come and go."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from asyncllm.supervise.front.metrics import labelled

PAGE = """\
# HELP asyncllm_steps_total Steps.
# TYPE asyncllm_steps_total counter
asyncllm_steps_total {0}
# HELP asyncllm_requests_finished_total Requests.
# TYPE asyncllm_requests_finished_total counter
asyncllm_requests_finished_total{{reason="stop"}} {0}
# HELP vllm:num_requests_running Running.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{model_name="m"}} {0}
"""


def test_each_sample_says_whose_it_is() -> None:
    page = labelled({"abc": PAGE.format(1.0), "xyz": PAGE.format(2.0)})
    families = list(text_string_to_metric_families(page))
    found = [(s.name, s.labels, s.value) for family in families for s in family.samples]
    steps, finished = "asyncllm_steps_total", "asyncllm_requests_finished_total"
    assert found == [
        (steps, {"replica": "abc"}, 1.0),
        (steps, {"replica": "xyz"}, 2.0),
        (finished, {"replica": "abc", "reason": "stop"}, 1.0),
        (finished, {"replica": "xyz", "reason": "stop"}, 2.0),
        ("vllm:num_requests_running", {"model_name": "m"}, 3.0),  # as gateways read it
    ]
