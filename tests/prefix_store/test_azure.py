"""A store in Azure's object store, on a real server of that language: Azurite (`npm install azurite`), where it is installed.

The container is made by a signed request of its own, since a store never makes one (learn.microsoft.com: "Authorize with
Shared Key"); account and key are the ones that every Azurite has.
"""

import base64
import email.utils
import hashlib
import hmac
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request

import pytest

from prefix_store import PrefixStore, StoreError
from prefix_store.trajectory import example_sequence, sequences_equal

AZURITE = shutil.which("azurite-blob")
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
pytestmark = pytest.mark.skipif(AZURITE is None, reason="azurite-blob is not on the PATH (npm install azurite)")


@pytest.fixture
def options(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [AZURITE, "--location", str(tmp_path / "azurite"), "--blobPort", str(port), "--skipApiVersionCheck"]
    process = subprocess.Popen([*command, "--disableTelemetry"], stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        endpoint = f"http://127.0.0.1:{port}/{ACCOUNT}"
        make_container(endpoint, "bucket")
        yield {"account_name": ACCOUNT, "account_key": KEY, "endpoint": endpoint}
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def make_container(endpoint, name):
    headers = {"x-ms-date": email.utils.formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    signed = "PUT" + 12 * "\n" + "".join(f"{key}:{value}\n" for key, value in headers.items())
    signed += f"/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
    digest = hmac.new(base64.b64decode(KEY), signed.encode(), hashlib.sha256).digest()
    headers |= {"Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}", "Content-Type": ""}
    request = urllib.request.Request(f"{endpoint}/{name}?restype=container", b"", headers, method="PUT")
    end = time.monotonic() + 60
    while True:  # until the server is up
        try:
            return urllib.request.urlopen(request, timeout=10).close()
        except urllib.error.HTTPError:
            raise
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


def test_a_store_lives_in_azure(options):
    place = "az://bucket/deep/store"
    with PrefixStore.open(place, "a", storage_options=options) as store:
        for seed in range(6):
            store.append(example_sequence(seed))
            if seed % 2:
                store.commit(f"up to {seed}")
    a, b = (PrefixStore.open(place, "a", storage_options=options) for _ in range(2))
    ids = [a.append(example_sequence(100)), b.append(example_sequence(100)), b.append(example_sequence(101))]
    assert (a.commit(), b.commit(), b.duplicates) == ("v000004", "v000005", 1)  # two that would make version 4
    assert len(b) == 8 and set(ids) <= set(b.ids())
    b.compact()
    assert b.gc(keep_versions=1, min_age_seconds=0).segments
    store = PrefixStore.open(place, storage_options=options)
    assert len(store) == 8 and store.verify().ok and store.info()["segments"] == 1
    assert sequences_equal(store.sequence(ids[2]), example_sequence(101))
    points = store.decision_points()
    assert all(len(store.prefix(point)) > 0 for point in points)
    with pytest.raises(StoreError, match="bucket does not exist"):
        PrefixStore.open("az://nosuch/x", "a", storage_options=options)
    wrong = options | {"account_key": base64.b64encode(b"another secret").decode()}
    with pytest.raises(StoreError, match="access refused") as error:
        PrefixStore.open(place, storage_options=wrong)
    assert wrong["account_key"] not in str(error.value)
