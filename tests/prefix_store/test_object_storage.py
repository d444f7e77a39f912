"""The whole store on a real S3 server (moto's, over loopback): everything of it works, and writers at once lose nothing."""

import json
import os
import socket
import subprocess
import sys
import threading
import urllib.request

import pytest

from prefix_store import PrefixStore, StoreError, StoreExists, StoreNotFound
from prefix_store import object_storage as module
from prefix_store.object_storage import BlockCache, ObjectStorage
from prefix_store.storage import Storage
from prefix_store.trajectory import example_sequence, sequences_equal

SERVER = """
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server
class Quiet(WSGIRequestHandler):
    def log(self, *_): pass
# one request at a time: moto looks whether a key is there and puts it in two steps
server = make_server("127.0.0.1", 0, DomainDispatcherApplication(create_backend_app), threaded=False, request_handler=Quiet)
print(server.server_port, flush=True)
server.serve_forever()
"""
SECRET = "very-secret-0123456789"


@pytest.fixture(scope="module")
def endpoint():
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT"), timeout=30).close()
        yield url
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def options(endpoint, monkeypatch):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    return {"endpoint": endpoint, "region": "us-east-1", "access_key_id": "tester", "secret_access_key": SECRET}


@pytest.fixture
def url(request):
    return f"s3://bucket/{request.node.name}/deep"


def filled(url, options, seeds, commits=1):
    store = PrefixStore.open(url, "a", storage_options=options)
    for number in range(commits):
        for seed in seeds[number::commits]:
            store.append(example_sequence(seed))
        store.commit(f"commit {number}")
    return store


def test_conditional_put_is_won_once(url, options):
    storage = ObjectStorage(url, options)
    assert isinstance(storage, Storage) and repr(storage) == f"ObjectStorage({url!r})"
    for number in range(5):
        won = []
        barrier = threading.Barrier(6)

        def put(who, number=number, won=won, barrier=barrier):
            barrier.wait()
            if storage.create(f"versions/{number}", b"%d" % who):
                won.append(who)

        threads = [threading.Thread(target=put, args=(who,)) for who in range(6)]
        [t.start() for t in threads], [t.join() for t in threads]
        assert len(won) == 1 and storage.read(f"versions/{number}") == b"%d" % won[0]
    assert storage.names("versions") == [str(n) for n in range(5)] and storage.names("nothing") == []


def test_an_answer_lost_on_the_way_is_not_a_lost_commit(url, options):
    """The server stores the version but its answer never arrives; the client asks again and finds its own file."""
    host, port = options["endpoint"].removeprefix("http://").split(":")
    listener = socket.create_server(("127.0.0.1", 0))
    cut = []

    def relay():
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            data = client.recv(65536)
            head, _, body = data.partition(b"\r\n\r\n")
            lines = {k.lower(): v for k, v in (line.split(b": ", 1) for line in head.split(b"\r\n")[1:])}
            while len(body) < int(lines.get(b"content-length", 0)):
                body += client.recv(65536)
            with socket.create_connection((host, int(port))) as server:
                keep = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"connection")]
                server.sendall(b"\r\n".join([*keep, b"Connection: close"]) + b"\r\n\r\n" + body)
                answer = b"".join(iter(lambda: server.recv(65536), b""))
            if b"PUT" in head[:4] and b"/versions/" in head.split(b"\r\n")[0] and not cut:
                cut.append(answer.split(b"\r\n")[0])
            else:
                client.sendall(answer)
            client.close()

    threading.Thread(target=relay, daemon=True).start()
    direct = filled(url, options, range(2))
    through = options | {"endpoint": f"http://127.0.0.1:{listener.getsockname()[1]}"}
    with PrefixStore.open(url, "a", storage_options=through) as store:
        store.append(example_sequence(7))
        assert store.commit() == "v000002" and b"200" in cut[0]
    listener.close()
    direct.refresh()
    assert len(direct) == 3 and direct.versions() == ["v000001", "v000002"] and direct.verify().ok


