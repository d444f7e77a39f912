"""Whose an address is: this machine's own, or the world's."""

from __future__ import annotations

from ipaddress import ip_address
from urllib.parse import urlsplit


def loopback(host: str) -> bool:
    """Whether a host name or address is this machine's own, which no other machine reaches."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def loopback_url(url: str) -> bool:
    """`loopback` of the host of an address."""
    return loopback(urlsplit(url).hostname or "")


def takes_proxy(url: str) -> bool:
    """Whether a proxy of the environment is for this address: it is for the world outside, not for this machine."""
    return not loopback_url(url)
