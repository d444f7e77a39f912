"""A store in an object store (S3 and what speaks its language, Google, Azure) through obstore.

Files are put one by one, a segment's group file last; that is enough, since nothing counts before a version names it,
and versions are made by a conditional put (`If-None-Match: *`), of which any number of writers wins exactly one.
Credentials come from the environment, from what obstore finds by itself, or from the options, and are never shown.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import datetime
import os
import pathlib
import re
import tempfile
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from prefix_store.disk import StoreError
from prefix_store.storage import Scratch, remove_leftovers

BLOCK_BYTES = 256 * 1024
# a request takes tens of milliseconds whether it brings 10 KB or this much
CACHE_BYTES = 64 * 1024 * 1024
THREADS = 16
CLIENT_OPTIONS = {"allow_http", "allow_invalid_certificates", "connect_timeout", "default_headers", "proxy_url", "timeout"}
CLIENT = {"connect_timeout": "5s", "timeout": "120s"}
RETRY = {"max_retries": 5, "retry_timeout": datetime.timedelta(seconds=30)}
HINTS = {
    "s3": "`endpoint`, `region`, `access_key_id`, `secret_access_key` (AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID, …)",
    "gs": "`service_account_path` or `service_account_key` (GOOGLE_SERVICE_ACCOUNT, GOOGLE_APPLICATION_CREDENTIALS)",
    "az": "`account_name`, `account_key` or `sas_key`, `endpoint` (AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ACCOUNT_KEY, …)",
}
# by scheme: what says where a bucket is and who asks, as storage options and in the environment
SECRET_NAMES = re.compile(r"(?i)(key|secret|token|password|credential|sas)")


class ObjectStorage:
    """A prefix of a bucket: "s3://bucket/prefix", "gs://…", "az://…".

    options are obstore's configuration ("endpoint", "region", "access_key_id", "secret_access_key", …) and of its client
    those of CLIENT_OPTIONS; plain http is allowed where the endpoint says http://.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None):
        """Raises StoreError where obstore is missing or an option is not known; asks the server nothing."""
        try:
            import obstore
            from obstore.store import from_url
        except ImportError:
            raise StoreError(
                f"{url} lies in an object store, which needs the package obstore: `pip install obstore`"
            ) from None
        self._obstore = obstore
        self.location = url.rstrip("/")
        given = {str(key).lower(): value for key, value in (options or {}).items()}
        endpoint = given.get("endpoint") or given.get("aws_endpoint") or given.get("endpoint_url") or _environment_endpoint()
        client = CLIENT | {key: given.pop(key) for key in CLIENT_OPTIONS & set(given)}
        if endpoint and str(endpoint).startswith("http://"):
            client.setdefault("allow_http", True)
        self._secrets = [str(value) for key, value in given.items() if SECRET_NAMES.search(key) and value]
        self._secrets += [value for key, value in os.environ.items() if SECRET_NAMES.search(key) and len(value) > 5]
        self._where = f" at {endpoint}" if endpoint else ""
        try:
            with self._errors():
                self._store = from_url(self.location, config=given, client_options=client, retry_config=RETRY)
        except _NoAnswer as error:  # nobody was asked yet
            raise StoreError(f"{self.location}: the storage options do not do ({error.reason}); {self._hint()}") from None
        self._cache = BlockCache(CACHE_BYTES)
        self._lock = threading.Lock()
        self._scratch: Scratch | None = None

    def __repr__(self) -> str:
        return f"ObjectStorage({self.location!r})"

    def read(self, key: str) -> bytes:
        with self._errors(key):
            return bytes(self._obstore.get(self._store, key).bytes())

    def file(self, key: str) -> ObjectFile:
        return ObjectFile(self, key)

    def names(self, prefix: str) -> list[str]:
        with self._errors(prefix):
            found = self._obstore.list_with_delimiter(self._store, prefix or None)
        paths = [*found["common_prefixes"], *(entry["path"] for entry in found["objects"])]
        return sorted(path.rpartition("/")[2] for path in paths)

    def create(self, key: str, data: bytes) -> bool:
        try:
            with self._errors(key):
                self._obstore.put(self._store, key, data, mode="create", use_multipart=False)
            return True
        except FileExistsError:
            # an answer that was lost on the way makes the client ask again, and find its own file there
            return self.read(key) == data

    def replace(self, key: str, data: bytes) -> None:
        with self._errors(key):
            self._obstore.put(self._store, key, data, use_multipart=False)

    def put_folder(self, prefix: str, files: Mapping[str, bytes | pathlib.Path]) -> None:
        """The file `zarr.json` of the folder itself is put last."""

        def put(name: str) -> None:
            with self._errors(f"{prefix}/{name}"):
                # never in parts: parts of an upload that was cut off would stay, invisible and paid for
                self._obstore.put(self._store, f"{prefix}/{name}", files[name], use_multipart=False)

        with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(put, (name for name in files if name != "zarr.json")))
        for name in files:
            if name == "zarr.json":
                put(name)

    def delete_folder(self, prefix: str) -> None:
        keys = [entry["path"] for entry in self._entries(prefix)]
        group = [key for key in keys if key == f"{prefix}/zarr.json"]
        with self._errors(prefix):
            for some in (group, [key for key in keys if key not in group]):
                if some:
                    self._obstore.delete(self._store, some)

    def delete(self, key: str) -> None:
        with contextlib.suppress(FileNotFoundError), self._errors(key):
            self._obstore.delete(self._store, key)

    def usage(self, prefix: str) -> tuple[int, float]:
        entries = self._entries(prefix)
        newest = max((entry["last_modified"].timestamp() for entry in entries), default=0.0)
        return sum(entry["size"] for entry in entries), datetime.datetime.now().timestamp() - newest

    def _entries(self, prefix: str) -> list[dict[str, Any]]:
        with self._errors(prefix):
            return [entry for part in self._obstore.list(self._store, prefix) for entry in part]

    def scratch(self) -> pathlib.Path:
        """A folder on this machine, below its folder for temporary files."""
        with self._lock:
            if self._scratch is None:
                parent = _temporary()
                remove_leftovers(parent)
                self._scratch = Scratch(parent)
            return self._scratch.path

    def asides(self) -> tuple[list[str], list[str]]:
        """None: what is not published yet lies on the writers' own machines, and the next one there tidies up."""
        return [], []

    def remove_leftovers(self, min_age_seconds: float, dry_run: bool) -> tuple[list[str], int]:
        return [], 0

    def close(self) -> None:
        with self._lock:
            if self._scratch is not None:
                self._scratch.close()
                self._scratch = None

    def get(self, key: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop) by one request, past the cache."""
        with self._errors(key):
            return bytes(self._obstore.get_range(self._store, key, start=start, end=stop))

    def tail(self, key: str) -> tuple[int, bytes]:
        """Size of a file and its last bytes (at most BLOCK_BYTES), by one request where the service can do that."""
        try:
            with self._errors(key):
                answer = self._obstore.get(self._store, key, options={"range": {"suffix": BLOCK_BYTES}})
                return answer.meta["size"], bytes(answer.bytes())
        except (_NotInOneRequest, StoreError):
            pass
        with self._errors(key):
            size = self._obstore.head(self._store, key)["size"]
        start = max(0, size - BLOCK_BYTES)
        return size, self.get(key, start, size) if size else b""

    @contextlib.contextmanager
    def _errors(self, key: str = "") -> Iterator[None]:
        """Obstore's errors as ours: FileNotFoundError, FileExistsError, or StoreError with place and remedy. What obstore
        says is cut to its first line and freed of secrets, and not chained, since tracebacks are logged too."""
        exceptions = self._obstore.exceptions
        place = f"{self.location}/{key}" if key else self.location
        try:
            yield
        except (FileNotFoundError, exceptions.GenericError) as error:
            if any(code in str(error) for code in ("NoSuchBucket", "ContainerNotFound")):
                raise StoreError(f"{self.location}: the bucket does not exist{self._where}; make it first") from None
            if "Unable to recognise URL" in str(error):
                raise StoreError(f"{self.location} is not the URL of an object store; write s3://bucket/prefix") from None
            if isinstance(error, FileNotFoundError):
                raise FileNotFoundError(2, f"no {place}") from None
            raise self._unreachable(place, error) from None
        except exceptions.AlreadyExistsError:
            raise FileExistsError(17, f"{place} is there already") from None
        except exceptions.NotSupportedError:
            raise _NotInOneRequest(place) from None
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
            raise StoreError(
                f"{place}: access refused{self._where} ({self._clean(error)}); check the credentials and what they may do: "
                f"{self._hint()}"
            ) from None
        except exceptions.UnknownConfigurationKeyError as error:
            raise StoreError(f"{self.location}: unknown storage option ({self._clean(error)}); {self._hint()}") from None
        except (exceptions.BaseError, OSError) as error:
            raise self._unreachable(place, error) from None

    def _unreachable(self, place: str, error: BaseException) -> StoreError:
        reason = self._clean(error)
        return _NoAnswer(
            f"{place}: the object store{self._where} does not answer as it should ({reason}); check that it "
            f"runs and can be reached: {self._hint()}",
            reason,
        )

    def _hint(self) -> str:
        scheme = {"s3a": "s3", "gcs": "gs", "azure": "az", "abfs": "az", "abfss": "az", "adl": "az"}
        name = self.location.split(":", 1)[0]
        return f"storage options are {HINTS.get(scheme.get(name, name), 'those of obstore')}"

    def _clean(self, error: BaseException) -> str:
        text = " ".join(str(error).split("\n\nDebug source", 1)[0].split())
        text = re.sub(r"<\?xml.*?<Code>(\w+)</Code>.*", r"\1", text)[:400]
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


class _NoAnswer(StoreError):
    """Something obstore has no kind of error for; `reason` is what it says, without secrets."""

    def __init__(self, message: str, reason: str):
        super().__init__(message)
        self.reason = reason


class _NotInOneRequest(Exception):
    """The service has no requests for the end of a file (Azure)."""


class ObjectFile:
    """A file that is read by ranges, in whole blocks that a cache keeps for the next reader."""

    def __init__(self, storage: ObjectStorage, key: str):
        self._storage, self._key = storage, key
        self.size, tail = storage.tail(key)
        self._tail_start = self.size - len(tail)
        storage._cache.put((key, -1), tail)

    def read(self, start: int, stop: int) -> bytes | memoryview:
        cache, key = self._storage._cache, self._key
        if start >= self._tail_start:
            tail = cache.get((key, -1))
            if tail is not None:
                return memoryview(tail)[start - self._tail_start : stop - self._tail_start]
        if stop - start > 4 * BLOCK_BYTES:
            return self._storage.get(key, start, stop)
        first, last = start // BLOCK_BYTES, max(start, stop - 1) // BLOCK_BYTES
        blocks = [cache.get((key, number)) for number in range(first, last + 1)]
        missing = [first + at for at, block in enumerate(blocks) if block is None]
        if missing:
            begin, end = missing[0] * BLOCK_BYTES, min((missing[-1] + 1) * BLOCK_BYTES, self.size)
            data = self._storage.get(key, begin, end)
            for number in range(missing[0], missing[-1] + 1):
                block = data[number * BLOCK_BYTES - begin : (number + 1) * BLOCK_BYTES - begin]
                blocks[number - first] = block
                cache.put((key, number), block)
        joined = blocks[0] if len(blocks) == 1 else b"".join(blocks)
        return memoryview(joined)[start - first * BLOCK_BYTES : stop - first * BLOCK_BYTES]


class BlockCache:
    """Blocks of files, those used last, up to a number of bytes. Files never change, so nothing in it grows stale."""

    def __init__(self, limit: int):
        self.limit, self.bytes = limit, 0
        self._blocks: collections.OrderedDict[tuple[str, int], bytes] = collections.OrderedDict()
        self._lock = threading.Lock()

    def get(self, block: tuple[str, int]) -> bytes | None:
        with self._lock:
            data = self._blocks.get(block)
            if data is not None:
                self._blocks.move_to_end(block)
            return data

    def put(self, block: tuple[str, int], data: bytes) -> None:
        with self._lock:
            self.bytes += len(data) - len(self._blocks.pop(block, b""))
            self._blocks[block] = data
            while self.bytes > self.limit and len(self._blocks) > 1:
                self.bytes -= len(self._blocks.popitem(last=False)[1])


def _environment_endpoint() -> str | None:
    return os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT") or os.environ.get("AWS_ENDPOINT_URL_S3")


def _temporary() -> pathlib.Path:
    """This user's own folder for scratch files. Raises StoreError where somebody else has taken the name."""
    parent = pathlib.Path(tempfile.gettempdir()) / f"prefix-store-{os.getuid()}"
    parent.mkdir(mode=0o700, exist_ok=True)
    status = parent.lstat()
    if status.st_uid != os.getuid() or not parent.is_dir() or parent.is_symlink():
        raise StoreError(f"{parent} belongs to somebody else; set TMPDIR to a folder of your own")
    return parent