def test_everything_works_there(url, options):
    with pytest.raises(StoreNotFound, match="s3://bucket/.*holds no prefix store|is an empty folder"):
        PrefixStore.open(url, storage_options=options)
    store = filled(url, options, range(12), commits=2)
    assert store.path == url and len(store) == 12 and len(store.versions()) == 2
    with pytest.raises(StoreExists):
        PrefixStore.open(url, "w", storage_options=options)
    reader = PrefixStore.open(url, storage_options=options)
    ids, points = reader.ids(), reader.decision_points()
    by_id = {i: reader.sequence(i) for i in ids}
    assert sum(any(sequences_equal(example_sequence(s), b) for b in by_id.values()) for s in range(12)) == 12
    for point in points:
        context = by_id[point.sequence].contexts[point.context]
        prefix, played = reader.prefix(point), reader.continuation(point)
        assert (context.tokens[: len(prefix)] == prefix).all()
        assert (context.tokens[len(prefix) : len(prefix) + len(played)] == played).all()
    report = reader.verify()
    assert report.ok and report.sequences == 12 and report.unreferenced == (), str(report)
    info = reader.info()
    assert info["bytes"] > 1000 and info["segments"] == 2 and info["path"] == url

    assert store.compact() == "v000003" and store.compaction.merged == 2 and store.ids() == ids
    assert store._manifest["segments"][0]["sequences"] == 12 and reader.refresh() == "v000003" and reader.ids() == ids
    assert len(PrefixStore.open(url, version=1, storage_options=options)) == 6
    assert store.gc(min_age_seconds=0).segments == ()
    report = store.gc(keep_versions=1, min_age_seconds=0)
    assert len(report.segments) == 2 and len(report.versions) == 2 and report.bytes > 1000
    assert store.versions() == ["v000003", "v000004"] and store.verify().ok and store.ids() == ids
    with pytest.raises(ValueError, match="gc removed it"):
        PrefixStore.open(url, version=2, storage_options=options)

    store.append(example_sequence(50))
    store.commit()
    name = store._manifest["segments"][-1]["name"]
    storage = ObjectStorage(url, options)
    data = bytearray(storage.read(f"segments/{name}/tokens/c.0"))
    data[10] ^= 1
    storage.replace(f"segments/{name}/tokens/c.0", bytes(data))
    lenient = PrefixStore.open(url, skip_damaged=True, storage_options=options)
    assert len(lenient) == 13  # its tables are whole
    fresh = PrefixStore.open(url, "a", storage_options=options)
    assert fresh.verify().damaged_segments() == [name]
    report = fresh.quarantine()
    assert len(report.lost) == 1 and len(fresh) == 12 and fresh.verify().ok


WRITER = """
import sys, json
from prefix_store import PrefixStore
from prefix_store.trajectory import example_sequence
url, first, options = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
for number in range(2):
    with PrefixStore.open(url, "a", storage_options=options) as store:
        ids = [store.append(example_sequence(seed)) for seed in (*range(first + 3 * number, first + 3 * number + 3), number)]
        print(json.dumps([store.commit(f"writer {first}"), ids]), flush=True)
"""


def test_writers_at_once_lose_nothing_and_store_nothing_twice(url, options):
    command = [sys.executable, "-c", WRITER, url]
    processes = [
        subprocess.Popen([*command, str(1000 * n), json.dumps(options)], stdout=subprocess.PIPE, text=True) for n in (1, 2, 3)
    ]
    commits = [json.loads(line) for p in processes for line in p.communicate()[0].splitlines()]
    assert all(p.returncode == 0 for p in processes) and len(commits) == 6
    assert sorted(version for version, _ in commits) == [f"v{n:06d}" for n in range(1, 7)]
    store = PrefixStore.open(url, storage_options=options)
    expected = {i for _, ids in commits for i in ids}
    assert set(store.ids()) == expected and len(store) == len(expected) == 20  # 18 of their own, 2 that all three brought
    report = store.verify()
    assert report.ok and report.unreferenced == ()


def test_requests_are_few(url, options, monkeypatch):
    filled(url, options, range(20))
    storage = ObjectStorage(url, options)
    calls = []
    for name in ("get", "get_range", "head"):
        real = getattr(storage._obstore, name)
        monkeypatch.setattr(storage._obstore, name, lambda *a, real=real, **k: calls.append(1) or real(*a, **k))
    store = PrefixStore.open(url, storage_options=options)
    points = store.decision_points()
    assert len(calls) < 20
    store.prefix(points[0])
    calls.clear()
    for point in points:
        store.prefix(point)
    assert calls == []  # all in the one block that was fetched


