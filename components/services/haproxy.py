"""The configuration of HAProxy, the splitter of traffic between two engines.

One backend, `engines`, with two slots, `candidate` and `baseline`. Both start in maintenance with a
placeholder address: who serves is decided at runtime over the admin socket
(`set server engines/candidate addr ... port ...`, `state ready|maint`, `weight 0..256`), never by a
reload, so a rollout step drops no request.
"""

from __future__ import annotations

from pathlib import Path

from components.settings import ServicesSettings

BACKEND = "engines"
CANDIDATE = "candidate"
BASELINE = "baseline"
ARM_HEADER = "X-Arm"
MAX_SOCKET_PATH_LENGTH = 107
"""Bytes; sun_path of a Unix socket address on Linux holds 108 with its terminator."""

INIT_ADDR = "none,last,libc,none"
"""Servers start without an address that means anything; none of these ways may stop HAProxy."""

# Round robin is HAProxy's smooth weighted one: over any 100 requests, weights 1 and 99 give 1 and
# 99. `fullconn` and `maxconn` of the servers stay unset, for a queue in the splitter would hide the
# engines' own queueing from the judge. `http-reuse safe` shares idle engine connections and never
# sends a client's first request over one that may close. Redispatch lets a request whose server
# refused the connection, or closed it without a byte of answer (an engine that was killed), go to
# the other arm instead of failing: generating again is harmless. A request can only be sent again
# while it fits the buffer, so that holds a prompt of some 60 KB.
_TEMPLATE = """\
global
    stats socket {socket_path} mode 600 level admin expose-fd listeners
    stats timeout 2m
    maxconn 4096
    tune.bufsize 65536

defaults
    mode http
    log stdout format raw local0
    option dontlognull
    option redispatch 1
    retries 2
    retry-on conn-failure empty-response
    http-reuse safe
    timeout connect 5s
    timeout client 300s
    timeout server 300s
    timeout queue 30s
    timeout http-request 30s
    timeout http-keep-alive 60s
    timeout check 5s

frontend clients
    bind {host}:{port}
    option httplog
    default_backend {backend}

backend {backend}
    balance roundrobin
    option httpchk
    http-check send meth GET uri /health
    http-check expect status 200
    http-response set-header {arm_header} %s
    default-server check inter 2s fastinter 500ms downinter 1s rise 1 fall 3 init-addr {init_addr}
    server {candidate} 127.0.0.1:1 weight 0 disabled
    server {baseline} 127.0.0.1:1 weight 100 disabled

frontend statistics
    bind {host}:{stats_port}
    no log
    http-request use-service prometheus-exporter if {{ path /metrics }}
    http-request return status 200 content-type text/plain string ok if {{ path /health }}
    stats enable
    stats uri /stats
    stats refresh 5s
"""


def render_haproxy_config(services: ServicesSettings, *, socket_path: Path | str) -> str:
    """HAProxy configuration for resolved `services`.

    Args:
        services: host, haproxy_port and haproxy_stats_port are used; ports must not be 0.
        socket_path: where the runtime API listens (mode 600).
    """
    return _TEMPLATE.format(
        socket_path=socket_path,
        host=services.host,
        port=services.haproxy_port,
        stats_port=services.haproxy_stats_port,
        backend=BACKEND,
        candidate=CANDIDATE,
        baseline=BASELINE,
        arm_header=ARM_HEADER,
        init_addr=INIT_ADDR,
    )
