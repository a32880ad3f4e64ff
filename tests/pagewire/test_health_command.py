"""`pagewire health`: what a container's health check runs."""

from tests.pagewire.router_stub import running_stub
from tests.pagewire.test_cli import one_line_error, pagewire


def test_serving_unknown_and_unreachable() -> None:
    with running_stub() as (target, _):
        assert pagewire("health", "--target", target).stdout == "SERVING\n"
        assert pagewire("health", "--target", target, "--service", "pagewire.v1.AdminService").stdout == "SERVING\n"
        unknown = one_line_error(pagewire("health", "--target", target, "--service", "nobody"), 1)
        assert unknown == "NOT_FOUND: no service 'nobody' here"
    assert one_line_error(pagewire("health", "--target", target, "--timeout", "1"), 1).startswith("UNAVAILABLE: ")