def test_blocks_are_joined_and_bounded(url, options, monkeypatch):
    monkeypatch.setattr(module, "BLOCK_BYTES", 16)
    storage = ObjectStorage(url, options)
    data = bytes(range(200))
    storage.put_folder("segments/x", {"a/c.0": data, "zarr.json": b"{}"})
    file = storage.file("segments/x/a/c.0")
    assert file.size == 200
    for start, stop in [(0, 1), (0, 200), (15, 17), (190, 200), (180, 200), (33, 34), (10, 10), (64, 128)]:
        assert bytes(file.read(start, stop)) == data[start:stop]
    with pytest.raises(FileNotFoundError):
        storage.file("segments/x/b")
    cache = BlockCache(40)
    for number in range(9):
        cache.put(("a", number), b"x" * 16)
    assert cache.bytes <= 40 and cache.get(("a", 8)) and cache.get(("a", 0)) is None


def test_no_server_no_bucket_no_access(url, options):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    module_retry = dict(module.RETRY)
    module.RETRY["max_retries"] = 1
    try:
        with pytest.raises(StoreError) as error:
            PrefixStore.open(url, storage_options=options | {"endpoint": f"http://127.0.0.1:{port}"})
    finally:
        module.RETRY.update(module_retry)
    assert url in str(error.value) and f"127.0.0.1:{port}" in str(error.value) and "check that it runs" in str(error.value)
    assert SECRET not in str(error.value) and error.value.__cause__ is None and error.value.__suppress_context__
    with pytest.raises(StoreError, match="bucket does not exist"):
        PrefixStore.open("s3://nosuchbucket/x", "a", storage_options=options)
    with pytest.raises(StoreError, match="unknown storage option"):
        PrefixStore.open(url, storage_options={"no_such_option": "1"})
    with pytest.raises(ValueError, match="leave them out"):
        PrefixStore.open("/tmp", storage_options=options)


def test_credentials_come_from_the_environment(url, options, monkeypatch):
    for name, key in [
        ("AWS_ACCESS_KEY_ID", "access_key_id"),
        ("AWS_SECRET_ACCESS_KEY", "secret_access_key"),
        ("AWS_ENDPOINT_URL", "endpoint"),
        ("AWS_REGION", "region"),
    ]:
        monkeypatch.setenv(name, options[key])
    with PrefixStore.open(url, "a") as store:
        store.append(example_sequence(1))
        assert store.commit() == "v000001" and SECRET not in repr(store.storage) + str(vars(store.storage._store))


@pytest.mark.parametrize(
    ("place", "given", "words"),
    [
        ("gs://bucket/x", {"nonsense": "1"}, ["unknown storage option", "nonsense", "service_account_path"]),
        ("gs://bucket/x", {"service_account_key": f"{{{SECRET}"}, ["storage options do not do", "service_account_key"]),
        ("gs://bucket/x", {"service_account_path": "/no/such.json"}, ["storage options do not do", "/no/such.json"]),
        ("az://container/x", {}, ["storage options do not do", "Account must be specified", "`account_name`"]),
        ("az://container/x", {"nonsense": "1"}, ["unknown storage option", "nonsense", "account_name"]),
        ("az://container/x", {"account_name": "me", "account_key": f"?{SECRET}"}, ["do not do", "Access Key", "account_key"]),
        ("ftp://bucket/x", {}, ["not the URL of an object store"]),
    ],
)
def test_options_that_do_not_do_are_said_before_anything_is_asked(place, given, words, monkeypatch):
    """No server for Google's store was found that can be tested against, so this is all that is tested of it."""
    for name in [name for name in os.environ if name.startswith(("GOOGLE_", "AZURE_"))]:
        monkeypatch.delenv(name)
    with pytest.raises(StoreError) as error:
        ObjectStorage(place, given)
    assert all(word in str(error.value) for word in words) and place in str(error.value), str(error.value)
    assert SECRET not in str(error.value)
